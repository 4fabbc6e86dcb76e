"""How many contributions of healthy fleets the clip makes lighter: by a constant limit, and by the run's own norms.

    PYTHONPATH=tests/support python benchmarks/clips.py --docs      # about ten minutes of one core

The fleets are those of benchmarks/healthy_norms.py, in which nobody attacks. Their norms are kept in a file; with
`--norms FILE` that holds them already, rules are tried without training again.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import torch
from attackers import DOCUMENT
from healthy_norms import Kind, kinds, norms_of
from measuring import RUNS, markdown, publish

from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol.weights import folded, limit_of

CONSTANT = 2.0  # times the median of the round
COLUMNS = ("healthy fleet", "replicas", "contributions", "largest norm, times the median", "constant", "as it is now")
Norms = list[list[float]]  # by round and replica


def by_a_constant(norms: Norms) -> int:
    """How many are above twice the median of their round."""
    return sum(norm > CONSTANT * median_low(round_) for round_ in norms for norm in round_)


def by_the_run(norms: Norms) -> int:
    """How many are above the limit that follows from the rounds before."""
    config, before, found = make_config({"entrypoint": "m:f", "replicas": len(norms[0])}), None, 0
    for round_ in norms:
        limit = limit_of(round_, 0, before, config)
        found += sum(norm > limit.factor * limit.usual for norm in round_)
        before = folded(before, 0, round_, fewest=min(3, len(round_)))
    return found


def recorded(path: Path, fleets: Sequence[Kind]) -> list[tuple[str, Norms]]:
    """Each fleet's name and norms. Those that are not in the file are trained, and written to it at once."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in fleets:
        if kind.key() not in known:
            print(f"{kind.label}, {kind.replicas} replicas", file=sys.stderr, flush=True)
            known[kind.key()] = norms_of(kind)
            path.write_text(json.dumps(known))
    return [(kind.label, known[kind.key()]) for kind in fleets]


def table_of(fleets: Sequence[tuple[str, Norms]]) -> str:
    """One row for each fleet, and the sums."""
    rows, sums = [], [0, 0, 0]
    for name, norms in fleets:
        counts = [sum(map(len, norms)), by_a_constant(norms), by_the_run(norms)]
        largest = max(max(round_) / median_low(round_) for round_ in norms)
        rows.append([name, str(len(norms[0])), str(counts[0]), f"{largest:.3g}", *map(str, counts[1:])])
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
    each = [f"{count}, {1000 * count / sums[0]:.2f} of 1,000" for count in sums[1:]]
    return markdown(COLUMNS, [*rows, [f"all {len(fleets)}", "", str(sums[0]), "", *each]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norms", type=Path, default=RUNS / "healthy_norms.json", help="the file of norms")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/attacks.md")
    parser.add_argument("--only", default="", help="only fleets with this in their name")
    parser.add_argument("--rounds", type=int, help="of every fleet; by default each has its own number")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [kind for kind in kinds() if given.only in kind.label]
    table = table_of(recorded(given.norms, [replace(kind, rounds=given.rounds or kind.rounds) for kind in chosen]))
    command = shlex.join(["python", "benchmarks/clips.py", *sys.argv[1:]])
    text = f"Taken {time.strftime('%Y-%m-%d')}.\n\n```\nPYTHONPATH=tests/support .venv/bin/{command}\n```\n\n{table}"
    print(text)
    if given.docs:
        publish("clips", text, None, DOCUMENT)


if __name__ == "__main__":
    main()
