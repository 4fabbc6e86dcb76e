"""Checks that the reference of the drift from the run's start is the one whose digest was recorded."""

from diloco_orchestrator.inspection.verify.findings import equal, fetch, parse
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Probe, Start
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.store.base import Store


def check_probe(store: Store, start: Start) -> None:
    """Raise `Differs` if `probe.json` or `probe.safetensors` was changed. A run without a `KLProbe` has neither."""
    data = read_optional(store, keys.KL_RECORD)
    if data is None:
        return
    record = parse(Probe, keys.KL_RECORD, data)
    equal(keys.KL_RECORD, "base_digest", record.base_digest, start.base_digest, keys.START)
    reference = fetch(store, keys.KL_REFERENCE, f"{keys.KL_RECORD} names it")
    equal(keys.KL_REFERENCE, "digest", bulk_digest(reference), record.digest, keys.KL_RECORD)
