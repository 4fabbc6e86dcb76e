"""`RankProcesses`: the ranks of one replica as child processes, started, watched and ended together.

The parent process trains nothing itself. It holds the attempt's claim, writes heartbeat, output and exit record, and so
outlives any rank that is killed. No rank is restarted: when one fails, all end, and so does the attempt.
"""

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.protocol.process import (
    ENV_LEAVE_AFTER,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
    EXIT_SUPERSEDED,
)
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.process.rank import STACKS, RankPlace
from diloco_orchestrator.replica.process.run_attempt import Ending

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # between two polls of the ranks
_SETTLE_S = 1.0  # after a failure: others fail because of it, and the first to be seen need not be the first
_STACKS_S = 2.0  # for printing them
_OF_A_COLLECTIVE = ("Timed out waiting", "Connection closed by peer", "Connection reset", "timed out", "NCCL", "gloo")


@dataclass
class RankState:
    """The state of one rank of a replica, as its parent process knows it."""

    number: int
    ending: Ending | None = None  # as it reported itself
    died: int | None = None  # exit code, negative for a signal, once the process has ended
    heard_at: float = 0.0  # s of the clock: its start, then its newest sign of life
    is_ready: bool = False  # whether it has sent one, which it does once it has imported torch

    @property
    def has_failed(self) -> bool:
        """Whether the rank ended otherwise than a finished or preempted rank does."""
        if self.ending is not None:
            return self.ending.code not in (EXIT_DONE, EXIT_PREEMPTED)
        return self.died is not None

    def is_silent(self, now: float, hung_after_s: float, startup_timeout_s: float) -> bool:
        """Whether a living rank has sent no sign of life for longer than it may.

        It may be silent for `hung_after_s` once it was ready, and before for `startup_timeout_s` too, as a replica
        until its first heartbeat.
        """
        most_s = hung_after_s if self.is_ready else max(hung_after_s, startup_timeout_s)
        return self.died is None and now - self.heard_at > most_s


@dataclass(kw_only=True)
class _Rank(RankState):
    """One rank's child process and what its parent has read from it."""

    process: subprocess.Popen[bytes]
    rest: dict[str, bytes] = field(default_factory=dict)  # of an incomplete line, by stream


class RankProcesses:
    """Starts the ranks of an attempt and watches them until all have ended.

    Args:
        ranks: their number.
        arguments: of this process: store, replica, attempt and digests, which every rank gets too.
        should_leave: whether this process was asked to leave; rank 0 is then asked, and signals the others.
        program: the module that each rank runs.
    """

    def __init__(
        self,
        attempt: Attempt,
        ranks: int,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        clock: Clock,
        should_leave: Callable[[], bool],
        program: str = "diloco_orchestrator.replica.process.rank",
    ) -> None:
        self._attempt = attempt
        self._arguments = arguments
        self._environ = environ
        self._clock = clock
        self._should_leave = should_leave
        self._program = program
        self._count = ranks
        self._timeout_s = attempt.config.retry.hung_after_s
        self._startup_s = attempt.config.timing.startup_timeout_s
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._was_asked = False

    def run(self) -> Ending:
        """Start the ranks, and return how the attempt ended once none of them lives."""
        config, replica_id = self._attempt.config, self._attempt.replica_id
        if self._count != (said := config.ranks_of(replica_id)) and config.weights == "uniform":
            log.warning(
                "this machine trains replica %d with %d ranks, and the run's configuration says %d: its contributions "
                'count like those of others, however many tokens they are of (weights="uniform")',
                *(replica_id, self._count, said),
            )
        with tempfile.TemporaryDirectory(prefix="diloco-ranks-") as folder:
            try:
                for number in range(self._count):
                    self._ranks.append(self._start(number, Path(folder) / "meeting"))
                return self._watch()
            finally:
                self._kill()
                self._selector.close()

    def _start(self, number: int, meeting: Path) -> _Rank:
        read_end, write_end = os.pipe()
        attempt = self._attempt
        leg, claim = attempt.begin.leg, attempt.claim_sha256
        place = RankPlace(number, self._count, leg, claim, write_end, str(meeting), os.getpid(), self._timeout_s)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._program, *self._arguments, "--place", place.to_text()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(self._environ, number, self._count),
            pass_fds=(write_end,),
            process_group=0,  # a signal to this process's group must not reach ranks, nor their data loaders
        )
        os.close(write_end)
        rank = _Rank(number, process=process, heard_at=self._clock.now())
        assert process.stdout is not None
        for name, stream in (("output", process.stdout), ("events", os.fdopen(read_end, "rb", buffering=0))):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (rank, name))
        return rank

    # -- watching --------------------------------------------------------------------------------------------------

    def _watch(self) -> Ending:
        while any(rank.died is None for rank in self._ranks):
            self._look(_LOOK_S)
            if self._should_leave() and not self._was_asked:
                self._was_asked = True
                if not self._ranks[0].is_ready:
                    return Ending(EXIT_PREEMPTED, "preempted")
                self._ranks[0].process.send_signal(signal.SIGTERM)
            silent = [rank for rank in self._ranks if self._is_silent(rank)]
            if silent or any(rank.has_failed for rank in self._ranks):
                return self._failed(silent)
            if self._ranks[0].ending is not None and self._clock.now() - self._ranks[0].heard_at > self._timeout_s:
                log.warning("rank 0 has ended and others have not, %.0f s later: they are ended", self._timeout_s)
                break
        first = self._ranks[0].ending
        assert first is not None, "rank 0 has not failed, so it has reported its ending"
        return first

    def _is_silent(self, rank: _Rank) -> bool:
        return rank.is_silent(self._clock.now(), self._timeout_s, self._startup_s)

    def _look(self, seconds: float) -> None:
        """Read output and events of the ranks, waiting up to `seconds` for some; record which ranks have ended."""
        for key, _ in self._selector.select(seconds):
            rank, name = key.data
            self._read(key.fileobj, rank, name)  # type: ignore[arg-type]
        for rank in self._ranks:
            if rank.died is None and rank.process.poll() is not None:
                self._read_rest(rank)
                rank.died = rank.process.returncode

    def _read(self, stream: IO[bytes], rank: _Rank, name: str) -> bool:
        """Read once from a stream of a rank. Returns whether there was data, so that more may follow."""
        data = stream.read(1 << 16)
        if data is None:  # nothing there
            return False
        if not data:
            self._selector.unregister(stream)
            stream.close()
        *lines, rest = (rank.rest.get(name, b"") + data).split(b"\n")
        if not data and rest:
            lines, rest = [*lines, rest], b""
        rank.rest[name] = rest
        for line in lines:
            if name == "output":
                print(f"[rank {rank.number}] {line.decode(errors='backslashreplace')}", file=sys.stderr)
            else:
                self._heard(rank, json.loads(line))
        return bool(data)

    def _read_rest(self, rank: _Rank) -> None:
        """Read what a rank that has ended left in its pipes, which a child of it may still hold open."""
        for key in list(self._selector.get_map().values()):
            owner, name = key.data
            while owner is rank and self._read(key.fileobj, rank, name):  # type: ignore[arg-type]
                pass

    def _heard(self, rank: _Rank, event: Mapping[str, Any]) -> None:
        rank.heard_at, rank.is_ready = self._clock.now(), True
        if "ending" in event:
            rank.ending = Ending(**event["ending"])
        elif rank.number == 0:
            for name, value in event["pulse"].items():
                setattr(self._attempt.pulse, name, value)

    # -- failing ---------------------------------------------------------------------------------------------------

    def _failed(self, silent: Sequence[_Rank]) -> Ending:
        """Print the stacks of all living ranks, end them, and return the ending with the rank that failed first."""
        self._look_for(_SETTLE_S)
        ending = ending_of(self._ranks, silent, self._timeout_s)
        for rank in self._ranks if ending.code == EXIT_ERROR else ():
            if rank.died is None and rank.ending is None:
                print(f"the stacks of rank {rank.number}, because {ending.reason}:", file=sys.stderr)
                rank.process.send_signal(STACKS)
                self._look_for(_STACKS_S / self._count)
            elif rank.ending is not None and rank.ending.error and rank.ending.error != ending.error:
                print(f"rank {rank.number} ended too: {redact(rank.ending.error, self._environ)}", file=sys.stderr)
        return ending

    def _look_for(self, seconds: float) -> None:
        until = self._clock.now() + seconds
        while (left_s := until - self._clock.now()) > 0 and any(rank.died is None for rank in self._ranks):
            self._look(min(left_s, _LOOK_S))

    def _kill(self) -> None:
        """End all ranks that live, with their children, and wait until they are gone."""
        for rank in self._ranks:
            if rank.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
        self._look(0.0)


def ending_of(ranks: Sequence[RankState], silent: Sequence[RankState], timeout_s: float) -> Ending:
    """The ending of an attempt in which a rank has failed, named after the rank whose failure explains the others'.

    A process that died or fell silent comes before an error, an error that a relaunch would repeat before another, and
    any error before those of collectives, which end when another rank is gone. `silent`: ranks without a sign of life
    for `timeout_s`, which is also the time-out of collectives, or not ready within the start-up time-out.
    """
    count = len(ranks)
    for rank in ranks:
        if rank.died is not None and rank.ending is None:
            return Ending(EXIT_ERROR, f"rank {rank.number} of {count} {_death_words(rank.died)}")
    for rank in silent:
        words = f"gave no sign of life for {timeout_s:.0f} s: it is stopped, or hangs outside of Python"
        if not rank.is_ready:
            words = "was not ready within timing.startup_timeout_s: it still imports torch, or waits for the bucket"
        return Ending(EXIT_ERROR, f"rank {rank.number} of {count} {words}")
    rank = min((rank for rank in ranks if rank.has_failed), key=lambda each: (_order(each.ending), each.number))
    assert rank.ending is not None, "those without were the first"
    first = ranks[0].ending
    if _is_of_a_collective(rank.ending) and first is not None and not ranks[0].has_failed:
        return first  # it has left or ended, and others only lost their connection to it
    late = [str(each.number) for each in ranks if each.ending is None]
    if _is_of_a_collective(rank.ending) and late:
        who = f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} of {count}"
        waited = f"rank {rank.number} waited for {timeout_s:.0f} s (retry.hung_after_s)"
        return replace(rank.ending, reason=f"{who} did not come to a collective in which {waited}")
    return replace(rank.ending, reason=f"rank {rank.number} of {count}: {rank.ending.reason}")


def _environment(environ: Mapping[str, str], number: int, count: int) -> dict[str, str]:
    """The environment of rank `number` of `count`: torch's variables, its share of the threads, and the import path."""
    threads = int(environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)  # as in the attempt's claim: bits depend on it
    return {
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine, whose own name may not resolve
        **{name: value for name, value in environ.items() if name != ENV_LEAVE_AFTER},  # which is watched here
        "OMP_NUM_THREADS": str(max(1, threads // count)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }


def _death_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}, without a word"
    why = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.Signals(-code).name}{why})"


def _is_of_a_collective(ending: Ending) -> bool:
    last = (ending.error or "").strip().rpartition("\n")[2]
    return ending.code == EXIT_ERROR and any(words in last for words in _OF_A_COLLECTIVE)


def _order(ending: Ending | None) -> int:
    assert ending is not None
    return 0 if ending.code in (EXIT_PERMANENT, EXIT_SUPERSEDED) else 1 + _is_of_a_collective(ending)
