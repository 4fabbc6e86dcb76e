"""What scripted attackers do to a run of eight replicas: held-out loss at its end, and what its commits say of them.

    PYTHONPATH=tests/support python benchmarks/attackers.py --docs      # about half an hour on one core

One or two of the replicas write to the bucket what their script says (tests/support/hostile_replicas.py). Held-out loss
is compared with that of the same run without attackers, by the default and by `aggregate="agreeing_mean"`. The other
aggregates are measured where the default ends more than 2 % above it.
"""

import argparse
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from hostile_replicas import ATTACKS, Attack, HostileFleet
from measuring import ROOT, markdown, publish

from diloco_orchestrator.protocol.records import Commit

DOCUMENT = ROOT / "docs" / "attacks.md"
REPLICAS, ROUNDS = 8, 60
ALLOWED = 0.02
# Attacks that only mean something with another setting than the default.
SETTINGS: dict[str, dict[str, Any]] = {"huge counts of steps and tokens": {"weights": "tokens"}}
COLUMNS = [
    "attack",
    *("1 of 8", "2 of 8", "1 of 8, agreeing_mean", "2 of 8, agreeing_mean"),
    *("2 of 8, trimmed_mean", "2 of 8, median"),
    *("what the commits say, 2 of 8", "the same, agreeing_mean"),
]
# Why a contribution that is averaged as it is does no harm, or as much as one share can.
AVERAGED = {
    "sign flip, just below the limit": "averaged: within the clip's limit",
    "sign flip x1": "averaged: one share",
    "drift: a constant direction added": "averaged: its norm is usual, two shares at the most",
    "random noise of the usual norm": "averaged: one share, without a direction",
    "zero update": "averaged: one share of a shorter step",
    "replay of its first payload": "averaged: one share",
    "copy of another's payload": "averaged: two shares for the one that is copied",
    "lying scores, high": "averaged: its training is honest; scores are clipped to what the shares show",
    "lying scores, low": "averaged: its training is honest; scores are clipped to what the shares show",
    "scores that are not finite": "averaged: its training is honest; its share of the scores is missing",
    "late flood": "no answer in time; what comes late is not averaged",
}


@dataclass(frozen=True)
class Outcome:
    """The end of one run."""

    loss: float  # held-out, of the model it ended with
    stop: str
    rounds: int
    judged: Counter[str]  # what its commits say of attackers, by kind
    reason: str  # the last one that they give


def played(attack: Attack | None, attackers: int, seed: int, rounds: int, **settings: Any) -> Outcome:
    """Play one run. `attack` is None without attackers."""
    fleet = HostileFleet(REPLICAS, rounds, seed, attackers, attack or (lambda writer: None), **settings)
    commits = fleet.play()
    judged: Counter[str] = Counter()
    reason = ""
    for commit, after in zip(commits, [*commits[1:], None], strict=True):
        for replica_id in range(REPLICAS - attackers, REPLICAS):
            kind, why = judgement(commit, after, replica_id)
            judged[kind] += 1
            reason = why or reason
    return Outcome(fleet.loss, commits[-1].stop, len(commits), judged, reason)


def judgement(commit: Commit, after: Commit | None, replica_id: int) -> tuple[str, str]:
    """What a commit, and the one after it, say of a replica's contribution, and why; "" where they give no reason."""
    for left_out in after.figures.disagreeing if after and after.figures else ():
        if left_out.replica_id == replica_id and left_out.round == commit.round:
            return "left out", left_out.reason
    for each in commit.clipped:
        if each.replica_id == replica_id:
            return "clipped", each.reason
    for answer in commit.answers:
        if answer.replica_id == replica_id:
            return ("averaged" if answer.averaged else answer.kind), answer.reason
    return "no answer", ""


def excess(outcomes: Sequence[Outcome], clean: Sequence[Outcome]) -> float:
    """By how much the held-out loss is above that of the clean run, as a share of it, mean over seeds."""
    return mean(each.loss / beside.loss - 1.0 for each, beside in zip(outcomes, clean, strict=True))


def cell(outcomes: Sequence[Outcome], clean: Sequence[Outcome]) -> str:
    value = excess(outcomes, clean)
    halted = sum(each.stop != "completed" for each in outcomes)
    words = f"{100 * value:+.1f} %" if abs(value) < 10 else f"x{value + 1:.3g}"
    return f"{words}, {halted} of {len(outcomes)} halted" if halted else words


def said(name: str, outcomes: Sequence[Outcome]) -> str:
    """What the commits say of the attackers, over all seeds, and the last reason that they give."""
    counts: Counter[str] = sum((each.judged for each in outcomes), Counter())
    counts.pop("no answer", None) if len(counts) > 1 else None  # of the closing round, in which nobody attacks
    total = sum(counts.values())
    kinds = ", ".join(f"{kind} {count} of {total}" for kind, count in counts.most_common())
    reason = next((each.reason for each in outcomes if each.reason), "")
    reason = reason.replace("|", "/").replace(" in memory://", "")
    return "; ".join(filter(None, [kinds, reason and f"“{reason[:140]}”", AVERAGED.get(name, "")]))


def measure(names: Sequence[str], seeds: range, rounds: int, clip_factor: float) -> str:
    """The table."""
    clean = [played(None, 0, seed, rounds, clip_factor=clip_factor) for seed in seeds]
    rows = []
    for name in names:
        settings, attack = {**SETTINGS.get(name, {}), "clip_factor": clip_factor}, ATTACKS[name]
        found = {f: [played(attack, f, seed, rounds, **settings) for seed in seeds] for f in (1, 2)}
        agreeing = {**settings, "aggregate": "agreeing_mean"}
        chosen = {f: [played(attack, f, seed, rounds, **agreeing) for seed in seeds] for f in (1, 2)}
        cells = [cell(each[f], clean) for each in (found, chosen) for f in (1, 2)]
        for aggregate in ("trimmed_mean", "median"):
            if excess(found[2], clean) <= ALLOWED:
                cells.append("")
                continue
            how = {"aggregate": aggregate, "clip_factor": clip_factor}
            others = [played(attack, 2, seed, rounds, **how) for seed in seeds]
            cells.append(cell(others, clean))
        rows.append([name, *cells, said(name, found[2]), said(name, chosen[2])])
        print(rows[-1], file=sys.stderr, flush=True)
    nobody = {
        how: cell([played(None, 0, seed, rounds, aggregate=how) for seed in seeds], clean)
        for how in ("agreeing_mean", "trimmed_mean", "median")
    }
    rows.append(["(nobody)", "", "", nobody["agreeing_mean"], "", nobody["trimmed_mean"], nobody["median"], "", ""])
    return markdown(COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="an attack; by default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--clip-factor", type=float, default=2.0, help="the run's setting")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/attacks.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    table = measure(given.only or list(ATTACKS), range(given.seeds), given.rounds, given.clip_factor)
    command = shlex.join(["python", "benchmarks/attackers.py", *sys.argv[1:]])
    text = (
        f"Taken {time.strftime('%Y-%m-%d')}; {REPLICAS} replicas, {given.rounds} rounds, mean over {given.seeds} seeds."
        f"\n\n```\nPYTHONPATH=tests/support .venv/bin/{command}\n```\n\n{table}"
    )
    print(text)
    if given.docs:
        publish("attackers", text, None, DOCUMENT)


if __name__ == "__main__":
    main()
