"""`DriftMeter`: measures a run's KL drift by a `KLProbe`, from one reference that all replicas share.

The reference is the model at the run's start, in `probe.safetensors`, beside `start.json`. The first process to create
it fixes it; `probe.json` has its digest. So neither a restart nor a resume resets the drift.
"""

import logging
import math

import torch

from diloco_orchestrator.errors import ConfigError, ModelMismatch, RecordInvalid
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Metric, Probe
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.tip import OpenRound
from diloco_orchestrator.replica.training.heldout_scorer import ShownBase
from diloco_orchestrator.replica.training.kl_probe import KLProbe
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot
from diloco_orchestrator.snapshots.tensor_file import encode, views

log = logging.getLogger(__name__)


class DriftMeter:
    """Measures the KL drift of bases from the run's start. `kl`: of the last base, in nats per token; None: not
    measured.

    Rounds 1, 1 + `every`, 1 + 2 `every`… are measured, by the probe's setting. The run's start has drift 0 by
    definition; in that round the lowest replica id that the round waits for writes the reference.
    """

    def __init__(self, probe: KLProbe) -> None:
        self.kl: Metric | None = None
        self._probe = probe
        self._measured = (-1, -1)  # round, and version of the base
        self._written = False

    def is_of(self, opened: OpenRound) -> bool:
        """Whether `kl` is the drift of the base that the open round starts from."""
        return self._measured == (opened.round, opened.version)

    def measure(self, shown: ShownBase) -> None:
        """Measure the KL divergence of the base in `shown` from the first base, in the rounds that the setting names.

        Raises `ModelMismatch` if this replica's probe has other items than the run's, `RecordInvalid` if the stored
        outputs of the first base were changed.
        """
        opened, attempt = shown.open, shown.attempt
        if opened.outer_step == 0:
            if not self._written and attempt.replica_id == min(opened.roster):
                self._create(shown.model, attempt)
                self._written = True
            self.kl = Metric(sum=0.0, count=1)
        elif (opened.round - 1) % self._probe.every:
            self.kl = None
        else:
            if not self._probe.has_reference:
                self._load(shown)
            drift = self._probe.measure(shown.model)
            self.kl = Metric(sum=drift if math.isfinite(drift) else None, count=1)
        self._measured = (opened.round, opened.version)

    # -- the reference -------------------------------------------------------------------------------------------

    def _load(self, shown: ShownBase) -> None:
        """Load the reference outputs from which drift is measured; they are created from the first base if missing."""
        attempt = shown.attempt
        record = self._record(attempt)
        if record is None:
            log.warning("the run has no reference for kl_to_init yet; it is computed from snapshot 0")
            with shown.holding(_first_base(attempt)):
                self._create(shown.model, attempt)
            record = self._record(attempt)
            assert record is not None
        if record.items != self._probe.items_digest:
            raise ModelMismatch(
                f"the KLProbe of this replica has other items (sha256 {self._probe.items_digest[:12]}) than the run's "
                f"in {attempt.store.url} (sha256 {record.items[:12]}). All replicas must pass the same items, in one "
                "order; other items need a new run."
            )
        data = attempt.store.get(keys.KL_REFERENCE)
        where = f"{keys.KL_REFERENCE} in {attempt.store.url}"
        if bulk_digest(data) != record.digest:
            raise RecordInvalid(
                f"{where} was changed after it was written: its digest is not the one in {keys.KL_RECORD}. Start a new "
                "run from the newest snapshot; the drift so far is in the commits."
            )
        self._probe.load(views(data, where))

    def _create(self, model: torch.nn.Module, attempt: Attempt) -> None:
        """Write the reference outputs of `model`, which has the first base, and their record, unless they exist."""
        if self._record(attempt) is not None:
            return
        reference = self._probe.reference_of(model)
        data = encode(reference)
        if len(data) > attempt.object_limit:
            tokens = sum(len(each) for each in reference.values())
            raise ConfigError(
                f"the KLProbe's reference of {tokens} tokens takes {len(data) / 2**20:.0f} MiB, more than the "
                f"{attempt.object_limit / 2**20:.0f} MiB of one object: pass fewer items, or a mask of fewer tokens."
            )
        if not attempt.store.create(keys.KL_REFERENCE, data):
            data = attempt.store.get(keys.KL_REFERENCE)
        start = attempt.log.start()
        assert start is not None
        record = Probe(
            **attempt.stamp(),
            base_digest=start.record.base_digest,
            items=self._probe.items_digest,
            digest=bulk_digest(data),
            size=len(data),
            tokens=sum(len(each) for each in views(data, keys.KL_REFERENCE).values()),
        )
        attempt.writer.create(record)

    def _record(self, attempt: Attempt) -> Probe | None:
        data = read_optional(attempt.store, keys.KL_RECORD)
        return None if data is None else Probe.from_bytes(data, f"{keys.KL_RECORD} in {attempt.store.url}")


def _first_base(attempt: Attempt) -> Base:
    """The run's first base, from snapshot 0."""
    start = attempt.log.start()
    assert start is not None
    return first_snapshot(attempt.log).base(start.record)
