"""Data sets that the run's log deals (`deal="open"`), as a training function sees them, and what is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from in_one_process import SmallRun
from real_runs import wait_for
from tiny_workloads import batch_of, inner_step, mlp

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.launching.plan import plan_launch
from diloco_orchestrator.protocol import keys
from replica.context import ReplicaContext

Each = Callable[[int, torch.nn.Module, torch.optim.Optimizer], object]


def step(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inner_step(model, optimizer, batch_of(number))


def taken(data: Any, each: Each = step, replicas: int = 1, **settings: Any) -> list[list[Any]]:
    """The batches that each replica takes. `data`: for all, or a function of the replica's id."""

    def workload(ctx: ReplicaContext) -> list[Any]:
        torch.manual_seed(0)
        model, found = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mine = data(ctx.replica_id) if callable(data) else data
        with ctx.attach(model, optimizer) as session:
            for batch in session.batches(mine):
                found.append(batch)
                each(batch, model, optimizer)
        return found

    return SmallRun(replicas, deal="open", guard="off", **settings).train(workload)


def test_two_replicas_divide_one_list_of_batches():
    first, second = taken(list(range(8)), replicas=2, rounds=2)
    assert (first, second) == ([0, 1, 2, 6, 7, 0], [3, 4, 5, 1, 2, 3])


def test_a_batch_on_which_a_loss_scale_let_no_step_happen_is_given_again():
    seen: list[int] = []

    def scaled(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number in (1, 2) and seen.count(number) < 2:
            seen.append(number)
        else:
            step(number, model, optimizer)

    assert taken(list(range(8)), scaled, rounds=1) == [[0, 1, 1, 1, 2, 2, 2]]


class Stream:
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def accumulating() -> Each:
    """A step for every second batch."""
    calls: list[int] = []

    def each(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        calls.append(number)
        if len(calls) % 2 == 0:
            step(number, model, optimizer)

    return each


def twice(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(number, model, optimizer), step(number, model, optimizer)


@pytest.mark.parametrize(
    ("data", "each", "replicas", "words"),
    [
        (Stream(), step, 1, r"type Stream: a data set that is dealt has len\(data\) and data\[i\]"),
        ([], step, 1, "with an empty data set"),
        (list(range(8)), twice, 1, "2 optimizer steps were taken on one batch"),
        (list(range(8)), accumulating(), 1, "batches had no optimizer step, and were given again"),
        (lambda i: list(range(8 + i)), step, 2, "was given [89] batches, replica [01] [89]"),
    ],
    ids=["a stream", "nothing", "two steps on a batch", "accumulation", "parts of one's own"],
)
def test_what_the_log_cannot_deal_is_told(data, each, replicas, words):
    with pytest.raises(ConfigError, match=words):
        taken(data, each, replicas, rounds=40)


def ends(parts: list[list[int]], first: set[int], **settings: Any) -> list[str]:
    """How each replica ends that is given these batches: with its run, or by which error.

    `first`: replicas whose manifest of a round is there, while they train, before the others publish theirs.
    """
    ended: set[int] = set()

    def workload(ctx: ReplicaContext) -> str:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            with ctx.attach(model, optimizer) as session:
                for number, batch in enumerate(session.batches(parts[ctx.replica_id])):
                    if ctx.replica_id not in first:
                        wait_for(lambda r=1 + number // 3: all(is_done(each, r) for each in first), "a manifest")
                    step(batch, model, optimizer)
        except ConfigError as error:
            return str(error)
        finally:
            ended.add(ctx.replica_id)
        return "with its run"

    def is_done(replica: int, round_: int) -> bool:
        return replica in ended or any(
            info.key == keys.contribution(round_, replica) for info in run.store.list(keys.contributions(round_))
        )

    run = SmallRun(len(parts), deal="open", guard="off", rounds=5, quorum=2, aggregate="mean", **settings)
    found: list[str] = run.train(workload)
    return found


def test_one_replica_with_a_part_of_its_own_ends_alone(caplog):
    """Every replica ended that read its manifest."""
    first, second, third = ends([list(range(8)), list(range(8)), list(range(7))], first={2})
    assert first == second == "with its run" and "replica 2 was given 7 batches, replica 0 8" in third
    told = [record.getMessage() for record in caplog.records if "was given 8 batches" in record.getMessage()]
    assert told and all("replica 2 7" in each for each in told)


def test_what_strangers_say_of_their_data_ends_no_launched_replica():
    """As many strangers as launched replicas: where their word counted, nobody was in the majority."""
    first, second, *strangers = ends([list(range(8))] * 2 + [list(range(7))] * 2, first={2, 3}, invited=[2, 3])
    assert first == second == "with its run" and all("batches" in each for each in strangers)


def test_a_loop_of_its_own_is_refused():
    ctx = SmallRun(1, deal="open", guard="off").context()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ctx.attach(model, optimizer) as session, pytest.raises(ConfigError, match=r"loop over these, or launch with"):
        session.step(loss=1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fragment_sync_delay": 2}, "steps are taken before the commit that deals them"),
        ({"fragment_update_alpha": 0.5}, "goes back a round"),
        ({"ranks_per_replica": 2}, "each rank iterates over data of its own"),
        ({"deal": "opne"}, "setting 'deal'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_config({"entrypoint": "m:f", "deal": "open", **settings})


def test_a_plan_says_that_all_data_are_read_and_run_json_has_the_setting_only_where_it_is_used(tmp_path):
    plan = plan_launch("tiny_workloads:train", str(tmp_path), replicas="2..8", deal="open", executor="local")
    lines = "\n".join(plan.lines())
    assert "data:      dealt round by round over the replicas that train" in lines and "nobody reads" not in lines
    assert "deal" not in make_config({"entrypoint": "m:f"}).model_dump(mode="json")
