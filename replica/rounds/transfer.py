"""`Transfer`: publishes a contribution in the background, and then receives those of the other replicas."""

from collections.abc import Callable
from contextlib import suppress

from diloco_orchestrator.clock import Background
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.protocol.records import Contribution


class Transfer:
    """Calls `contribute` at once and, after it has returned, `poll` every `poll_s` seconds, both in the background.

    No other call may use the round until `wait` has returned.
    """

    def __init__(
        self,
        background: Background,
        contribute: Callable[[], Contribution],
        *,
        poll: Callable[[], None],
        poll_s: float,
    ) -> None:
        self._poll = poll
        self._contribution = background.start(contribute)
        self._polling = background.every(poll_s, self._poll_once_published)

    def wait(self) -> Contribution:
        """Block until the contribution is published and no poll is under way. Raises what `contribute` raised."""
        try:
            return self._contribution.result()
        finally:
            self._polling.stop()

    def _poll_once_published(self) -> None:
        if self._contribution.done():
            # Errors are ignored here: closing the round polls the same objects again and raises them.
            with suppress(DilocoError):
                self._poll()
