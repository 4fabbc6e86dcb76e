"""I12 in a simulated run: each payload of a codec with error feedback is the encoding of just what it should contain.

The author's steps, its carry, and the residual of its contribution before are added in float64, from
docs/reference/protocol.md; what the payload's classes say of each element is compared with that sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from plain_codecs import decoded, groups
from simulation_gradients import LEARNING_RATE, Model, gradient, pattern
from simulation_store import InvariantBroken

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.contributions import ContributionReader

if TYPE_CHECKING:
    from simulation import Simulation

Vector = NDArray[np.float64]
FEEDBACK = {"2bit": 0.9, "topk64": 0.95, "topk128": 0.95}


@dataclass(frozen=True)
class Before:
    """A contribution that the next one of its author follows on."""

    round: int
    residual: Vector
    carried: Vector | None  # its payload, if no commit averages it


def check_residuals(simulation: "Simulation", commits: Sequence[Commit]) -> int:
    """The number of residuals that were in a payload. Raises `InvariantBroken` for a payload that holds anything else.

    Only for plans in which replicas train one fragment without overlap, and in which nobody forges or harms anything.
    """
    plan = simulation.plan
    feedback = FEEDBACK.get(plan.settings.get("codec", ""))
    odd = plan.harms or plan.forged or plan.forgeries or plan.flips or plan.nan or plan.other_arithmetic
    overlaps = plan.settings["fragment_sync_delay"] or plan.settings.get("fragment_update_alpha")
    if feedback is None or odd or overlaps or plan.lies or plan.settings["fragments"] > 1 or plan.width > 64:
        return 0
    averaged = {(c.round, a.replica_id) for c in commits for a in c.answers if a.averaged}
    trained = Model(plan.width, plan.buffer, plan.adapted).named_parameters()
    parameters = [each for _, each in sorted(trained, key=lambda named: named[0]) if each.requires_grad]
    reader, paid = ContributionReader(simulation.bucket), 0
    for replica_id in range(plan.replicas):
        before, leg = None, 1
        for commit in commits:
            if commit.leg != leg:  # whose stop drops what was to be carried, with its residual
                before, leg = (None if before and before.carried is not None else before), commit.leg
            manifest = reader.of(commit.round, replica_id)
            if manifest is None or manifest.kind != "delta":
                continue
            wanted = _steps(parameters, manifest) + _added(manifest, before, feedback)
            paid += before is not None and bool(np.any(before.residual)) and not _is_given_up(manifest, before)
            key = keys.payload(manifest.round, replica_id, manifest.attempt, 0)
            shard = simulation.bucket.sent[key]
            _compare(shard, wanted, key)
            values = decoded(shard).astype(np.float64)
            unaveraged = None if (commit.round, replica_id) in averaged else values
            before = Before(commit.round, wanted - values, unaveraged)
    return paid


def _steps(parameters: Sequence[torch.Tensor], manifest: Contribution) -> Vector:
    """What the author's own steps add to a payload of these parameters."""
    assert manifest.progress is not None
    cursor: Any = manifest.progress.cursor
    end, replica_id = int(cursor["state"]["next"]), manifest.replica_id
    scale = LEARNING_RATE * sum(gradient(replica_id, batch) for batch in range(end - manifest.own_steps, end))
    factors = [pattern(replica_id, parameter).numpy().ravel() for parameter in parameters]
    return np.concatenate(factors).astype(np.float64) * scale


def _added(manifest: Contribution, before: Before | None, feedback: float) -> Vector | float:
    """The debt in a payload. Raises `InvariantBroken` if the manifest lists more or less than there is."""
    if before is None or _is_given_up(manifest, before):
        return 0.0
    if len(manifest.origins) > 1 and before.carried is None:
        raise InvariantBroken(f"I12: round {manifest.round} carries what a commit averages")
    carried = before.carried is not None
    weight = carry_weight(max(1, manifest.round - before.round)) if carried else 0.0
    unaveraged = weight * before.carried if before.carried is not None else 0.0
    assert manifest.residual is not None
    if manifest.residual.missing:
        if [round_ for round_, _ in manifest.residual.missing] != [before.round]:
            raise InvariantBroken(f"I12: round {manifest.round} misses the residual of {manifest.residual.missing}")
        return unaveraged
    return feedback * before.residual + unaveraged


def _is_given_up(manifest: Contribution, before: Before) -> bool:
    """Whether a manifest lists the work before it as dropped; its residual lapses with it."""
    return any(origin.round == before.round for origin in manifest.dropped)


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
