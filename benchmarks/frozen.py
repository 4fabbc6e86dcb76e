"""Seconds that a replica takes to hash its frozen tensors: `python benchmarks/frozen.py [--gb 2]`."""

import argparse
import time

import torch

from diloco_orchestrator.clock import ThreadBackground
from diloco_orchestrator.snapshots.model_tensors import digest_of

TENSOR_BYTES = 128 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    count = max(1, round(parser.parse_args().gb * 1e9 / TENSOR_BYTES))
    tensors = {f"layer{i}": torch.full((TENSOR_BYTES // 2,), i, dtype=torch.bfloat16) for i in range(count)}
    size = count * TENSOR_BYTES / 1e9
    for name, background in (("one thread", None), ("as a replica", ThreadBackground())):
        began, used = time.perf_counter(), time.process_time()
        digest_of(tensors, background)
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        print(f"{name}: {wall / size:.2f} s and {cpu / size:.2f} s of CPU for each GB, of {size:.1f} GB in bf16")


if __name__ == "__main__":
    main()
