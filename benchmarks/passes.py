"""Times what one replica computes in a synchronisation through a folder, pass by pass, on one core.

    python benchmarks/passes.py                 # N=4, 25 million parameters in fp32 and in int4
    python benchmarks/passes.py --docs
    python benchmarks/passes.py --codecs        # GB of fp32 that each codec encodes and decodes in a second of a core

Each pass is the product's own function on payloads in a folder; medians of CPU seconds. What a synchronisation takes
beyond their sum is waiting for the others' payloads, the log's requests, and the other replicas on the same cores and
memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from measuring import machine, markdown, publish, scratch_folder

from diloco_orchestrator.allreduce import payload as payloads
from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.mean import Part
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import open_verified, shard_ranges
from diloco_orchestrator.allreduce.vectors import BLOCK, FlatTensors
from diloco_orchestrator.codecs import plain
from diloco_orchestrator.codecs.table import CODECS, Encoded, encode
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.arithmetic import nesterov_step
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Payload
from diloco_orchestrator.store.open_store import open_store

SHARD_NUMEL = 16 * 2**20


def passes(folder: Path, replicas: int, numel: int, codec: str) -> Mapping[str, Callable[[], object]]:
    """The passes by name, in the order of a synchronisation."""
    store, outer = open_store(str(folder)), OuterConfig()
    gradient = torch.randn(numel) * 1e-3
    parameters, momenta = torch.randn(numel), torch.zeros(numel)
    lengths = [stop - start for start, stop in shard_ranges(numel, SHARD_NUMEL)]
    written: list[Payload] = []

    def write() -> Payload:
        """A replica's payload under a new key."""
        number = len(written)
        with_number: Callable[[int], str] = lambda index: f"{number}-{index}.bin"  # noqa: E731
        written.append(
            payloads.publish(store, with_number, FlatTensors([gradient]), codec, SHARD_NUMEL, PayloadCache())
        )
        return written[-1]

    others = [(number, write()) for number in range(replicas)]

    def verify() -> None:
        for number, payload in others[1:]:
            for index in range(len(lengths)):
                opened = open_verified(store, f"{number}-{index}.bin", payload, index)
                assert opened is not None
                opened.close()

    data = {
        (number, index): store.get(f"{number}-{index}.bin") for number, _ in others for index in range(len(lengths))
    }

    def step() -> None:
        parts = [
            Part(number, 30, payload, lambda index, number=number: data[number, index])  # type: ignore[misc]
            for number, payload in others
        ]
        average = aggregate_of("mean", parts, lengths)
        begin = 0
        for index in range(len(lengths)):
            for block in average.shard(index)(0, lengths[index]):
                end = begin + block.numel()
                nesterov_step(parameters[begin:end], momenta[begin:end], block, outer)
                begin = end

    def claim() -> None:
        for values in (parameters, momenta):
            bulk_digest(memoryview(values.numpy()).cast("B"))

    local = torch.empty(numel)
    return {
        "form: base minus local parameters": lambda: torch.sub(parameters, gradient, out=local),
        "encode, measure, hash and write the own payload": write,
        f"hash and measure the payloads of {replicas - 1} others": verify,
        f"mean of {replicas} payloads and outer step": step,
        "hash the base, parameters and momenta": claim,
        "copy the base into the model": lambda: local.copy_(parameters),
    }


def codec_rates(numel: int, repetitions: int) -> list[tuple[str, str, str, str]]:
    """By codec: bits an element, GB of fp32 a CPU second when it encodes and decodes, the best of all repetitions."""
    values, rows = torch.randn(numel), []
    for name, codec in CODECS.items():
        encoded = Encoded(encode(values, name), name, numel)
        calls = (
            lambda codec=codec: [codec.pack(block) for block in values.split(BLOCK)],
            lambda encoded=encoded: [block.numel() for block in encoded.blocks(0, numel, BLOCK)],
        )
        seconds = [min(_cpu_s(call) for _ in range(repetitions)) for call in calls]
        rates = (f"{4 * numel / each / 1e9:.2f}" if codec.group > 1 else "a copy or none" for each in seconds)
        rows.append((name, f"{8 * codec.body_size(numel) / numel:.3f}", *rates))
    return rows  # type: ignore[return-value]


def _medians(replicas: int, numel: int, codec: str, repetitions: int) -> dict[str, float]:
    """CPU seconds of each pass, by name."""
    with scratch_folder(None) as folder:
        timed = passes(Path(folder), replicas, numel, codec)
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(repetitions):
            for name, run in timed.items():
                seconds[name].append(_cpu_s(run))
    return {name: statistics.median(found) for name, found in seconds.items()}


def _cpu_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--million", type=int, default=25, help="parameters")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=["fp32", "int4"], help="default: fp32 int4")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/performance.md")
    parser.add_argument("--codecs", action="store_true", help="measure the codecs alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.codecs:
        rows = codec_rates(given.million * 10**6, given.repetitions)
        print(f"{machine()}\n\n{markdown(('codec', 'bits an element', 'encode, GB/s', 'decode, GB/s'), rows)}")
        return
    by_codec = [_medians(given.replicas, given.million * 10**6, codec, given.repetitions) for codec in given.codec]
    table = [(name, *(f"{each[name]:.3f}" for each in by_codec)) for name in by_codec[0]]
    table.append(("together", *(f"{sum(each.values()):.3f}" for each in by_codec)))
    command = f"PYTHONPATH=tests/support .venv/bin/python benchmarks/passes.py --docs --repetitions {given.repetitions}"
    compiled = "with" if plain.compiled() else "without"
    fleet = f"N={given.replicas}, {given.million} million parameters"
    title = f"CPU seconds, median. {fleet}, {compiled} numba, one core of {machine()}."
    text = f"{title}\n\n```\n{command}\n```\n\n{markdown(('pass', *given.codec), table)}"
    print(text)
    if given.docs:
        publish("passes", text, None)


if __name__ == "__main__":
    main()
