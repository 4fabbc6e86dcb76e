"""What three hostile strangers do to a run whose other replicas score their work, and which honest ones it costs.

    PYTHONPATH=tests/support python benchmarks/strangers.py --docs              # about 25 minutes of one core
    PYTHONPATH=tests/support python benchmarks/strangers.py --honest --docs
    PYTHONPATH=tests/support python benchmarks/strangers.py --dealt --docs      # who trains on what it is dealt
    PYTHONPATH=tests/support python benchmarks/strangers.py --aggregates --docs # by which aggregate they harm least
    PYTHONPATH=tests/support python benchmarks/strangers.py --guard --docs      # with the kill-switch, as by default

Real participants score the contributions of strangers on held-out items (`guard.strangers`) and decide each round, with
the default aggregate of runs with strangers. The hostile ones follow a script (tests/support/hostile_replicas.py). The
loss at a run's end is over items that nobody has scored, compared with the same run of launched replicas alone.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from attackers import SETTINGS, quiet
from hostile_replicas import ATTACKS, SHARE, HostileFleet, Task, Writer, drift
from measuring import ROOT, markdown, publish
from other_data import KINDS, OtherData

from diloco_orchestrator.protocol.records import Score

DOCUMENT = ROOT / "docs" / "inside" / "attacks.md"
ROUNDS, HOSTILE = 60, 3
ITEMS = (8, 32, SHARE, 2048)  # of each launched replica, where nobody attacks
DEALT = (16, 64, 256)  # items dealt to a stranger on which each launched replica scores its work
UNTRAINED, COPY = "it trains on other items than it is dealt", "it sends another's work with a little noise"
HALF = "drift, half as large"
FALLING = "honest work, and words of a score that falls"
AGGREGATES = ("mean", "agreeing_mean", "trimmed_mean", "median")
# Scripts of which an average gets something before they are left out. Of those that are left out from the first round
# on, or refused, none gets anything.
AVERAGED = "drift: a constant direction added", HALF, "replay of its first payload"
# (launched replicas, strangers): in both fleets three of the strangers are hostile.
FLEETS = {"5 launched, 3 strangers": (5, 3), "3 launched, 8 strangers": (3, 8)}


@dataclass(frozen=True)
class Outcome:
    """The end of one run, and how many contributions were left out of its rounds."""

    loss: float  # of the model it ended with, on items that nobody has scored
    stop: str
    hostile: int  # contributions of hostile strangers that were left out for their scores
    honest: int  # likewise of honest ones
    last: int  # of these, of the run's last replica
    repeating: int  # of these, because the stranger's work repeats what it sent before
    of_honest: int  # contributions of honest strangers, left out or not
    untrained: dict[
        int, int
    ]  # stranger -> the first round that left it out because its share of the data does not show


def played(
    fleet: str,
    name: str | None,
    rounds: int,
    scored: bool,
    seed: int,
    kind: str | None = None,
    share: int = SHARE,
    dealt: int = 0,
    aggregate: str | None = None,
    task_of: Callable[[int], Task] | None = None,
    guard: bool = False,
) -> Outcome:
    """Play one run. `name`: of the attack; None: nobody attacks. `kind`: how replicas' data differ, if at all.

    `guard`: whether the kill-switch may halt it. `task_of`: makes another task than the classifier's from the seed.

    `share`: held-out items on which each launched replica scores. `dealt`: items of the data dealt to a stranger, and
    as many others, on which each scores its work; 0: none. `aggregate`: None: the default where strangers contribute.
    """
    launched, strangers = FLEETS[fleet]
    total, attackers = launched + strangers, HOSTILE if name else 0
    settings: dict[str, Any] = {"invited": list(range(launched, total)), **SETTINGS.get(name or "", {})}
    if not scored:
        settings["aggregate"] = "agreeing_mean"
    if aggregate is not None:
        settings["aggregate"] = aggregate
        settings |= {} if aggregate in ("mean", "agreeing_mean") else {"weights": "uniform"}
    task = task_of(seed) if task_of else Task(seed) if kind is None else OtherData(seed, kind)
    others = {None: lambda w: None, UNTRAINED: lambda w: w.send(w.delta), COPY: _copied, HALF: partial(drift, size=0.5)}
    others |= {FALLING: _says_that_it_falls}
    attack = others.get(name) or ATTACKS[name]
    deciders = launched if scored else 1
    settings |= {"scores_strangers": scored, **({} if guard else {"guard": "off"})}
    run = HostileFleet(
        total, rounds, seed, attackers, attack, task, deciders, share, dealt, name == UNTRAINED, **settings
    )
    commits = run.play()
    first = total - attackers
    left_out = [each for commit in commits for each in commit.quarantined]
    out = [each.replica_id for each in left_out]
    honest = [each for each in left_out if launched <= each.replica_id < first]
    answers = [a.replica_id for commit in commits for a in commit.answers if a.kind == "delta"]
    return Outcome(
        loss=task.fresh_loss(run.deciders[0].base.parameters, seed),
        stop=commits[-1].stop,
        hostile=sum(each >= first for each in out),
        honest=len(honest),
        last=sum(each.replica_id == total - 1 for each in honest),
        repeating=sum("repeats" in each.reason for each in honest),
        of_honest=sum(launched <= each < first for each in answers),
        untrained={
            each.replica_id: commit.round
            for commit in reversed(commits)
            for each in commit.quarantined
            if "the data dealt to it" in each.reason
        },
    )


def _copied(writer: Writer) -> None:
    noise = torch.randn(writer.delta.shape, generator=writer.memory["draw"])
    writer.send(writer.others[0] + 0.1 * noise * (writer.delta.norm() / noise.norm()))


def _says_that_it_falls(writer: Writer) -> None:
    """Honest work. The score that it reports of its own share falls by .02 an item a round, from the 11th on."""
    own = writer.own
    fallen = 0.02 * max(0, writer.round - 10) * own.count
    writer.send(writer.delta, scores=(Score(share=own.share, sum=(own.sum or 0.0) - fallen, count=own.count),))


def begun(pool: Executor, seeds: range, *which: Any, **how: Any) -> list[Future[Outcome]]:
    """A run for each seed, in the pool's processes. `which`, `how`: the other arguments of `played`.

    All runs of a table begin before the first is waited for, so that no process waits for the end of a row.
    """
    return [pool.submit(partial(played, *which, seed=seed, **how)) for seed in seeds]


def ended(runs: Sequence[Future[Outcome]]) -> list[Outcome]:
    return [each.result() for each in runs]


def excess(outcomes: Sequence[Outcome], clean: Sequence[Outcome]) -> str:
    value = mean(each.loss / beside.loss - 1.0 for each, beside in zip(outcomes, clean, strict=True))
    halted = sum(each.stop != "completed" for each in outcomes)
    words = f"{100 * value:+.1f} %" if abs(value) < 10 else f"x{value + 1:.3g}"
    return f"{words}, {halted} of {len(outcomes)} ended early" if halted else words


def rate(found: Sequence[Outcome]) -> str:
    total = sum(each.of_honest for each in found)
    return f"{sum(each.honest for each in found)} of {total}" if total else ""


def of_attacks(names: Sequence[str], seeds: range, rounds: int, pool: Executor) -> str:
    few, many = FLEETS
    clean = {fleet: begun(pool, seeds, fleet, None, rounds, False) for fleet in FLEETS}
    before = {name: begun(pool, seeds, few, name, rounds, False) for name in names}
    scored = {
        name: {fleet: begun(pool, seeds, fleet, name, rounds, True) for fleet in FLEETS} for name in (None, *names)
    }
    columns = ["attack", f"not scored: {few}", f"scored: {few}", "hostile left out", f"scored: {many}"]
    columns += ["hostile left out", "honest strangers left out"]
    rows, beside = [], {fleet: ended(clean[fleet]) for fleet in FLEETS}
    for name, of_fleets in scored.items():
        found = {fleet: ended(runs) for fleet, runs in of_fleets.items()}
        sent = HOSTILE * rounds * len(seeds)
        left = {fleet: f"{100 * sum(e.hostile for e in found[fleet]) / sent:.0f} %" if name else "" for fleet in FLEETS}
        cells = [excess(ended(before[name]) if name else beside[few], beside[few])]
        cells += [excess(found[few], beside[few]), left[few]]
        cells += [excess(found[many], beside[many]), left[many], rate(found[many])]
        rows.append([name or "(nobody)", *cells])
        print(rows[-1], file=sys.stderr, flush=True)
    return markdown(columns, rows)


def of_honest(seeds: range, rounds: int, pool: Executor) -> str:
    """Honest strangers alone, also where data differ: how many of their contributions are left out."""
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"nobody's data differ, {n} items a scorer", {"share": n}) for n in ITEMS
    ]
    cases += [(kind, {"kind": kind}) for kind in KINDS[1:]]
    runs = {name: begun(pool, seeds, next(iter(FLEETS)), None, rounds, True, **how) for name, how in cases}
    rows = []
    for name in runs:
        found = ended(runs[name])
        last, repeating = sum(each.last for each in found), sum(each.repeating for each in found)
        rows.append([name, rate(found), str(repeating), f"{last} of {rounds * len(seeds)}"])
        print(rows[-1], file=sys.stderr, flush=True)
    columns = ["honest replicas; three of eight are strangers", "strangers' contributions left out"]
    columns += ["of these, for repetition", "the last one's left out"]
    return markdown(columns, rows)


def of_aggregates(names: Sequence[str | None], seeds: range, rounds: int, pool: Executor) -> str:
    """What each aggregate leaves of an attack on work that is scored, beside the mean where nobody attacks."""
    clean = {fleet: begun(pool, seeds, fleet, None, rounds, True, aggregate="mean") for fleet in FLEETS}
    where = [(fleet, how) for fleet in FLEETS for how in AGGREGATES]
    runs = {
        name: [begun(pool, seeds, fleet, name, rounds, True, aggregate=how) for fleet, how in where] for name in names
    }
    rows, beside = [], {fleet: ended(found) for fleet, found in clean.items()}
    for name, of_where in runs.items():
        cells = [excess(ended(each), beside[fleet]) for each, (fleet, _) in zip(of_where, where, strict=True)]
        rows.append([name or "(nobody)", *cells])
        print(rows[-1], file=sys.stderr, flush=True)
    return markdown(["attack", *(f"{fleet}: {how}" for fleet, how in where)], rows)


def of_guard(names: Sequence[str], seeds: range, rounds: int, pool: Executor) -> str:
    """Runs that the kill-switch may halt, as by default."""
    play = partial(begun, pool, seeds)
    runs = {name: [play(fleet, name, rounds, True, guard=True) for fleet in FLEETS] for name in (None, *names)}
    rows, clean = [], [ended(each) for each in runs[None]]
    for name, of_fleets in runs.items():
        cells = [excess(ended(each), beside) for each, beside in zip(of_fleets, clean, strict=True)]
        rows.append([name or "(nobody)", *cells])
        print(rows[-1], file=sys.stderr, flush=True)
    return markdown(["attack", *FLEETS], rows)


def of_dealt(seeds: range, rounds: int, pool: Executor) -> str:
    """Strangers that train on what they are dealt, and such that do not: how many are left out for it, and when."""
    fleet, rows = next(iter(FLEETS)), []
    names = (None, UNTRAINED, COPY, "random noise of the usual norm", "replay of its first payload")
    runs = {name: [begun(pool, seeds, fleet, name, rounds, True, dealt=items) for items in DEALT] for name in names}
    for name, of_items in runs.items():
        cells = []
        for each in of_items:
            first = sorted(round_ for found in ended(each) for round_ in found.untrained.values())
            cells.append(f"{len(first)} of {HOSTILE * len(seeds)}")
            if first:
                cells[-1] += f", after {median(first):.0f} rounds, the last after {first[-1]}"
        rows.append([name or "it trains on what it is dealt", *cells])
        print(rows[-1], file=sys.stderr, flush=True)
    return markdown(["what a stranger does", *(f"left out by {n} items a scorer" for n in DEALT)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*ATTACKS, HALF, FALLING], help="an attack; by default all")
    parser.add_argument("--honest", action="store_true", help="play honest strangers alone, also with other data")
    parser.add_argument(
        "--dealt", action="store_true", help="play strangers that train on other data than they are dealt"
    )
    parser.add_argument(
        "--aggregates", action="store_true", help="play the scripts that are averaged, by each aggregate"
    )
    parser.add_argument("--guard", action="store_true", help="play runs that the kill-switch may halt")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/attacks.md")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    with ProcessPoolExecutor(given.processes, initializer=quiet) as pool:
        if given.honest:
            table, where = of_honest(seeds, given.rounds, pool), "honest_strangers"
        elif given.aggregates:
            table, where = of_aggregates(given.only or [None, *AVERAGED], seeds, given.rounds, pool), "aggregates"
        elif given.guard:
            table, where = of_guard(given.only or [FALLING, *ATTACKS], seeds, given.rounds, pool), "guarded_strangers"
        elif given.dealt:
            table, where = of_dealt(seeds, given.rounds, pool), "dealt_strangers"
        else:
            table, where = of_attacks(given.only or list(ATTACKS), seeds, given.rounds, pool), "strangers"
    command = shlex.join(["python", "benchmarks/strangers.py", *sys.argv[1:]])
    text = (
        f"Taken {time.strftime('%Y-%m-%d')}; {given.rounds} rounds, mean over {given.seeds} seeds.\n\n"
        f"```\nPYTHONPATH=tests/support .venv/bin/{command}\n```\n\n{table}"
    )
    print(text)
    if given.docs:
        publish(where, text, None, DOCUMENT, by="strangers")


if __name__ == "__main__":
    main()
