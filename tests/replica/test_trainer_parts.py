"""What `train_as_replica` is made of, without a trainer: the stream of batches, reward taps, checks of settings."""

import asyncio
import math
import random
import statistics
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Progress
from diloco_orchestrator.replica.interop.loader_stream import Deal, LoaderStream
from diloco_orchestrator.replica.interop.reward_taps import RewardTap, take, tap
from diloco_orchestrator.replica.interop.trainer_settings import (
    adapt_trainer,
    batches_in_a_row,
    check_trainer,
    rollout_steps,
)
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.replica.training.dealt_order import ORDER, digest_of


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Shuffled(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A stream that is shuffled where it is read, perhaps in a worker."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(7), 7))


class OwnOrder(torch.utils.data.Sampler[int]):
    """Draws each epoch's order from a generator of its own, as TRL's sampler does."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(7, generator=self.generator).tolist())


def noisy(items: list[int]) -> tuple[list[int], float]:
    return items, float(torch.rand(()))


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(range(7), batch_size=2, shuffle=True, collate_fn=noisy),  # type: ignore[arg-type]
    "own order": lambda: DataLoader(range(7), batch_size=2, sampler=OwnOrder(), collate_fn=noisy),  # type: ignore[arg-type]
    "persistent workers": lambda: DataLoader(
        range(7),  # type: ignore[arg-type]
        batch_size=2,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        collate_fn=list,
    ),
    "stream in persistent workers": lambda: DataLoader(
        Shuffled(), batch_size=2, num_workers=1, persistent_workers=True, collate_fn=list
    ),
    "no batches": lambda: DataLoader(range(7), batch_size=None, shuffle=True),  # type: ignore[arg-type]
    "iterable": lambda: DataLoader(Endless(), batch_size=2, collate_fn=noisy),
    "list": lambda: [[0, 1], [2, 3], [4]],
}


def draw(stream: LoaderStream, count: int) -> list[Any]:
    """Batches, with a step after each that draws random numbers too."""
    return [(next(stream), float(torch.rand(()))) for _ in range(count)]


def slow_with_workers(kinds: Any) -> list[Any]:
    """The same as parameters; those whose loaders start processes are slow."""
    return [pytest.param(kind, marks=[pytest.mark.slow] if "workers" in kind else []) for kind in kinds]


@pytest.mark.parametrize("kind", slow_with_workers(LOADERS))
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_restart_after_any_batch_goes_on_with_the_next(kind: str, replicas: int):
    rng.seed_all(1)
    straight = draw(LoaderStream(LOADERS[kind](), Deal.over([1] * replicas, 0)), 12)
    for taken in range(12):
        rng.seed_all(1)
        first = LoaderStream(LOADERS[kind](), Deal.over([1] * replicas, 0))
        head = draw(first, taken)
        state, chance = first.state_dict(), rng.capture()
        random.seed(99), torch.manual_seed(99)
        second = LoaderStream(LOADERS[kind](), Deal.over([1] * replicas, 0))
        second.load_state_dict(state)
        rng.restore(chance)
        assert head + draw(second, 12 - taken) == straight, f"after {taken} batches"


def items_of(stream: LoaderStream, count: int) -> list[int]:
    """The items of `count` batches."""
    return [item for batch, _ in draw(stream, count) for item in torch.as_tensor(batch).flatten().tolist()]


class Buffered(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A stream that is shuffled through a buffer, as those of `datasets` are."""

    def __iter__(self) -> Iterator[int]:
        waiting = list(range(24))
        while waiting:
            yield waiting.pop(random.randrange(min(5, len(waiting))))


def weighted() -> DataLoader[int]:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 24, 24, replacement=False)
    return DataLoader(range(24), batch_size=2, sampler=sampler)  # type: ignore[arg-type]


ORDERS: dict[str, Any] = {
    "shuffle=True": lambda: DataLoader(range(24), batch_size=2, shuffle=True),  # type: ignore[arg-type]
    "weighted": weighted,
    "workers": lambda: DataLoader(range(24), batch_size=2, shuffle=True, num_workers=1),  # type: ignore[arg-type]
    "stream": lambda: DataLoader(Buffered(), batch_size=2),
}


@pytest.mark.parametrize("kind", slow_with_workers(ORDERS))
def test_replicas_with_random_numbers_of_their_own_train_no_item_twice_in_an_epoch(kind: str):
    epochs: list[list[int]] = [[], [], []]
    for replica_id in (0, 1):
        rng.seed_all(100 + replica_id)  # as a replica's are when training begins
        stream = LoaderStream(ORDERS[kind](), Deal.over([1] * 2, replica_id))
        for epoch in epochs:
            epoch += items_of(stream, 6)
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_dataset_that_is_not_dealt_is_shuffled_by_each_replica_for_itself():
    orders = [items_of(LoaderStream(ORDERS["shuffle=True"](), Deal.over([1] * 1, 0), seed=seed), 12) for seed in (1, 2)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def said(stream: LoaderStream, replica_id: int, cursor: Any = None) -> Contribution:
    """A manifest of a replica whose position is the stream's, or `cursor`."""
    assert stream.dealt is not None
    cursor = {ORDER: stream.dealt.state()} if cursor is None else cursor
    return Contribution(
        **Stamp("said", lambda: 0.0)(),
        round=1,
        leg=1,
        replica_id=replica_id,
        attempt=1,
        kind="scores",
        base_digest="",
        snapshot_round=0,
        rebuilt_after=0,
        progress=Progress(cursor=cursor, rng={}, inner_steps=1, tokens=0),
    )


def seeded(seed: int, count: int = 24, batch_size: int = 2) -> DataLoader[int]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(range(count), batch_size=batch_size, shuffle=True, generator=generator)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda odd: seeded(42 + odd), id="a generator seeded by replica"),
        pytest.param(lambda odd: seeded(42, batch_size=2 + odd), id="another batch size"),
        pytest.param(lambda odd: DataLoader(Endless() if odd else Buffered(), batch_size=2), id="another stream"),
    ],
)
def test_another_order_is_refused_by_both_of_two_replicas_and_by_the_odd_one_of_three(make: Any, caplog: Any):
    streams = [LoaderStream(make(replica_id == 1), Deal.over([1] * 3, replica_id)) for replica_id in range(3)]
    for stream in streams:
        next(stream)
    manifests = [said(stream, i) for i, stream in enumerate(streams)]
    for mine, others in ((0, manifests[:2]), (1, manifests[:2]), (1, manifests)):
        with pytest.raises(ConfigError, match=f"replica {mine} draws another order of its training data.*shard=False"):
            streams[mine].dealt.compare(mine, others)  # type: ignore[union-attr]
    streams[2].dealt.compare(2, [manifests[0], manifests[2]])  # type: ignore[union-attr]
    assert not caplog.records
    streams[0].dealt.compare(0, manifests)  # type: ignore[union-attr]
    assert "which the others do not either" in caplog.text


def test_orders_are_compared_within_an_epoch_and_with_whatever_a_manifest_holds():
    one, other = LoaderStream(seeded(1, 4), Deal.over([1] * 2, 0)), LoaderStream(seeded(2, 4), Deal.over([1] * 2, 1))
    next(one), next(one), next(other)  # one is in its second epoch
    strange = [{}, {ORDER: 3}, {ORDER: {"epoch": 1}}, {ORDER: {"epoch": 0, "batches": []}}]
    assert one.dealt is not None
    one.dealt.compare(0, [said(other, 1), *(said(other, 1, cursor) for cursor in strange)])


class CountsItsEpochs(torch.utils.data.Sampler[int]):
    """Draws each order from the number of epochs that this object has seen, which nobody saves."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist())


@pytest.mark.parametrize("replicas", [2, 1])
def test_another_order_after_a_restart_is_refused_where_batches_are_dealt_and_else_said(replicas: int, caplog: Any):
    loaders = [DataLoader(range(8), sampler=CountsItsEpochs()) for _ in range(2)]  # type: ignore[arg-type]
    first, again = (LoaderStream(each, Deal.over([1] * replicas, 0)) for each in loaders)
    draw(first, 9)
    again.load_state_dict(first.state_dict())
    if replicas == 1:
        next(again)
        assert "batch 1 of epoch 1 is another than the earlier attempt of this replica drew" in caplog.text
        return
    with pytest.raises(ConfigError, match="batch 1 of epoch 2 is another than the earlier attempt of this"):
        next(again)


# Of replica 1 of 2, after batches 6 and 7 of a shuffled epoch of 8, as an earlier version wrote it.
OLD_STATE: dict[str, Any] = {
    "epoch": 0,
    "taken": 2,
    "before": 0,
    "chance": {
        "process": {
            "seed": 5,
            "random": "sR5QbQB42u3BAQ0AAADCoPdPbQ43oAAAuDYJ0QAB",
            "torch": "flHOhgB42u3BMQEAAADCoPVPbQ0PoAAAAACAVwMTwAAB",
            "numpy": "IL30jAB42u3BAQ0AAADCoPdPbQ43oAAAeDYJ0AAB",
        },
        "generators": [],
    },
}


def test_a_run_of_an_earlier_version_ends_its_epoch_in_the_order_that_it_has_and_says_so(caplog: Any):
    loader = DataLoader(range(8), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    stream = LoaderStream(loader, Deal.over([1] * 2, 1))
    stream.load_state_dict(OLD_STATE)
    assert "Epoch 0 goes on in the order that it has" in caplog.text
    assert items_of(stream, 1) == [3] and stream.dealt is None
    again = LoaderStream(loader, Deal.over([1] * 2, 1))
    again.load_state_dict(stream.state_dict())
    assert items_of(again, 1) == [0]
    items_of(again, 1)
    assert again.dealt is not None and "chance" not in again.state_dict()


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_each_batch_is_one_replicas_and_none_is_left_out(replicas: int):
    """Seven batches an epoch: over `replicas` epochs everybody has taken seven."""
    parts = []
    for replica_id in range(replicas):
        loader = DataLoader(range(7), batch_size=None, sampler=OwnOrder())  # type: ignore[arg-type]
        stream = LoaderStream(loader, Deal.over([1] * replicas, replica_id))
        parts.append([int(next(stream)) for _ in range(7)])
    assert sorted(item for part in parts for item in part) == sorted(list(range(7)) * replicas)


def test_batches_of_one_generation_stay_together():
    stream = LoaderStream([0, 0, 1, 1, 2, 2, 3, 3], Deal.over([1] * 2, 1, block=2))
    assert [next(stream) for _ in range(8)] == [1, 1, 3, 3] * 2


@pytest.mark.parametrize("block", [1, 2])
def test_batches_are_dealt_over_the_ranks_of_replicas_of_any_size(block):
    ranks = [2, 1, 3]
    deals = [Deal.over(ranks, i, rank, block) for i, count in enumerate(ranks) for rank in range(count)]
    takers = [[number for number, deal in enumerate(deals) if deal.takes(index)] for index in range(30)]
    assert all(len(each) == 1 for each in takers)
    assert [taker for (taker,) in takers[: 6 * block]] == [0, 1] * block + [2] * block + [3, 4, 5] * block
    for deal in deals:
        taken = list(map(deal.takes, range(30)))
        assert [deal.count(index) for index in range(31)] == [sum(taken[:index]) for index in range(31)]


@pytest.mark.parametrize("kind", ["shuffled", "iterable"])
def test_another_rank_goes_on_from_the_state_of_rank_0(kind):
    """Seven items in batches of two are dealt to three ranks, so that one of them begins an epoch before rank 0."""

    def streams() -> list[LoaderStream]:
        return [LoaderStream(LOADERS[kind](), Deal.over([2, 1], 0, rank), seed=1) for rank in (0, 1)]

    def items(stream: LoaderStream, count: int) -> list[Any]:
        return [list(next(stream)[0]) for _ in range(count)]

    for before in range(9):
        first, second = streams()
        items(first, before), items(second, before)
        again = streams()[1]
        again.load_state_dict(first.state_dict())
        assert items(again, 5) == items(second, 5), before


def test_a_replica_that_comes_back_with_another_number_of_ranks_repeats_no_batch():
    before = [LoaderStream(list(range(100)), Deal.over([2, 2], 0, rank)) for rank in (0, 1)]
    taken = [next(each) for each in before for _ in range(5)]
    for ranks in (1, 2, 3):
        after = [LoaderStream(list(range(100)), Deal.over([ranks, 2], 0, rank)) for rank in range(ranks)]
        for each in after:
            each.load_state_dict(before[0].state_dict())
        following = [next(each) for each in after]
        assert max(taken) < min(following) <= max(taken) + 8, (ranks, following)


@pytest.mark.parametrize("stream", [False, True])
def test_batches_that_accelerate_has_divided_over_ranks_are_dealt_anew(stream):
    divided = pytest.importorskip("accelerate.data_loader", reason="the extra [trl] is not installed")
    ranks = {"num_processes": 2, "process_index": 1}
    if stream:
        loader = DataLoader(divided.IterableDatasetShard(Endless(), batch_size=2, **ranks), batch_size=2)
    else:
        sampler = torch.utils.data.BatchSampler(range(7), 2, drop_last=False)
        shard = divided.BatchSamplerShard(sampler, **ranks)
        loader = DataLoader(range(7), batch_sampler=shard)  # type: ignore[arg-type]
    found = [next(LoaderStream(loader, Deal.over([2, 1], *who))).tolist() for who in ((0, 0), (0, 1), (1, 0))]
    assert found == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("data", [range(5), range(1), Endless()], ids=["indices", "fewer than a batch", "stream"])
def test_the_ranks_of_a_replica_get_batches_of_one_size(data):
    """An epoch's last batch is filled up with its first items; that of a stream is left out."""
    whose = ((0, 0), (0, 1), (1, 0))
    streams = [LoaderStream(DataLoader(data, batch_size=2), Deal.over([2, 1], *who)) for who in whose]
    found = [[next(stream).tolist() for _ in range(4)] for stream in streams]
    last = [4, 5] if isinstance(data, Endless) else [4, 0]
    assert found == ([[[0, 0]] * 4] * 3 if data == range(1) else [[each] * 4 for each in ([0, 1], [2, 3], last)])


def test_loaders_whose_division_cannot_be_undone_are_refused():
    sampler = torch.utils.data.DistributedSampler(range(7), num_replicas=2, rank=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"DistributedSampler over 2 processes\. Take it out"):
        LoaderStream(DataLoader(range(7), sampler=sampler), Deal())  # type: ignore[arg-type]
    divided = pytest.importorskip("accelerate.data_loader", reason="the extra [trl] is not installed")
    batches = torch.utils.data.BatchSampler(range(8), 2, drop_last=False)
    shard = divided.BatchSamplerShard(batches, num_processes=2, process_index=0, split_batches=True)
    with pytest.raises(ConfigError, match="Set split_batches=False"):
        LoaderStream(DataLoader(range(8), batch_sampler=shard), Deal.over([2], 0))  # type: ignore[arg-type]
    balanced = pytest.importorskip("transformers.trainer_pt_utils").BatchRebalanceSampler([1] * 8, 4, 2, 1)
    shard = divided.BatchSamplerShard(balanced, num_processes=1, process_index=0)
    for batches in (balanced, shard):
        with pytest.raises(ConfigError, match=r'batch_rebalance.*Set "group_by_length" or "random"'):
            LoaderStream(DataLoader(range(8), batch_sampler=batches), Deal.over([2], 0))  # type: ignore[arg-type]


def test_equal_batches_have_one_digest_also_where_numpy_holds_objects():
    """As of `datasets` with the format "numpy", whose rows have different lengths: by addresses all orders differed."""
    rows = [np.array([np.arange(1000, 1000 + n) for n in (2, last)], dtype=object) for last in (3, 3, 4)]
    assert len({digest_of({"ids": row}) for row in rows[:2]}) == 1 and len({digest_of(row) for row in rows}) == 2


def test_no_replica_gets_all_the_long_items_of_a_sampler_that_sorts_each_accumulation_window():
    balanced = pytest.importorskip("transformers.trainer_pt_utils").BatchRebalanceSampler
    lengths = [100, 1] * 8
    in_a_row = batches_in_a_row(trainer_with(train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=2))
    for replica_id in range(2):
        sampler = balanced(lengths, effective_batch_size=4, dp_size=1, grad_accum=2)
        loader = DataLoader(range(16), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
        stream = LoaderStream(loader, Deal.over([1, 1], replica_id, block=in_a_row))
        windows = [next(stream) + next(stream) for _ in range(2)]
        assert [len(window) for window in windows] == [4, 4] and len({*windows[0], *windows[1]}) == 8
    assert batches_in_a_row(trainer_with(gradient_accumulation_steps=2)) == 1
    generates = {"steps_per_generation": 4, "gradient_accumulation_steps": 2}  # by a sampler of its own
    assert batches_in_a_row(trainer_with(train_sampling_strategy="batch_rebalance", **generates)) == 4


def test_the_stream_ends_when_training_has_ended_and_an_empty_loader_is_refused():
    assert list(LoaderStream([1], Deal.over([1] * 1, 0), ended=lambda: True)) == []
    with pytest.raises(ConfigError, match="yields no batch"):
        next(LoaderStream([], Deal.over([1] * 1, 0)))


def test_items_of_other_replicas_are_never_loaded():
    asked: list[int] = []

    class Watched(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return index

    stream = LoaderStream(DataLoader(Watched(), batch_size=2), Deal.over([1] * 2, 1))
    next(stream), next(stream)
    assert asked == [2, 3, 6, 7]


# -- rewards ----------------------------------------------------------------------------------------------------------


class Listener:
    in_training = True

    def __init__(self) -> None:
        self.taps: list[RewardTap] = []

    def new_tap(self, weight: float) -> RewardTap:
        self.taps.append(RewardTap(weight))
        return self.taps[-1]


def test_rewards_of_several_functions_are_summed_by_weight_and_none_is_left_out():
    listener = Listener()
    first = tap(lambda completions: [1.0, 2.0, None, None], listener)

    async def second(completions: Any) -> list[float | None]:
        return [10.0, None, 30.0, None]

    tapped = tap(second, listener, weight=0.5)
    assert first([]) == [1.0, 2.0, None, None]
    assert asyncio.run(tapped([])) == [10.0, None, 30.0, None]
    found = take(listener.taps)
    sums = [6.0, 2.0, 15.0]
    assert found == pytest.approx({"reward": statistics.mean(sums), "reward_std": statistics.pstdev(sums)})
    assert take(listener.taps) == {}


def test_a_reward_that_is_not_finite_is_passed_to_the_guard_and_evaluations_are_not():
    listener = Listener()
    function = tap(lambda: [1.0, math.nan], listener)
    function()
    assert math.isnan(take(listener.taps)["reward"])
    listener.in_training = False
    function()
    assert take(listener.taps) == {}


def test_a_reward_model_is_heard_by_a_hook():
    class Scorer(torch.nn.Module):
        def forward(self) -> Any:
            return SimpleNamespace(logits=torch.tensor([[0.5], [1.5]]))

    listener, model = Listener(), Scorer()
    assert tap(model, listener) is model
    model()
    assert take(listener.taps) == {"reward": 1.0, "reward_std": 0.5}


# -- settings ---------------------------------------------------------------------------------------------------------


def trainer_with(**args: Any) -> Any:
    plain = {
        "world_size": 1,
        "n_gpu": 1,
        "fp16": False,
        "resume_from_checkpoint": None,
        "auto_find_batch_size": False,
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "gradient_accumulation_steps": 1,
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "max_steps": -1,
    }
    kept = {
        name: args.pop(name)
        for name in (
            "is_fsdp_enabled",
            "is_deepspeed_enabled",
            "num_iterations",
            "ref_model",
            "accelerator",
            "model",
            "callback_handler",
            "lr_scheduler",
        )
        if name in args
    }
    state = SimpleNamespace(global_step=args.pop("global_step", 0))
    return SimpleNamespace(args=SimpleNamespace(**{**plain, **args}), state=state, **{"model": None, **kept})


CONFIG = make_config({"entrypoint": "m:f", "sync_every": 4, "rounds": 3})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"is_deepspeed_enabled": True}, r"deepspeed set.*Take TrainingArguments\(deepspeed=...\) out"),
        ({"is_fsdp_enabled": True}, r"fsdp set.*set ranks_per_replica.*or take TrainingArguments\(fsdp=...\) out"),
        ({"world_size": 2}, "world_size=2.*this replica in 1: start .* without torchrun"),
        ({"n_gpu": 2}, "n_gpu=2.*Set CUDA_VISIBLE_DEVICES"),
        ({"fp16": True}, "fp16=True.*Set bf16=True"),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "resume_from_checkpoint='out/checkpoint-5'.*Take it out"),
        ({"global_step": 5}, "global_step=5.*Make a new trainer"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*per_device_train_batch_size"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, 'reduce_lr_on_plateau.*Set another, such as "linear"'),
        ({"lr_scheduler_type": "greedy"}, 'greedy.*Set another, such as "linear"'),
        ({"lr_scheduler": ReduceLROnPlateau(SGD([torch.ones(1)]))}, 'ReduceLROnPlateau.*Set another, such as "linear"'),
        ({"sync_ref_model": True}, "sync_ref_model=True.*Set sync_ref_model=False"),
        ({"callback_handler": SimpleNamespace(callbacks=[EarlyStoppingCallback()])}, "EarlyStopping.*Take it out"),
        ({"eval_strategy": "epoch"}, 'eval_strategy="epoch".*Set eval_strategy="steps"'),
        (
            {"steps_per_generation": 6, "num_iterations": 2, "gradient_accumulation_steps": 2},
            r"sync_every=4.*steps_per_generation=6 \* num_iterations=2.*a multiple of 6, such as 6",
        ),
    ],
)
def test_a_trainer_that_cannot_be_a_replica_is_refused_with_setting_value_and_remedy(settings, words):
    with pytest.raises(ConfigError, match=words):
        check_trainer(trainer_with(**settings), CONFIG)


def accelerator_with(**parallel: int) -> Any:
    return SimpleNamespace(parallelism_config=SimpleNamespace(**parallel), state=SimpleNamespace())


_FSDP1 = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"world_size": 1}, "world_size=1.*this replica in 2: .*set use_cpu=True"),
        ({"accelerator": _FSDP1}, 'version 1.*Set .*fsdp_config={"version": 2}'),
        ({"accelerator": accelerator_with(cp_size=2)}, "cp_size=2.*Set cp_size=1"),
        ({"model": SimpleNamespace(tp_size=2)}, "tp_size=2.*Set tp_size=1"),
        ({"steps_per_generation": 4, "num_iterations": 1}, r"ranks_per_replica=\[2, 1\].*Set one number"),
    ],
)
def test_a_trainer_that_cannot_be_a_replica_of_ranks_is_refused(settings, words):
    config = make_config(
        {"entrypoint": "m:f", "sync_every": 4, "rounds": 3, "replicas": 2, "ranks_per_replica": [2, 1]}
    )
    with pytest.raises(ConfigError, match=words):
        check_trainer(trainer_with(**{"world_size": 2, **settings}), config, 2)
    check_trainer(trainer_with(world_size=2, is_fsdp_enabled=True), config, 2)


def test_a_reference_model_that_residuals_would_change_is_refused():
    exact = make_config({"entrypoint": "m:f", "sync_every": 4, "rounds": 3, "adapters": "exact"})
    trainer = trainer_with(beta=0.1, ref_model=None)
    with pytest.raises(ConfigError, match=r"adapters=.exact. with beta=0.1: the reference model .*Pass ref_model="):
        check_trainer(trainer, exact)
    check_trainer(trainer, CONFIG)
    for fine in ({"beta": 0.0}, {"ref_model": "another"}, {"precompute_ref_log_probs": True}):
        check_trainer(trainer_with(**{"beta": 0.1, "ref_model": None, **fine}), exact)


def test_what_has_to_be_otherwise_is_changed_and_logged(caplog):
    caplog.set_level("INFO")
    trainer = trainer_with(steps_per_generation=2, num_iterations=2)
    check_trainer(trainer, CONFIG)
    adapt_trainer(trainer, 12)
    assert rollout_steps(trainer) == 4
    assert (trainer.args.save_strategy, trainer.args.load_best_model_at_end, trainer.args.max_steps) == (
        "no",
        False,
        12,
    )
    assert all(name in caplog.text for name in ("save_strategy", "load_best_model_at_end", "max_steps=-1"))
    trainer.args.max_steps = 20
    adapt_trainer(trainer, 12)
    assert trainer.args.max_steps == 20  # a schedule may be longer than the run
    assert "max_steps=20 is more than the run's 12 inner steps" in caplog.text
