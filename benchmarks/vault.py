"""What a vault set changes: false halts and delays of `SequentialGuard` with and without one.

    PYTHONPATH=. .venv/bin/python benchmarks/vault.py --runs 200 --seed 1

Simulated runs of the product's own fold, AR(1) .5 noise of sd .02, as in benchmarks/guard.py. The noise is of the
items, so that the vault set's is independent of it; or of the model, so that both sets see the same.
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from guard_rules import Rounds
from guard_trajectories import BOTH_MOVE, CHANGE, FAULTS, Array, healthy, noise, times
from measuring import markdown

from diloco_orchestrator.guard import Evidence, SequentialGuard
from diloco_orchestrator.guard.vault import VaultChange

PHI, SD = 0.5, 0.02
ROUNDS, LATEST = 600, 400  # of a healthy run; of one with a fault after round 100
FAMILIES = ("plateau", "benign gap, flat")
RULES = {
    "halting at once": (SequentialGuard(), "items"),
    "confirmed, noise of the items": (SequentialGuard(vault_sigmas=2.0), "items"),
    "confirmed, noise of the model": (SequentialGuard(vault_sigmas=2.0), "model"),
}


def halt(guard: SequentialGuard, heldout: Array, in_loop: Array, vault: Array, error: float) -> tuple[int, int]:
    """The round in which a run halts, 0 if it does not, and how often the vault set was asked."""
    state: dict[str, Any] | None = None
    asked = 0
    for t in range(len(heldout)):
        against = SequentialGuard.vault_base(state)
        change = None
        if against is not None:
            asked += 1
            change = VaultChange(float(vault[t] - vault[against]), error)  # the model after round t is in row t
        evidence = Evidence(round=t + 1, heldout=float(heldout[t]), in_loop=float(in_loop[t]), vault=change)
        state, verdict = guard.fold(state, evidence)
        if verdict.fire:
            return t + 1, asked
    return 0, asked


def measure(rule: str, case: str, seed: int, runs: int) -> tuple[Rounds, int]:
    """The rounds of the halts of some runs, and how often their vault sets were asked together."""
    guard, source = RULES[rule]
    fault, rounds = FAULTS.get(case), LATEST if case in FAULTS else ROUNDS
    rng = np.random.default_rng([seed, [*FAMILIES, *BOTH_MOVE].index(case)])
    heldout, in_loop = healthy(rng, "plateau" if fault else case, runs, PHI, SD, rounds)
    signal = healthy(rng, "plateau" if fault else case, runs, PHI, 0.0, rounds)[0]
    if fault:
        u = times(rounds)[1][:, None]
        heldout, in_loop, signal = heldout + fault.heldout(u), in_loop + fault.in_loop(u), signal + fault.heldout(u)
    vault, error = heldout, 0.0
    if source == "items":
        vault, error = signal + noise(rng, rounds, runs, PHI, SD), SD * math.sqrt(2)
    found = [halt(guard, heldout[:, i], in_loop[:, i], vault[:, i], error) for i in range(runs)]
    return np.array([round_ for round_, _ in found]), sum(asked for _, asked in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="simulated runs in a cell; default 200")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    given = parser.parse_args()
    cases = [*FAMILIES, *BOTH_MOVE]
    with ProcessPoolExecutor(given.processes) as pool:
        jobs = {
            (rule, case): pool.submit(measure, rule, case, given.seed, given.runs) for rule in RULES for case in cases
        }
        print(markdown(["alarms are", *cases, "asked in 1000 healthy rounds"], [_row(rule, jobs) for rule in RULES]))


def _row(rule: str, jobs: dict[tuple[str, str], Any]) -> list[str]:
    cells, asked, lived = [], 0, 0
    for case in FAMILIES:
        halts, questions = jobs[rule, case].result()
        rounds = int(np.where(halts > 0, halts, ROUNDS).sum())
        asked, lived = asked + questions, lived + rounds
        cells.append(f"{1000 * (halts > 0).sum() / rounds:.2f}")
    for case in BOTH_MOVE:
        halts, _ = jobs[rule, case].result()
        late = halts[halts > CHANGE] - CHANGE
        missed = f", {(halts == 0).sum()} of {len(halts)} missed" if (halts == 0).any() else ""
        cells.append(f"{late.mean():.1f} ± {1.96 * late.std(ddof=1) / math.sqrt(len(late)):.1f}{missed}")
    return [rule, *cells, f"{1000 * asked / lived:.1f}"]


if __name__ == "__main__":
    main()
