"""Two made texts for the guard's real runs: sentences and program lines, the same bytes on every interpreter.

Each text has a vocabulary of its own and is cut into files, each with a topic: words that are more frequent there. So
held-out files differ from those trained on, as files of people do. Only `random.Random.random` is drawn from, whose
sequence Python promises for a seed.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence

from diloco_orchestrator.demo.text import Corpus

KINDS = ("sentences", "program")
FILES, SIZE = 64, 16_000  # files of a text, bytes of each
HELD_OUT = 8  # every so manyth file
_SEED = 20_261_127
_WORDS, _TOPIC, _LINKS = 800, 40, 3  # of a text, of a file, usual successors of a word
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvz", "aeiou"


@functools.cache
def text(kind: str) -> Corpus:
    """The files of "sentences", of "program", or of "both" in turn. An eighth of the files is held out."""
    if kind == "both":
        parts = [text(each) for each in KINDS]
        training, heldout = (_in_turn([getattr(p, name) for p in parts]) for name in ("training", "heldout"))
        return Corpus(training, heldout)
    rng = random.Random(_SEED + KINDS.index(kind))
    vocabulary = _Vocabulary(rng)
    line = {"sentences": _sentence, "program": _statement}[kind]
    files = [_file(rng, vocabulary, line) for _ in range(FILES)]
    training = tuple(each for number, each in enumerate(files) if number % HELD_OUT)
    return Corpus(training, tuple(files[::HELD_OUT]))


def _in_turn(parts: Sequence[Sequence[bytes]]) -> tuple[bytes, ...]:
    return tuple(each for together in zip(*parts, strict=True) for each in together)


class _Vocabulary:
    """Made words with frequencies of 1 / rank, each of which has usual successors."""

    def __init__(self, rng: random.Random) -> None:
        self.words = [_word(rng) for _ in range(_WORDS)]
        self.links = [[_ranked(rng, _WORDS) for _ in range(_LINKS)] for _ in self.words]

    def stream(self, rng: random.Random, topic: Sequence[int]) -> Iterator[str]:
        """Words without end: a usual successor of the last, a word of the topic, or any."""
        last = _ranked(rng, _WORDS)
        while True:
            yield self.words[last]
            draw = rng.random()
            if draw < 0.45:
                last = self.links[last][_below(rng, _LINKS)]
            else:
                last = topic[_below(rng, len(topic))] if draw < 0.65 else _ranked(rng, _WORDS)


def _file(
    rng: random.Random, vocabulary: _Vocabulary, line: Callable[[random.Random, Iterator[str], int], str]
) -> bytes:
    words = vocabulary.stream(rng, [_below(rng, _WORDS) for _ in range(_TOPIC)])
    lines, size, depth = [], 0, 0
    while size < SIZE:
        lines.append(line(rng, words, depth))
        size += len(lines[-1]) + 1
        opened = lines[-1].endswith(":")
        depth = min(depth + 1, 3) if opened else depth - (depth > 0 and rng.random() < 0.3)
    return "\n".join(lines).encode()


def _sentence(rng: random.Random, words: Iterator[str], _depth: int) -> str:
    found = [next(words) + ("," if rng.random() < 0.1 else "") for _ in range(4 + _below(rng, 12))]
    if rng.random() < 0.15:
        found.insert(1 + _below(rng, 3), str(_below(rng, 1000)))
    end = ".?!"[min(_below(rng, 8), 2)] if rng.random() < 0.3 else "."
    return " ".join(found).capitalize().rstrip(",") + end


def _statement(rng: random.Random, words: Iterator[str], depth: int) -> str:
    name, draw = f"{next(words)}_{next(words)}", rng.random()
    number, operator = str(_below(rng, 100)), "+-*/"[_below(rng, 4)]
    if draw < 0.15:
        body = f"if {name} {'<=>'[_below(rng, 3)]} {number}:"
    elif draw < 0.25:
        body = f"for {next(words)} in range({number}):"
    elif draw < 0.55:
        body = f"{name} = {next(words)}({next(words)}, {number})"
    elif draw < 0.8:
        body = f"{name} = {next(words)} {operator} {number}"
    elif draw < 0.9:
        body = f"return {name}"
    else:
        body = f"# {' '.join(next(words) for _ in range(6))}"
    return "    " * depth + body


def _word(rng: random.Random) -> str:
    syllables = 1 + _below(rng, 3)
    return "".join(
        _CONSONANTS[_below(rng, len(_CONSONANTS))] + _VOWELS[_below(rng, len(_VOWELS))] for _ in range(syllables)
    )


def _ranked(rng: random.Random, count: int) -> int:
    """A number below `count`, small ones with chances of about 1 / (number + 1)."""
    return min(int(float(count) ** rng.random()) - 1 + (rng.random() < 0.3), count - 1)


def _below(rng: random.Random, count: int) -> int:
    return int(rng.random() * count)
