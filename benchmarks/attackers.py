"""What scripted attackers do to a run of eight replicas: held-out loss at its end, and what its commits say of them.

    PYTHONPATH=tests/support python benchmarks/attackers.py --docs      # about half an hour of one core

One or two of the replicas write to the bucket what their script says (tests/support/hostile_replicas.py). Held-out loss
is compared with that of the same run without attackers, by the default and by `aggregate="agreeing_mean"`. The other
aggregates are measured where the default ends more than 2 % above it. An attack of which no commit takes anything in
the first seed, and which ends there with the bits of a run whose attackers abstain, is not played with other seeds.
"""

import argparse
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from hostile_replicas import ATTACKS, HostileFleet
from measuring import ROOT, markdown, publish

from diloco_orchestrator.protocol.records import Commit

DOCUMENT = ROOT / "docs" / "inside" / "attacks.md"
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
ABSTAINING = "abstaining"
REFUSED = {"unverifiable", "wrong_base", "abstention", "no answer"}  # judgements of a contribution that is not averaged
# Why a contribution that is averaged as it is does no harm, or as much as one share can.
AVERAGED = {
    "sign flip, just below the limit": "averaged: within the clip's limit",
    "sign flip x1": "averaged: one share",
    "drift: a constant direction added": "averaged: its norm is usual, two shares at the most",
    "random noise of the usual norm": "averaged: one share, without a direction",
    "replay of its first payload": "averaged: one share",
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


def played(name: str | None, attackers: int, rounds: int, settings: Mapping[str, Any], seed: int) -> Outcome:
    """Play one run. `name`: of the attack; None without attackers."""
    attack = (lambda writer: None) if name is None else ATTACKS[name]
    fleet = HostileFleet(REPLICAS, rounds, seed, attackers, attack, deciders=1, **settings)
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
    for said in commit.discounted:
        if said.replica_id == replica_id:
            return "scores discounted", said.reason
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
    counts.pop("no answer", None) if len(counts) > 1 else None  # of the final evaluation round, in which nobody attacks
    total = sum(counts.values())
    kinds = ", ".join(f"{kind} {count} of {total}" for kind, count in counts.most_common())
    reason = next((each.reason for each in outcomes if each.reason), "")
    reason = reason.replace("|", "/").replace(" in memory://", "")
    return "; ".join(filter(None, [kinds, reason and f"“{reason[:140]}”", AVERAGED.get(name, "")]))


def measure(names: Sequence[str], seeds: range, rounds: int, given: Mapping[str, Any], pool: Executor) -> str:
    """The table. `given`: settings of all runs."""

    def play(name: str | None, attackers: int, **settings: Any) -> list[Outcome]:
        everywhere = {**SETTINGS.get(name or "", {}), **given, **settings}
        found = list(pool.map(partial(played, name, attackers, rounds, everywhere), seeds[:1]))
        if name not in (None, ABSTAINING) and found[0].judged.keys() <= REFUSED:
            without = abstained(attackers, **settings)
            if found[0].loss == without[0].loss:
                return [replace(each, judged=found[0].judged, reason=found[0].reason) for each in without]
        return found + list(pool.map(partial(played, name, attackers, rounds, everywhere), seeds[1:]))

    @cache
    def abstained(attackers: int, **settings: Any) -> list[Outcome]:
        return play(ABSTAINING, attackers, **settings)

    clean = play(None, 0)
    rows = []
    for name in names:
        found = {f: play(name, f) for f in (1, 2)}
        chosen = {f: play(name, f, aggregate="agreeing_mean") for f in (1, 2)}
        cells = [cell(each[f], clean) for each in (found, chosen) for f in (1, 2)]
        for aggregate in ("trimmed_mean", "median"):
            far = excess(found[2], clean) > ALLOWED
            by_coordinate = {"aggregate": aggregate, "weights": "uniform"}
            cells.append(cell(play(name, 2, **by_coordinate), clean) if far else "")
        rows.append([name, *cells, said(name, found[2]), said(name, chosen[2])])
        print(rows[-1], file=sys.stderr, flush=True)
    nobody = {how: cell(play(None, 0, aggregate=how), clean) for how in ("agreeing_mean", "trimmed_mean", "median")}
    rows.append(["(nobody)", "", "", nobody["agreeing_mean"], "", nobody["trimmed_mean"], nobody["median"], "", ""])
    return markdown(COLUMNS, rows)


def measure_many(names: Sequence[str], attackers: int, seeds: range, rounds: int, pool: Executor) -> str:
    """The excess of held-out loss with so many attackers among the replicas, by two aggregates, without shortcuts."""
    columns = {"default": {}, "agreeing_mean": {"aggregate": "agreeing_mean"}}

    def play(name: str | None, count: int, settings: Mapping[str, Any]) -> list[Outcome]:
        everywhere = {**SETTINGS.get(name or "", {}), **settings}
        return list(pool.map(partial(played, name, count, rounds, everywhere), seeds))

    clean, rows = play(None, 0, {}), []
    for name in names:
        rows.append([name, *(cell(play(name, attackers, each), clean) for each in columns.values())])
        print(rows[-1], file=sys.stderr, flush=True)
    return markdown(["attack", *(f"{attackers} of {REPLICAS}, {each}" for each in columns)], rows)


def quiet() -> None:
    """Set up a process that plays runs."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="an attack; by default all")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--clip-factor", type=float, help="the run's setting")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--attackers", type=int, help="so many instead of one and two, by two aggregates")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/attacks.md")
    given = parser.parse_args()
    settings = {} if given.clip_factor is None else {"clip_factor": given.clip_factor}
    with ProcessPoolExecutor(given.processes, initializer=quiet) as pool:
        names, seeds = given.only or list(ATTACKS), range(given.seeds)
        if given.attackers is None:
            table = measure(names, seeds, given.rounds, settings, pool)
        else:
            table = measure_many(names, given.attackers, seeds, given.rounds, pool)
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
