"""I12 in a simulated run: each payload of a codec with error feedback is the encoding of just what it should contain.

What its author had trained, its carry, and the residual of its contribution before are added in float64, from
docs/reference/protocol.md; what the payload's classes say of each element is compared with that sum. What a replica
had trained is its model's values after the last batch that a manifest counts, as the simulated workload saw them, and
the base before the round that of plain arithmetic (`simulation_oracle`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from plain_codecs import decoded, groups
from simulation_oracle import PlainBase
from simulation_store import InvariantBroken

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog

if TYPE_CHECKING:
    from simulation import Simulation

Vector = NDArray[np.float64]
FEEDBACK = {"2bit": 0.9, "topk64": 0.95, "topk128": 0.95}
WIDEST = 64  # elements of a parameter in models whose values are compared


@dataclass(frozen=True)
class Before:
    """A contribution that later ones of its author follow on."""

    manifest: Contribution
    end: int  # the number of the batch after its last
    residual: Vector | None  # None: unknown, as are the values that it was formed from
    carried: Vector | None  # its payload, if no commit averages it
    right: bool  # whether it claims the base of plain arithmetic


def check_residuals(
    simulation: "Simulation", commits: Sequence[Commit], bases: Mapping[int, PlainBase], digests: Mapping[int, str]
) -> int:
    """The number of residuals that were in a payload. Raises `InvariantBroken` for a payload that holds anything else.

    `bases`, `digests`: by round, the base that the round started from. Checks nothing of plans without error feedback,
    with forged manifests, and with parameters of more than `WIDEST` elements.
    """
    plan = simulation.plan
    feedback = FEEDBACK.get(simulation.config.codec)
    if feedback is None or plan.forged or plan.forgeries or plan.width > WIDEST:
        return 0
    averaged = {(c.round, a.replica_id) for c in commits for a in c.answers if a.averaged}
    begins = {begin.leg: begin for begin in RunLog(simulation.bucket).begins()}
    reader, paid = ContributionReader(simulation.bucket), 0
    for replica_id in range(plan.most_replicas):
        history, leg = list[Before](), 1
        for commit in commits:
            if commit.leg != leg:
                leg = commit.leg
                history = _left(history, begins[leg].from_round)
            manifest = reader.of(commit.round, replica_id)
            if manifest is None or manifest.kind != "delta":
                continue
            end = _end(manifest)
            while history and history[-1].end > end - manifest.own_steps:
                history.pop()  # by an attempt that lived on beside this one, which has trained the same batches again
            before = next((b for b in reversed(history) if _counts(b, manifest.fragment)), None)
            key = keys.payload(manifest.round, replica_id, manifest.attempt, 0)
            values = decoded(simulation.bucket.sent[key]).astype(np.float64)
            right, residual = manifest.base_digest == digests[commit.round], None
            # Without a step since the last fragment was installed, the model's values were never seen.
            seen = manifest.own_steps > simulation.config.fragment_sync_delay
            if right and seen and (before is None or before.residual is not None):
                base = bases[commit.round]
                trained = simulation.trained[replica_id, manifest.attempt, end - 1]
                wanted = base.parameters[manifest.fragment] - trained[_place(base, manifest.fragment)]
                wanted = wanted.astype(np.float64) + _added(simulation, manifest, before, feedback)
                paid += before is not None and _is_paid(manifest, before)
                _compare(simulation.bucket.sent[key], wanted, key)
                residual = wanted - values
            unaveraged = None if (commit.round, replica_id) in averaged else values
            history.append(Before(manifest, end, residual, unaveraged, right))
    return paid


def _left(history: Sequence[Before], from_round: int) -> list[Before]:
    """What a new leg goes on with: residuals of what was averaged last before its base. A stop drops the carry."""
    kept = [before for before in history if before.manifest.round <= from_round]
    newest = {before.manifest.fragment: before for before in kept}
    return [before for before in kept if newest[before.manifest.fragment].carried is None]


def _counts(before: Before, fragment: int) -> bool:
    """Whether a contribution leaves a debt: not one from a wrong base that no commit averages, which is dropped."""
    return before.manifest.fragment == fragment and (before.right or before.carried is None)


def _end(manifest: Contribution) -> int:
    assert manifest.progress is not None
    cursor: Any = manifest.progress.cursor
    return int(cursor["state"]["next"])


def _place(base: PlainBase, fragment: int) -> slice:
    """Where a fragment is among the parameters in name order: the fragments of these models follow each other."""
    start = sum(len(vector) for vector in base.parameters[:fragment])
    return slice(start, start + len(base.parameters[fragment]))


def _added(simulation: "Simulation", manifest: Contribution, before: Before | None, feedback: float) -> Vector | float:
    """The debt in a payload. Raises `InvariantBroken` if the manifest lists more or less than there is."""
    if before is None or _is_given_up(manifest, before):
        return 0.0
    assert manifest.residual is not None and before.residual is not None and before.manifest.residual is not None
    earlier, missing = before.manifest, manifest.residual.missing
    if len(manifest.origins) > 1 and before.carried is None:
        raise InvariantBroken(f"I12: round {manifest.round} carries what a commit averages")
    staleness = max(1, (manifest.round - earlier.round) // simulation.config.fragments)
    unaveraged = carry_weight(staleness) * before.carried if before.carried is not None else 0.0
    if not missing:
        return feedback * before.residual + unaveraged
    if [round_ for round_, _ in missing] != [earlier.round]:
        raise InvariantBroken(f"I12: round {manifest.round} misses the residual of {missing}")
    if earlier.attempt == manifest.attempt or (earlier.residual.saved and not simulation.plan.harms):
        raise InvariantBroken(f"I12: round {manifest.round} misses the residual of {missing}, which its author has")
    return unaveraged


def _is_paid(manifest: Contribution, before: Before) -> bool:
    """Whether a payload holds a residual that is not zero."""
    listed = manifest.residual is not None and manifest.residual.missing
    return not listed and not _is_given_up(manifest, before) and bool(np.any(before.residual))


def _is_given_up(manifest: Contribution, before: Before) -> bool:
    """Whether a manifest lists the work before it as dropped; its residual lapses with it."""
    return any(origin.round == before.manifest.round for origin in manifest.dropped)


def _compare(shard: bytes, wanted: Vector, key: str) -> None:
    start = 0
    for group in groups(shard):
        x = wanted[start : start + len(group.values)]
        start += len(x)
        near = 1e-4 * float(np.abs(x).max()) + 1e-7
        kept = group.classes >= 0
        if not group.large:
            wrong = np.abs(x - group.values) > np.abs(x).max() / 254 + near
        else:
            sizes = np.abs(x)
            limit = group.large * float(sizes[kept].mean())
            negative, large = group.classes >= 2, group.classes % 2 == 1
            least = float(sizes[kept].min())
            wrong = np.where(kept, (x < -near) & ~negative | (x > near) & negative, sizes > least + near)
            wrong |= kept & (large & (sizes < limit - near) | ~large & (sizes > limit + near))
            for each in range(4):
                members = group.classes == each
                if members.any():
                    mean = float(x[members].mean())
                    wrong |= members & (np.abs(group.values - mean) > 2**-8 * abs(mean) + near)
        if wrong.any():
            place = start - len(x) + int(np.argmax(wrong))
            found = decoded(shard)[place]
            raise InvariantBroken(
                f"I12: {key}: element {place} is {found:.5f}; steps and debt make {wanted[place]:.5f}"
            )
