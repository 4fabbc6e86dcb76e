"""`Transfer`: one round in the background of training, from publishing this replica's contribution to the next base.

The caller passes in the functions that publish and close.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future

from diloco_orchestrator.clock import Background, Clock
from diloco_orchestrator.replica.rounds.interface import ClosedRound

log = logging.getLogger(__name__)


class Transfer:
    """Calls `contribute` in the background at once, and after it the function that `close` is given.

    The objects that these functions use belong to the background until `wait` has returned or raised. Their errors are
    raised with their type by `raise_error` and `wait`. `round_`: for the log.
    """

    def __init__(self, background: Background, clock: Clock, round_: int, contribute: Callable[[], object]) -> None:
        self._background = background
        self._clock = clock
        self._round = round_
        self._began_at = self._ended_at = clock.now()
        self._published = background.start(contribute)
        self._closed: Future[ClosedRound] | None = None

    def close(self, close: Callable[[], ClosedRound]) -> None:
        """Begin to call `close` in the background once the contribution is published, unless begun. Returns at once."""
        if self._closed is None:
            self._closed = self._background.start(lambda: self._close_once_published(close))

    def wait_published(self) -> None:
        """Block until the contribution is published, not until the round is closed. Raises the errors of publishing."""
        self._published.result()

    def raise_error(self) -> None:
        """Raise the error with which the background call has failed, if it has."""
        for each in (self._published, self._closed):
            if each is not None and each.done():
                each.result()

    def wait_ended(self) -> None:
        """Block until no call runs in the background. Raises nothing."""
        for each in (self._published, self._closed):
            if each is not None:
                each.exception()

    def wait(self) -> ClosedRound:
        """Block until the round is closed, and log how long that took. Raises the background call's error."""
        assert self._closed is not None, "close was called"
        began_at = self._clock.now()
        closed = self._closed.result()
        waited_s, whole_s = self._clock.now() - began_at, self._ended_at - self._began_at
        log.info("round %d: waited %.1f s of %.1f s", self._round, min(waited_s, whole_s), whole_s)
        return closed

    def _close_once_published(self, close: Callable[[], ClosedRound]) -> ClosedRound:
        self._published.result()
        closed = close()
        self._ended_at = self._clock.now()
        return closed
