"""`ctx.attach` in one process: the training loop's side of a run, alone over a folder."""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_fleet import FAST
from tiny_workloads import batch_of, heldout, inner_step, mlp

from diloco_orchestrator.clock import SystemClock, ThreadBackground
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError, Preempted, StoreDenied
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Contribution, Halt, Result, Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from replica.attempt.attempt import claim_attempt
from replica.context import ReplicaContext, ReplicaSession
from replica.training import rng
from replica.training.position import DataCursor


class Alone:
    """A run with one replica in this process."""

    def __init__(self, folder: Path, store: Store | None = None, **settings: Any) -> None:
        self.store: Store = store or open_store(str(folder))
        values = {"entrypoint": "m:f", "replicas": 1, "rounds": 2, "sync_every": 3, "timing": FAST, **settings}
        stamp = Stamp("founder", lambda: 0.0)
        run = Run(**stamp(), run_id="run-1", config=make_config(values), package_version="0")
        create_run(self.store, run, "test", stamp)
        self.leaving = False

    def context(self) -> ReplicaContext:
        stamp = Stamp(f"token{random.random()}", lambda: 0.0)
        attempt = claim_attempt(self.store, 0, None, SystemClock(), stamp, lambda: self.leaving, ThreadBackground())
        return ReplicaContext(attempt)

    def commits(self) -> list[Commit]:
        return RunReader(self.store).commits()

    def manifest(self, round_: int) -> Contribution:
        key = keys.contribution(round_, 0)
        return Contribution.from_bytes(self.store.get(key), key)


BATCHES = [batch_of(i) for i in range(40)]


def train(
    alone: Alone, data: Any = BATCHES, steps: int | None = None, **attach: Any
) -> tuple[torch.nn.Module, ReplicaSession]:
    """Train until the run ends, or SIGTERM comes after `steps` inner steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(mlp(), torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach = {"heldout": heldout, "heldout_items": list(range(8)), **attach}
    taken = 0
    with alone.context().attach(model, optimizer, **attach) as session:
        for batch in session.batches(data):
            session.observe(loss=inner_step(model, optimizer, batch), tokens=8)
            taken += 1
            alone.leaving = taken == steps
    return model, session


def test_a_run_ends_by_itself_and_scores_every_model_from_first_to_last(tmp_path: Path):
    alone = Alone(tmp_path)
    _, session = train(alone)
    assert session.stopped and not session.preempted
    commits = alone.commits()
    assert [(c.outer_step, c.applied, c.stop) for c in commits] == [
        (1, True, "none"),
        (2, True, "none"),
        (2, False, "completed"),
    ]
    rows = RunReader(alone.store).rows()
    assert all(row.heldout is not None for row in rows)
    assert rows[-1].heldout < rows[0].heldout  # type: ignore[operator]
    assert [row.tokens for row in rows] == [24, 24, 0]
    assert Result.from_bytes(alone.store.get(keys.result(1)), "").status == "completed"


def test_the_last_snapshot_is_the_model_in_hand(tmp_path: Path):
    alone = Alone(tmp_path)
    model, _ = train(alone)
    from stored_snapshots import read_tensors

    saved = read_tensors(alone.store, keys.snapshot(2, "model.safetensors"))
    assert sorted(saved) == sorted(model.state_dict())
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_scoring_does_not_disturb_training(tmp_path: Path):
    """Dropout and data order draw random numbers; a scorer that draws many must not change one bit."""

    def noisy(model: torch.nn.Module, items: Any) -> list[float]:
        torch.rand(100)
        random.random()
        assert not model.training and not torch.is_grad_enabled()
        return heldout(model, items)

    digests = []
    for name, attach in (("on", {"heldout": noisy}), ("off", {"heldout": None})):
        alone = Alone(tmp_path / name)
        model, _ = train(alone, **attach)
        assert model.training
        digests.append([commit.base_digest for commit in alone.commits()])
    assert digests[0] == digests[1]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path):
    def last_digest(name: str, seed: int) -> str:
        rng.seed_all(123)
        alone = Alone(tmp_path / name, seed=seed)
        train(alone)
        return alone.commits()[-1].base_digest

    assert last_digest("a", 1) == last_digest("b", 1) != last_digest("c", 2)


# -- leaving and coming back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "rounds_done"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)])
def test_a_notice_in_mid_round_publishes_nothing_partial_and_the_next_attempt_goes_on(
    steps: int, rounds_done: int, tmp_path: Path
):
    alone = Alone(tmp_path)
    _, session = train(alone, steps=steps)
    assert session.preempted and not session.stopped
    assert len(alone.commits()) == rounds_done
    alone.leaving = False
    _, again = train(alone)
    assert again.stopped and [c.outer_step for c in alone.commits()] == [1, 2, 2]
    assert [alone.manifest(r).attempt for r in (1, 2)] == [1 if r <= rounds_done else 2 for r in (1, 2)]


class Counting:
    """Data with a state of its own; remembers what it gave out."""

    def __init__(self) -> None:
        self.position, self.given = 0, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            self.position += 1
            self.given.append(self.position)
            yield batch_of(self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_restarted_attempt_repeats_no_published_batch(tmp_path: Path):
    alone = Alone(tmp_path, rounds=3)
    first, second = Counting(), Counting()
    train(alone, first, steps=5)
    alone.leaving = False
    train(alone, second)
    assert first.given == [1, 2, 3, 4, 5]
    assert second.given == [4, 5, 6, 7, 8, 9]  # the open round's 4 and 5 were never published


def test_an_object_that_the_users_code_did_not_have_before_begins_anew(tmp_path: Path, caplog):
    alone, schedule = Alone(tmp_path, rounds=3, replica_state="round"), Counting()
    train(alone, steps=5)
    alone.leaving = False
    train(alone, stateful={"schedule": schedule})
    assert (
        schedule.position == 0
        and "stateful 'schedule' begins anew: this replica's newest manifest lacks it" in caplog.text
    )


def test_a_restarted_attempt_skips_what_plain_data_gave_out(tmp_path: Path):
    alone = Alone(tmp_path, rounds=3)
    seen: list[int] = []

    class Plain(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            for index, item in enumerate(list.__iter__(self)):
                seen.append(index)
                yield item

    train(alone, Plain(BATCHES[:4]), steps=5)  # second epoch begins after four
    alone.leaving = False
    before = len(seen)
    train(alone, Plain(BATCHES[:4]))
    assert seen[:before] == [0, 1, 2, 3, 0]
    assert seen[before:] == [0, 1, 2, 3, 0, 1, 2, 3, 0]  # three skipped, then the six of rounds 2 and 3


@pytest.mark.parametrize("generator", ["the process's", "its own", "its sampler's"])
def test_a_restarted_attempt_goes_on_in_the_middle_of_a_shuffle(generator: str, tmp_path: Path):
    """With a DataLoader that shuffles, over epochs: the same batches in the same order as without the restart."""

    def loader(seen: list[int]) -> torch.utils.data.DataLoader[Any]:
        def collate(picked: list[int]) -> Any:
            seen.extend(picked)
            return batch_of(picked[0])

        drawn = torch.Generator().manual_seed(5)
        if generator == "its sampler's":
            sampler = torch.utils.data.RandomSampler(range(4), generator=drawn)  # type: ignore[arg-type]
            return torch.utils.data.DataLoader(range(4), sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
        own = drawn if generator == "its own" else None
        return torch.utils.data.DataLoader(range(4), shuffle=True, generator=own, collate_fn=collate)  # type: ignore[arg-type]

    straight: list[int] = []
    train(Alone(tmp_path / "straight", rounds=3), loader(straight))
    first: list[int] = []
    second: list[int] = []
    alone = Alone(tmp_path / "restarted", rounds=3)
    train(alone, loader(first), steps=7)  # in the middle of the second epoch, the seventh is never published
    alone.leaving = False
    train(alone, loader(second))
    assert len(straight) == 9 and first == straight[:7]
    assert second[-3:] == straight[6:]


@pytest.mark.parametrize("steps", [4, 5, 7])
def test_a_restarted_attempt_takes_whole_epochs_of_a_stream_of_datasets(steps: int, tmp_path: Path):
    """It began every further epoch where it had gone on, and ended if that was an epoch's end."""
    datasets = pytest.importorskip("datasets")

    def stream(seen: list[int]) -> Any:
        rows = datasets.Dataset.from_dict({"row": list(range(4))}).to_iterable_dataset(num_shards=2)
        return rows.map(lambda row: {"kept": seen.append(row["row"])})

    def train_on(alone: Alone, rows: Any, steps: int | None = None) -> list[int]:
        model, taken = mlp(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with alone.context().attach(model, optimizer) as session:
            for row in session.batches(rows):
                session.observe(loss=inner_step(model, optimizer, batch_of(row["row"])))
                taken.append(row["row"])
                alone.leaving = len(taken) == steps
        return taken

    alone = Alone(tmp_path, rounds=5, sync_every=2)
    first = train_on(alone, stream([]), steps)
    alone.leaving = False
    read: list[int] = []
    second = train_on(alone, stream(read))
    published = steps - steps % 2
    assert first == [index % 4 for index in range(steps)]
    assert second == [index % 4 for index in range(published, 10)]
    assert len(read) <= len(second) + 1  # what was trained is not read again


def test_a_loader_that_keeps_its_workers_has_one_order_with_and_without_a_restart():
    """New workers cost a random number before the order is drawn, and kept ones none."""

    def cursor() -> DataCursor:
        return DataCursor(torch.utils.data.DataLoader(range(5), shuffle=True, num_workers=1, persistent_workers=True))  # type: ignore[arg-type]

    torch.manual_seed(3)
    straight = cursor()
    before, position = [int(straight.next()) for _ in range(7)], straight.position()
    after = [int(straight.next()) for _ in range(8)]
    assert sorted(before[:5]) == sorted(before[5:] + after[:3]) == sorted(after[3:]) == list(range(5))
    restarted = cursor()
    restarted.seek(position)
    assert [int(restarted.next()) for _ in range(8)] == after


class Told(torch.utils.data.Dataset[int]):
    """Five numbers of its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return 10 * self.epoch + range(5)[index]


class ShuffledStream(torch.utils.data.IterableDataset[int]):
    """Five numbers in an order that the worker draws."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(5).tolist())


@pytest.mark.parametrize("data", [Told(), ShuffledStream()], ids=["set_epoch", "stream"])
def test_workers_that_hold_what_decides_the_order_have_one_with_and_without_a_restart(data: Any):
    """Kept workers had the first epoch's number for ever, and random numbers that a restarted attempt's lack."""

    def cursor() -> DataCursor:
        return DataCursor(torch.utils.data.DataLoader(data, num_workers=1, persistent_workers=True))

    torch.manual_seed(3)
    straight = cursor()
    [straight.next() for _ in range(7)]
    position = straight.position()
    after = [int(straight.next()) for _ in range(8)]
    for other in (cursor(), straight):
        other.seek(position)
        assert [int(other.next()) for _ in range(8)] == after


def test_data_with_a_state_that_draws_as_it_begins_leaves_the_steps_their_random_numbers():
    """As torchdata's loaders do: dropout and the orders of later epochs were others after a restart."""

    class DrawsAsItBegins:
        """Five numbers in an order that it draws, of which the state is a place."""

        def __init__(self) -> None:
            self.place = 0

        def __iter__(self) -> Iterator[int]:
            self.order, first, self.place = torch.randperm(5).tolist(), self.place, 0
            return self._from(first)

        def _from(self, first: int) -> Iterator[int]:
            for place in range(first, 5):
                self.place = place + 1
                yield self.order[place]
            self.place = 0

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    def trained(cursor: DataCursor, steps: int) -> list[tuple[int, float]]:
        return [(cursor.next(), torch.rand(()).item()) for _ in range(steps)]

    torch.manual_seed(3)
    straight, restarted = DataCursor(DrawsAsItBegins()), DataCursor(DrawsAsItBegins())
    trained(straight, 7)
    position, state = straight.position(), rng.capture()
    after = trained(straight, 8)
    torch.manual_seed(4)
    restarted.seek(json.loads(json.dumps(position)))
    rng.restore(state)
    assert trained(restarted, 8) == after


def test_set_epoch_is_called_where_it_takes_a_number_and_not_beneath_it():
    class AsksForMore(Told):
        def set_epoch(self, epoch: int, *, length: int) -> None:  # type: ignore[override]
            raise AssertionError("it is called by others")

    class Further:
        """Goes on at an epoch of an earlier training."""

        def __init__(self) -> None:
            self.dataset = Told()
            self.set_epoch(0)

        def set_epoch(self, epoch: int) -> None:
            self.dataset.set_epoch(7 + epoch)

        def __iter__(self) -> Iterator[int]:
            return (self.dataset[index] for index in range(5))

    def drawn(data: Any, count: int = 10) -> list[int]:
        cursor = DataCursor(data)
        return [int(cursor.next()) for _ in range(count)]

    assert drawn(torch.utils.data.DataLoader(AsksForMore())) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert drawn(Further()) == [70, 71, 72, 73, 74, 80, 81, 82, 83, 84]
    indices = torch.utils.data.DistributedSampler(range(5), num_replicas=1, rank=0)  # type: ignore[arg-type]
    by_batch = torch.utils.data.BatchSampler(indices, batch_size=1, drop_last=False)
    whole = torch.arange(5)  # takes the indices of a batch at once
    order = drawn(torch.utils.data.DataLoader(whole, sampler=by_batch, batch_size=None))  # type: ignore[arg-type]
    assert sorted(order[:5]) == sorted(order[5:]) == list(range(5)) and order[:5] != order[5:]
    part = torch.utils.data.Subset(Told(), range(5))
    assert drawn(torch.utils.data.DataLoader(part)) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


def test_a_loader_that_accelerate_has_prepared_has_one_order_with_and_without_a_restart():
    """Its methods for a position raised an AttributeError at the end of the first round."""
    accelerator = pytest.importorskip("accelerate", reason="the extra [trl] is not installed").Accelerator(cpu=True)

    def cursor() -> DataCursor:
        return DataCursor(accelerator.prepare(torch.utils.data.DataLoader(range(5), shuffle=True)))  # type: ignore[arg-type]

    torch.manual_seed(3)
    straight = cursor()
    before, position = [int(straight.next()) for _ in range(7)], straight.position()
    after = [int(straight.next()) for _ in range(8)]
    assert sorted(before[:5]) == sorted(before[5:] + after[:3]) == sorted(after[3:]) == list(range(5))
    restarted = cursor()
    restarted.seek(json.loads(json.dumps(position)))
    assert [int(restarted.next()) for _ in range(8)] == after


class Drawn:
    """Numbers from a generator, whose state is a tensor, as that of torchdata's loaders. `more`: further state."""

    def __init__(self, more: Any = None) -> None:
        self.generator, self.more = torch.Generator().manual_seed(7), more

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(1000, (), generator=self.generator))

    def state_dict(self) -> dict[Any, Any]:
        return {0: self.generator.get_state(), "more": self.more}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.generator.set_state(state[0])


def test_the_position_of_data_may_hold_tensors():
    first, second = DataCursor(Drawn()), DataCursor(Drawn())
    [first.next() for _ in range(3)]
    second.seek(json.loads(json.dumps(first.position())))
    assert [second.next() for _ in range(5)] == [first.next() for _ in range(5)]


@pytest.mark.parametrize(
    ("more", "words"),
    [({1}, r"state_dict\(\)\['more'\] is a set"), (torch.zeros(2**14), "bytes.* at most 65536 are saved")],
)
def test_a_position_that_no_manifest_can_hold_is_refused(more: Any, words: str):
    cursor = DataCursor(Drawn(more))
    cursor.next()
    with pytest.raises(ConfigError, match=words):
        cursor.position()


def test_data_learns_its_epoch_before_it_takes_its_state():
    class Reshuffled:
        """Three numbers in an order of the epoch, of which `set_epoch` begins the first."""

        def __init__(self) -> None:
            self.epoch = self.place = 0

        def __iter__(self) -> Iterator[int]:
            while self.place < 3:
                self.place += 1
                yield 10 * self.epoch + self.place

        def set_epoch(self, epoch: int) -> None:
            self.epoch, self.place = epoch, 0

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    first, second = DataCursor(Reshuffled()), DataCursor(Reshuffled())
    assert [first.next() for _ in range(5)] == [1, 2, 3, 11, 12]
    second.seek(first.position())
    assert [second.next() for _ in range(4)] == [13, 21, 22, 23]
    second.seek({"epoch": 0, "batches": 1, "state": {"place": 1}})
    assert second.next() == 2


@pytest.mark.parametrize("in_batches", [False, True])
def test_every_epoch_of_a_sampler_that_is_told_it_has_an_order_of_its_own_also_after_a_restart(
    in_batches: bool, tmp_path: Path
):
    def loader(seen: list[int]) -> torch.utils.data.DataLoader[Any]:
        def collate(picked: list[int]) -> Any:
            seen.extend(picked)
            return batch_of(picked[0])

        sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=1)  # type: ignore[arg-type]
        if in_batches:
            batches = torch.utils.data.BatchSampler(sampler, 1, drop_last=False)
            return torch.utils.data.DataLoader(range(8), batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]
        return torch.utils.data.DataLoader(range(8), sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]

    straight: list[int] = []
    train(Alone(tmp_path / "straight", rounds=4), loader(straight))
    second: list[int] = []
    alone = Alone(tmp_path / "restarted", rounds=4)
    train(alone, loader([]), steps=7)
    alone.leaving = False
    train(alone, loader(second))
    assert straight[:4] != straight[4:8] != straight[8:12]
    assert second[-6:] == straight[6:]


def test_an_attempt_after_the_end_finds_the_run_over(tmp_path: Path):
    alone = Alone(tmp_path)
    train(alone)
    counting = Counting()
    _, session = train(alone, counting)
    assert session.stopped and counting.given == []


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_a_nan_batch_costs_one_round_and_poisons_nothing(tmp_path: Path):
    alone = Alone(tmp_path, rounds=3)
    data = list(BATCHES)
    data[4] = (data[4][0] * float("nan"), data[4][1])
    model, session = train(alone, data)
    assert session.stopped
    assert [c.applied for c in alone.commits()] == [True, False, True, True, False]
    assert alone.manifest(2).kind == "abstention" and "not finite" in alone.manifest(2).reason
    names = ", ".join(sorted(name for name, _ in model.named_parameters())[:3])
    assert f"They are in {names}" in alone.manifest(2).reason
    assert "Not finite either: loss." in alone.manifest(2).reason
    assert alone.manifest(2).reason[:100] in alone.commits()[1].reason  # which ends the run after three of them
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_more_than_one_optimizer_step_per_batch_is_counted(tmp_path: Path):
    alone = Alone(tmp_path, sync_every=4)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = 0
    with alone.context().attach(model, optimizer) as session:
        for batch in session.batches(BATCHES):
            batches += 1
            for _ in range(2):
                inner_step(model, optimizer, batch)
    assert batches == 4 and [o.steps for c in alone.commits() for a in c.answers for o in a.origins] == [4, 4]


def test_gradient_accumulation_counts_optimizer_steps_only(tmp_path: Path):
    alone = Alone(tmp_path, sync_every=2, rounds=1)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = 0
    with alone.context().attach(model, optimizer) as session:
        for x, y in session.batches(BATCHES):
            torch.nn.functional.mse_loss(model(x), y).backward()
            batches += 1
            if batches % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert batches == 6


@pytest.mark.parametrize(
    ("attach", "words"),
    [
        ({"in_loop": "losss"}, r"unknown in_loop 'losss': did you mean 'loss'\?"),
        ({"heldout_items": []}, "0 held-out items cannot be dealt over 1 replicas"),
        ({"heldout": lambda model, items: [1.0]}, "heldout returned 1 numbers for 8 items"),
        ({"heldout_items": [object()]}, "held-out item of type object"),
    ],
)
def test_arguments_of_attach_that_cannot_be_meant(attach, words, tmp_path: Path):
    with pytest.raises((ConfigError, TypeError), match=words):
        train(Alone(tmp_path), **attach)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "the data yields no batch"),
        (iter(BATCHES[:4]), "A generator can be used up only once"),
    ],
)
def test_data_that_runs_dry_is_told(data, words, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        train(Alone(tmp_path), data)


def test_a_loop_outside_the_with_block_is_refused(tmp_path: Path):
    model = mlp()
    session = Alone(tmp_path).context().attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(ConfigError, match=r"write `with ctx.attach\(...\) as replica:`"):
        next(session.batches(BATCHES))


def test_attach_and_batches_are_called_once(tmp_path: Path):
    alone = Alone(tmp_path)
    context, model = alone.context(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with context.attach(model, optimizer) as session:
        next(session.batches(BATCHES))
        with pytest.raises(ConfigError, match="batches was called twice"):
            next(session.batches(BATCHES))
        with pytest.raises(ConfigError, match="attach was called twice"):
            context.attach(model, optimizer)


def test_a_manifest_counts_what_was_observed_in_its_own_round(tmp_path: Path):
    alone = Alone(tmp_path, rounds=3, sync_every=4)
    train(alone)
    metrics = [alone.manifest(round_).metrics for round_ in (1, 2, 3)]
    assert [each["loss"].count for each in metrics] == [4, 4, 4]
    assert [each["tokens"].sum for each in metrics] == [32.0, 32.0, 32.0]


def test_rewards_are_published_as_they_are(tmp_path: Path):
    alone = Alone(tmp_path, rounds=1)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach = {"heldout": lambda model, items: [0.25] * len(items), "heldout_items": [1, 2], "in_loop": "reward"}
    with alone.context().attach(model, optimizer, **attach) as session:  # type: ignore[arg-type]
        for batch in session.batches(BATCHES):
            inner_step(model, optimizer, batch)
            session.observe(reward=0.5, kl_to_init=0.01)
    manifest = alone.manifest(1)
    assert manifest.scores[0].sum == 0.5
    start = RunLog(alone.store).start()
    assert start is not None and start.record.heldout is not None and start.record.heldout.metric == "reward"
    assert manifest.in_loop is not None and manifest.in_loop.sum == 0.5 * manifest.in_loop.count
    assert manifest.metrics["kl_to_init"].count == 3
    assert RunReader(alone.store).rows()[0].heldout == 0.25


# -- streaming fragments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"fragments": 2}, {"fragments": 3, "fragment_sync_delay": 1}])
def test_what_is_scored_is_the_global_model_and_not_what_a_replica_trained_meanwhile(tmp_path: Path, settings):
    alone = Alone(tmp_path, rounds=6, sync_every=6, **settings)
    scored: list[dict[str, torch.Tensor]] = []

    def remember(model: torch.nn.Module, items: Any) -> list[float]:
        scored.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return heldout(model, items)

    train(alone, heldout=remember)
    log = RunLog(alone.store)
    assert len(scored) == 7
    for round_, parameters in enumerate(scored):
        base = rebuild(log, log.newest_begin().record, until=round_).base
        assert all(torch.equal(parameters[name], base.parameters[name]) for name in parameters)


def test_training_between_synchronisations_goes_on_in_the_fragments_that_do_not_move(tmp_path: Path):
    """A fragment's pseudo-gradient holds the steps of all rounds since it moved last: more than a round's."""
    alone = Alone(tmp_path, rounds=4, sync_every=6, fragments=2, outer={"lr": 1e-6, "momentum": 0})
    train(alone)
    reader = ContributionReader(alone.store)

    def size(round_: int) -> float:
        manifest = alone.manifest(round_)
        assert manifest.payload is not None
        return float(Encoded(reader.shard(manifest, 0), "fp32", manifest.payload.numel).values().norm())

    assert [alone.manifest(r).fragment for r in (1, 2, 3, 4)] == [0, 1, 0, 1]
    assert size(3) > 1.2 * size(1)


class HeldUpload(MemoryStore):
    """A payload's upload ends only when training has gone on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.trained = threading.Event(), threading.Event()

    def create(self, key: str, data: bytes) -> bool:
        if "/payload/" in key:
            self.began.set()
            self.trained.wait()
        return super().create(key, data)


def test_an_upload_overlaps_with_training_where_a_delay_is_set(tmp_path: Path):
    held = HeldUpload()
    alone = Alone(tmp_path, rounds=1, sync_every=4, fragment_sync_delay=2, store=held)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with alone.context().attach(model, optimizer) as session:
        for batch in session.batches(BATCHES):
            if held.began.is_set():
                held.trained.set()
            inner_step(model, optimizer, batch)
            if session._training._loop.published:
                held.began.wait()
    assert session.stopped
    assert [(o.round, o.steps) for o in alone.manifest(1).origins] == [(1, 2)]


class SeenCommits(MemoryStore):
    """Counts the commits that exist, for a test that waits for one; with `error` raises that in place of the first."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.reached = threading.Semaphore(0)
        self.may_fail = threading.Semaphore(0)

    def create(self, key: str, data: bytes) -> bool:
        if not key.endswith("commit.json"):
            return super().create(key, data)
        if self.error is not None:
            self.may_fail.acquire()
            self.reached.release()
            raise self.error
        created = super().create(key, data)
        self.reached.release()
        return created


def overlapped(store: Store, folder: Path, at_last_delayed_step: Any, **settings: Any) -> ReplicaSession:
    """Train a run of rounds of four steps, published after the first; call something after the third of each."""
    alone = Alone(folder, sync_every=4, fragment_sync_delay=3, store=store, **settings)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with alone.context().attach(model, optimizer) as session:
        for index, batch in enumerate(session.batches(BATCHES)):
            inner_step(model, optimizer, batch)
            if index % 4 == 2:
                at_last_delayed_step(session)
    return session


def test_the_whole_round_goes_by_beside_training_which_sees_it_at_the_synchronisation_step(tmp_path: Path):
    """Training takes no step after the third before the round is committed: so it is, without being asked."""
    store, seen = SeenCommits(), list[tuple[int, bool]]()

    def look(session: ReplicaSession) -> None:
        store.reached.acquire()
        seen.append((session.round, session.stopped))

    session = overlapped(store, tmp_path, look, rounds=3)
    assert session.stopped and seen == [(1, False), (2, False), (3, False)]
    commits = RunReader(store).commits()
    assert [c.applied for c in commits] == [True, True, True, False]
    manifests = [Contribution.from_bytes(store.get(k := keys.contribution(r, 0)), k) for r in (1, 2, 3)]
    assert [[(o.round, o.steps) for o in m.origins] for m in manifests] == [[(1, 1)], [(2, 4)], [(3, 4)]]


def test_nothing_is_published_after_a_stop_though_training_sees_it_later(tmp_path: Path):
    store = SeenCommits()
    halt = Halt(write_id="h", at=0.0, leg=1, by="test", reason="enough")
    store.create(keys.halt(1), halt.to_bytes())
    session = overlapped(store, tmp_path, lambda _: store.reached.acquire(), rounds=3)
    (commit,) = RunReader(store).commits()
    assert session.stopped and commit.stop == "halted"
    assert not list(store.list(keys.contributions(2)))


def test_an_error_beside_training_is_raised_in_it_with_its_type(tmp_path: Path):
    store = SeenCommits(error=StoreDenied("the credentials of this bucket were withdrawn."))
    steps = []

    def look(session: ReplicaSession) -> None:
        store.may_fail.release()
        store.reached.acquire()
        steps.append(session.round)

    with pytest.raises(StoreDenied, match="were withdrawn"):
        overlapped(store, tmp_path, look)
    assert steps == [1]


def test_an_error_of_the_users_loop_waits_for_no_round_in_flight(tmp_path: Path):
    """Of two replicas one is missing, so the round cannot end; the error is raised all the same, and polling ends."""
    sessions = []

    def fail(session: ReplicaSession) -> None:
        sessions.append(session._training)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        overlapped(MemoryStore(), tmp_path, fail, replicas=2, timing={**FAST, "round_timeout_s": 60.0})
    assert sessions[0].round == 1
    with pytest.raises(Preempted):
        sessions[0]._rounds.close()


def test_a_notice_to_leave_waits_for_no_round_in_flight(tmp_path: Path):
    alone = Alone(tmp_path, rounds=2, sync_every=4, fragment_sync_delay=2, replicas=2)
    _, session = train(alone, steps=3)
    assert session.preempted and alone.manifest(1).kind == "delta" and alone.commits() == []


def test_a_notice_to_leave_lets_an_upload_under_way_arrive(tmp_path: Path):
    alone = Alone(tmp_path, rounds=2, sync_every=4, fragment_sync_delay=2)
    _, session = train(alone, steps=3)
    assert session.preempted and alone.manifest(1).kind == "delta"
    alone.leaving = False
    _, again = train(alone)
    assert again.stopped and [a.attempt for c in alone.commits() for a in c.answers] == [1, 2, 2]
