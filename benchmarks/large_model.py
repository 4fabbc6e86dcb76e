"""Takes a model through start, commit, snapshot, resume, pull and verify, and prints memory and the largest object.

    make large-model MILLIONS=300 LIMIT_MIB=64
    TMPDIR=/scratch python benchmarks/large_model.py --millions 3000 --limit-mib 1024 --memory-mib 2048

Training is faked, so that what is measured is the data plane: the parameters, a pseudo-gradient and a state of two
numbers a parameter (as Adam has) are constants that take no memory, as if they were on a GPU. The model is linear
layers of `--width`. Most of the constants are zeros: the run lies in a folder whose files have holes where there are
zeros, because a base and momenta in fp32, twice, need more disk than a test machine has. What is read, hashed, sent and
held is as large as of any other model.

Every step is a process of its own, and its peaks are what it needed beyond its start, torch imported: "anonymous" is
memory that the kernel cannot take away, up to `--memory-mib` of it held and the rest in passing; "mapped" lies in files
in TMPDIR, of which the kernel keeps in memory what there is room for.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diloco_orchestrator.allreduce.vectors import BLOCK
from diloco_orchestrator.clock import SystemClock, random_token
from diloco_orchestrator.config import make_config
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol.process import ENV_MEMORY
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.replica.attempt.attempt import claim_attempt
from diloco_orchestrator.replica.rounds.interface import ContributionFields
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.tensor_tree import state_file, stored_tree, whole_tree
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.open_store import open_store

MIB = 2**20
NONZERO = 16  # one layer, or block, in so many is not zero
ZEROS = memoryview(bytes(MIB))


@dataclass(frozen=True)
class Size:
    """What is measured."""

    millions: int  # parameters
    width: int
    dtype: str
    limit_mib: int  # of one object; also the payload's shards

    def model(self) -> torch.nn.Module:
        """Square layers, each of one number; some of the numbers are not zero."""
        layers = max(1, round(self.millions * 1e6 / self.width**2))
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width, bias=False) for _ in range(layers)))
        for index, layer in enumerate(model):
            value = 0.01 * (index + 1) if index % NONZERO == 0 else 0.0
            layer.weight = torch.nn.Parameter(self.constant(value))
        return model

    def constant(self, value: float) -> torch.Tensor:
        """A layer's tensor of one value, which takes the memory of one number."""
        return torch.tensor(value, dtype=getattr(torch, self.dtype)).expand(self.width, self.width)


class FakeGradient:
    """A pseudo-gradient whose values are computed when they are read; one block in `NONZERO` is not zero."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = torch.zeros(stop - start)
        for begin in range(start // BLOCK * BLOCK, stop, BLOCK):
            if begin // BLOCK % NONZERO == 0:
                found[max(0, begin - start) : begin - start + BLOCK] = 1e-3
        return found


class FolderWithHoles(Store):
    """A store in a folder, whose files take no disk space for zeros."""

    def __init__(self, folder: Path) -> None:
        self._store = open_store(str(folder))
        self._folder = folder
        self.url = self._store.url

    def create(self, key: str, data: bytes) -> bool:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}#{random_token()}")
        with draft.open("wb") as file:
            for start in range(0, len(data), MIB):
                block = memoryview(data)[start : start + MIB]
                if block == ZEROS[: len(block)]:
                    file.seek(len(block), os.SEEK_CUR)
                else:
                    file.write(block)
            file.truncate(len(data))
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._store.get(key, start, end)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix, start_after)

    def delete(self, key: str) -> None:
        self._store.delete(key)


class Bench:
    """The steps, each run in a fresh process on what the steps before left in the folder."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.stamp = Stamp(random_token(), time.time)

    def store(self) -> Store:
        return FolderWithHoles(self.folder / "run")

    def join(self) -> tuple[Participant, torch.nn.Module]:
        model = self.size.model()
        attempt = claim_attempt(self.store(), 0, None, SystemClock(), self.stamp)
        attempt = replace(attempt, object_limit=self.size.limit_mib * MIB)
        parameters = trainable(model)
        return Participant.join(attempt, OwnModel(parameters, [tuple(parameters)], ModelFiles.of(model))), model

    def start(self) -> str:
        values = {"entrypoint": "m:f", "replicas": 1, "rounds": 2, "quorum": "all", "snapshot_every": 1}
        config = make_config({**values, "codec": "bf16", "shard_mib": min(64, self.size.limit_mib)})
        run = Run(**self.stamp(), run_id="large", config=config, package_version="0")
        create_run(self.store(), run, "benchmark", self.stamp)
        participant, _ = self.join()
        return f"base {participant.digest[:12]}"

    def commit(self) -> str:
        participant, model = self.join()
        gradient = FakeGradient(sum(p.numel() for p in model.parameters()))
        moments = [self.size.constant(float(i % NONZERO == 0)) for i, _ in enumerate(trainable(model)) for _ in "mv"]
        state = state_file({"moments": moments}, limit=min(64, self.size.limit_mib) * MIB)
        participant._contributor.contribute_delta(gradient, ContributionFields(steps=1, state=state))
        del gradient, state
        participant.close()
        participant.write_snapshot_if_due()
        return f"base {participant.digest[:12]}, with its snapshot"

    def resume(self) -> str:
        participant, _ = self.join()
        history = participant.history
        manifest = history.of(1)
        assert manifest is not None and participant.open.round == 2
        tree = whole_tree(stored_tree(history.read_state(manifest), "the state"))
        return f"base {participant.digest[:12]}, and a state of {len(tree['moments'])} tensors"

    def pull(self) -> str:
        copy_model(RunLog(self.store()), self.folder / "newest")
        files = sorted(path.name for path in (self.folder / "newest").glob("*.safetensors"))
        shutil.rmtree(self.folder / "newest")  # without holes
        return f"{len(files)} files, {files[0]} to {files[-1]}"

    def verify(self) -> str:
        done = verify_run(self.store())
        assert done.agrees, done.disagreement
        return "agrees"


STEPS = ("start", "commit", "resume", "pull", "verify")


class MemoryPeaks:
    """Context that samples this process's memory a hundred times a second: `anonymous` and `mapped`, MiB beyond its
    start, and `used` of /proc, both together.
    """

    def __enter__(self) -> "MemoryPeaks":
        self.before = self._now()
        self.peaks = [0.0, 0.0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            now = (each - before for each, before in zip(self._now(), self.before, strict=True))
            self.peaks = [max(pair) for pair in zip(self.peaks, now, strict=True)]

    def _now(self) -> list[float]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return [int(status[field].split()[0]) / 1024 for field in ("RssAnon", "RssFile")]


def run_step(bench: Bench, step: str) -> None:
    """One step, in this process. Prints one line of JSON."""
    call: Callable[[], str] = getattr(bench, step)
    began = time.monotonic()
    with MemoryPeaks() as memory:
        said = call()
    print(json.dumps({"said": said, "peaks_mib": memory.peaks, "s": time.monotonic() - began}))


def measure(size: Size, folder: Path, memory_mib: int) -> None:
    """All steps, then a table."""
    given = ["--millions", size.millions, "--width", size.width, "--dtype", size.dtype, "--limit-mib", size.limit_mib]
    count = sum(p.numel() for p in size.model().parameters())
    largest = f"objects of at most {size.limit_mib} MiB"
    print(f"{count / 1e6:.0f} M parameters in {size.dtype}, {largest}, {ENV_MEMORY}={memory_mib}", flush=True)
    print("| step | anonymous, MiB | mapped, MiB | bytes a parameter | s | |\n|---|---|---|---|---|---|", flush=True)
    environ = {**os.environ, ENV_MEMORY: str(memory_mib)}
    for step in STEPS:
        command = [sys.executable, __file__, *map(str, given), "--folder", str(folder), "--step", step]
        done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ).stdout)
        anonymous, mapped = done["peaks_mib"]
        each = f"{anonymous:,.0f} | {mapped:,.0f} | {anonymous * MIB / count:.1f}"
        print(f"| {step} | {each} | {done['s']:.0f} | {done['said']} |", flush=True)
    objects = sorted(open_store(str(folder / "run")).list(""), key=lambda info: -info.size)
    print(f"largest object {objects[0].size / MIB:.1f} MiB ({objects[0].key}); {len(objects)} objects")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=int, default=300, help="parameters, in millions")
    parser.add_argument("--width", type=int, default=2048, help="of each square layer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--limit-mib", type=int, default=64, help="largest object")
    parser.add_argument("--memory-mib", type=int, default=4096, help=f"{ENV_MEMORY} of every step")
    parser.add_argument("--folder", type=Path, help="where the run is written; by default a temporary folder")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(args.millions, args.width, args.dtype, args.limit_mib)
    if args.step:
        run_step(Bench(size, args.folder), args.step)
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="diloco-large-"))
    try:
        measure(size, folder, args.memory_mib)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
