"""`python -m diloco_orchestrator.replica.process.rank`: the process of one rank, in a replica of several processes.

`rank_processes` starts it, in the process that has claimed the attempt, and reads its output and its events: one JSON
line a second as a sign of life, once torch is imported, and how the rank ended. The rank dies with the process that
started it.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from diloco_orchestrator.clock import Background, SystemClock, ThreadBackground, random_token
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import ENV_STORAGE_OPTIONS, EXIT_ERROR, load_entrypoint
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.replica.attempt.attempt import Attempt, adopted_attempt
from diloco_orchestrator.replica.process.run_attempt import (
    Ending,
    LeavingNotice,
    LoadEntrypoint,
    call_entrypoint,
    caught,
    configure_logging,
    load_training_libraries,
    process_environment,
)
from diloco_orchestrator.replica.process.stuck import PHASES_OF_RANK_0, STUCK, StuckWatch, stuck_before
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.open_store import LASTING, open_store

STACKS = signal.SIGUSR2  # makes a rank print the stacks of all its threads
ALIVE_S = 1.0  # between two signs of life
_PARENT_DIED = 1  # PR_SET_PDEATHSIG

Adopt = Callable[[Mapping[str, str], LeavingNotice, Background], Attempt]


@dataclass(frozen=True)
class RankPlace:
    """The arguments of a rank from its parent process: its number, the other ranks, and where its events go."""

    rank: int
    ranks: int
    on_machine: int  # ranks on each machine
    leg: int
    claim_sha256: str
    timeout_s: float  # of a collective
    meeting: str  # path of the file through which the ranks find each other; on several machines machine 0's address
    port: int = 0  # of that address; 0: `meeting` is a path
    listener: int = -1  # file descriptor of a socket that listens there, in rank 0
    events: int = -1  # file descriptor
    parent: int = 0  # pid of the process above

    @property
    def local_rank(self) -> int:
        return self.rank % self.on_machine

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "RankPlace":
        return cls(**json.loads(text))


class Events:
    """Sends JSON lines to the parent process, from any thread: signs of life with training progress, and the ending."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def alive(self, pulse: Any) -> None:
        """Send a sign of life to the parent process. `pulse`: the content of the attempt's next heartbeat."""
        self._send({"pulse": asdict(pulse)})

    def ended(self, ending: Ending) -> None:
        """Send to the parent process how this rank ended."""
        self._send({"ending": {"code": ending.code, "reason": ending.reason, "error": ending.error}})

    def _send(self, event: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(event).encode() + b"\n")  # one write, of which a short one is atomic
        except OSError:
            os._exit(1)  # nobody reads any more: the process above has died


def main(load: LoadEntrypoint = load_entrypoint) -> int:
    """Train as the rank that the command line names, report the ending to the parent, and return the exit code.

    `load`: returns the user's training function named "module:function".
    """
    parser = argparse.ArgumentParser(prog="python -m diloco_orchestrator.replica.process.rank")
    parser.add_argument("--store", required=True)
    parser.add_argument("--replica-id", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--place", required=True)
    Launched.add_options(parser)
    options = parser.parse_args()
    place = RankPlace.of(options.place)

    def adopt(environ: Mapping[str, str], notice: LeavingNotice, background: Background) -> Attempt:
        clock = SystemClock()
        opened = open_store(
            options.store,
            json.loads(environ.get(ENV_STORAGE_OPTIONS) or "{}"),
            clock=clock,
            retry=LASTING,
            is_leaving=notice,
        )
        return adopted_attempt(
            of_run(opened, environ),
            options.replica_id,
            options.attempt,
            place.leg,
            place.claim_sha256,
            clock,
            Stamp(random_token(), clock.wall_time),
            notice,
            background,
            Launched.of_options(options),
        )

    return train_as_rank(place, options.replica_id, options.attempt, adopt, load)


def train_as_rank(place: RankPlace, replica_id: int, number: int, adopt: Adopt, load: LoadEntrypoint) -> int:
    """Train as the rank at `place` of attempt `number`, report the ending to the parent, and return the exit code.

    `adopt`: returns the attempt, which the parent has begun. `load`: as for `main`.
    """
    environ = process_environment()
    _die_with(place.parent)
    faulthandler.register(STACKS, all_threads=True)
    events, notice = Events(place.events), LeavingNotice(SystemClock())
    if place.rank == 0:
        notice.install()
    configure_logging(replica_id, number)
    ending = caught(lambda: _train(place, environ, events, notice, adopt, load))
    assert ending is not None, "training has an ending"
    events.ended(ending)
    return ending.code


def _train(
    place: RankPlace,
    environ: Mapping[str, str],
    events: Events,
    notice: LeavingNotice,
    adopt: Adopt,
    load: LoadEntrypoint,
) -> Ending:
    background = ThreadBackground()
    attempt = adopt(environ, notice, background)
    load_training_libraries(environ)
    thread = threading.get_ident()
    clock, before = SystemClock(), partial(stuck_before, attempt)
    watch = StuckWatch(attempt.pulse, attempt.config, clock, thread, phases=PHASES_OF_RANK_0, stuck_before=before)

    def beat() -> None:
        events.alive(attempt.pulse)
        # Others wait for rank 0 without limit, or in a collective that ends them all if it does not come.
        if place.rank == 0 and (stack := watch.stack()):
            events.ended(Ending(EXIT_ERROR, STUCK, stack))  # the process above ends all ranks

    stop_beating = background.every(ALIVE_S, beat)
    try:
        ranks = joined(place, store=attempt.store, background=background)
        return call_entrypoint(replace(attempt, owners=ranks.owners), load, notice, ranks)
    finally:
        stop_beating()
        events.alive(attempt.pulse)  # as it is at the end


def joined(place: RankPlace, **own: object) -> Any:
    """Join torch's default process group, that of the replica's ranks, and return this process's `Ranks`.

    Waits without limit until every rank has come, since the parent process ends all when one does not; from then on no
    collective takes longer than `place.timeout_s`.

    `own`: objects of which every rank has its own, by name. Raises `ConfigError` if this machine has GPUs, but fewer
    than ranks on it, or does not run Linux.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"replicas of several ranks need Linux, and this machine runs {platform.system()}: leave ranks_per_replica "
            "at 1 here, or launch on machines with Linux."
        )
    # Imported late: what comes before, such as a refused configuration, needs no torch.
    import torch
    import torch.distributed as dist

    from diloco_orchestrator.replica.training.ranks import Ranks

    has_gpus = torch.cuda.is_available()
    if has_gpus:
        if (gpus := torch.cuda.device_count()) < place.on_machine:
            raise ConfigError(
                f"this replica has {place.on_machine} ranks on this machine, which sees {gpus} "
                f"GPU{'s' if gpus > 1 else ''}: each rank needs its own. Ask the executor for more, or set "
                "ranks_per_replica to their number."
            )
        torch.cuda.set_device(place.local_rank)
    else:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else accelerate takes each rank for the only process
    without_limit = timedelta(days=365)
    meeting: Any
    if place.port:
        fd = place.listener if place.listener >= 0 else None
        meeting = dist.TCPStore(  # type: ignore[attr-defined]
            place.meeting,
            place.port,
            place.ranks,
            is_master=fd is not None,
            timeout=without_limit,
            wait_for_workers=False,
            master_listen_fd=fd,
        )
    else:
        meeting = dist.FileStore(place.meeting, place.ranks)  # type: ignore[attr-defined]
    meeting.set(f"rank {place.rank}", "")
    meeting.wait([f"rank {rank}" for rank in range(place.ranks)], without_limit)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
        store=meeting,
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=place.timeout_s),
    )
    host = place.meeting if place.port else "127.0.0.1"
    return Ranks.joined(place.local_rank, host, place.timeout_s, **own)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when the process `parent`, which started it, dies, even by SIGKILL."""
    if sys.platform == "linux":  # elsewhere `joined` refuses
        ctypes.CDLL(None, use_errno=True).prctl(_PARENT_DIED, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


if __name__ == "__main__":
    # Non-daemon threads of a workload must not keep a finished rank alive.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
