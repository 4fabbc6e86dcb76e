"""`SegmentWriter`: writes segments (many commits in one object) beside training, so that history costs few requests.

`run_log.segments` has the content. Any replica may write one, because its bytes follow from the commit log.
"""

import logging
from concurrent.futures import Future

from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.run_log.segments import TAIL_ROUNDS, write_segments

log = logging.getLogger(__name__)


class SegmentWriter:
    """Writes log segments for one replica.

    After every tenth round the averaged replica with the lowest id writes all missing ones, so that ten rounds later
    another replica replaces one that died. It lists the segments unless it wrote the last ones itself.
    """

    def __init__(self, attempt: Attempt, tip: HeldTip) -> None:
        self._attempt = attempt
        self._tip = tip
        self._complete_until = 0  # this replica knows that all segments of rounds up to it exist
        self._writing: Future[None] | None = None

    def write_if_due(self) -> None:
        """Start to write the missing segments if it is this replica's turn. Returns at once."""
        commit = self._tip.last
        if commit is None or commit.round % TAIL_ROUNDS:
            return
        averaged = [a.replica_id for a in commit.answers if a.averaged]
        if min(averaged, default=None) != self._attempt.replica_id:
            return
        if self._writing is None or self._writing.done():
            self._writing = self._attempt.background.start(lambda: self._write(commit.round))

    def wait(self) -> None:
        """Block until no segment is being written."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, newest_round: int) -> None:
        try:
            knows = self._complete_until if self._complete_until >= newest_round - TAIL_ROUNDS else 0
            write_segments(self._attempt.store, self._attempt.log.commit, newest_round, knows)
            self._complete_until = newest_round
        except DilocoError as error:  # a segment only saves requests; ten rounds later it is tried again
            log.warning("no segment of the log is written this time: %s", error)
