"""Which texts are near-duplicates of held-out ones, by which rule, and which are not."""

import argparse
import ast
import calendar
import inspect
import random
import re
import textwrap
from collections.abc import Callable
from functools import partial

import pytest

from diloco_orchestrator.split.near_duplicates import Rule, find_near
from diloco_orchestrator.split.split import HeldoutSplit, Side, SplitItem, text_of

THRESHOLD = 0.5  # as `diloco split` has it


def functions() -> list[str]:
    """Functions of 8 lines or more from modules of the standard library."""
    sources = [inspect.getsource(each).splitlines() for each in (argparse, calendar, random, textwrap)]
    return [
        textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        for lines in sources
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.FunctionDef) and 8 <= (node.end_lineno or 0) - node.lineno <= 60
    ]


def words(count: int, rng: random.Random) -> str:
    """Words of which some are frequent, as in a language."""
    return " ".join(f"word{int(5000 ** rng.random())}" for _ in range(count))


def characters(count: int, rng: random.Random, first: int) -> str:
    return "".join(chr(first + int(3000 ** rng.random())) for _ in range(count))


def changed(text: str, rng: random.Random, to: str) -> str:
    at = rng.randrange(len(text))
    return text[:at] + to + text[at + 1 :]


def renamed(code: str, rng: random.Random) -> str:
    names = sorted(set(re.findall(r"\b[a-z_]{3,}\b", code)) - {"def", "for", "not", "and", "return", "else", "elif"})
    for number, name in enumerate(rng.sample(names, min(3, len(names)))):
        code = re.sub(rf"\b{name}\b", f"other_{number}", code)
    return code


def another_word(text: str, rng: random.Random) -> str:
    parts = text.split()
    parts[rng.randrange(len(parts))] = "elephant"
    return " ".join(parts)


def within_three_times(text: str, rng: random.Random) -> str:
    return f"{words(80, rng)}\n\n{text}\n\n{words(80, rng)}"


Edit = Callable[[str, random.Random], str]
SYSTEM = "System: You are a helpful assistant, who thinks step by step, explains and never guesses. Be brief.\n"
LEAKS: dict[str, tuple[Callable[[random.Random], str], Edit]] = {
    "one Chinese character of 120": (partial(characters, 120, first=0x4E00), partial(changed, to="\u9fa0")),
    "all but one Chinese character of 120": (partial(characters, 120, first=0x4E00), partial(changed, to="")),
    "one Thai character of 120": (lambda rng: "".join(rng.choices("กขคงจชซญดตถทธนบ", k=120)), partial(changed, to="ฮ")),
    "a prefix before 8 words": (partial(words, 8), lambda text, _: f"Question: {text}"),
    "one word of 18": (partial(words, 18), another_word),
    "a system prompt before a chat": (partial(words, 30), lambda text, _: SYSTEM + text),
    "inside one of three times its length": (partial(words, 80), within_three_times),
    "the first half": (partial(words, 80), lambda text, _: text[: len(text) // 2]),
    "in a long document": (partial(words, 40), lambda text, rng: f"{words(2000, rng)} {text} {words(2000, rng)}"),
    "of a long document": (partial(words, 2000), lambda text, _: text[9_000:10_000]),
}


@pytest.mark.parametrize("name", LEAKS)
def test_of_held_out_texts_that_leak_with_an_edit_at_most_a_tenth_passes_and_of_others_a_hundredth_is_flagged(name):
    make, edit = LEAKS[name]
    rng = random.Random(name)
    held = [make(rng) for _ in range(40)]
    near = find_near(held, [edit(text, rng) for text in held], THRESHOLD)
    assert sum(near[index].index == index for index in near) >= 0.9 * len(held)
    others = [make(rng) for _ in range(100)]
    assert len(find_near(held, others, THRESHOLD)) <= 1


def test_code_with_three_names_changed_is_found():
    held, rng = functions(), random.Random(0)
    found = find_near(held, [renamed(code, rng) for code in held], THRESHOLD)
    assert len(held) > 80 and len(found) >= 0.9 * len(held)


def test_the_rule_says_which_text_holds_the_other():
    rng = random.Random(1)
    held = [words(40, rng) for _ in range(3)]
    found = find_near(
        held,
        [held[2] + " more", words(40, rng) + held[1] + words(40, rng), held[0][:150], words(9, rng)],
        THRESHOLD,
    )
    assert {number: (near.rule, near.index) for number, near in found.items()} == {
        0: (Rule.SIMILAR, 2),
        1: (Rule.CONTAINS, 1),
        2: (Rule.PART, 0),
    }
    assert all(0.9 < near.similarity <= 1 for near in found.values())
    assert not find_near([], ["a"], THRESHOLD) and not find_near(["", "--"], ["", "--"], THRESHOLD)


def test_what_all_items_have_in_common_does_not_make_them_near():
    form = (
        "Below is an instruction that describes a task. Write a response that completes it.\n\n### Instruction:\n{}\n"
    )
    rng = random.Random(2)
    given = [form.format(words(12, rng)) for _ in range(400)]
    held, others = given[:40], given[40:]
    assert len(find_near(held, others, THRESHOLD)) <= 0.01 * len(others)
    leaked = [another_word(text, rng) for text in held]
    assert len(find_near(held, others + leaked, THRESHOLD)) >= 0.9 * len(leaked)


def test_of_many_texts_that_are_nearly_the_same_some_stand_for_all():
    rng = random.Random(3)
    licence = words(200, rng)
    held = [f"Copyright {number} by owner{number}. {licence}" for number in range(200)]
    assert find_near(held, [f"Copyright 7 by someone. {licence}"], THRESHOLD)[0].similarity > 0.8


def test_near_duplicates_of_held_out_items_are_left_out_of_training_whatever_the_order():
    rng = random.Random(4)
    given = [SplitItem(f"item{n:02d}", words(60, rng)) for n in range(80)]
    split = HeldoutSplit(share=0.3, near_duplicates=THRESHOLD)
    held = [item for item, side in zip(given, split.split(given).sides, strict=True) if side is Side.HELDOUT]
    trained = next(group for group in (f"g{i}" for i in range(99)) if not split.holds_out(group))
    near = SplitItem("near", {"q": another_word(held[0].content, rng), "a": 17}, trained)
    far = SplitItem("far", " ".join(held[0].content.split()[:5]) + words(60, rng), trained)
    done = split.split([*given, near, far])
    assert done.sides[-2:] == (Side.EXCLUDED, Side.TRAIN) and list(done.why) == ["near"]
    assert str(done.why["near"]).startswith(f"similar to {held[0].id} (9")
    assert done.manifest.hash_of(near.content) in done.manifest.forbidden()
    shuffled = rng.sample([*given, near, far], len(given) + 2)
    assert split.split(shuffled).why == done.why
    assert HeldoutSplit(share=0.3).split([*given, near]).sides[-1] is Side.TRAIN


def test_the_text_of_json_is_its_texts_and_numbers_by_name():
    assert text_of({"b": ["x", 1, None], "a": {"c": 2.5}}) == "2.5\nx\n1\n"
    assert text_of('{"b": "x", "a": 1}') == text_of({"a": 1, "b": "x"}) and text_of("[x]") == "[x]"
