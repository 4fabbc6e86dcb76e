"""Plays many seeds on all cores: `make simulate SEEDS=100000`, or one with its log: `make simulate SEED=7`.

With `WIDE=1` the runs have more replicas, settings and faults, with `FLIPS=1` they are those in which bits flip in
memory.
"""

import argparse
import gc
import logging
import multiprocessing
import sys
import time
from functools import partial

import torch
from simulation import simulate, simulate_flips, simulate_wide
from simulation_store import InvariantBroken

KINDS = {"plain": simulate, "wide": simulate_wide, "flips": simulate_flips}


def play(kind: str, seed: int) -> str:
    """Empty, or what was broken."""
    try:
        KINDS[kind](seed)
    except InvariantBroken as broken:
        return str(broken)
    return ""


def set_up() -> None:
    """Prepare a process that plays many seeds."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    gc.freeze()  # what is imported stays
    gc.set_threshold(20_000, 20, 50)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--processes", type=int, help="by default one for each core")
    given = parser.parse_args()
    if given.seed is not None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        played = KINDS[given.kind](given.seed)
        print(f"{played.plan}\n{played.events} calls, {played.time.now:.0f} s of virtual time: every invariant held")
        return 0
    began, broken = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(given.processes, set_up) as pool:
        for words in pool.imap_unordered(
            partial(play, given.kind), range(given.first, given.first + given.seeds), chunksize=8
        ):
            if words:
                broken += 1
                print(words, flush=True)
    seconds = time.monotonic() - began
    print(f"{given.seeds} seeds in {seconds:.0f} s, {given.seeds / seconds:.1f} seeds/s, {broken} broke an invariant")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
