"""With the per-replica guard a manifest holds the scores of the local parameters; without it nothing more is scored."""

from typing import Any

import torch
from protocol_fleet import Fleet, tiny_model
from sessions import constant_steps, context_of

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution

ITEMS = [1, 2]


def trained(per_replica: bool) -> tuple[Fleet, list[float]]:
    """A run of two rounds of two steps. Returns also the first parameter as it was at each evaluation."""
    fleet = Fleet(replicas=1, rounds=2, sync_every=2, guard={"per_replica": per_replica})
    seen: list[float] = []

    def heldout(model: torch.nn.Module, items: list[Any]) -> list[float]:
        first = next(model.parameters()).detach().reshape(-1)[0].item()
        seen.append(first)
        return [first * item for item in items]

    constant_steps(
        context_of(fleet, 0),
        tiny_model(),
        lambda _: 1.0,
        lr=0.25,
        heldout=heldout,
        heldout_items=ITEMS,
        in_loop="reward",
    )
    return fleet, seen


def manifest(fleet: Fleet, round_: int) -> Contribution:
    key = keys.contribution(round_, 0)
    return Contribution.from_bytes(fleet.store.get(key), key)


def test_local_parameters_are_scored_on_the_shares_of_the_base_before_they_are_averaged():
    fleet, _ = trained(per_replica=True)
    first = manifest(fleet, 1)
    (base,), (local,) = first.scores, first.local_scores
    assert (base.share, base.count) == (local.share, local.count)
    assert base.sum is not None and local.sum is not None
    assert abs((local.sum - base.sum) - (-0.25 * 2) * sum(ITEMS)) < 1e-5  # two steps of lr times a gradient of 1
    assert manifest(fleet, 3).kind == "scores" and manifest(fleet, 3).local_scores == ()


def test_without_the_per_replica_guard_only_bases_are_scored_and_training_is_the_same():
    without, seen = trained(per_replica=False)
    assert len(seen) == 3 and manifest(without, 1).local_scores == ()
    with_guard, more = trained(per_replica=True)
    assert len(more) > 3 and set(seen) <= set(more)
    assert manifest(without, 3).base_digest == manifest(with_guard, 3).base_digest
