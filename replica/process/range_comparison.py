"""Compares one replica's training in one round, repeated for an audit, with the recorded one: bits and distances.

Such a training is called a range. `inspection.audit` judges the differences.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.errors import PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol.digests import BulkHasher
from diloco_orchestrator.protocol.records import Contribution, Payload
from diloco_orchestrator.replica.attempt.attempt import differences
from diloco_orchestrator.replica.process.rerun_result import RerunResult
from diloco_orchestrator.replica.training.dealt_batches import DEAL
from diloco_orchestrator.replica.training.dealt_order import ORDER
from diloco_orchestrator.replica.training.small_state import same_but_for_version
from diloco_orchestrator.replica.training.tensor_tree import unpack
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.snapshots.saved_state import read_state
from diloco_orchestrator.store.base import Store

# Equal on every machine: they follow from the log and from the data, not from rounding.
EXACT = ("base", "steps", "dropped work", "tokens", "cursor", "counters", "items")
# Equal on a machine of the same hardware class.
SAME_CLASS = ("payload", "state", "buffers", "random state", "schedules", "scores", "training metric")


def compare(
    store: Store,
    written: Store,
    recorded: Contribution,
    found: Contribution,
    before: Contribution | None,
    output: Path,
    earlier: Path | None,
) -> RerunResult:
    """Compare one replica's repeated training in one round with the one that the bucket `store` holds.

    `recorded`, `found`: manifests in `store` and in `written`, the store of the repetition. `before`: the contribution
    from whose state the training begins; None at the run's start. `output`: folder into which the new payload is
    written; `earlier`: such a folder of an earlier repetition; None for the first.
    """
    if found.payload is None:
        return RerunResult(differing=("payload",), follows=before.round if before else 0)
    distance, noise = None, None
    ours = list(_shards(ContributionReader(written), found))
    with suppress(PayloadCorrupt):  # retention may have deleted it; its digest is in the manifest
        distance = _distance(_shards(ContributionReader(store), recorded), iter(ours), found.payload)
    for index, data in enumerate(ours):
        (output / _file(index)).write_bytes(data)
    if earlier is not None:
        before_it = ((earlier / _file(index)).read_bytes() for index in range(len(ours)))
        noise = _distance(before_it, iter(ours), found.payload)
    claim = AttemptRecords(store).claim(recorded.replica_id, recorded.attempt)
    differing = {name for name, (theirs, mine) in _facts(recorded, found).items() if theirs != mine}
    if "state" in differing and same_state(store, recorded, written, found):
        differing.remove("state")
    if "schedules" in differing and recorded.progress and found.progress:
        with suppress(RecordInvalid):
            if same_but_for_version(recorded.progress.stateful, found.progress.stateful):
                differing.remove("schedules")
    return RerunResult(
        differing=tuple(name for name in (*EXACT, *SAME_CLASS) if name in differing),
        payload=_digest(found.payload),
        distance=distance,
        state_distance=_state_distance(store, written, recorded, found),
        noise=noise,
        other_class=tuple(differences(claim.versions, claim.hardware)) if claim else ("its claim is gone",),
        follows=before.round if before else 0,
        micro_batches=_takes_micro_batches(before, found),
    )


def is_of_an_earlier_order(found: Contribution, recorded: Sequence[Contribution]) -> bool:
    """Whether the repeated training drew data in another order than all replicas of the round, by an older version.

    `recorded`: all manifests of the round, so that no single replica can name another version for itself.
    """
    cursors = [each.progress.cursor for each in recorded if each.progress]
    return found.progress is not None and ORDER in found.progress.cursor and not any(ORDER in each for each in cursors)


def _facts(recorded: Contribution, found: Contribution) -> Mapping[str, tuple[Any, Any]]:
    """The values that a repeated training must have equal to the recorded ones, by name: (recorded, new).

    They are the facts in `EXACT` and `SAME_CLASS`, from the manifests `recorded` and `found`.
    """

    drawn = _chance(recorded).keys()  # an earlier version wrote fewer random states, or none

    def of(manifest: Contribution) -> dict[str, Any]:
        progress = manifest.progress
        chance = {name: state for name, state in _chance(manifest).items() if name in drawn}
        return {
            "base": (manifest.base_digest, manifest.fragment),
            "steps": manifest.origins,
            "dropped work": manifest.dropped,
            "tokens": manifest.tokens,
            "cursor": progress and _without_chance(progress.cursor),
            "counters": progress and (progress.inner_steps, progress.tokens),
            "items": manifest.consumed,
            "payload": manifest.payload and tuple(shard.digest for shard in manifest.payload.shards),
            "state": manifest.state and manifest.state.digest,
            "buffers": manifest.buffers and manifest.buffers.digest,
            "random state": progress and (progress.rng, chance),
            "schedules": progress and progress.stateful,
            "scores": (manifest.scores, manifest.local_scores, manifest.vault),
            "training metric": manifest.in_loop,
        }

    theirs, mine = of(recorded), of(found)
    return {name: (theirs[name], mine[name]) for name in (*EXACT, *SAME_CLASS)}


def _chance(manifest: Contribution) -> Mapping[str, Any]:
    """The states of random generators in a manifest's data cursor; nothing where it has none, or no mapping."""
    found = manifest.progress.cursor.get("chance") if manifest.progress else None
    return found if isinstance(found, dict) else {}


def _without_chance(cursor: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cursor.items() if name != "chance"}


def _takes_micro_batches(before: Contribution | None, found: Contribution) -> bool:
    """Whether the training repeated for an audit took another number of batches than inner steps.

    True too if that is not known: without a data cursor, or if an epoch ended in between. `before`: the contribution
    from whose state it began; `found`: the one that it made.
    """
    now, then = found.progress, before.progress if before else None
    if now is not None and DEAL in now.cursor:
        return False  # each batch that the log deals is one step
    if now is None or "batches" not in now.cursor:
        return True
    start = dict(then.cursor) if then else {"epoch": 0, "batches": 0}
    steps = now.inner_steps - (then.inner_steps if then else 0)
    return now.cursor["epoch"] != start.get("epoch") or now.cursor["batches"] != start.get("batches", 0) + steps  # type: ignore[operator]


def _shards(reader: ContributionReader, manifest: Contribution) -> Iterator[bytes]:
    assert manifest.payload is not None
    return (reader.shard(manifest, index) for index in range(len(manifest.payload.shards)))


def _file(index: int) -> str:
    return f"payload-{index}.bin"


def _digest(payload: Payload) -> str:
    hasher = BulkHasher()
    hasher.update("\n".join(shard.digest for shard in payload.shards).encode())
    return str(hasher.digest())


def _distance(theirs: Iterator[bytes], mine: Iterator[bytes], payload: Payload) -> float:
    """The L2 distance of two pseudo-gradients before they were encoded, relative to the first, from their payloads.

    Both have one layout. All sums in float64, shard by shard. Where a codec's groups have steps, an element that
    differs by x before is one step apart afterwards with the probability x / step. So a relative distance d becomes at
    most sqrt(d * (d + steps)), where `steps` is the norm of all steps, relative too; that is solved for d. For codecs
    with error feedback, whose steps are far apart, it is a lower estimate.
    """
    apart = norm = steps = 0.0
    for (start, stop), a, b in zip(shard_ranges(payload.numel, payload.shard_numel), theirs, mine, strict=True):
        first, second = (Encoded(each, payload.codec, stop - start) for each in (a, b))
        before, after = (each.values().to(torch.float64) for each in (first, second))
        apart += float((before - after).square().sum())
        norm += float(before.square().sum())
        steps += first.step_norm() ** 2
    distance, wide = _ratio(apart, norm), _ratio(steps, norm)
    return distance if wide == 0 or math.isinf(distance) else (math.hypot(wide, 2 * distance) - wide) / 2


def _ratio(apart: float, norm: float) -> float:
    if apart == 0:
        return 0.0
    return math.sqrt(apart / norm) if norm else math.inf


def same_state(store: Store, recorded: Contribution, written: Store, found: Contribution) -> bool:
    """Whether two manifests name saved states of the same bytes, however each was cut into pieces.

    False if one names none, or an object of one is gone or changed.
    """
    digests = []
    for where, manifest in ((store, recorded), (written, found)):
        hasher = BulkHasher()
        try:
            for piece in read_state(where, manifest) if manifest.state else ():
                hasher.update(piece)
        except (PayloadCorrupt, RecordInvalid):
            return False
        digests.append(hasher.digest() if manifest.state else None)
    return digests[0] == digests[1]


def _state_distance(store: Store, written: Store, recorded: Contribution, found: Contribution) -> float | None:
    """The largest relative distance of a tensor between the recorded saved training state and that of the repetition.

    Infinite if their structures or shapes differ; None if a manifest names no state or the recorded one is unreadable.
    """
    if recorded.state is None or found.state is None:
        return None
    try:
        theirs = dict(_tensors(unpack(read_state(store, recorded), "the saved state")))
    except (PayloadCorrupt, RecordInvalid):
        return None
    mine = dict(_tensors(unpack(read_state(written, found), "the state of the re-run")))
    if {path: value.shape for path, value in theirs.items()} != {path: value.shape for path, value in mine.items()}:
        return math.inf
    return max((_apart(theirs[path], mine[path]) for path in theirs), default=0.0)


def _apart(theirs: torch.Tensor, mine: torch.Tensor) -> float:
    first, second = theirs.to(torch.float64), mine.to(torch.float64)
    return _ratio(float((first - second).square().sum()), float(first.square().sum()))


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    match tree:
        case torch.Tensor():
            yield path, tree
        case dict():
            for key, value in tree.items():
                yield from _tensors(value, f"{path}/{key}")
        case list() | tuple():
            for index, value in enumerate(tree):
                yield from _tensors(value, f"{path}/{index}")
