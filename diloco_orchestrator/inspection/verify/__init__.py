"""Verifies a run: derives it again from its bucket and names the first object that disagrees."""

from collections.abc import Callable, Mapping
from typing import Any

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.verify.findings import Disagreement, Verification
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, open_store

__all__ = ["Disagreement", "Verification", "verify", "verify_run"]


def verify(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_round: Callable[[int], None] = lambda round_: None,
) -> Verification:
    """Derive the run in `url` again, oldest object first, up to the first that disagrees.

    Checks hash chain, guard, averages, outer steps and snapshots. `storage_options`: credentials and endpoint in s3fs
    spelling. `on_round` is called with every round's number. A disagreement is part of the result, not an error. Raises
    `NoSuchRun`, `RecordTooNew`, and `StoreError` if the bucket cannot be read.
    """
    return verify_run(open_store(absolute_url(url), storage_options, retry=INTERACTIVE, must_exist=True), on_round)
