"""An hour in which providers, store and network fail, in real time: runs over three providers, and what it cost them.

    PYTHONPATH=.:tests/support:benchmarks python benchmarks/bad_hour.py --minutes 60

Three replicas, one each as Hugging Face Job, Kubernetes Job and Modal Sandbox of the loopback services, over a signed
S3 server behind a proxy. Each fault has a run of its own, all at the same time; the fault lasts for the given minutes,
and one replica is preempted just after it began, so that it has to be launched again. With `quorum="all"` and a state
for each round a run must end with the bits of an undisturbed one. Each result is a line of runs/bad_hour.jsonl.
`--in-turn` has one run meet all faults, one after another, each for an eighth of the time and with a pause after it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty_proxy import Faults, FaultyProxy, proxy_before
from grpclib import Status
from loopback_hf import LoopbackHF
from loopback_kubernetes import LoopbackKubernetes, running_kubernetes
from loopback_modal import LoopbackModal
from s3_server import running_server

from diloco_orchestrator import LocalProcessExecutor, ModalExecutor, RunReader, launch
from diloco_orchestrator.executors.contract import ReplicaHandle
from diloco_orchestrator.executors.hf_jobs import HFJobsExecutor
from diloco_orchestrator.executors.kubernetes_jobs import KubernetesExecutor
from diloco_orchestrator.executors.mixed import MixedExecutor
from diloco_orchestrator.store.open_store import open_store

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "bad_hour.jsonl"
STEP_S, SYNC_EVERY, BEFORE_S = 0.25, 8, 20.0
ROUNDS = 60  # of a run that meets one fault
SETTINGS: dict[str, Any] = {
    "replicas": 3,
    "sync_every": SYNC_EVERY,
    "quorum": "all",
    "replica_state": "round",
    "snapshot_every": 10,
    "guard": {"rule": "heldout", "min_steps": 1_000_000},
    "env": {"OMP_NUM_THREADS": "1"},
}
LIVE: dict[str, Any] = {
    "timing": {"poll_s": 0.5, "heartbeat_s": 2.0},
    "retry": {"max_errors": 1, "hung_after_s": 60.0},
}


@dataclass
class Services:
    """The three providers and the way to the store, each of which can be made to fail."""

    hugging_face: LoopbackHF
    kubernetes: LoopbackKubernetes
    modal: LoopbackModal
    proxy: FaultyProxy

    def answer(self, status: int, grpc: Status, retry_after: str | None = None) -> None:
        """Every call of every provider is answered with an error."""
        self.hugging_face.failing = self.kubernetes.failing = status
        self.hugging_face.retry_after = self.kubernetes.retry_after = retry_after
        self.modal.failing = grpc

    def never_answer(self) -> None:
        """Every provider takes requests and does not answer them."""
        self.hugging_face.delay_s = self.kubernetes.slow_s = self.modal.slow_s = 600.0

    def heal(self) -> None:
        self.hugging_face.failing = self.kubernetes.failing = 0
        self.modal.failing = None
        self.hugging_face.delay_s = self.kubernetes.slow_s = self.modal.slow_s = 0.0
        self.proxy.faults = Faults()

    def cut_store(self, faults: Faults) -> None:
        self.proxy.faults = faults

    def cut_everything(self) -> None:
        self.cut_store(Faults(reset=1.0))
        self.answer(503, Status.UNAVAILABLE)

    def cut_network(self) -> None:
        self.cut_store(Faults(refused=1.0))
        self.never_answer()

    def preempt(self, handle: ReplicaHandle) -> None:
        if handle.executor == "modal":
            self.modal.preempt(handle.native_id)
        elif handle.executor == "hf-jobs":
            self.hugging_face.end(handle.native_id)
        else:
            self.kubernetes.preempt(handle.native["job"])


FAULTS: dict[str, Callable[[Services], None]] = {
    "500": lambda services: services.answer(500, Status.INTERNAL),
    "429": lambda services: services.answer(429, Status.UNAVAILABLE),
    "429, Retry-After": lambda services: services.answer(429, Status.UNAVAILABLE, "20"),
    "UNAVAILABLE": lambda services: services.answer(503, Status.UNAVAILABLE),
    "time-outs": lambda services: services.answer(504, Status.DEADLINE_EXCEEDED),
    "no answers": lambda services: services.never_answer(),
    "the store": lambda services: services.cut_store(Faults(refused=1.0)),
    "the network": lambda services: services.cut_network(),
    "everything": lambda services: services.cut_everything(),
}


def measure_in_turn(minutes: float) -> None:
    """One run that meets every fault, each for two thirds of its part of the time."""
    part_s = (60 * minutes - BEFORE_S) / len(FAULTS)
    rounds = max(4, int(0.7 * 60 * minutes / (STEP_S * SYNC_EVERY)))
    measure(list(FAULTS), part_s * 2 / 3, part_s / 3, rounds)


def measure_each(minutes: float) -> None:
    """One run for each fault, all at the same time, each in a process of its own; their output follows their end."""
    here = [sys.executable, __file__, "--minutes", str(minutes), "--fault"]
    runs = [subprocess.Popen([*here, name], stdout=subprocess.PIPE, text=True) for name in FAULTS]
    for run in runs:
        print(run.communicate()[0], end="", flush=True)


def measure(faults: list[str], outage_s: float, pause_s: float, rounds: int) -> None:
    """Run once, print what was seen and add it to the results."""
    with tempfile.TemporaryDirectory(prefix="diloco-bad-hour-") as folder, ExitStack() as stack:
        undisturbed = _undisturbed(Path(folder) / "twin", rounds)
        server = stack.enter_context(running_server())
        bucket = server.make_bucket("bad-hour")
        proxy, url = stack.enter_context(proxy_before(server.url, Faults()))
        cluster = stack.enter_context(running_kubernetes())
        services = Services(stack.enter_context(LoopbackHF()), cluster, stack.enter_context(LoopbackModal()), proxy)
        config = cluster.write_kubeconfig(Path(folder) / "kubeconfig")
        hugging_face = HFJobsExecutor(endpoint=services.hugging_face.endpoint, token=services.hugging_face.token)
        kubernetes = KubernetesExecutor(kubeconfig=config, image="any")
        modal = ModalExecutor("bad-hour", client=services.modal.client())
        executor = MixedExecutor([(hugging_face, 1), (kubernetes, 1), (modal, 1)])
        began = time.monotonic()
        run = launch(
            "paced:train",
            store=f"s3://{bucket}/run",
            storage_options=server.options(endpoint_url=url),
            executor=executor,
            rounds=rounds,
            args={"step_s": STEP_S},
            **SETTINGS,
            **LIVE,
        )
        reader = RunReader(open_store(f"s3://{bucket}/run", server.options()))
        run_id = reader.run.run_id
        script = threading.Thread(
            target=_disturb, args=(services, executor, run_id, faults, outage_s, pause_s), daemon=True
        )
        script.start()
        status = run.wait().status
        minutes_taken = (time.monotonic() - began) / 60
        script.join()
        commits = reader.commits()
        seen = {
            "faults": faults,
            "outage_minutes": round(len(faults) * outage_s / 60, 1),
            "minutes": round(minutes_taken, 1),
            "status": status,
            "rounds": len(commits),
            "attempts": [reader.attempts.numbers(i)[-1] for i in range(3)],
            "preempted": [len([name for name in faults if _victim(name) == i]) for i in range(3)],
            "same_bits": [commit.base_digest for commit in commits] == undisturbed,
            "errors": _errors(reader),
        }
    print(json.dumps(seen))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as results:
        results.write(json.dumps(seen) + "\n")


def _undisturbed(folder: Path, rounds: int) -> list[str]:
    """Digests of the bases of the same run in local processes over a folder, as fast as it can."""
    executor = LocalProcessExecutor(folder / "executor")
    timing = {"poll_s": 0.05}
    given = {**SETTINGS, "timing": timing, "args": {"step_s": 0.0}, "rounds": rounds}
    run = launch("paced:train", store=str(folder / "bucket"), executor=executor, **given)
    assert run.wait().status == "completed"
    return [commit.base_digest for commit in RunReader(open_store(str(folder / "bucket"))).commits()]


def _disturb(
    services: Services, executor: MixedExecutor, run_id: str, faults: list[str], outage_s: float, pause_s: float
) -> None:
    """Begin one fault after another, each with a preemption, and end each after its outage."""
    time.sleep(BEFORE_S)
    for name in faults:
        victim = [each for each in executor.find(run_id) if each.replica_id == _victim(name)][-1]
        print(f"{time.strftime('%H:%M:%S')} {name}; replica {victim.replica_id} is preempted", flush=True)
        FAULTS[name](services)
        services.preempt(victim)
        time.sleep(outage_s)
        services.heal()
        time.sleep(pause_s)


def _victim(fault: str) -> int:
    """The replica that is preempted while this fault lasts; faults take the three providers in turn."""
    return list(FAULTS).index(fault) % 3


def _errors(reader: RunReader) -> list[str]:
    """Why attempts were replaced, apart from preemptions."""
    found = []
    for replica_id in range(3):
        for number in reader.attempts.numbers(replica_id):
            intent = reader.attempts.intent(replica_id, number)
            if intent is not None and number > 1 and "(preempted" not in intent.why:
                found.append(f"replica {replica_id}: {intent.why}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--fault", choices=list(FAULTS), help="only this one")
    parser.add_argument("--in-turn", action="store_true", help="one run meets every fault")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    if given.in_turn:
        measure_in_turn(given.minutes)
    elif given.fault:
        measure([given.fault], 60 * given.minutes, 0.0, ROUNDS)
    else:
        measure_each(given.minutes)
