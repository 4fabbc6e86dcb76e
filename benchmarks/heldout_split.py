"""What it costs to compare every training item with the held-out set: microseconds an item, and share of a step.

    make bench-heldout_split

One process with one thread trains a small transformer on texts; a token is taken to be four characters. Each
repetition alternates steps and comparisons of the same batches, so that both see the same machine. The held-out
manifest has `--heldout` items. The second table splits `--items` texts of 2,000 characters, with and without the
search for near-duplicates.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Results, Sample, Source, markdown, middle, parser_of, pick, run
from svg_chart import Bar, Group, bars

CHARACTERS = (200, 2_000, 8_000)  # of an item
_BATCH = {200: 64, 2_000: 8, 8_000: 2}  # items
_WIDTH, _LAYERS, _VOCABULARY = 256, 4, 8_000
_STEPS = 5


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    for repetition in range(given.repetitions):
        for source in sources:
            for sample in one_process(source, given):
                results.add(arm=source.name, repetition=repetition, **sample)


def one_process(source: Source, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The samples of one process that imports a checkout."""
    sizes = json.dumps({"heldout": given.heldout, "items": given.items})
    command = [sys.executable, "-P", str(Path(__file__)), "--one", sizes]
    environ = source.environ(PYTHONPATH=f"{source.path}:{Path(__file__).parent}")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the process failed:\n{done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


# -- in the process ---------------------------------------------------------------------------------------------------


def texts(count: int, characters: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = [f"word{i}" for i in range(5_000)]
    return [" ".join(rng.choices(words, k=characters // 8))[:characters] for _ in range(count)]


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds, which other work on the machine stretches less than those of the clock."""
    began = time.process_time()
    call()
    return time.process_time() - began


def compare(heldout: int) -> list[dict[str, Any]]:
    """Seconds of comparisons and of steps, by the length of an item."""
    from diloco_orchestrator.replica.training.consumed_items import ConsumedItems
    from diloco_orchestrator.split.manifest import HeldoutManifest

    manifest = HeldoutManifest.of(texts(heldout, 200, seed=1))
    found = []
    for characters in CHARACTERS:
        items, step = ConsumedItems(manifest, None), step_of(_BATCH[characters], characters // 4)
        batches = [texts(_BATCH[characters], characters, seed=index + 2) for index in range(_STEPS + 1)]
        items.checked(batches[0]), step()  # the first of each is slower
        checks, steps = [], []
        for batch in batches[1:]:
            checks.append(seconds(partial(items.checked, batch)))
            steps.append(seconds(step))
        check_s, step_s = median(checks), median(steps)
        found.append(
            {
                "what": "compare",
                "characters": characters,
                "batch": _BATCH[characters],
                "item_us": 1e6 * check_s / _BATCH[characters],
                "step_s": step_s,
                "share": check_s / step_s,
                "heldout": heldout,
            }
        )
    return found


def step_of(batch: int, tokens: int) -> Callable[[], object]:
    """A training step of a small causal language model on random tokens."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(_VOCABULARY, _WIDTH),
        torch.nn.TransformerEncoder(layer, _LAYERS),
        torch.nn.Linear(_WIDTH, _VOCABULARY),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(_VOCABULARY, (batch, tokens + 1))

    def step() -> None:
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def divide(count: int) -> list[dict[str, Any]]:
    """Seconds of a split, without and with the search for near-duplicates."""
    from diloco_orchestrator.split.split import HeldoutSplit, SplitItem

    items = [SplitItem(str(index), text) for index, text in enumerate(texts(count, 2_000, seed=0))]
    rules = {"equal items only": HeldoutSplit(), "near-duplicates too": HeldoutSplit(near_duplicates=0.5)}
    return [
        {
            "what": "split",
            "rule": name,
            "items": count,
            "item_us": 1e6 * seconds(partial(rule.split, items)) / count,
        }
        for name, rule in rules.items()
    ]


# -- tables -----------------------------------------------------------------------------------------------------------


def _arms(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(sample["arm"] for sample in samples))


def table(samples: Sequence[Sample]) -> str:
    rows = []
    for arm in _arms(samples):
        for characters in CHARACTERS:
            own = pick(samples, arm=arm, what="compare", characters=characters)
            share = f"{100 * middle(own, 'share'):.3f} %"
            step_ms, tokens = f"{1000 * middle(own, 'step_s'):.0f}", own[0]["batch"] * characters // 4
            rows.append([arm, f"{characters:,}", f"{middle(own, 'item_us'):.1f}", f"{tokens:,}", step_ms, share])
    first = pick(samples, what="compare")[0]
    compared = markdown(["", "characters an item", "µs an item", "tokens a step", "ms a step", "share of it"], rows)
    splits = []
    for arm in _arms(samples):
        for rule in dict.fromkeys(s["rule"] for s in pick(samples, arm=arm, what="split")):
            own = pick(samples, arm=arm, what="split", rule=rule)
            splits.append([arm, rule, f"{own[0]['items']:,}", f"{middle(own, 'item_us'):.0f}"])
    words = (
        f"Comparing with {first['heldout']:,} held-out items, one thread, a transformer of {_LAYERS} layers of width "
        f"{_WIDTH}; CPU time, medians."
    )
    return f"{words}\n\n{compared}\n\nSplitting:\n\n{markdown(['', 'search', 'items', 'µs an item'], splits)}"


def picture(samples: Sequence[Sample]) -> str:
    drawn = []
    for arm in _arms(samples):
        for characters in CHARACTERS:
            share = 100 * middle(pick(samples, arm=arm, what="compare", characters=characters), "share")
            drawn.append(Bar(f"{arm}: {characters:,} characters", [share], text=f"{share:.3f} %"))
    return bars("Comparing training items, % of a step's time", [Group("by the length of an item", drawn)], "%")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        sizes = json.loads(sys.argv[2])
        print(json.dumps([*compare(sizes["heldout"]), *divide(sizes["items"])]))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--heldout", type=int, default=10_000, help="held-out items to compare with; default 10,000")
    parser.add_argument("--items", type=int, default=1_000, help="to split; default 1,000")
    run("heldout_split", parser, measure, table, picture)


if __name__ == "__main__":
    main()
