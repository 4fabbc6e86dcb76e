"""Training items are compared with the held-out set before they are trained on."""

import hashlib
from typing import Any

import pytest
import torch
from in_one_process import SmallRun

from diloco_orchestrator.errors import ConfigError, HeldoutItemInTraining, ModelMismatch
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol.process import EXIT_PERMANENT
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.split.content import item_hash, merkle_root
from diloco_orchestrator.split.manifest import HeldoutItem, HeldoutManifest
from diloco_orchestrator.split.split import HeldoutSplit, Side, SplitItem
from replica.context import ReplicaContext
from replica.process.run_attempt import train as train_attempt
from replica.training.consumed_items import ConsumedItems
from replica.training.heldout_scorer import scorer_digest

TEXTS = [f"a text about subject {i}" for i in range(200)]
SPLIT = HeldoutSplit(share=0.1).split([SplitItem(f"id{i}", text) for i, text in enumerate(TEXTS)])
HELD = [text for text, side in zip(TEXTS, SPLIT.sides, strict=True) if side is Side.HELDOUT]
TRAIN = [text for text, side in zip(TEXTS, SPLIT.sides, strict=True) if side is Side.TRAIN]
BATCHES = [TRAIN[i : i + 4] for i in range(0, 160, 4)]


def score(model: torch.nn.Module, items: Any) -> list[float]:
    return [float(model(encoded([item])).square().mean()) for item in items]


def encoded(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text) / 10, text.count("1") / 2, 1.0] for text in texts])


def workload(ctx: ReplicaContext, data: Any = BATCHES, steps: int | None = None, **attach: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach = {"heldout": score, "heldout_items": HELD, "heldout_manifest": SPLIT.manifest, **attach}
    with ctx.attach(model, optimizer, **attach) as replica:
        for taken, batch in enumerate(replica.batches(data), start=1):
            loss = model(encoded(batch["text"] if isinstance(batch, dict) else batch)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item())
            if taken == steps:
                return


# -- what is reported -------------------------------------------------------------------------------------------------


def test_every_manifest_has_count_and_digest_of_the_items_of_its_steps():
    run = SmallRun()
    workload(run.context())
    for round_ in (1, 2):
        consumed = [text for batch in BATCHES[3 * round_ - 3 : 3 * round_] for text in batch]
        digest = hashlib.sha256(b"".join(map(item_hash, consumed))).hexdigest()
        said = run.manifest(round_).consumed
        assert said is not None and (said.items, said.digest) == (12, digest)
    final_evaluation = run.manifest(3).consumed
    assert final_evaluation is not None and final_evaluation.items == 0
    assert verify_run(run.store).agrees


def test_a_restarted_attempt_counts_no_item_twice():
    run, undisturbed = SmallRun(), SmallRun()
    workload(run.context(), steps=4)  # one step into round 2
    workload(run.context())
    workload(undisturbed.context())
    assert [run.manifest(r).consumed for r in (1, 2)] == [undisturbed.manifest(r).consumed for r in (1, 2)]


def test_the_root_is_in_the_start_and_in_every_verdict():
    run = SmallRun()
    workload(run.context())
    start = RunLog(run.store).start()
    assert start is not None and start.record.heldout is not None
    assert start.record.heldout.root == SPLIT.manifest.root == merkle_root(map(item_hash, HELD))
    assert start.record.heldout.scorer == scorer_digest(score)
    assert {c.verdict.heldout_root for c in run.commits() if c.verdict} == {SPLIT.manifest.root}


def test_without_a_manifest_the_held_out_items_themselves_are_compared():
    def of_batch(batch: list[str]) -> list[str]:
        return batch

    run = SmallRun()
    workload(run.context(), heldout_manifest=None, items_of=of_batch)
    assert run.manifest(1).consumed is not None
    plain = SmallRun()
    workload(plain.context(), heldout_manifest=None)
    assert plain.manifest(1).consumed is None
    with pytest.raises(HeldoutItemInTraining, match="held-out item 'item 3'"):
        workload(SmallRun().context(), [*BATCHES[:2], [HELD[3]]], heldout_manifest=None, items_of=of_batch)


def test_a_loop_that_owns_its_batches_compares_them_by_checked():
    def attempt(run: SmallRun, batches: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"heldout": score, "heldout_items": HELD, "heldout_manifest": SPLIT.manifest}
        with run.context().attach(model, optimizer, **given) as replica:
            assert replica.compares_items
            for batch in batches:
                assert replica.checked(batch) is batch
                optimizer.step()
                if not replica.step(loss=1.0):
                    break

    run, pulled = SmallRun(), SmallRun()
    attempt(run, BATCHES)
    workload(pulled.context())
    assert [run.manifest(r).consumed for r in (1, 2, 3)] == [pulled.manifest(r).consumed for r in (1, 2, 3)]
    with pytest.raises(HeldoutItemInTraining, match="held-out item"):
        attempt(SmallRun(), [*BATCHES[:2], [HELD[3]]])


# -- refusing ---------------------------------------------------------------------------------------------------------


def test_a_held_out_item_in_training_stops_the_replica_before_its_step_for_good_and_names_its_id():
    run, taken = SmallRun(), []
    tainted = [*BATCHES[:4], [TRAIN[0], f"{HELD[2].upper()}.".replace(" ", "\n ")]]

    def data() -> Any:
        for batch in tainted:
            taken.append(batch)
            yield batch

    class Again:
        def __iter__(self) -> Any:
            return data()

    ending = train_attempt(run.context()._attempt, lambda _: lambda ctx: workload(ctx, Again()))
    name = f"id{TEXTS.index(HELD[2])}"
    assert ending.code == EXIT_PERMANENT and ending.reason == f"held-out item '{name}' in training"
    assert ending.error is not None and f"held-out item '{name}'" in ending.error and len(taken) == 5
    assert [c.round for c in run.commits()] == [1]  # the round with that batch was not published


def test_what_a_split_has_excluded_is_refused_too():
    near = HeldoutItem(hash=item_hash(HELD[0] + " too").hex(), id="near")
    manifest = SPLIT.manifest.model_copy(update={"excluded": (near,)})
    with pytest.raises(HeldoutItemInTraining) as error:
        ConsumedItems(manifest, None).add([HELD[0] + " too"])
    assert error.value.item == "near"


def test_declared_items_are_compared_beside_those_of_the_batch():
    def declares(ctx: ReplicaContext, items: list[str]) -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with ctx.attach(model, optimizer, heldout_manifest=SPLIT.manifest) as replica:
            for _ in replica.batches(BATCHES):
                replica.declare(items)
                optimizer.step()

    run = SmallRun()
    declares(run.context(), TRAIN[:2])
    said = run.manifest(1).consumed
    assert said is not None and said.items == 3 * (4 + 2)
    with pytest.raises(HeldoutItemInTraining, match=r"No step was taken on it\. Remove it"):
        declares(SmallRun().context(), HELD[:1])


@pytest.mark.parametrize(
    "batch",
    [
        HELD[0],
        [HELD[0]],
        {"text": [TRAIN[0], HELD[0]]},
        {"text": HELD[0], "label": 1},
        [{"text": HELD[0]}],
        (TRAIN[0], (HELD[0],)),
    ],
)
def test_items_are_found_in_the_usual_forms_of_batches(batch: Any):
    fields = {"text_field": "text"}
    manifest = HeldoutSplit(share=0.1, fields=fields).split([SplitItem(t, t) for t in TEXTS]).manifest
    with pytest.raises(HeldoutItemInTraining):
        ConsumedItems(manifest, None).checked(batch)


def test_rows_of_arrays_are_items():
    windows = torch.arange(40).view(10, 4)
    items = ConsumedItems(HeldoutManifest.of(list(windows[:3])), None, list(windows[:3]))
    assert items.checked(windows[5:]) is not None and items.take().items == 5
    with pytest.raises(HeldoutItemInTraining, match="'item 1'"):
        items.checked(windows[1:5])


# -- the proof that refusing works ------------------------------------------------------------------------------------


def test_batches_that_could_never_be_refused_are_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"an item of the kind array, the held-out items are text: they could never"):
        workload(SmallRun().context(), [torch.zeros(2, 3)])
    with pytest.raises(ConfigError, match=r"declares no item.*items_of must return"):
        workload(SmallRun().context(), items_of=lambda batch: [])


class _NeverFound(HeldoutManifest):
    """A manifest whose forbidden items are lost: a fault that the planted item must reveal."""

    def forbidden(self) -> dict[bytes, str]:
        return {}


def test_a_planted_item_that_is_not_refused_stops_the_run():
    broken = _NeverFound(**dict(SPLIT.manifest))
    with pytest.raises(ConfigError, match="a planted held-out item was not refused"):
        ConsumedItems(broken, None, HELD)

    class Forgetful(ConsumedItems):
        def _compared(self, items: Any, forbidden: Any) -> list[bytes]:
            return [item_hash(item) for item in items]

    with pytest.raises(ConfigError, match="a planted held-out item was not refused"):
        Forgetful(SPLIT.manifest, None).checked(BATCHES[0])


def test_scored_items_outside_the_manifest_and_items_of_without_items_are_refused():
    with pytest.raises(ConfigError, match=r"item 0 of heldout_items is not in the held-out manifest"):
        workload(SmallRun().context(), heldout_items=TRAIN[:3])
    with pytest.raises(ConfigError, match="items_of was given with no held-out item"):
        workload(SmallRun().context(), heldout=None, heldout_manifest=None, heldout_items=[], items_of=list)
    model = torch.nn.Linear(3, 1)
    replica = SmallRun().context().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with replica, pytest.raises(ConfigError, match="declare was called with nothing to compare with"):
        replica.declare(["a"])


# -- the scorer -------------------------------------------------------------------------------------------------------


def test_a_replica_with_another_scorer_is_refused():
    def other(model: torch.nn.Module, items: Any) -> list[float]:
        return [0.0 for _ in items]

    run = SmallRun()
    workload(run.context(), steps=1)
    with pytest.raises(
        ModelMismatch, match=rf"scorer {(scorer_digest(other) or '')[:12]}\).* score by the same function"
    ):
        workload(run.context(), heldout=other)


def test_a_scorers_digest_is_that_of_its_source_also_of_partials_and_objects():
    import functools

    class Scorer:
        def __call__(self, model: Any, items: Any) -> list[float]:
            return [1.0 for _ in items]

    assert scorer_digest(functools.partial(score)) == scorer_digest(score) != scorer_digest(Scorer())
    assert scorer_digest(Scorer()) == scorer_digest(Scorer()) is not None
    namespace: dict[str, Any] = {}
    exec("def typed(model, items): return [0.0 for _ in items]", namespace)
    assert scorer_digest(namespace["typed"]) is None
