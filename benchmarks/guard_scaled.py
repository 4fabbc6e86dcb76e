"""The guard in runs that are scaled: false halts and delays while 4 of 16 replicas take part, or come and go.

    PYTHONPATH=. python benchmarks/guard_scaled.py --docs

The held-out items lie in 16 shares, which are dealt over the replicas on the roster (`guard.shares.deal`): with four
replicas each scores four. So one replica that lies has one share of 16, or four of them. In the round in which a fleet
shrinks the leavers' shares are missing, more than half of the items, and the guard does not fold it. The rule is the
twin of `guard_rules`, which `guard.py` compares with the product's folds.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import guard_rules
import numpy as np
from guard import delay_words, figures, rate_words
from guard_curves import Runs
from guard_trajectories import BOTH_MOVE, CHANGE, FAULTS, LIES, Array, clipped, noise, times
from measuring import ROOT, Results, Sample, heading, markdown, publish, sources_of
from numpy.typing import NDArray

from diloco_orchestrator.guard import SequentialGuard
from diloco_orchestrator.guard.shares import deal

SHARES, ROUNDS, PHI, SD = 16, 400, 0.5, 0.02
_DOCUMENT = ROOT / "docs" / "inside" / "kill-switch-figures.md"


@dataclass(frozen=True)
class Fleet:
    """The number of replicas in each round, repeated, and what replica 0 reports from round `CHANGE` on."""

    sizes: Sequence[int]
    lie: str = ""  # of LIES

    def replicas(self, round_: int) -> int:
        return self.sizes[round_ % len(self.sizes)]


FOUR, SIXTEEN, COMES_AND_GOES = (4,), (16,), (4,) * 40 + (16,) * 40
FLEETS = {
    "16 replicas": Fleet(SIXTEEN),
    "4 replicas": Fleet(FOUR),
    "4, then 16, then 4, 40 rounds each": Fleet(COMES_AND_GOES),
    **{f"4 replicas, one lies: {lie}": Fleet(FOUR, lie) for lie in LIES},
    **{
        f"4, then 16, then 4, one lies: {lie}": Fleet(COMES_AND_GOES, lie)
        for lie in ("down by 1 sd", "down by 1000", "up by 1 sd", "down by .001 more each round")
    },
}


def gains_of(rng: np.random.Generator, fleet: Fleet, fault: str, runs: int) -> tuple[Array, NDArray[np.bool_]]:
    """Gains by share after clipping (rounds, shares, runs), and which rounds the guard folds.

    All shares together have AR(1) noise of standard deviation `SD`.
    """
    held = FAULTS[fault].heldout(times(ROUNDS)[1][:, None]) if fault else np.zeros((ROUNDS, 1))
    noises = np.stack([noise(rng, ROUNDS, runs, PHI, SD * SHARES**0.5) for _ in range(SHARES)], axis=1)
    scores = held[:, None, :] + noises
    gains = scores - scores[0]
    folded = np.ones(ROUNDS, dtype=bool)
    for round_ in range(ROUNDS):
        now, next_ = fleet.replicas(round_), fleet.replicas(round_ + 1)
        folded[round_] = next_ * 2 > now  # those who leave in it do not answer
        if fleet.lie and round_ >= CHANGE:
            own = list(deal(SHARES, range(now))[0])
            honest = np.delete(gains[round_], own, axis=0)
            since = np.array([float(round_ - CHANGE)])
            gains[round_, own] = LIES[fleet.lie](honest.mean(axis=0), honest.std(axis=0), since)
    return clipped(gains[folded]), folded


def measure(case: str, fault: str, seed: int, runs: int) -> Sample:
    """The figures of one fleet and one fault."""
    rng = np.random.default_rng([seed, [*FLEETS].index(case), ["", *BOTH_MOVE].index(fault)])
    gains, folded = gains_of(rng, FLEETS[case], fault, runs)
    trained = FAULTS[fault].in_loop(times(ROUNDS)[1][:, None]) if fault else np.zeros((ROUNDS, 1))
    in_loop = (trained + noise(rng, ROUNDS, runs, PHI, SD))[folded]
    begins = int(folded[:CHANGE].sum())
    made = Runs(gains.mean(axis=1), in_loop, None, begins, np.ones((len(gains), runs)), gains, metric="reward")
    rule = SequentialGuard(gap_sigmas=5.0)
    judged = guard_rules.sequential(made.heldout, made.in_loop, made.weight, made.gains, rule)
    return {"case": case, "fault": fault, **figures(*judged, made, faulty=bool(fault))}


def table(samples: Sequence[Sample]) -> str:
    rows = []
    for case in FLEETS:
        of = {each["fault"]: each for each in samples if each["case"] == case}
        if len(of) == 1 + len(BOTH_MOVE):
            rows.append([case, rate_words(of[""]), *(delay_words(of[fault]) for fault in BOTH_MOVE)])
    return markdown(["fleet", "false halts per 1000", "fast .02", "medium .005", "slow .001"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="simulated runs in a cell; default 200")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-guard_scaled.jsonl")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/kill-switch-figures.md")
    given = parser.parse_args()
    results = Results("guard_scaled", given.results)
    results.begin(sources_of(None), vars(given))
    for case in FLEETS:
        for fault in ("", *BOTH_MOVE):
            results.add(**measure(case, fault, given.seed, given.runs))
    session, samples = results.newest()
    text = f"{heading(session)}\n\n{table(samples)}"
    print(text)
    if given.docs:
        publish("guard_scaled", text, None, _DOCUMENT)


if __name__ == "__main__":
    main()
