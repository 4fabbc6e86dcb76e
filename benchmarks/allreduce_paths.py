"""Counts what `ObjectStoreAllReduce` reads and writes by gather and by scatter-reduce, at an S3 server on loopback.

    make bench-allreduce
    make bench-allreduce OPTIONS="--ranks 4 8 16 --codecs fp32 int4"

Requests and MB of objects for each rank in the mean, in one all-reduce of a vector of 4 MiB of fp32. Beside them stands
what `tests/support/foretold_bytes.py` foretells from the rules of dealing. Exits with 1 where the count is off by more
than 1 %.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from fast_s3 import FastS3, running_fast_s3
from foretold_bytes import bytes_down

from diloco_orchestrator import ObjectStoreAllReduce
from diloco_orchestrator.allreduce.dealing import shard_numel_for
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.vectors import SHARD_NUMEL
from diloco_orchestrator.codecs.table import CODECS

NUMEL = 2**20
NAMES = [name for name, codec in CODECS.items() if not codec.feedback]


def counted(server: FastS3, ranks: int, codec: str, path: str) -> tuple[float, float, float]:
    """Requests, MB read and MB written of each rank in one all-reduce."""
    tensors = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    reducers = [
        ObjectStoreAllReduce(f"s3://bucket/{path}-{codec}-{ranks}", rank, ranks, codec=codec, path=path)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    server.requests(), server.moved()
    with ThreadPoolExecutor(ranks) as pool:
        means = list(pool.map(lambda reducer, tensor: reducer.allreduce(tensor, 0), reducers, tensors))
    assert all(torch.equal(mean, means[0]) for mean in means)
    requests, moved = server.requests(), server.moved()
    return sum(requests.values()) / ranks, moved["down"] / ranks / 1e6, moved["up"] / ranks / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--codecs", nargs="+", default=NAMES, choices=NAMES)
    options, off = parser.parse_args(), 0
    print("| ranks | codec | path | requests | MB down | foretold | MB up |\n|---|---|---|---|---|---|---|")
    with running_fast_s3() as server:
        os.environ |= server.environ()
        for ranks in options.ranks:
            for codec in options.codecs:
                cut = shard_ranges(NUMEL, shard_numel_for(NUMEL, ranks, SHARD_NUMEL, codec))
                foretold = bytes_down([stop - start for start, stop in cut], codec, ranks)
                for path, expected in zip(("gather", "scatter_reduce"), foretold, strict=True):
                    requests, down, up = counted(server, ranks, codec, path)
                    mb = expected / ranks / 1e6
                    off += abs(down - mb) > 0.01 * mb + 0.02  # records and retries of listings come on top
                    print(
                        f"| {ranks} | {codec} | {path} | {requests:.0f} | {down:.2f} | {mb:.2f} | {up:.2f} |",
                        flush=True,
                    )
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
