"""Filters and deduplicates preference pairs with data-juicer's own command, which runs in an environment of its own.

`pip install py-data-juicer==1.6.1 aiohttp` there: its pins (dill, multiprocess, emoji) must not enter a replica's.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer.pairs import DPOPair
from composer.traces import Message

_LAST_LINES = 20  # of the command's output in an error
_SIDES = ("chosen", "rejected")

Text = str | list[Message]  # an answer: its text, or messages, of which the last one's content is the text


class NormalizerFailed(RuntimeError):
    """data-juicer's command is missing or failed; the text has its last lines."""


@dataclass(frozen=True)
class NormalizedDPOPair:
    """A pair that passed, in the shape in which it came: answers as text or as messages."""

    prompt: Any
    chosen: Text
    rejected: Text
    metadata: dict[str, Any] = field(default_factory=dict)  # every other field of the pair, unchanged


class DJNormalizer:
    """`recipe`: data-juicer's YAML, over rows with `text` and `dedup`. `dj_process`: path of its command."""

    def __init__(self, recipe: str | Path = "normalize.yaml", dj_process: str = "dj-process") -> None:
        given = Path(recipe)
        self.recipe = given if given.exists() else Path(__file__).parent / given
        self.dj_process = dj_process
        if not self.recipe.exists():
            raise ValueError(f"recipe {recipe!s} is neither a file nor one beside normalize.py.")

    def normalize(self, pairs: Sequence[DPOPair | Mapping[str, Any]]) -> list[NormalizedDPOPair]:
        """The pairs of which both answers pass, in order. Mappings have "prompt", "chosen", "rejected" and others.

        Raises `NormalizerFailed`.
        """
        given = [asdict(each) if isinstance(each, DPOPair) else dict(each) for each in pairs]
        if not given:
            return []
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "in.jsonl"), Path(folder, "out", "out.jsonl")
            source.write_text("".join(json.dumps(row) + "\n" for row in rows_of(given)))
            self._run(source, target)
            kept = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
        return pairs_of(given, kept)

    def _run(self, source: Path, target: Path) -> None:
        paths = ["--config", str(self.recipe), "--dataset_path", str(source), "--export_path", str(target)]
        try:
            done = subprocess.run([self.dj_process, *paths], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise NormalizerFailed(
                f"there is no command {self.dj_process!r}: make an environment with `pip install py-data-juicer==1.6.1 "
                "aiohttp` and pass DJNormalizer(dj_process=…) the path of its bin/dj-process."
            ) from None
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
            raise NormalizerFailed(f"{self.dj_process} ended with {done.returncode} over {self.recipe}:\n{tail}")


def rows_of(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """data-juicer's rows, two for each pair. Rejected answers are all different in `dedup`, by letters."""
    return [
        {
            "text": (text := _text_of(pair[side])),
            "dedup": text if side == "chosen" else f"rejected {_letters(index)}",
            "pair": index,
            "side": side,
        }
        for index, pair in enumerate(pairs)
        for side in _SIDES
    ]


def pairs_of(pairs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[NormalizedDPOPair]:
    """The pairs of which both rows are left, with the texts that those hold now."""
    texts = {(row["pair"], row["side"]): row["text"] for row in rows}
    found = []
    for index, pair in enumerate(pairs):
        if all((index, side) in texts for side in _SIDES):
            chosen, rejected = (_with_text(pair[side], texts[index, side]) for side in _SIDES)
            metadata = {key: value for key, value in pair.items() if key not in ("prompt", *_SIDES)}
            found.append(NormalizedDPOPair(pair["prompt"], chosen, rejected, metadata))
    return found


def _text_of(answer: Text) -> str:
    return answer if isinstance(answer, str) else str(answer[-1]["content"])


def _with_text(answer: Text, text: str) -> Text:
    return text if isinstance(answer, str) else [*answer[:-1], {**answer[-1], "content": text}]


def _letters(index: int) -> str:
    """A number in letters, since digits do not count where non-characters are ignored."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(index))
