"""Plays many seeds on all cores: `make simulate SEEDS=100000`, or one with its log: `make simulate SEED=7`.

With `FLIPS=1` the runs are those in which bits flip in memory.
"""

import argparse
import logging
import multiprocessing
import sys
import time
from functools import partial

import torch
from simulation import simulate, simulate_flips
from simulation_store import InvariantBroken


def play(flips: bool, seed: int) -> str:
    """Empty, or what was broken."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    try:
        (simulate_flips if flips else simulate)(seed)
    except InvariantBroken as broken:
        return str(broken)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--flips", action="store_true", help="runs in which bits flip in memory")
    given = parser.parse_args()
    if given.seed is not None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        played = (simulate_flips if given.flips else simulate)(given.seed)
        print(f"{played.plan}\n{played.events} calls, {played.time.now:.0f} s of virtual time: every invariant held")
        return 0
    began, broken = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool() as pool:
        for words in pool.imap_unordered(
            partial(play, given.flips), range(given.first, given.first + given.seeds), chunksize=8
        ):
            if words:
                broken += 1
                print(words, flush=True)
    seconds = time.monotonic() - began
    print(f"{given.seeds} seeds in {seconds:.0f} s, {given.seeds / seconds:.1f} seeds/s, {broken} broke an invariant")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
