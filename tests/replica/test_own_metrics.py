"""`observe(extra=...)`, the guard's limits on it, and `on_round`."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_fleet import Fleet, together
from sessions import Counted, context_of

from diloco_orchestrator import LocalProcessExecutor, attach
from diloco_orchestrator.cli.report_page import page
from diloco_orchestrator.clock import NoBackground, SystemClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.fold import fold_extra
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.inspection.report import Report
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution, Metric, Progress, Score
from diloco_orchestrator.protocol.round_metrics import round_metrics_of
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.verdict import Verdict
from diloco_orchestrator.replica.training.observed_metrics import ObservedMetrics
from diloco_orchestrator.store.open_store import open_store
from replica.context import ReplicaSession

SCORED = {"heldout": lambda model, items: [1.0 for _ in items], "heldout_items": [1, 2]}
UNSCORED = {"heldout": None, "heldout_items": None}
QUIET = Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=1, folded=True)


def train(
    fleet: Fleet,
    on_round: Any = None,
    extra: Any = None,
    steps: int | None = None,
    replica_id: int = 0,
    loss: Any = lambda batch: 1.0,
    **attach: Any,
) -> ReplicaSession:
    """An attempt whose every inner step observes `extra(step)` and `loss(step)`. `attach`: instead of two items."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(1, 1), Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = context_of(fleet, replica_id, SystemClock())
    attach = {**SCORED, **attach}
    with context.attach(model, optimizer, stateful={"data": data}, **attach) as replica:
        if on_round is not None:
            replica.on_round(on_round)
        for taken, batch in enumerate(data, 1):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01 * batch)
            optimizer.step()
            if not replica.step(loss=loss(batch), extra=extra(batch) if extra else None) or taken == steps:
                break
    return replica


def test_a_hook_sees_every_commit_once_and_in_order():
    fleet, seen = Fleet(replicas=1, rounds=3, sync_every=2), []  # type: ignore[var-annotated]
    train(fleet, seen.append, lambda step: {"hacks": float(step)})
    assert [view.round for view in seen] == [1, 2, 3, 4]
    assert [view.commit.stop for view in seen] == ["none"] * 3 + ["completed"]
    assert [view.extra for view in seen] == [{"hacks": 0.5}, {"hacks": 2.5}, {"hacks": 4.5}, {}]
    assert {view.heldout for view in seen} == {1.0} and seen[1].in_loop == 1.0


@pytest.mark.parametrize("attach", [SCORED, UNSCORED], ids=["scored", "unscored"])
def test_a_hook_is_given_the_training_metric_with_and_without_a_held_out_set(attach: dict[str, Any]):
    """The mean of the first of every eight steps: 16 steps a round, so steps 0 and 1, 16 and 17, 32 and 33."""
    fleet, seen = Fleet(replicas=1, rounds=3, sync_every=16), []  # type: ignore[var-annotated]
    train(fleet, seen.append, loss=lambda batch: 5.0 - 0.1 * batch, **attach)
    assert [view.in_loop for view in seen[:3]] == pytest.approx([4.95, 3.35, 1.75])
    assert [view.heldout for view in seen] == [None if attach is UNSCORED else 1.0] * 4
    assert attach is SCORED or [view.verdict for view in seen] == [None] * 4


def test_a_metric_of_ones_own_is_in_manifests_rows_status_metrics_and_report(tmp_path: Path):
    """Two replicas, one of which leaves it out of every second step and of the whole third round."""
    url = str(tmp_path / "run")
    fleet = Fleet(replicas=2, rounds=3, sync_every=2, store=open_store(url))

    def hacks(replica_id: int, step: int) -> dict[str, float]:
        measured = not replica_id or (step % 2 == 0 and step < 4)
        return {"hacks": 0.125 * (1 + step + replica_id)} if measured else {}

    together([lambda i=i: train(fleet, extra=partial(hacks, i), replica_id=i) for i in (0, 1)])  # type: ignore[misc]
    told = [
        [
            Contribution.from_bytes(fleet.store.get(keys.contribution(round_, i)), "").metrics.get("extra.hacks")
            for round_ in (1, 2, 3)
        ]
        for i in (0, 1)
    ]
    assert told == [
        [Metric(sum=0.375, count=2), Metric(sum=0.875, count=2), Metric(sum=1.375, count=2)],
        [Metric(sum=0.25, count=1), Metric(sum=0.5, count=1), None],
    ]
    reader = RunReader(fleet.store)
    means = [{"hacks": 0.21875}, {"hacks": 0.46875}, {"hacks": 0.6875}, {}]
    assert [row.extra for row in reader.rows()] == means
    assert [row["extra"] for row in json.loads(json.dumps(reader.status().to_json()))["rounds"]] == means
    assert [row["extra"] for row in attach(url, executor=LocalProcessExecutor()).metrics()] == means
    shown = page(Report.read(reader, NoBackground()))
    (section,) = re.findall(r'<section id="metrics"[^>]*>.*?</section>', shown, re.DOTALL)
    assert section.count("<svg") == 1 and ">hacks" in section
    (points,) = re.findall(r'<polyline[^>]*points="([^"]*)"', section)
    assert len(points.split()) == 3


def manifest_of(**fields: Any) -> Contribution:
    values = {"round": 1, "leg": 1, "replica_id": 0, "attempt": 1, "kind": "delta", "outer_step": 0, "fragment": 0}
    return Contribution.model_construct(
        **(
            values
            | {"in_loop": None, "metrics": {}, "scores": (), "dropped": (), "payload": None, "disagreeing": ()}
            | fields
        )
    )


@pytest.mark.parametrize(
    ("sums", "mean"),
    [
        ([-2.0, -4.0], -3.0),
        ([-2.0, None], -2.0),  # one replica observed what is not finite
        ([None, None], None),
        ([1.7e308, 1.7e308, 0.0], pytest.approx(1.7e308 / 3 * 2)),  # made up, and beyond the range as a sum
    ],
)
def test_figures_of_a_round_are_means_of_what_is_finite(sums: list[float | None], mean: Any):
    """Both the training metric and the user's own; a replica that observed none has no part in either."""
    metrics = [Metric(sum=each, count=1) for each in sums]
    manifests = [manifest_of(in_loop=metric, metrics={"extra.hacks": metric}) for metric in metrics]
    figures = round_metrics_of([*manifests, manifest_of()], ())
    assert figures.in_loop == mean and figures.extra == ({} if mean is None else {"hacks": mean})


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


@pytest.mark.parametrize(
    ("sums", "counted"),
    [
        ([0.2, 0.2, None], 0.2),  # one replica's is not finite
        ([0.2, 0.3, "missing"], 0.25),
        ([0.2, 0.2, -1e300], 0.2),  # one replica says what it likes
        ([0.2, "missing", "missing"], None),  # one alone brings no metric
        ([0.2, None, None], None),  # most of those who observed it say nothing usable
        (["missing"] * 3, None),
    ],
)
def test_what_the_guard_reads_when_one_replicas_metric_is_missing_or_not_finite(sums: list[Any], counted: float | None):
    config = make_config({"entrypoint": "m:f", "guard": {"max_extra": {"hacks": 0.1}, "min_steps": 1}}).guard
    heldout = HeldoutSet(metric="loss", shares=(1, 1, 1), digest="0" * 64)
    metrics = [{} if each == "missing" else {"extra.hacks": Metric(sum=each, count=1)} for each in sums]
    said = [
        manifest_of(
            replica_id=i, metrics=each, scores=(Score(share=i, sum=1.0, count=1),), in_loop=Metric(sum=1.0, count=1)
        )
        for i, each in enumerate(metrics)
    ]
    folded = fold_round(None, config, 1, heldout, (0, 1, 2), said, said)
    assert folded is not None
    assert folded.verdict.fire == (counted is not None)
    averages = folded.state["extra"]["averages"]
    assert averages == ({} if counted is None else {"hacks": [pytest.approx(counted), 1]})


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
        ObservedMetrics("loss").add_extra(extra)


def test_a_seventeenth_name_in_a_later_step_is_refused():
    metrics = ObservedMetrics("loss")
    metrics.add_extra({f"{letter}_": 1.0 for letter in "abcdefghijklmnop"})
    metrics.add_extra({"a_": 2.0})
    with pytest.raises(ConfigError, match="17 extra metrics"):
        metrics.add_extra({"z": 1.0})


def test_what_was_observed_in_steps_that_another_attempt_took_first_counts_in_no_later_round():
    metrics = ObservedMetrics("loss")
    metrics.count_step()
    metrics.add({"loss": 1.0}, tokens=100)
    metrics.resume(Progress(cursor={}, rng={}, inner_steps=8, tokens=800))
    metrics.count_step()
    metrics.add({"loss": 2.0}, tokens=50)
    taken = metrics.take()
    assert (taken.steps, taken.tokens, taken.metrics["loss"].sum) == (1, 50, 2.0)
    assert (metrics.total_inner_steps, metrics.total_tokens) == (9, 850)
