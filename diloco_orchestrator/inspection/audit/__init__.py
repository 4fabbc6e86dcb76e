"""Audits a run: trains randomly drawn replica rounds again, and compares the results with the published ones."""

from collections.abc import Callable, Mapping
from typing import Any

from diloco_orchestrator.clock import random_token
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.audit.auditor import Auditor
from diloco_orchestrator.inspection.audit.findings import Audit, AuditOutcome, RangeFinding, drawn
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, open_store

__all__ = ["Audit", "AuditOutcome", "RangeFinding", "SegmentFinding", "audit"]

SegmentFinding = RangeFinding  # the name that it had first


def audit(
    url: str,
    draw: int = 5,
    seed: int | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    trust_bucket: bool = False,
    limit_s: float | None = None,
    on_draw: Callable[[Audit], None] = lambda drawn: None,
    on_range: Callable[[RangeFinding], None] = lambda found: None,
) -> Audit:
    """Train `draw` ranges of the run in `url` again, and compare them with what its replicas published.

    A range is one replica's training in one round. Each is repeated on this machine, in a process of its own with the
    run's code, from the base, data cursor, random state and saved optimizer that the bucket has. A difference is part
    of the result, not an error. Nothing is written to the bucket.

    Args:
        draw: how many ranges; all, if the run has fewer.
        seed: of the draw, a whole number chosen after the log was written; by default from the system's randomness. The
            result holds it: the same seed draws the same ranges of the same log.
        storage_options: credentials and endpoint in s3fs spelling.
        trust_bucket: run the training function that the bucket names although this user did not launch the run here.
        limit_s: seconds after which one re-run is ended.
        on_draw: called with the result before the first range, when head and seed are known.
        on_range: called with every finding.

    Raises `NoSuchRun`, `ConfigError` for a run that saved no states or whose code may not be run here, and
    `StoreError` if the bucket cannot be read.
    """
    if draw < 1:
        raise ConfigError(f"draw={draw} ranges would show nothing. Draw at least 1.")
    store = open_store(absolute_url(url), storage_options, retry=INTERACTIVE, must_exist=True)
    chosen = int(random_token(), 16) if seed is None else seed
    with Auditor(store, storage_options=storage_options, trust_bucket=trust_bucket, limit_s=limit_s) as auditor:
        done = Audit(store.url, str(auditor.head), chosen, len(auditor.ranges), auditor.left_out)
        on_draw(done)
        for range_ in drawn(auditor.ranges, draw, chosen, auditor.head):
            done.findings.append(auditor.audited(range_))
            on_range(done.findings[-1])
    return done
