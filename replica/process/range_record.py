"""`RangeRecord`: the recorded state from which one replica's training in one round (a range) can be repeated.

A restarted attempt continues from its replica's newest manifest and saved state, and so does a repetition. State that
an attempt had in memory only cannot be repeated.
"""

from dataclasses import dataclass

from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol.records import Begin, Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.saved_state import read_state


@dataclass(frozen=True)
class RangeRecord:
    """The recorded state before one replica's training in one round. `manifest`: of the contribution it made."""

    run_log: RunLog
    manifest: Contribution

    @property
    def delay(self) -> int:
        """Inner steps that a replica takes from publishing its contribution to applying the round's outer step."""
        return self.run_log.configs.of(self.manifest.leg).fragment_sync_delay

    def delta_before(self) -> Contribution | None:
        """The contribution from whose saved state the replica's training in this round begins; None at the start.

        It is the one that a restarted attempt continues from (`newest_delta` of its history), unless replicas' base
        digests disagree.
        """
        for round_ in (*self._rounds_before(), self._begin.from_round):
            found = self._of(round_) if round_ else None
            if found is not None and found.kind == "delta":
                return found
        return None

    def steps_in_round(self) -> int:
        """Number of the contribution's inner steps that its author took after the round had opened.

        With a sync delay of d steps its first d steps were taken before: after the author had published its
        contribution to the round before, while that round was not closed.
        """
        before = self.delta_before()
        behind = before is not None and (before.leg, before.round) == (self.manifest.leg, self.manifest.round - 1)
        return self.manifest.own_steps - (self.delay if behind else 0)

    def why_not(self) -> str:
        """Reason why the range (one replica's round) cannot be repeated from recorded state; empty if it can."""
        if self.steps_in_round() <= 0:
            return (
                "its author was cut before its first step of the round, and published what its fragments held from "
                "the round before"
            )
        return self._why_no_state() or (self._why_not_with_delay() if self.delay else "")

    def why_lost(self) -> str:
        """The object from which the training begins, if somebody deleted or replaced it, with the reason; else empty.

        The log has the saved state's digest. If the object has another, or is gone though the run keeps all states,
        retention is not the cause.
        """
        before = self.delta_before()
        if before is None or before.state is None:
            return ""
        try:
            for _ in read_state(self.run_log.store, before):
                pass
        except PayloadGone as error:
            kept = self.run_log.keeps_payloads
            return f"the state that it begins from was removed, though the run keeps all: {error}" if kept else ""
        except (PayloadCorrupt, RecordInvalid) as error:
            return f"the state that it begins from was changed: {error}"
        return ""

    def _why_no_state(self) -> str:
        before = self.delta_before()
        if before is None:
            return ""
        if before.state is None:
            return f"its contribution to round {before.round}, which it follows, names no saved state"
        try:
            for _ in read_state(self.run_log.store, before):
                pass
        except (PayloadCorrupt, RecordInvalid) as error:
            return f"the state that it begins from, of round {before.round}, cannot be read: {error}"
        return ""

    def _why_not_with_delay(self) -> str:
        """Reason why, with `fragment_sync_delay` d > 0, a repetition may train other steps than the author did; or
        empty.

        The first d steps of a round may be taken before it opens, between publishing a contribution to the round before
        and that round's end. A repetition continues from the bucket, as a restarted attempt does, and takes these d
        steps after any contribution to the round before, but after no other response. An author that was not restarted
        takes them after a contribution of all steps that a round publishes, not after a partial one (published with
        fewer steps); after other responses no record says whether it did.
        """
        response = next((each for each in map(self._of, self._rounds_before()) if each and each.progress), None)
        if response is None or response.attempt != self.manifest.attempt:
            return ""  # the author itself was restarted, or is new
        whole = self.run_log.configs.of(self.manifest.leg).round_steps
        partial = RangeRecord(self.run_log, response).steps_in_round() < whole - self.delay
        if (response.kind, response.round) == ("delta", self.manifest.round - 1) and not partial:
            return ""
        kind = "partial contribution" if response.kind == "delta" and partial else response.kind
        return (
            f"its author's last response was the {kind} of round {response.round}; with fragment_sync_delay="
            f"{self.delay} the steps that it took or left out behind that are in no record"
        )

    @property
    def _begin(self) -> Begin:
        return self.run_log.begin_of(self.manifest.leg).record

    def _rounds_before(self) -> range:
        """The rounds since the last start or resume before this one, newest first."""
        return range(self.manifest.round - 1, self._begin.after_round, -1)

    def _of(self, round_: int) -> Contribution | None:
        return ContributionReader(self.run_log.store).of(round_, self.manifest.replica_id)
