"""Looks for mutated records and buckets that make a reader fail: `make fuzz RECORDS=1000000 BUCKETS=10000`.

Prints every failure with its seed, and how much memory the process gained. `--seed 7` reads one bucket again.
"""

import argparse
import collections
import multiprocessing
import resource
import tempfile
import traceback
from functools import partial
from pathlib import Path

import torch
from mutated_buckets import build_bucket, parse_mutated, read_mutated

_CHUNK = 1000  # records a task


def records(folder: Path, first: int) -> list[str]:
    """What failed among the records of `_CHUNK` seeds."""
    failed = []
    for seed in range(first, first + _CHUNK):
        try:
            parse_mutated(folder, seed)
        except Exception:
            failed.append(f"record {seed}\n{traceback.format_exc()}")
    return failed


def bucket(folder: Path, seed: int) -> list[str]:
    """What failed in one bucket."""
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as work:
        try:
            read_mutated(folder, Path(work), seed)
        except BaseException:
            return [f"bucket {seed}\n{traceback.format_exc()}"]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    return [f"bucket {seed}\ngrew by {grown} MiB"] if grown > 200 else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--buckets", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    failed: collections.Counter[str] = collections.Counter()
    example: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "run"
        build_bucket(folder)
        if given.seed is not None:
            print("\n".join(bucket(folder, given.seed) or [f"seed {given.seed}: every command ended as it should"]))
            return 0
        # A bucket that hangs a reader is killed with its process by `--timeout` of whoever runs this.
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            tasks = range(given.first, given.first + given.records, _CHUNK)
            found = pool.imap_unordered(partial(records, folder), tasks)
            seeds = range(given.first, given.first + given.buckets)
            for each in (*found, *pool.imap_unordered(partial(bucket, folder), seeds)):
                for text in each:
                    site = "\n".join(text.strip().splitlines()[-4:])[-400:]
                    failed[site] += 1
                    example.setdefault(site, text)
    for site, count in failed.most_common():
        print(f"--- {count} times, such as {example[site]}\n")
    print(f"{given.records} records, {given.buckets} buckets: {sum(failed.values())} failures of {len(failed)} kinds")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
