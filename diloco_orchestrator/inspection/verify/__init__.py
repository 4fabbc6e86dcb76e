"""Verifies a run: recomputes it from its bucket and names the first object that disagrees."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.verify.findings import TOLERANCE, Disagreement, Verification
from diloco_orchestrator.inspection.witness import heads_seen
from diloco_orchestrator.protocol.head import Head, Noted
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, open_store

__all__ = ["Disagreement", "Verification", "verify", "verify_run"]


def verify(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_round: Callable[[int], None] = lambda round_: None,
    load: bool = False,
    build: Callable[[], Any] | None = None,
    score: Callable[[Any, Sequence[Any]], Any] | None = None,
    heldout_items: Sequence[Any] | None = None,
    tolerance: float = TOLERANCE,
    expect: str | None = None,
    signed_by: str | None = None,
    witness: str | None = None,
    witnessed_by: str | None = None,
) -> Verification:
    """Derive the run in `url` again, oldest object first, up to the first that disagrees.

    Checks hash chain, guard, averages, outer steps and snapshots. A disagreement is part of the result, not an error.
    Without torch it compares records and digests alone; `not_derived` then names the rest, and the run does not agree.

    Args:
        storage_options: credentials and endpoint in s3fs spelling.
        on_round: called with every round's number.
        load: load every confirmed snapshot as its users do; what cannot be loaded here is among `unchecked`.
        build: for `load`, makes the model as the training function does (under an adapter: its base); None where
            transformers or PEFT know how.
        score: `score(model, items)`, the training function's `heldout`: scores every loaded snapshot, and compares with
            what the replicas logged.
        heldout_items: the held-out items that `score` is given; default: those given to `launch(heldout_items=...)`.
        tolerance: by which a mean score may differ from the logged one, relative where that is above 1.
        expect: a head noted before (`RunStatus.head`, `RunResult.head`): a log that was cut or replaced disagrees.
        signed_by: the public key of whoever launched the run, as `status` names it: a run that this key did not sign
            disagrees.
        witness: URL or folder with the statements of a witness (`diloco witness`): a log that was cut, forked or
            written anew since they were made disagrees, whoever did it.
        witnessed_by: the public key that this witness must have.

    Raises `NoSuchRun`, `RecordTooNew`, `StoreError` if the bucket cannot be read, and `ConfigError` for a scorer where
    nothing was scored, or for other items.
    """
    if load or build or score:
        from diloco_orchestrator.inspection.verify.loading import OwnCode, check_loading  # torch
    store = open_store(absolute_url(url), storage_options, retry=INTERACTIVE, must_exist=True)
    noted: Sequence[Noted] = ()
    if witness is not None:
        place = open_store(absolute_url(witness), storage_options, retry=INTERACTIVE, must_exist=True)
        noted = heads_seen(of_run(place), witnessed_by)
    done = verify_run(store, on_round, Head.parse(expect) if expect else None, signed_by, noted)
    if (load or build or score) and done.agrees:
        check_loading(store, done, OwnCode(build, score, heldout_items), tolerance)
    return done
