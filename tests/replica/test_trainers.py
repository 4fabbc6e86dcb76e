"""Trainers of transformers and TRL as replicas: real ones, over tiny models. Needs the extra `trl`."""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra [trl] is not installed")
pytest.importorskip("peft", reason="the extra [trl] is not installed")

import tiny_trainers as tiny
import torch
from page_blocks import blocks
from protocol_fleet import Fleet
from real_runs import FAST
from sessions import context_of
from stored_snapshots import read_tensors
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco_orchestrator import (
    CollapseStopError,
    ConfigError,
    HeldOutGuard,
    HeldOutGuardCallback,
    HeldoutItemInTraining,
    KLProbe,
    LocalProcessExecutor,
    ReplicaCallback,
    RunFailed,
    RunReader,
    WorkloadEndedEarly,
    launch,
    open_store,
    train_as_replica,
    verify,
)
from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


ALIKE = {"outer": {"lr": 1.0, "momentum": 0.0, "nesterov": False}}  # the base is what a lone replica trained


class Killed(BaseException):
    """The process is gone."""


class Dies(TrainerCallback):
    """Kills the attempt before the step after this one."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            raise Killed


def fleet_of(**settings: Any) -> Fleet:
    return Fleet(**{"replicas": 1, "rounds": 3, "sync_every": 4, **settings})


def attempt(
    fleet: Fleet, make: Callable[[str], Any], dies_after: int | None = None, context: Any = None, **options: Any
) -> Any:
    """An attempt in this process, of the only replica unless it has another context; the trained model."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = make(folder)
        if dies_after is not None:
            trainer.add_callback(Dies(dies_after))
        if "heldout" not in options:
            options |= {"heldout": tiny.heldout, "heldout_items": list(range(tiny.ITEMS))}
        train_as_replica(trainer, context or context_of(fleet, 0, SystemClock()), **options)
        return trainer.model


def digests(fleet: Fleet) -> list[str | None]:
    return [commit.base_digest for commit in fleet.commits()]


def manifests(fleet: Fleet) -> list[Contribution]:
    found = [keys.contribution(commit.round, 0) for commit in fleet.commits()]
    return [Contribution.from_bytes(fleet.store.get(key), key) for key in found]


def launched(tmp_path: Path, entrypoint: str, name: str = "run", **settings: Any) -> Any:
    folder = tmp_path / name
    folder.mkdir()
    settings = {"replicas": 2, "rounds": 3, "sync_every": 4, **FAST, **settings}
    args = {"folder": str(folder), **settings.pop("args", {})}
    executor = LocalProcessExecutor(str(folder / "executor"))
    run = launch(f"tiny_trainers:{entrypoint}", store=str(folder / "bucket"), executor=executor, args=args, **settings)
    return run.wait(), RunReader(open_store(str(folder / "bucket")))


# -- runs of two replicas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_two_replicas_end_with_one_model(kind: str, tmp_path: Path):
    result, reader = launched(tmp_path, "train", args={"kind": kind})
    assert result.status == "completed"
    commits = reader.commits()
    assert [c.applied for c in commits] == [True, True, True, False]
    for commit in commits:
        said = [keys.contribution(commit.round, each) for each in (0, 1)]
        claims = {Contribution.from_bytes(reader.store.get(key), key).base_digest for key in said}
        assert claims == {commit.base_digest}
    assert all(len(row.contributors) == 2 for row in reader.rows()[:3])
    assert verify(str(tmp_path / "run" / "bucket")).agrees


def test_killed_by_the_system_the_run_ends_with_the_undisturbed_model(tmp_path: Path):
    models = []
    for name, killed in (("undisturbed", {}), ("killed", {"killed_after": 6})):
        result, reader = launched(tmp_path, "train", name, args={"kind": "sft", **killed}, replicas=2)
        assert result.status == "completed"
        assert reader.attempts.all_numbers()[1] == ([1, 2] if killed else [1])
        models.append(reader.store.get(keys.snapshot(3, "model.safetensors")))
    assert models[0] == models[1]


@pytest.mark.parametrize("kind", [kind for kind in tiny.ORDERS if kind != "seeded by replica"])
def test_replicas_share_no_item_of_an_epoch_and_one_that_is_killed_changes_no_bit(kind: str, tmp_path: Path):
    """Six steps of two replicas, two items each, are an epoch of 24; then three of the next one."""
    models = []
    for name, killed in (("undisturbed", {}), ("killed", {"killed_after": 4})):
        result, reader = launched(
            tmp_path, "train_dealt", name, args={"kind": kind, **killed}, sync_every=3, guard={"rule": "off"}
        )
        assert result.status == "completed"
        assert reader.attempts.all_numbers()[1] == ([1, 2] if killed else [1])
        models.append(reader.store.get(keys.snapshot(3, "model.safetensors")))
        epoch = [set((tmp_path / name / f"items-{i}.txt").read_text().split()[:12]) for i in (0, 1)]
        if not killed:
            assert epoch[0] | epoch[1] == {str(i) for i in range(24)} and not epoch[0] & epoch[1]
    assert models[0] == models[1]


def test_ranks_of_unequal_replicas_share_no_item_of_an_epoch(tmp_path: Path):
    """Four steps of three ranks, two items each, are an epoch of 24."""
    settings = {"rounds": 1, "sync_every": 4, "guard": {"rule": "off"}}
    result, _ = launched(tmp_path, "train_dealt", args={"kind": "seedable"}, ranks_per_replica=[2, 1], **settings)
    items = [(tmp_path / "run" / f"items-{replica_id}.txt").read_text().split() for replica_id in (0, 1)]
    assert [len(each) for each in items] == [16, 8]
    assert sorted(items[0] + items[1], key=int) == [str(i) for i in range(24)]
    assert result.status == "completed"


def test_a_sharded_trainer_of_which_a_rank_is_killed_ends_with_the_same_bits(tmp_path: Path):
    found = []
    for name, killed in (("undisturbed", {}), ("killed", {"killed_after": 6})):
        args = {"kind": "trainer", "sharded": True, **killed}
        result, reader = launched(tmp_path, "train", name, args=args, ranks_per_replica=[1, 2])
        assert reader.attempts.all_numbers()[1] == ([1, 2] if killed else [1])
        assert "DTensor" in (tmp_path / name / "kinds-1.1").read_text()
        found.append([commit.base_digest for commit in reader.commits()])
        per_step = [row.tokens / 4 for row in result.metrics[:-1]]
        assert all(2 * 2 * 11 < each <= 3 * 2 * 11 for each in per_step)  # of three ranks; the last batch has one row
    assert found[0] == found[1]


def test_orders_that_are_seeded_by_replica_are_refused_with_the_setting(tmp_path: Path):
    with pytest.raises(RunFailed) as failed:
        launched(tmp_path, "train_dealt", args={"kind": "seeded by replica"}, sync_every=3, guard={"rule": "off"})
    assert "draws another order of its training data than replica" in str(failed.value)
    assert "seeds (TrainingArguments: seed, data_seed) the same" in str(failed.value)
    assert [c.applied for c in RunReader(open_store(str(tmp_path / "run" / "bucket"))).commits()] == [True, False]


def test_only_adapters_travel_and_the_base_model_stays(tmp_path: Path):
    result, reader = launched(tmp_path, "train_lora")
    assert result.status == "completed"
    start = reader.log.start()
    assert start is not None
    assert all("lora_" in each.name for each in start.record.parameters)
    count = sum(torch.Size(each.shape).numel() for each in start.record.parameters)
    assert count == 2 * 2 * (16 * 2 + 2 * 16)  # layers, projections, r=2 of 16 to 16
    key = keys.contribution(1, 0)
    payload = Contribution.from_bytes(reader.store.get(key), key).payload
    assert payload is not None and payload.numel == count
    assert sum(each.size for each in payload.shards) <= 4 * count + 64
    assert start.record.frozen is not None and start.record.frozen.tensors == 21
    first, last = (read_tensors(reader.store, keys.snapshot(r, "adapter_model.safetensors")) for r in (0, 3))
    assert sorted(first) == sorted(each.name.replace(".default", "") for each in start.record.parameters)
    assert all(not torch.equal(first[name], last[name]) for name in first)
    assert verify(str(tmp_path / "run" / "bucket")).agrees


def test_a_learned_prompt_that_two_ranks_shard_is_an_adapter_in_snapshots(tmp_path: Path):
    settings = {"replicas": 1, "rounds": 1, "ranks_per_replica": 2, "args": {"sharded": True}}
    result, reader = launched(tmp_path, "train_prompt", **settings)
    assert result.status == "completed" and verify(str(tmp_path / "run" / "bucket")).agrees
    first, last = (read_tensors(reader.store, keys.snapshot(r, "adapter_model.safetensors")) for r in (0, 1))
    assert first.keys() == last.keys() == {"prompt_embeddings"}
    assert not torch.equal(first["prompt_embeddings"], last["prompt_embeddings"])


@pytest.mark.parametrize("adapters", ["mean", "exact"])
@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"lora_alpha": 8}, "has lora_alpha=[48], that of the run|has the scaling [24], the run's"),
        ({"use_rslora": True}, "has use_rslora=(True|False), that of the run|has the scaling 2"),
        ({"r": 4}, r"ModelMismatch: .*lora_A.*\[[24], 16\]"),
    ],
)
def test_an_adapter_of_another_scaling_or_rank_is_refused(adapters: str, own: Any, words: str, tmp_path: Path):
    with pytest.raises(RunFailed, match=words):
        launched(tmp_path, "train_lora", args={"adapter_of_replica_1": own}, adapters=adapters)


TRIPWIRE = {"rule": "heldout", "max_proxy_real_gap": 0.1, "min_steps": 5}


def test_a_reward_hack_halts_both_replicas_at_one_round(tmp_path: Path):
    with pytest.raises(CollapseStopError):
        launched(tmp_path, "train_grpo", args={"wanted": "w5"}, rounds=30, guard=TRIPWIRE)
    reader = RunReader(open_store(str(tmp_path / "run" / "bucket")))
    last = reader.commits()[-1]
    assert last.stop == "halted" and not last.applied and last.round <= 15
    assert [reader.attempts.exit(each, 1).round for each in (0, 1)] == [last.round] * 2  # type: ignore[union-attr]
    rewards = [row.reward for row in reader.rows()]
    assert rewards[-1] > rewards[0] + 0.1  # type: ignore[operator]
    # The model to go back to is good, though the newest one is spoilt.
    scores = {round_: reader.heldout_of_base(round_) for round_ in range(last.round)}
    best, advised = max(filter(None, scores.values())), reader.model()
    assert advised.after_verdict and advised.heldout == scores[advised.round]
    assert advised.heldout >= 0.9 * best > 0.9 * 2 * scores[last.round - 1]  # type: ignore[operator]


def test_its_healthy_twin_is_not_halted(tmp_path: Path):
    result, reader = launched(tmp_path, "train_grpo", args={"wanted": "w3"}, rounds=30, guard=TRIPWIRE)
    assert result.status == "completed" and len(reader.commits()) == 31


# -- exactness --------------------------------------------------------------------------------------------------------


def even_rows(folder: str, **changes: Any) -> Any:
    return tiny.plain(folder, dataset=tiny.Rows(36), **changes)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(even_rows, id="trainer"),
        pytest.param(lambda f, **c: even_rows(f, gradient_accumulation_steps=2, **c), id="accumulation"),
        pytest.param(lambda f, **c: tiny.plain(f, dataset=tiny.Stream(36), **c), id="iterable"),
        pytest.param(lambda f, **c: even_rows(f, model=tiny.llama(tie_word_embeddings=True), **c), id="tied weights"),
        pytest.param(lambda f, **c: even_rows(f, gradient_checkpointing=True, **c), id="checkpointing"),
        pytest.param(lambda f, **c: even_rows(f, dataloader_num_workers=2, **c), id="workers"),
        pytest.param(tiny.sft, id="sft"),
        pytest.param(tiny.dpo, id="dpo"),
    ],
)
def test_a_lone_replica_trains_what_the_trainer_trains(make: Any, tmp_path: Path):
    torch.manual_seed(0)
    trainer = make(str(tmp_path), max_steps=20, save_strategy="no")
    trainer.train()
    model = attempt(fleet_of(rounds=5, **ALIKE), lambda folder: make(folder))
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter, model.get_parameter(name), rtol=0, atol=1e-6), name


class NoisyCollator:
    """Draws random numbers for every batch, as masking collators do."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.stack([row["input_ids"] for row in rows])
        noisy = torch.where(torch.rand(ids.shape) < 0.2, torch.full_like(ids, 5), ids)
        return {"input_ids": noisy, "labels": ids}


def noisy(folder: str) -> Any:
    model = tiny.llama(attention_dropout=0.1)
    trainer = tiny.plain(folder, model=model, dataset=tiny.Rows(11), gradient_accumulation_steps=2)
    trainer.data_collator = NoisyCollator()
    return trainer


def lora(folder: str) -> Any:
    from peft import LoraConfig

    adapter = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return tiny.sft(folder, peft_config=adapter, gradient_accumulation_steps=2)


class Draws(TrainerCallback):
    """Draws random numbers after the step, as a callback that logs samples of the model does."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        torch.rand(3)


def evaluated(folder: str) -> Any:
    """Evaluates at the end of each round, which draws a seed for the data loader."""
    trainer = tiny.plain(
        folder, model=tiny.llama(attention_dropout=0.1), evaluated=tiny.Rows(6), eval_strategy="steps", eval_steps=4
    )
    trainer.add_callback(Draws())
    return trainer


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        pytest.param(evaluated, (5, 8), id="evaluation and callbacks that draw"),
        pytest.param(noisy, range(1, 12), id="dropout, random collator, accumulation over epochs"),
        pytest.param(lambda f: tiny.plain(f, dataset=tiny.Stream(5)), range(1, 12, 2), id="iterable"),
        pytest.param(
            lambda f: tiny.plain(f, dataset=tiny.Rows(11), dataloader_num_workers=1), (1, 6, 10), id="prefetching"
        ),
        pytest.param(
            lambda f: tiny.plain(f, dataset=tiny.Rows(11), accelerator_config={"use_seedable_sampler": False}),
            (2, 6, 11),
            id="an order from the global generator",
        ),
        pytest.param(lambda f: tiny.plain(f, model=tiny.llama(dtype=torch.bfloat16), bf16=True), (3, 9), id="bf16"),
        pytest.param(lora, (2, 7), id="lora"),
        pytest.param(tiny.sft, (1, 6, 11), id="sft"),
        pytest.param(tiny.dpo, (1, 6, 11), id="dpo"),
        pytest.param(tiny.grpo, (1, 6, 11), id="grpo"),
        pytest.param(
            lambda f: tiny.grpo(f, num_iterations=2, gradient_accumulation_steps=2, per_device_train_batch_size=4),
            (1, 6),
            id="grpo, rollouts used twice",
        ),
    ],
)
def test_killed_at_any_step_the_run_ends_with_the_undisturbed_bits(make: Any, steps: Any):
    undisturbed = fleet_of()
    attempt(undisturbed, make)
    assert len(digests(undisturbed)) == 4
    for step in steps:
        killed = fleet_of()
        with pytest.raises(Killed):
            attempt(killed, make, dies_after=step)
        attempt(killed, make)
        assert digests(killed) == digests(undisturbed), f"killed after step {step}"


def test_scoring_does_not_disturb_training():
    on, off = fleet_of(), fleet_of()
    attempt(on, noisy)
    attempt(off, noisy, heldout=None)
    assert digests(on) == digests(off)


def with_remembered_rates() -> tuple[list[dict[int, float]], Callable[..., Any]]:
    """The learning rate of each step, by attempt; and what makes an attempt's trainer, with a cosine schedule."""
    rates: list[dict[int, float]] = []

    class Remembers(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates[-1][state.global_step] = kwargs["optimizer"].param_groups[0]["lr"]

    def make(folder: str, **changes: Any) -> Any:
        trainer = tiny.plain(folder, lr_scheduler_type="cosine", warmup_steps=3, **changes)
        trainer.add_callback(Remembers())
        rates.append({})
        return trainer

    return rates, make


def test_under_the_default_quorum_the_schedule_goes_on_after_a_restart():
    rates, make = with_remembered_rates()
    attempt(fleet_of(quorum=None), make)
    killed = fleet_of(quorum=None)
    with pytest.raises(Killed):
        attempt(killed, make, dies_after=6)
    assert not list(killed.store.list("replicas/0/state/"))
    attempt(killed, make)
    straight, _, again = rates
    assert sorted(straight) == list(range(12)) and sorted(again) == list(range(4, 12))
    assert again == {step: straight[step] for step in range(4, 12)}


def test_another_learning_rate_of_a_resumed_run_counts_and_follows_the_schedule():
    rates, make = with_remembered_rates()
    attempt(fleet_of(quorum=None), lambda folder: make(folder, learning_rate=6e-3))
    changed = fleet_of(quorum=None)
    with pytest.raises(Killed):
        attempt(changed, make, dies_after=6)
    attempt(changed, lambda folder: make(folder, learning_rate=6e-3))
    wanted, _, again = rates
    assert again == pytest.approx({step: wanted[step] for step in range(4, 12)}) and again[11] == wanted[11]


def test_a_replica_that_missed_rounds_takes_up_the_schedule_where_the_run_is():
    rates, make = with_remembered_rates()
    fleet = fleet_of(replicas=2, quorum=1)
    for replica_id, step in ((0, 9), (1, 8)):  # the first one alone takes two rounds
        with pytest.raises(Killed):
            attempt(fleet, make, dies_after=step, context=context_of(fleet, replica_id))
    alone, late = rates
    assert sorted(alone) == list(range(10)) and late == {8: alone[8]}


def test_the_callback_alone_does_the_same_and_says_that_the_data_is_dealt(caplog: pytest.LogCaptureFixture):
    by_call, by_callback = fleet_of(), fleet_of()
    attempt(by_call, even_rows, heldout=None)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = even_rows(folder)
        trainer.add_callback(ReplicaCallback(trainer, context_of(by_callback, 0, SystemClock())))
        trainer.train()
        assert digests(by_callback) == digests(by_call)
        other = even_rows(folder)
        with caplog.at_level(logging.INFO):
            ReplicaCallback(other, context_of(fleet_of(replicas=2), 1, SystemClock()))
            parts = other.get_train_dataloader()
    assert "dealt over the 2 replicas, batch by batch: this one takes batches 1, 3, ..." in caplog.text
    assert next(parts)["input_ids"].shape == (2, 12)


@pytest.mark.parametrize(("shard", "batches"), [(True, 2), (False, 1)])
def test_epochs_are_passes_of_all_replicas_over_the_data_and_their_number_is_logged(shard: bool, batches: int, caplog):
    seen = []

    class Remembers(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.epoch)

    def make(folder: str) -> Any:
        trainer = tiny.plain(folder, dataset=tiny.Rows(40), logging_steps=4, gradient_accumulation_steps=2)
        trainer.add_callback(Remembers())
        return trainer

    fleet = fleet_of(replicas=2, quorum=1)
    with caplog.at_level(logging.INFO), pytest.raises(Killed):
        attempt(fleet, make, dies_after=9, shard=shard, context=context_of(fleet, 0))
    per_step = 2 * batches / 20  # of 20 batches
    assert seen == [4 * per_step, 8 * per_step]
    whose = "the train dataset" if shard else "this replica's dataset"
    assert f"the run's 12 inner steps are {12 * per_step:.3g} passes over {whose}" in caplog.text


# -- observations -----------------------------------------------------------------------------------------------------


def test_an_inner_step_is_one_observation_whatever_the_accumulation():
    counts = []
    for settings in (
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 16},
    ):
        fleet = fleet_of()
        attempt(fleet, lambda folder, settings=settings: tiny.grpo(folder, **settings))
        counts.append([each.metrics["reward"].count for each in manifests(fleet)[:3]])
    assert counts == [[4, 4, 4]] * 2


def test_the_loss_of_an_accumulated_step_is_the_mean_over_its_items():
    losses = []
    for settings in ({"gradient_accumulation_steps": 4}, {"per_device_train_batch_size": 8}):
        fleet = fleet_of(rounds=1)
        make = lambda folder, settings=settings: tiny.plain(folder, dataset=tiny.Rows(64), **settings)  # noqa: E731
        attempt(fleet, make)
        losses.append(manifests(fleet)[0].metrics["loss"].mean)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0] < 4


def test_a_trainer_that_has_trained_is_refused(tmp_path: Path):
    trainer = tiny.plain(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    with pytest.raises(ConfigError, match="global_step=1 already"):
        train_as_replica(trainer, context_of(fleet_of(), 0))


class StopsEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 6


def test_a_callback_that_stops_training_before_the_runs_end_is_an_error():
    def make(folder: str) -> Any:
        trainer = tiny.plain(folder)
        trainer.add_callback(StopsEarly())
        return trainer

    with pytest.raises(WorkloadEndedEarly, match=r"global_step=6, before the run's 12 inner steps: a callback"):
        attempt(fleet_of(), make)


def test_rounds_that_end_between_generations_are_refused(tmp_path: Path):
    trainer = tiny.grpo(tmp_path, num_iterations=3)
    with pytest.raises(ConfigError, match=r"sync_every=4: .* num_iterations=3 .* a multiple of 3, such as 6"):
        train_as_replica(trainer, context_of(fleet_of(), 0))


# -- what the guard judges by ------------------------------------------------------------------------------------------


def ids_of(inputs: Any) -> list[list[int]]:
    return [row.tolist() for row in inputs["input_ids"]]


def test_items_of_and_a_probe_reach_the_guard_through_a_trainer(tmp_path: Path):
    def forward(model: Any, ids: torch.Tensor) -> Any:
        return model(input_ids=ids[None]).logits[0], torch.ones(len(ids))

    fleet = fleet_of()
    probe = KLProbe([torch.tensor(tiny.sentence(900 + i)) for i in range(2)], forward)
    attempt(fleet, tiny.plain, items_of=ids_of, kl_probe=probe, vault_items=list(range(100, 110)))
    said = manifests(fleet)
    assert [m.consumed.items for m in said if m.consumed] == [8, 8, 8, 0]  # 4 steps of 2 rows; final evaluation
    assert all(m.metrics["kl_to_init"].mean > 0 for m in said[1:])
    start = fleet.start().heldout
    assert start is not None and start.vault is not None and start.vault.items == 10


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_held_out_row_in_a_trainers_data_is_refused_before_its_step(accumulation: int):
    held = tiny.sentence(5)
    fleet = fleet_of()

    def make(folder: str) -> Any:
        return tiny.plain(folder, dataset=tiny.Rows(9), gradient_accumulation_steps=accumulation)

    def score(model: Any, items: Any) -> list[float]:
        return [1.0 for _ in items]

    with pytest.raises(HeldoutItemInTraining, match="item 0"):
        attempt(fleet, make, heldout=score, heldout_items=[held, [1, 2]], items_of=ids_of)


def test_an_argument_that_attach_does_not_have_is_refused_with_the_nearest_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'items_off'.*did you mean 'items_of'"):
        train_as_replica(tiny.plain(tmp_path), context_of(fleet_of(), 0), items_off=ids_of)  # type: ignore[call-arg]


# -- the guard alone --------------------------------------------------------------------------------------------------


def guarded(tmp_path: Path, wanted: str, strict: bool, **settings: Any) -> Any:
    guard = HeldOutGuard(max_proxy_real_gap=0.1, min_steps=5)
    trainer = tiny.grpo(tmp_path, max_steps=40, save_strategy="no", **settings)
    callback = HeldOutGuardCallback(guard, lambda model: tiny.p_of(wanted, model), strict=strict)
    trainer.add_callback(callback)
    return trainer, guard


def test_the_guard_alone_stops_a_hacking_trainer(tmp_path: Path):
    trainer, guard = guarded(tmp_path, "w5", strict=False)
    trainer.train()
    assert guard.should_halt() and trainer.state.global_step < 40
    fires = [each["killswitch/fire"] for each in trainer.state.log_history if "killswitch/fire" in each]
    assert len(fires) == guard.updates == trainer.state.global_step and fires == [0.0] * (len(fires) - 1) + [1.0]
    strict, guard = guarded(tmp_path, "w5", strict=True)
    with pytest.raises(CollapseStopError):
        strict.train()
    assert strict.state.log_history[-1]["killswitch/fire"] == 1.0


def test_the_guard_alone_folds_once_per_logging_step_whatever_the_accumulation(tmp_path: Path):
    settings = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 2}
    trainer, guard = guarded(tmp_path, "w3", strict=True, **settings)
    trainer.args.max_steps = 12
    trainer.train()
    assert guard.updates == 6 and not guard.should_halt()


def test_the_guard_alone_asks_for_no_score_where_nothing_was_logged_to_compare_it_with():
    asked: list[int] = []
    callback = HeldOutGuardCallback(HeldOutGuard(), lambda model: asked.append(1) or 0.5)
    args, state, control = TrainingArguments("unused"), TrainerState(global_step=3), TrainerControl()
    for logs in ({"learning_rate": 0.1}, {"eval_loss": 2.0}):
        callback.on_log(args, state, control, logs=logs, model=torch.nn.Linear(1, 1))
    assert asked == [] and callback.guard.updates == 0
    callback.on_log(args, state, control, logs={"reward": 0.5}, model=torch.nn.Linear(1, 1))
    assert asked == [1] and callback.guard.updates == 1


def test_a_guard_without_a_score_is_refused():
    with pytest.raises(ValueError, match="heldout_eval_fn"):
        HeldOutGuardCallback(HeldOutGuard())


# -- the documentation ------------------------------------------------------------------------------------------------


def test_the_program_of_the_documentation_runs(tmp_path: Path):
    root = Path(__file__).parent.parent.parent
    (tmp_path / "sft_run.py").write_text(blocks(root / "docs/recipes/trainers.md", "python")[0])
    environ = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "sft_run.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("held-out loss: ")
