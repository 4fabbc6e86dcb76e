"""On a GPU: how fast codecs run there, and what a synchronisation of a bf16 model of a billion parameters takes.

    python benchmarks/gpu_sync.py                          # codecs, then two replicas on one GPU, int4, two rounds
    python benchmarks/gpu_sync.py --device cpu --million 4 # the same on a machine without one

First each codec encodes and decodes a vector on the CPU, with all cores, and on the GPU, and the bytes are compared; a
base on its way to the GPU, as encoding there would need in each round, is timed beside them. Then replicas in processes
of their own train a stack of square layers in bf16 with AdamW on the one GPU, and synchronise through a folder in
memory. Seconds of the slowest replica, from the end of the last inner step: `publish` forms, encodes, hashes and writes
the payload, `close` waits for the other's, reads and averages it and takes the outer step, `install` brings the base
back into the model. Exits with 1 where bytes or bases differ.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LAYERS = 24
INNER_STEPS = 4


def codec_rows(device: str, numel: int) -> tuple[list[str], int]:
    """Lines of a table, one for each codec, and the number of codecs with other bytes on the GPU than on the CPU."""
    import torch

    from diloco_orchestrator.allreduce.threads import in_threads, ranges
    from diloco_orchestrator.codecs.table import CODECS
    from diloco_orchestrator.protocol.digests import bulk_digest

    values = torch.randn(numel) * 1e-3
    there = values.to(device)
    gigabytes, differing = 4 * numel / 1e9, 0
    lines = ["| codec | CPU encode, GB/s | CPU decode | device encode | device decode | bytes |", "|---|" + "---|" * 5]
    for name, codec in CODECS.items():
        pieces: list[Any] = [codec.pack(values[start:stop]) for start, stop in ranges(numel)]
        on_cpu = [
            _fastest(
                lambda codec=codec: in_threads([lambda a=a, b=b: codec.pack(values[a:b]) for a, b in ranges(numel)])
            ),
            _fastest(
                lambda codec=codec, pieces=pieces: in_threads(
                    [
                        lambda p=p, n=b - a: codec.unpack(p, n).numel()
                        for p, (a, b) in zip(pieces, ranges(numel), strict=True)
                    ]
                )
            ),
        ]
        packed = codec.pack(there)
        decoded = codec.unpack(packed, numel).to(torch.float32)
        on_device = [
            _fastest(lambda codec=codec: _finished(codec.pack(there))),
            _fastest(lambda codec=codec, packed=packed: _finished(codec.unpack(packed, numel))),
        ]
        whole = codec.pack(values)
        same = bulk_digest(packed.cpu().numpy().data) == bulk_digest(whole.numpy().data)
        same &= bool(torch.equal(decoded.cpu(), codec.unpack(whole, numel).to(torch.float32)))
        differing += not same
        rates = " | ".join(f"{gigabytes / seconds:.1f}" for seconds in (*on_cpu, *on_device))
        lines.append(f"| {name} | {rates} | {'equal' if same else 'DIFFERENT'} |")
    lines.append(
        f"\nfp32 to the device: {gigabytes / _fastest(lambda: _finished(values.to(device, copy=True))):.1f} GB/s"
    )
    return lines, differing


def _fastest(call: Callable[[], object], repetitions: int = 3) -> float:
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def _finished(tensor: Any) -> Any:
    """The tensor, once the device has computed it."""
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize()
    return tensor


def replica(rank: int, given: argparse.Namespace, folder: str, said: Any) -> None:
    """Train and synchronise; puts one dict of seconds by phase for the start, and one for each round, into `said`."""
    import torch

    from diloco_orchestrator import ObjectStoreManager, make_diloco_outer_loop

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // given.replicas))
    began = time.perf_counter()
    device, width = torch.device(given.device), max(1, round(math.sqrt(given.million * 1e6 / LAYERS)))
    layers = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 1 / math.sqrt(width), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(given.batch, width, device=device, dtype=torch.bfloat16)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    finish()
    built = time.perf_counter()
    manager = ObjectStoreManager.join(
        folder, rank, given.replicas, rounds=10**9, codec=given.codec, path=given.path, snapshot_every=10**9
    )
    loop = make_diloco_outer_loop(model, optimizer, manager, INNER_STEPS)
    said.put({"rank": rank, "build": built - began, "join": time.perf_counter() - built})
    participant, phases = manager.participant, dict[str, float]()
    for name in ("publish", "close"):
        setattr(participant, name, _timed(phases, name, getattr(participant, name)))
    with loop:
        for round_ in range(1, given.rounds + 1):
            phases.clear()
            train_s = step_s = 0.0
            for _ in range(INNER_STEPS):
                began = time.perf_counter()
                loss = (model(batch) - batch).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                finish()
                computed = time.perf_counter()
                optimizer.step()  # the loop's hook synchronises in here, behind the last one
                finish()
                train_s, step_s = train_s + computed - began, time.perf_counter() - computed
            # The optimizer's own step, a few milliseconds, is in `install`.
            install = step_s - sum(phases.values())
            said.put({"rank": rank, "round": round_, **phases, "install": install, "sync": step_s, "train": train_s})
    said.put({"rank": rank, "digest": participant.digest, "peak_gpu_mib": _peak_mib(device)})
    participant.leave()


def _peak_mib(device: Any) -> int:
    import torch

    return torch.cuda.max_memory_allocated(device) >> 20 if device.type == "cuda" else 0


def _timed(phases: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            phases[name] = phases.get(name, 0.0) + time.perf_counter() - began

    return timed


def synchronisations(given: argparse.Namespace) -> tuple[list[str], bool]:
    """Lines of a table, and whether all replicas end with the same base."""
    context = multiprocessing.get_context("spawn")
    said, folder = context.Queue(), tempfile.mkdtemp(prefix="gpu-sync-", dir=given.folder)
    processes = [context.Process(target=replica, args=(i, given, folder, said)) for i in range(given.replicas)]
    expected, heard = given.replicas * (given.rounds + 2), list[dict[str, Any]]()
    try:
        for process in processes:
            process.start()
        while len(heard) < expected:
            try:
                heard.append(said.get(timeout=1.0))
                print(json.dumps(heard[-1]), flush=True)
            except multiprocessing.queues.Empty:  # type: ignore[attr-defined]
                if any(process.exitcode for process in processes):
                    raise SystemExit("a replica died; its traceback is above.") from None
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    names = ("publish", "close", "install", "sync")
    lines = ["| round | " + " | ".join(f"{name}, s" for name in names) + " | inner steps, s |", "|---|" + "---|" * 5]
    for round_ in range(1, given.rounds + 1):
        own = [each for each in heard if each.get("round") == round_]
        cells = " | ".join(f"{max(each[name] for each in own):.2f}" for name in (*names, "train"))
        lines.append(f"| {round_} | {cells} |")
    joined = max(each["join"] for each in heard if "join" in each)
    lines.append(f"\njoining, with the first base written and read: {joined:.1f} s")
    return lines, len({each["digest"] for each in heard if "digest" in each}) == 1


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--million", type=float, default=1000, help="parameters; default 1000")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--path", default="gather")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where the run is written; default /dev/shm")
    parser.add_argument(
        "--codec-million", type=float, default=64, help="elements of the vector for the codecs; 0: none"
    )
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU on this machine: --device cpu with a small --million tries the script.")
    given.folder = given.folder or Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    name = torch.cuda.get_device_name() if given.device.startswith("cuda") else "no GPU"
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}\n", flush=True)
    differing = 0
    if given.codec_million:
        lines, differing = codec_rows(given.device, round(given.codec_million * 1e6))
        print("\n".join(lines), flush=True)
    if not given.rounds:
        return int(differing > 0)
    print(f"\n{given.replicas} replicas, {given.million:g} million parameters in bf16, {given.codec}, {given.path}")
    lines, same = synchronisations(given)
    print("\n".join(lines))
    print("all replicas hold the same base" if same else "THE REPLICAS' BASES DIFFER")
    return int(differing > 0 or not same)


if __name__ == "__main__":
    sys.exit(main())
