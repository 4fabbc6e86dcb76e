"""`observe(extra=...)`, the guard's limits on it, and `on_round`."""

from typing import Any

import pytest
import torch
from protocol_fleet import Fleet
from sessions import Counted, context_of

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.extra_limits import fold_extra
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.verdict import Verdict
from diloco_orchestrator.replica.training.round_metrics import RoundMetrics
from replica.context import ReplicaSession

QUIET = Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=1, folded=True)


def train(
    fleet: Fleet, on_round: Any = None, extra: Any = None, steps: int | None = None, replica_id: int = 0
) -> ReplicaSession:
    """An attempt whose every inner step observes `extra(step)`."""
    model, data = torch.nn.Linear(1, 1), Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = context_of(fleet, replica_id)
    score = lambda model, items: [1.0 for _ in items]  # noqa: E731
    with context.attach(model, optimizer, stateful={"data": data}, heldout=score, heldout_items=[1, 2]) as replica:
        if on_round is not None:
            replica.on_round(on_round)
        for taken, batch in enumerate(data, 1):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01 * batch)
            optimizer.step()
            if not replica.step(loss=1.0, extra=extra(batch) if extra else None) or taken == steps:
                break
    return replica


def test_a_hook_sees_every_commit_once_and_in_order():
    fleet, seen = Fleet(replicas=1, rounds=3, sync_every=2), []  # type: ignore[var-annotated]
    train(fleet, seen.append, lambda step: {"hacks": float(step)})
    assert [view.round for view in seen] == [1, 2, 3, 4]
    assert [view.commit.stop for view in seen] == ["none"] * 3 + ["completed"]
    assert [view.extra for view in seen] == [{"hacks": 0.5}, {"hacks": 2.5}, {"hacks": 4.5}, {}]
    assert {view.heldout for view in seen} == {1.0} and seen[1].in_loop == 1.0


def test_a_restarted_attempt_sees_the_newest_commit_again():
    fleet, first, second = Fleet(replicas=1, rounds=3, sync_every=2), [], []  # type: ignore[var-annotated]
    train(fleet, first.append, steps=5)
    train(fleet, second.append)
    assert [view.round for view in first] == [1, 2] and [view.round for view in second] == [2, 3, 4]


def test_a_hook_that_raises_ends_the_attempt():
    def broken(view: Any) -> None:
        raise ZeroDivisionError(view.round)

    with pytest.raises(ZeroDivisionError, match="1"):
        train(Fleet(replicas=1, rounds=3, sync_every=2), broken)


def test_the_limit_fires_at_the_fold_computed_by_hand():
    """Averages of 0, .1, .1 … with alpha .5: 0, .05, .075, .0875; above .08 at the fourth, and not before min_steps."""
    for min_steps, expected in ((1, 4), (6, 6)):
        config = make_config(
            {"entrypoint": "m:f", "guard": {"max_extra": {"hacks": 0.08}, "min_steps": min_steps, "ema_alpha": 0.5}}
        ).guard
        state, verdict, fold = None, QUIET, 0
        while not verdict.fire:
            fold += 1
            state, verdict = fold_extra(state, config, {"hacks": 0.0 if fold == 1 else 0.1}, QUIET)
        assert fold == expected and verdict.reason.startswith("extra: hacks 0.0")
        assert verdict.kind.stops
        assert fold_extra(state, config, {"hacks": 0.0}, QUIET)[1].fire  # latched
        unseen = fold_extra(None, config, {"hacks": None}, QUIET)
        assert unseen == ({"averages": {}, "fired": ""}, QUIET)


def test_a_metric_above_its_limit_halts_the_run():
    guard = {"max_extra": {"suspected_hacks": 0.05}, "min_steps": 2}
    fleet = Fleet(replicas=1, rounds=6, sync_every=2, guard=guard)
    replica = train(fleet, extra=lambda step: {"suspected_hacks": 0.2})
    assert replica.stopped
    last = fleet.commits()[-1]
    assert last.stop == "halted" and last.round == 2 and last.verdict is not None
    assert "suspected_hacks 0.2 (moving average of 2 rounds) is above its limit of 0.05" in last.verdict.reason
    assert [row.extra for row in RunReader(fleet.store).rows()] == [{"suspected_hacks": 0.2}] * 2


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"Hacks": 1.0}, "'Hacks': use 1 to 32 lower-case letters"),
        ({"h" * 33: 1.0}, "use 1 to 32"),
        ({"hacks": float("nan")}, "'hacks' is nan"),
        ({f"{letter}_": 1.0 for letter in "abcdefghijklmnopq"}, "17 extra metrics in one round: 16 are the most"),
    ],
)
def test_extra_metrics_that_cannot_be_used(extra: dict[str, float], words: str):
    with pytest.raises(ConfigError, match=words):
        RoundMetrics("loss").add_extra(extra)


def test_a_seventeenth_name_in_a_later_step_is_refused():
    metrics = RoundMetrics("loss")
    metrics.add_extra({f"{letter}_": 1.0 for letter in "abcdefghijklmnop"})
    metrics.add_extra({"a_": 2.0})
    with pytest.raises(ConfigError, match="17 extra metrics"):
        metrics.add_extra({"z": 1.0})
