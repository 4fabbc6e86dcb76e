"""Plays many seeds on all cores: `make simulate SEEDS=100000`, or one with its log: `make simulate SEED=7`.

With `WIDE=1` the runs have more replicas, settings and faults, with `FLIPS=1` they are those in which bits flip in
memory, with `FORGED=1` those in which somebody forges records, with `SIGNED=1` signed ones in which somebody does, with
`SCALED=1` those that grow and shrink, with `PLACED=1` those at places whose vendors lie, with `ISLANDS=1` those whose
replicas have several ranks; `--kind all` plays every kind in turn. Each line printed names the seeds that were played,
so an interrupted call goes on with `--first`.
"""

import argparse
import gc
import logging
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from simulation import simulate, simulate_flips, simulate_forged, simulate_islands, simulate_scaled, simulate_wide
from simulation_places import simulate_placed
from simulation_signed import simulate_signed

KINDS = {
    "plain": simulate,
    "flips": simulate_flips,
    "wide": simulate_wide,
    "forged": simulate_forged,
    "scaled": simulate_scaled,
    "signed": simulate_signed,
    "placed": simulate_placed,
    "islands": simulate_islands,
}
MOST_TOGETHER = 50  # seeds that one process plays for one line of output
COLLECTED_TOGETHER = 5  # seeds after which their garbage, up to 10 MB each, is collected


@dataclass(frozen=True)
class Seeds:
    """Seeds of one kind that a process plays one after the other."""

    kind: str
    seeds: range
    failures: Path | None  # a file to which each failure is appended at once

    def play(self) -> "Played":
        broken, began = 0, time.process_time()
        for seed in self.seeds:
            try:
                KINDS[self.kind](seed)
            except Exception as error:
                broken += 1
                self._tell(seed, error)
            if seed % COLLECTED_TOGETHER == 0:
                gc.collect()
        return Played(self, broken, time.process_time() - began)

    def _tell(self, seed: int, error: Exception) -> None:
        print(f"{self.kind} {seed}: {error}", flush=True)
        if self.failures is not None:
            with self.failures.open("a") as file:
                file.write(f"== {self.kind} {seed}\n{''.join(traceback.format_exception(error))}\n")


@dataclass(frozen=True)
class Played:
    """What came of `seeds`, and the CPU time that they took."""

    of: Seeds
    broken: int
    cpu_s: float


def play(seeds: Seeds) -> Played:
    return seeds.play()


def set_up() -> None:
    """Prepare a process that plays many seeds."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    simulate(1)  # imports what is imported late
    gc.collect()
    gc.freeze()  # what is imported stays
    gc.disable()  # while a run is played nearly all that exists is in use


def shares(kinds: list[str], first: int, count: int, together: int, failures: Path | None) -> Iterator[Seeds]:
    """All seeds, a few of each kind in turn."""
    for begin in range(first, first + count, together):
        for kind in kinds:
            yield Seeds(kind, range(begin, min(begin + together, first + count)), failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="plain")
    parser.add_argument("--processes", type=int, help="by default one for each core")
    parser.add_argument("--failures", type=Path, help="a file to which failures are appended, with their tracebacks")
    given = parser.parse_args()
    if given.seed is not None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        played = KINDS[given.kind](given.seed)
        print(f"{played.plan}\n{played.events} calls, {played.time.now:.0f} s of virtual time: every invariant held")
        return 0
    began, done, broken = time.monotonic(), 0, 0
    kinds = list(KINDS) if given.kind == "all" else [given.kind]
    processes = given.processes or multiprocessing.cpu_count()
    together = max(1, min(MOST_TOGETHER, given.seeds // processes))
    with multiprocessing.get_context("spawn").Pool(processes, set_up) as pool:
        for each in pool.imap(play, shares(kinds, given.first, given.seeds, together, given.failures)):
            count, seconds = len(each.of.seeds), time.monotonic() - began
            done, broken = done + count, broken + each.broken
            print(
                f"{each.of.kind} {each.of.seeds[0]} to {each.of.seeds[-1]}: {each.broken} broke an invariant, "
                f"{each.cpu_s / count:.3f} CPU-s a seed; {done} seeds in {seconds:.0f} s, {done / seconds:.1f} seeds/s",
                flush=True,
            )
    print(f"{done} seeds in {time.monotonic() - began:.0f} s, {broken} broke an invariant")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
