"""`RankProcesses`: the ranks of one replica as child processes, started, watched and ended together.

The parent process trains nothing itself. It holds the attempt's claim, writes heartbeat, output and exit record, and so
outlives any rank that is killed. No rank is restarted: when one fails, all end, and so does the attempt.
"""

import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.protocol.process import (
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_PERMANENT,
    EXIT_PREEMPTED,
    EXIT_SUPERSEDED,
)
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.process.machines import Link, interface_of, start_message
from diloco_orchestrator.replica.process.rank import STACKS, RankPlace
from diloco_orchestrator.replica.process.rank_children import LOOK_S, Message, RankChildren, RankProgram
from diloco_orchestrator.replica.process.run_attempt import Ending

log = logging.getLogger(__name__)

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
    lost_with: int | None = None  # number of its machine, if that was lost with all ranks on it

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


class RankProcesses:
    """Starts the ranks of an attempt, here and on the replica's other machines, and watches them until all have ended.

    Once the attempt should leave, rank 0 is asked to, and signals the others.

    Args:
        ranks: their number.
        program: what each of them runs.
        others: the connections to the replica's other machines, each of which has as many ranks as this one.
    """

    def __init__(
        self,
        attempt: Attempt,
        ranks: int,
        program: RankProgram,
        clock: Clock,
        others: Sequence[Link] = (),
    ) -> None:
        self._attempt = attempt
        self._environ = program.environ
        self._clock = clock
        self._timeout_s = attempt.config.retry.hung_after_s
        self._startup_s = attempt.config.timing.startup_timeout_s
        self._ranks = [RankState(number) for number in range(ranks)]
        self._on_machine = ranks // (1 + len(others))
        self._others = dict(enumerate(others, start=1))  # by number of the machine
        self._children = RankChildren(program, self._heard)
        self._other_is_asked = False
        self._was_asked = False

    def run(self) -> Ending:
        """Start the ranks, and return how the attempt ended once none of them lives."""
        config, replica_id, count = self._attempt.config, self._attempt.replica_id, len(self._ranks)
        if count != (said := config.ranks_of(replica_id)) and config.weights == "uniform":
            log.warning(
                "this machine trains replica %d with %d ranks, and the run's configuration says %d: its contributions "
                'count like those of others, however many tokens they are of (weights="uniform")',
                replica_id,
                count,
                said,
            )
        with tempfile.TemporaryDirectory(prefix="diloco-ranks-") as folder:
            try:
                self._start(Path(folder) / "meeting")
                return self._watch()
            finally:
                self._end()

    def _start(self, meeting: Path) -> None:
        """Start the ranks, in ascending order. On several machines they find each other at this one's address."""
        attempt, each = self._attempt, self._on_machine
        known = (each, attempt.begin.leg, attempt.claim_sha256, self._timeout_s)
        where: tuple[str, int] = (str(meeting), 0)
        interface, listener = "lo", None  # all ranks are on this machine, whose own name may not resolve
        if self._others:
            address = self._others[1].own_address
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=1 + len(self._ranks))
            where, interface = (address, listener.getsockname()[1]), interface_of(address)
        places = [RankPlace(rank.number, len(self._ranks), *known, *where) for rank in self._ranks]
        for rank in self._ranks:
            rank.heard_at = self._clock.now()
        for machine, link in self._others.items():
            self._children.also_read(link, partial(self._read, machine, link))
            link.send(start_message(places[machine * each : (machine + 1) * each]))
        for place in places[:each]:
            fd = listener.fileno() if listener is not None and place.rank == 0 else -1
            self._children.start(replace(place, listener=fd), interface)
        if listener is not None:
            listener.close()  # rank 0 has it

    # -- watching --------------------------------------------------------------------------------------------------

    def _watch(self) -> Ending:
        while any(rank.died is None for rank in self._ranks):
            self._children.look(LOOK_S)
            if (self._attempt.should_leave() or self._other_is_asked) and not self._was_asked:
                self._was_asked = True
                if not self._ranks[0].is_ready:
                    return Ending(EXIT_PREEMPTED, "preempted")
                self._children.signal(0, signal.SIGTERM)
            silent = [rank for rank in self._ranks if self._is_silent(rank)]
            if silent or any(rank.has_failed for rank in self._ranks):
                return self._failed(silent)
            if self._ranks[0].ending is not None and self._clock.now() - self._ranks[0].heard_at > self._timeout_s:
                log.warning("rank 0 has ended and others have not, %.0f s later: they are ended", self._timeout_s)
                break
        first = self._ranks[0].ending
        assert first is not None, "rank 0 has not failed, so it has reported its ending"
        return first

    def _is_silent(self, rank: RankState) -> bool:
        return rank.is_silent(self._clock.now(), self._timeout_s, self._startup_s)

    def _read(self, machine: int, link: Link) -> bool:
        """Read what another machine has sent. False once it is gone, and with it those of its ranks that lived."""
        said = link.read()
        for message in said or ():
            self._heard(message)
        if said is None:
            del self._others[machine]
            for rank in self._ranks[machine * self._on_machine : (machine + 1) * self._on_machine]:
                if rank.died is None:
                    rank.died, rank.lost_with = EXIT_ERROR, machine
        return said is not None

    def _heard(self, message: Message) -> None:
        """Take in what a rank, or the process above it on another machine, has said."""
        if "asked" in message:
            self._other_is_asked = True
            return
        rank = self._ranks[message["rank"]]
        if "output" in message:
            print(f"[rank {rank.number}] {message['output']}", file=sys.stderr)
        elif "died" in message:
            rank.died = message["died"]
        else:
            self._happened(rank, message["event"])

    def _happened(self, rank: RankState, event: Mapping[str, Any]) -> None:
        rank.heard_at, rank.is_ready = self._clock.now(), True
        if "ending" in event:
            rank.ending = Ending(**event["ending"])
        elif rank.number == 0:
            for name, value in event["pulse"].items():
                if name != "vacated":  # which this process alone reads
                    setattr(self._attempt.pulse, name, value)

    # -- failing ---------------------------------------------------------------------------------------------------

    def _failed(self, silent: Sequence[RankState]) -> Ending:
        """Print the stacks of all living ranks, end them, and return the ending with the rank that failed first."""
        self._look_for(_SETTLE_S)
        ending = ending_of(self._ranks, silent, self._timeout_s)
        for rank in self._ranks if ending.code == EXIT_ERROR else ():
            if rank.died is None and rank.ending is None:
                print(f"the stacks of rank {rank.number}, because {ending.reason}:", file=sys.stderr)
                self._signal(rank.number, STACKS)
                self._look_for(_STACKS_S / len(self._ranks))
            elif rank.ending is not None and rank.ending.error and rank.ending.error != ending.error:
                print(f"rank {rank.number} ended too: {redact(rank.ending.error, self._environ)}", file=sys.stderr)
        return ending

    def _signal(self, number: int, signal_number: int) -> None:
        if (link := self._others.get(number // self._on_machine)) is not None:
            link.send({"signal": [number, signal_number]})
        else:
            self._children.signal(number, signal_number)

    def _look_for(self, seconds: float) -> None:
        until = self._clock.now() + seconds
        while (left_s := until - self._clock.now()) > 0 and any(rank.died is None for rank in self._ranks):
            self._children.look(min(left_s, LOOK_S))

    def _end(self) -> None:
        """End all ranks on all machines. Those of the others have some seconds to send what their ranks have said."""
        for link in self._others.values():
            link.send({"end": True})
        self._children.kill()
        until = self._clock.now() + _SETTLE_S
        while self._others and (left_s := until - self._clock.now()) > 0:
            self._children.look(min(left_s, LOOK_S))
        self._children.close()


def ending_of(ranks: Sequence[RankState], silent: Sequence[RankState], timeout_s: float) -> Ending:
    """The ending of an attempt in which a rank has failed, named after the rank whose failure explains the others'.

    A process that died or fell silent comes before an error, an error that a relaunch would repeat before another, and
    any error before those of collectives, which end when another rank is gone. `silent`: ranks without a sign of life
    for `timeout_s`, which is also the time-out of collectives, or not ready within the start-up time-out.
    """
    count = len(ranks)
    for rank in ranks:
        if rank.died is not None and rank.ending is None:
            return Ending(EXIT_ERROR, f"rank {rank.number} of {count} {_death_words(rank)}")
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


def _death_words(rank: RankState) -> str:
    if rank.lost_with is not None:
        return f"was lost with machine {rank.lost_with} of this replica, whose connection to machine 0 has ended"
    code = rank.died or 0
    if code >= 0:
        return f"ended with exit code {code}, without a word"
    names = {named.value: f" ({named.name})" for named in signal.Signals}  # real-time signals have none
    names[signal.SIGKILL] = " (SIGKILL, as the kernel does where memory runs out)"
    return f"was killed by signal {-code}{names.get(-code, '')}"


def _is_of_a_collective(ending: Ending) -> bool:
    last = (ending.error or "").strip().rpartition("\n")[2]
    return ending.code == EXIT_ERROR and any(words in last for words in _OF_A_COLLECTIVE)


def _order(ending: Ending | None) -> int:
    assert ending is not None
    return 0 if ending.code in (EXIT_PERMANENT, EXIT_SUPERSEDED) else 1 + _is_of_a_collective(ending)
