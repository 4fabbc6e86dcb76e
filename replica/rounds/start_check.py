"""`check_start`: check that a replica has the model and the held-out set that the run's start record names."""

import logging
from collections.abc import Mapping, Sequence

import torch

from diloco_orchestrator.errors import ModelMismatch
from diloco_orchestrator.protocol.records import FrozenTensors, HeldoutSet, Start
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.snapshots.file_plan import Naming
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot
from diloco_orchestrator.snapshots.layout import ModelFiles, check_same_model, describe

log = logging.getLogger(__name__)


def check_start(
    start: Start,
    parameters: Mapping[str, torch.Tensor],
    fragments: Sequence[tuple[str, ...]],
    heldout: HeldoutSet | None,
    files: ModelFiles,
    attempt: Attempt,
) -> None:
    """Raise `ModelMismatch` unless a replica has the parameters, fragments, adapters, frozen tensors and held-out set
    of the run.
    """
    url = attempt.store.url
    check_same_model(describe(parameters), start.parameters)
    if start.fragments != tuple(fragments):
        raise ModelMismatch(
            f"this replica synchronises {len(fragments)} fragments of the model, the run in {url} "
            f"{len(start.fragments)}, or the same number split otherwise. All replicas must agree."
        )
    # There are as many: their residuals are parameters, compared above.
    for mine, pair in zip(files.adapters, start.adapters, strict=True):
        if mine != pair:
            raise ModelMismatch(
                f"this replica's adapter of {mine.weight!r} has the scaling {mine.scaling:g}, the run's in {url} "
                f"{pair.scaling:g}: its product would be averaged with other ones. Give all replicas the same "
                "lora_alpha and r."
            )
    if heldout != start.heldout:
        raise ModelMismatch(
            f"this replica scores {_heldout_words(heldout)}; the run in {url} is judged by "
            f"{_heldout_words(start.heldout)}. All replicas must pass the same `heldout_items`, `vault_items` and "
            "`in_loop` to attach, and score by the same function; another set or scorer needs a new run."
        )
    _check_untrained(start, files, attempt)


def _heldout_words(heldout: HeldoutSet | None) -> str:
    if heldout is None:
        return "no held-out set"
    root, scorer = heldout.root or heldout.digest, heldout.scorer or "unknown"
    vault = f" and {heldout.vault.items} vault items (sha256 {heldout.vault.digest[:12]})" if heldout.vault else ""
    return f"{heldout.items} held-out items ({heldout.metric}, root {root[:12]}, scorer {scorer[:12]}){vault}"


def _check_untrained(start: Start, files: ModelFiles, attempt: Attempt) -> None:
    """Raise `ModelMismatch` unless a replica's frozen tensors and adapter names are the run's.

    Hashes every frozen tensor, once per model. If this model's first buffers differ, they are replaced by those of
    snapshot 0.
    """
    untrained, naming, url = files.untrained, files.naming, attempt.store.url
    assert untrained is not None, "a replica has the live model"
    ours, theirs = untrained.describe_frozen(attempt.background), start.frozen
    if ours != theirs:
        raise ModelMismatch(
            f"replica {attempt.replica_id} has {_frozen_words(ours)}; the run in {url} has {_frozen_words(theirs)}. "
            "Its base model is another: what is trained on different bases cannot be averaged. Load the same model, in "
            "the same revision, dtype and quantisation, in every replica, or start a new run."
        )
    if Naming.of(start) != naming:
        raise ModelMismatch(
            f"the adapter of replica {attempt.replica_id} is stored under other names than that of the run in {url}: "
            "all replicas must build it alike, with the same version of PEFT."
        )
    if untrained.buffers.digest() != start.buffers:
        log.warning("this replica's first buffers differ from those of snapshot 0; it takes those")
        rest = first_snapshot(attempt.log).model_files(start, {}).rest()
        names = naming.by_file(untrained.buffers.first)
        untrained.buffers.adopt({names[name]: rest.read(name) for name in rest.specs() if name in names})


def _frozen_words(frozen: FrozenTensors | None) -> str:
    if frozen is None:
        return "no frozen tensor"
    return f"{frozen.tensors} frozen tensors ({frozen.size / 1e6:.3g} MB, digest {frozen.digest[:15]})"
