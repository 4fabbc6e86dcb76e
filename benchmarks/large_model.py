"""Takes a model through start, commit, snapshot, resume, pull and verify, and prints memory and the largest object.

    make large-model MILLIONS=300 LIMIT_MIB=64
    python benchmarks/large_model.py --millions 3000 --limit-mib 1024 --dtype bfloat16 --folder /scratch/run

Training is faked: a pseudo-gradient of constants and a state of two numbers a parameter (as Adam has), so that what is
measured is the data plane. Every step is a process of its own; its peak is what it needed beyond its start, torch
imported. The model is linear layers of `--width`, which stay in their dtype as a workload's model would.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import SystemClock, random_token
from diloco_orchestrator.config import make_config
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol.records import Run, Stamp
from diloco_orchestrator.replica.process.attempt import claim_attempt
from diloco_orchestrator.replica.rounds.contribution_fields import ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.tensor_tree import pack, unpack
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.layout import ModelFiles, trainable
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """What is measured."""

    millions: int  # parameters
    width: int
    dtype: str
    limit_mib: int  # of one object; also the payload's shards

    def model(self) -> torch.nn.Module:
        """A module without initialisation, so that a base of zeros costs no random numbers."""
        layers = max(1, round(self.millions * 1e6 / self.width**2))
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width, bias=False) for _ in range(layers)))
        model = model.to(getattr(torch, self.dtype)).to_empty(device="cpu")
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.fill_(0.01 * (index + 1))
        return model


class Bench:
    """The steps, each run in a fresh process on what the steps before left in the folder."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.url = str(folder / "run")
        self.stamp = Stamp(random_token(), time.time)

    def store(self) -> Store:
        return open_store(self.url)

    def join(self) -> tuple[Participant, torch.nn.Module]:
        model = self.size.model()
        attempt = claim_attempt(self.store(), 0, None, SystemClock(), self.stamp)
        attempt = replace(attempt, object_limit=self.size.limit_mib * MIB)
        parameters = trainable(model)
        return Participant.join(attempt, parameters, [tuple(parameters)], ModelFiles.of(model)), model

    def start(self) -> str:
        values = {"entrypoint": "m:f", "replicas": 1, "rounds": 2, "quorum": "all", "snapshot_every": 1}
        config = make_config({**values, "codec": "bf16", "shard_mib": min(64, self.size.limit_mib)})
        run = Run(**self.stamp(), run_id="large", config=config, package_version="0")
        create_run(self.store(), run, "benchmark", self.stamp)
        participant, _ = self.join()
        return f"base {participant.digest[:12]}"

    def commit(self) -> str:
        participant, model = self.join()
        gradient = FlatTensors([torch.full(p.shape, 1e-3) for p in trainable(model).values()])
        state = pack({"moments": [torch.ones_like(p) for p in trainable(model).values() for _ in range(2)]})
        participant.contributor.contribute_delta(gradient, ContributionFields(steps=1, state=state))
        del gradient, state
        participant.close()
        participant.write_snapshot_if_due()
        return f"base {participant.digest[:12]}, with its snapshot"

    def resume(self) -> str:
        participant, _ = self.join()
        history = participant.contributor.history
        manifest = history.of(1, participant.round)
        assert manifest is not None and participant.round == 2
        tree = unpack(history.read_state(manifest), "the state")
        return f"base {participant.digest[:12]}, and a state of {len(tree['moments'])} tensors"

    def pull(self) -> str:
        copy_model(RunLog(self.store()), self.folder / "newest")
        files = sorted(path.name for path in (self.folder / "newest").glob("*.safetensors"))
        return f"{len(files)} files, {files[0]} to {files[-1]}"

    def verify(self) -> str:
        done = verify_run(self.store())
        assert done.agrees, done.disagreement
        return "agrees"


STEPS = ("start", "commit", "resume", "pull", "verify")


def memory_mib(field: str) -> float:
    """Resident memory of this process from the kernel: "VmRSS" now, "VmHWM" at its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def run_step(bench: Bench, step: str) -> None:
    """One step, in this process. Prints one line of JSON."""
    call: Callable[[], str] = getattr(bench, step)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, began = memory_mib("VmRSS"), time.monotonic()
    said = call()
    print(json.dumps({"said": said, "peak_mib": memory_mib("VmHWM") - before, "s": time.monotonic() - began}))


def measure(size: Size, folder: Path) -> None:
    """All steps, then a table."""
    given = ["--millions", size.millions, "--width", size.width, "--dtype", size.dtype, "--limit-mib", size.limit_mib]
    count = sum(p.numel() for p in size.model().parameters()) if size.millions <= 500 else size.millions * 1e6
    print(f"{count / 1e6:.0f} M parameters in {size.dtype}, objects of at most {size.limit_mib} MiB", flush=True)
    for step in STEPS:
        command = [sys.executable, __file__, *map(str, given), "--folder", str(folder), "--step", step]
        done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        each = f"{done['peak_mib']:7.0f} MiB peak, {done['peak_mib'] * MIB / count:5.1f} bytes a parameter"
        print(f"{step:8s} {each}, {done['s']:6.1f} s: {done['said']}", flush=True)
    objects = sorted(open_store(str(folder / "run")).list(""), key=lambda info: -info.size)
    print(f"largest object {objects[0].size / MIB:.1f} MiB ({objects[0].key}); {len(objects)} objects")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=int, default=300, help="parameters, in millions")
    parser.add_argument("--width", type=int, default=2048, help="of each square layer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--limit-mib", type=int, default=64, help="largest object")
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
        measure(size, folder)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
