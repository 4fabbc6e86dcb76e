"""`Participant`: one replica's part in the rounds of a run, over a bucket. Implements `Rounds`.

Per round there is at most one `publish` and one `close`. The work is done in `tip`, `base_claims`, `timing`,
`contribute` and `close_round`. Depends on no training loop.

**Threads.** All these objects are used by one thread at a time: the one that calls the participant, except while a
round is in flight. From `publish(in_background=True)` or `close_beside_training` until `close` returns they belong to
the background thread, which changes base, position in the log, carried work and times. Meanwhile the caller may use
only `open`, which does not change, `close_beside_training`, `await_published`, `close`, `give_up` and `leave`. So no
round changes between two inner steps of training: only `close` makes the next round the open one.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from diloco_orchestrator.allreduce.vectors import Vector
from diloco_orchestrator.clock import Background, Clock
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.outer.adapter_products import with_residuals
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.golden_arithmetic import check_arithmetic
from diloco_orchestrator.protocol import rounds
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.allocator import returning_freed_memory
from diloco_orchestrator.replica.rounds.base_claims import BaseClaims
from diloco_orchestrator.replica.rounds.close_round import RoundCloser
from diloco_orchestrator.replica.rounds.contribute import Contributor
from diloco_orchestrator.replica.rounds.first_base import agree_on_first_base, check_start
from diloco_orchestrator.replica.rounds.interface import ClosedRound, ContributionFields
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.rounds.replica_buffers import ReplicaBuffers
from diloco_orchestrator.replica.rounds.reupload import ReuploadRequests
from diloco_orchestrator.replica.rounds.snapshot_writer import SegmentWriter, SnapshotWriter
from diloco_orchestrator.replica.rounds.timing import RoundTiming
from diloco_orchestrator.replica.rounds.tip import HeldTip, OpenRound
from diloco_orchestrator.replica.rounds.work_scores import DealtMeasure, Measure
from diloco_orchestrator.snapshots.layout import ModelFiles

log = logging.getLogger(__name__)


class Transfer:
    """Runs one round's calls in the background: `contribute` at once, then the call passed to `close`.

    Everything that these calls use belongs to the background until `wait` has returned or raised. `open`: the open
    round, as training sees it meanwhile. Errors of either call are kept, and raised with their type by `raise_error`
    and `wait`.
    """

    def __init__(
        self, background: Background, clock: Clock, opened: OpenRound, contribute: Callable[[], object]
    ) -> None:
        self._background = background
        self._clock = clock
        self.open = opened
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
        log.info("round %d: waited %.1f s of %.1f s", self.open.round, min(waited_s, whole_s), whole_s)
        return closed

    def _close_once_published(self, close: Callable[[], ClosedRound]) -> ClosedRound:
        self._published.result()
        closed = close()
        self._ended_at = self._clock.now()
        return closed


class Participant:
    """One replica's part in the rounds of a run, one call at a time. Created by `join`.

    `Rounds` documents what any loop needs. The other methods are for supervised runs: commits without this replica,
    restarts, scores, snapshots, the end. Each may be repeated: existing objects stay as they are.
    """

    def __init__(self, attempt: Attempt, tip: HeldTip, requests: ReuploadRequests, files: ModelFiles) -> None:
        self._attempt = attempt
        self._tip = tip
        self._claims = BaseClaims(attempt, tip, requests)
        self._requests = requests
        self._timing = RoundTiming(attempt, tip)
        self._contributor = Contributor(attempt, tip, self._claims, self._timing, requests.payloads)
        self._closer = RoundCloser(attempt, tip, self._claims, requests, self._timing, self._contributor)
        self._snapshots = SnapshotWriter(attempt, tip, self._claims, files)
        self._segments = SegmentWriter(attempt, tip)
        self._in_flight: Transfer | None = None
        # This replica's manifests, by any attempt, and the model's persistent buffers: not for use in flight.
        self.history = self._contributor.history
        self.buffers = ReplicaBuffers(attempt, tip, self.history, files)
        self._contributor.recover()
        attempt.pulse.round = self.open.round

    @classmethod
    @returning_freed_memory()
    def join(cls, attempt: Attempt, own: OwnModel) -> "Participant":
        """Agree on the first base with the other replicas, then rebuild the newest base from the bucket.

        `own`: this replica's model. Raises `ModelMismatch` if it differs from the run's, `ConfigError` if the run
        averages adapters that the model lacks, and `BaseDiverged` if the arithmetic of this machine differs from all
        others'.
        """
        check_arithmetic()
        if attempt.config.adapters == "exact" and not own.files.adapters:
            raise ConfigError(
                'the run averages adapters="exact", which needs ctx.attach: this loop joins without adapters. Use '
                'adapters="mean" in a new run, or ctx.attach.'
            )
        if own.files.adapters:
            parameters, fragments = with_residuals(own.parameters, own.fragments, own.files.adapters)
            own = replace(own, parameters=parameters, fragments=fragments)
        found, first = agree_on_first_base(attempt, own)
        check_start(found.record, own, attempt)
        requests = ReuploadRequests(attempt)
        tip = HeldTip(attempt, requests.rebuild(first=first), tuple(map(tuple, own.fragments)))
        if not tip.position.round and not own.has_values_of(tip.base):
            log.warning("this replica's first values differ from the run's first base; it takes those of snapshot 0")
        return cls(attempt, tip, requests, own.files)

    @property
    def open(self) -> OpenRound:
        return self._in_flight.open if self._in_flight else self._tip.open

    @property
    def base(self) -> Base:
        return self._tip.base

    @property
    def digest(self) -> str:
        return self._claims.digest

    @property
    def own(self) -> Contribution | None:
        """This replica's contribution to the open round, by any attempt; None before `publish` made or found it."""
        return self._contributor.own

    @property
    def elastic(self) -> bool:
        """Whether rounds may end without this replica and average fewer inner steps of it. Fixed for the whole run."""
        return self._timing.elastic

    # -- a round -------------------------------------------------------------------------------------------------

    def publish(self, form: Callable[[], Vector], fields: ContributionFields, *, in_background: bool = False) -> None:
        fields = replace(fields, buffers=self.buffers.changed())
        if in_background:
            self._begin(lambda: self._contribute(form, fields))
            return
        self._attempt.pulse.phase = "publishing"
        self._contribute(form, fields)

    def _contribute(self, form: Callable[[], Vector], fields: ContributionFields) -> None:
        if self._closer.trained_in_vain():
            self._contributor.abstain(fields, "it trained from a base that held an average which no payload gives")
            return
        with returning_freed_memory():
            self._contributor.contribute_delta(form(), fields)

    def close_beside_training(self, then: Callable[[], None] = lambda: None, *, keep_average: bool = False) -> None:
        flight = self._in_flight or self._begin(lambda: None)
        flight.raise_error()
        flight.close(lambda: self._close(then, keep_average))

    def await_published(self) -> None:
        """Block until the contribution published in the background is in the bucket. Raises errors of publishing."""
        if self._in_flight is not None:
            self._in_flight.wait_published()

    def close(self, *, keep_average: bool = False) -> ClosedRound:
        self._attempt.pulse.phase = "waiting"
        flight = self._in_flight
        if flight is None:
            closed = self._close(keep_average=keep_average)
        else:
            flight.close(lambda: self._close(keep_average=keep_average))
            try:
                closed = flight.wait()
            finally:
                self._in_flight = None
            self._timing.open_round()
        self._attempt.pulse.round, self._attempt.pulse.round_s = self.open.round, self._timing.usual_s
        return closed

    def give_up(self) -> None:
        """Make a round in flight end with an error where it would wait for others, because its result is not needed.

        Safe to repeat, and to call without a round in flight.
        """
        self._closer.give_up()

    def leave(self) -> None:
        """Give up a round in flight, and block until the background thread has ended its current request and snapshot.

        Called before the interpreter exits, because a thread inside a library's code may crash the exit.
        """
        self.give_up()
        if self._in_flight is not None:
            self._in_flight.wait_ended()
        self._snapshots.wait_ended()

    def _begin(self, contribute: Callable[[], object]) -> Transfer:
        self._in_flight = Transfer(self._attempt.background, self._attempt.clock, self._tip.open, contribute)
        return self._in_flight

    def _close(self, then: Callable[[], None] = lambda: None, keep_average: bool = False) -> ClosedRound:
        self._snapshots.wait()  # a snapshot is written of the base that closing steps in place
        with returning_freed_memory():
            closed = self._closer.close(keep_average=keep_average)
        self._segments.write_if_due()
        then()
        return closed

    def score_strangers_by(self, measure: Measure, dealt: DealtMeasure | None = None) -> None:
        """Have `close` score strangers' contributions, in the thread that calls it, before they are averaged.

        Scores are higher for better models, and both functions must leave the model as it was.

        Args:
            measure: scores of a base on the held-out items that the open round deals to this replica.
            dealt: scores of a base on training items that the open round deals to a contribution's author, and on as
                many that it deals to others, the same ones at each call; None: it deals none, or they cannot be scored.
        """
        self._closer.work.measure, self._closer.work.measure_dealt = measure, dealt

    def publish_scores(self, fields: ContributionFields) -> None:
        """Contribute scores to the final evaluation round, which takes no pseudo-gradient; at most once."""
        self._contributor.contribute_scores(fields)

    # -- rounds that go on without this replica ------------------------------------------------------------------

    def committed(self, *, if_due: bool = False) -> bool:
        """Whether the open round was committed without waiting for this replica. One GET request.

        `if_due`: make no request and return False where a commit is unlikely (`RoundTiming.poll_due`), so that the
        method can be called between any two inner steps.
        """
        asks = not self.open.stopped and (not if_due or self._timing.poll_due())
        return asks and self._closer.committed()

    def is_behind(self, steps: int, steps_s: float) -> bool:
        """Whether to contribute the `steps` inner steps taken so far, in `steps_s` seconds, and not a whole round.

        So it is for a replica that is too slow for the others.
        """
        return self._timing.is_behind(steps, steps_s)

    def announce(self) -> None:
        """Publish that this replica is back, so that the next round waits for it, unless it would anyway."""
        self._contributor.announce()

    def reopen(self, round_: int) -> None:
        """Go back to a closed round since the last resume and its base, to train it again as a restarted attempt would.

        No round may be in flight. Raises the errors of rebuilding a base; then nothing has changed.
        """
        with returning_freed_memory():
            self._claims.rebuild(until=round_ - 1)
        self._attempt.pulse.round = self.open.round
        self._timing.open_round()
        self._contributor.recover()

    # -- snapshots and the end -----------------------------------------------------------------------------------

    def write_snapshot_if_due(self) -> bool:
        """Begin to write the snapshot of the base in the background, if it is due and this replica's turn.

        Returns whether the base was rebuilt first and had other bits; `base` is then the rebuilt one. Write errors are
        raised by the next `close`. A missing or incomplete snapshot only makes later rebuilds longer.
        """
        with returning_freed_memory():
            healed = self._snapshots.write_if_due()
            if healed:
                self._contributor.recover_carry()
        return healed

    @returning_freed_memory()
    def finish_leg(self) -> bool:
        """After the stop: write the last snapshot and `result.json` unless others do.

        Returns whether the base was rebuilt first and had other bits; `base` is then the rebuilt one.
        """
        last = self._tip.value.last
        assert last is not None
        healed = self._snapshots.write_last()
        self._snapshots.write_default()
        self._segments.wait()
        if not self._attempt.is_invited:
            self._attempt.writer.create(rounds.result_of(last.commit, last.sha256, self._attempt.stamp()))
        return healed
