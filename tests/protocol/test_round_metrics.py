"""What a commit says of the metrics that replicas observed, and how groups of replicas are named."""

import pytest
import torch
from in_one_process import SmallRun
from tiny_workloads import batch_of, heldout, inner_step, mlp

from diloco_orchestrator.inspection.explain import explain
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.protocol.round_metrics import never_observed
from replica.context import ReplicaContext


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([2], "replica 2"),
        ([1, 0], "replicas 0 and 1"),
        ([0, 1, 2, 3], "replicas 0-3"),
        ([0, 1, 2, 5, 7, 8], "replicas 0-2, 5, 7 and 8"),
    ],
)
def test_replicas_are_named_together(ids: list[int], words: str):
    assert replicas(ids) == words


def test_what_is_said_of_several_is_said_once():
    assert grouped([(0, "full"), (1, "lost"), (2, "full")]) == [([0, 2], "full"), ([1], "lost")]


def trained(replicas: int, in_loop: str, loss_of_last: float | None, caplog: pytest.LogCaptureFixture) -> RunReader:
    """A run of two rounds that observes losses; those of the last replica are `loss_of_last` if that is given."""

    def train(ctx: ReplicaContext) -> None:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        given = {"heldout": heldout, "heldout_items": list(range(8)), "in_loop": in_loop}
        with ctx.attach(model, optimizer, **given) as session:
            for batch in session.batches([batch_of(i) for i in range(9)]):
                loss = inner_step(model, optimizer, batch)
                last = ctx.replica_id == replicas - 1 and loss_of_last is not None
                session.observe(loss=loss_of_last if last else loss, extra={"rewards": 1.0})

    run = SmallRun(replicas, rounds=2, sync_every=3)
    run.train(train)
    assert verify_run(run.store).disagreement is None
    return RunReader(run.store)


def test_a_loss_that_is_not_finite_beside_finite_gradients_is_said_in_every_round(caplog: pytest.LogCaptureFixture):
    reader = trained(2, "loss", float("nan"), caplog)
    status = reader.status()
    assert status.state == "completed" and [row.loss for row in status.rounds] == [None, None, None]
    assert ["loss of replica 1 is NaN or infinite" in row.warning for row in status.rounds] == [True, True, False]
    assert "loss of replica 1 is NaN or infinite" in " ".join(explain(status).why)
    said = [record.getMessage() for record in caplog.records if "NaN or infinite" in record.getMessage()]
    assert sorted(said) == [f"round {r}: loss of replica 1 is NaN or infinite" for r in (1, 1, 2, 2)]


def test_a_metric_of_the_guard_that_nobody_observes_is_named_after_the_first_round(caplog: pytest.LogCaptureFixture):
    reader = trained(1, "reward", None, caplog)
    words = "in_loop='reward' was never observed (observed: loss, rewards)"
    assert [words in row.warning for row in reader.rows()] == [True, True, False]
    assert sum(words in record.getMessage() for record in caplog.records) == 1
    assert "Did you mean 'rewards'?" in caplog.text and "observe(reward=...) or in_loop='loss'" in caplog.text


def test_a_metric_that_is_observed_is_not_missed(caplog: pytest.LogCaptureFixture):
    assert [row.warning for row in trained(1, "loss", None, caplog).rows()] == ["", "", ""]
    assert "never observed" not in caplog.text


def test_without_any_metric_the_words_still_say_what_to_write():
    assert never_observed("loss", []).endswith("with the held-out score: write observe(loss=...).")
