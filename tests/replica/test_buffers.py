"""Buffers, each replica's own, with one rule for those of a base; and frozen tensors, the same in every replica."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from protocol_fleet import MODEL, Fleet, answer, close, delta, report, together
from safetensors.torch import load
from sessions import Counted, context_of

from diloco_orchestrator.errors import ModelMismatch
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.layout import ModelFiles, write_snapshot
from diloco_orchestrator.snapshots.model_tensors import LiveBuffers, Untrained, digest_of
from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot

MEAN, COUNT = "1.running_mean", "1.num_batches_tracked"


pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """The process is gone."""


def normalised(seed: int = 0) -> torch.nn.Module:
    """A model with BatchNorm."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


def train(fleet: Fleet, replica_id: int = 0, until: int | None = None, **attach: Any) -> torch.nn.Module:
    """One attempt; killed before batch `until`."""
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with context_of(fleet, replica_id).attach(model, optimizer, **attach) as session:
        for batch in session.batches(Counted()):
            if batch == until:
                raise Killed
            optimizer.zero_grad()
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * replica_id + batch))
            model(inputs).square().sum().backward()
            optimizer.step()
            session.observe(loss=1.0, tokens=4)
    return model


def manifest(fleet: Fleet, round_: int, replica_id: int = 0) -> Contribution:
    key = keys.contribution(round_, replica_id)
    return Contribution.from_bytes(fleet.store.get(key), key)


def in_snapshot(fleet: Fleet, round_: int) -> dict[str, torch.Tensor]:
    return load(fleet.store.get(keys.snapshot(round_, MODEL)))


def lone(**settings: Any) -> Fleet:
    return Fleet(replicas=1, rounds=3, sync_every=4, guard="off", **settings)


def test_a_restarted_replica_goes_on_with_its_buffers_and_the_last_snapshot_has_them():
    undisturbed, killed = lone(), lone()
    train(undisturbed)
    for until in (6, 9):
        with pytest.raises(Killed):
            train(killed, until=until)
    train(killed)
    names = MODEL, "outer.safetensors"
    ours, theirs = ([fleet.store.get(keys.snapshot(3, name)) for name in names] for fleet in (killed, undisturbed))
    assert ours == theirs
    assert in_snapshot(killed, 3)[COUNT] == 12
    assert verify_run(killed.store).agrees


def test_a_replica_whose_buffers_are_gone_goes_on_with_those_of_the_base():
    fleet = lone(snapshot_every=1)
    with pytest.raises(Killed):
        train(fleet, until=9)
    fleet.store.delete(keys.buffers(0, 2, 1))
    model = normalised()
    with context_of(fleet, 0).attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert model.get_buffer(COUNT) == 0  # nobody's can be read: the first ones


def with_buffers(**values: float) -> Any:
    tensors = {name.replace("_", ".", 1): torch.full((3,), value) for name, value in values.items()}
    return report().__class__(**{**vars(report()), "buffers": tensors})


def normalised_fleet(**settings: Any) -> tuple[Fleet, list[Any]]:
    fleet = Fleet(replicas=2, rounds=9, snapshot_every=2, **settings)
    return fleet, [fleet.join(replica_id, model=normalised()) for replica_id in range(2)]


def contribute(participants: Iterable[Any], means: list[float]) -> None:
    def take_part(participant: Any, mean: float) -> None:
        numel = participant.base.numel(participant.open.names)
        pseudo_gradient = delta(0.0).__class__([torch.full((numel,), mean)])
        participant._contributor.contribute_delta(pseudo_gradient, with_buffers(**{"1_running_mean": mean}))
        close(participant)

    together([lambda p=p, m=m: take_part(p, m) for p, m in zip(participants, means, strict=True)])  # type: ignore[misc]


def test_a_snapshot_holds_the_buffers_of_the_lowest_replica_averaged_whoever_writes_it():
    fleet, participants = normalised_fleet()
    contribute(participants, [1.0, 5.0])
    contribute(participants, [2.0, 6.0])
    participants[0].write_snapshot_if_due()
    participants[0].leave()
    found = in_snapshot(fleet, 2)
    assert found[MEAN].tolist() == [2.0] * 3 and found[COUNT] == 0
    by_replica = fleet.store.get(keys.snapshot(2, MODEL))
    for info in list(fleet.store.list(keys.snapshot(2, ""))):
        fleet.store.delete(info.key)
    write_rebuilt_snapshot(RunLog(fleet.store), 2, Stamp("test", lambda: 0.0))
    assert fleet.store.get(keys.snapshot(2, MODEL)) == by_replica
    fleet.store.put(keys.buffers(0, 1, 1), b"damaged")
    write_rebuilt_snapshot(RunLog(fleet.store), 1, Stamp("test", lambda: 0.0))
    assert in_snapshot(fleet, 1)[MEAN].tolist() == [5.0] * 3


def test_buffers_of_a_stranger_are_no_bases_while_a_launched_replica_is_averaged():
    """They are taken as they are, and of a shape that the model cannot use each replica died that scored the base."""
    fleet = Fleet(replicas=3, rounds=9, snapshot_every=2, invited=[0], quorum="all", aggregate="mean")
    participants = [fleet.join(replica_id, model=normalised()) for replica_id in (1, 2, 0)]
    for _ in range(2):
        contribute(participants, [1.0, 5.0, 7.0])
    participants[0].write_snapshot_if_due()
    participants[0].leave()
    assert in_snapshot(fleet, 2)[MEAN].tolist() == [1.0] * 3
    assert verify_run(fleet.store).agrees


def test_verify_derives_the_buffers_of_snapshots_again():
    fleet, participants = normalised_fleet()
    contribute(participants, [1.0, 5.0])
    contribute(participants, [2.0, 6.0])
    participants[0].write_snapshot_if_due()
    participants[0].leave()
    assert verify_run(fleet.store).agrees
    for info in list(fleet.store.list(keys.snapshot(2, ""))):
        fleet.store.delete(info.key)
    one = participants[0]
    files = ModelFiles.of(normalised()).with_buffers({MEAN: torch.full((3,), 6.0)})
    write_snapshot(fleet.store, 2, one.base, one.digest, files, Stamp("test", lambda: 0.0), by=0)
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.snapshot(2, MODEL) and repr(MEAN) in found.words


def test_a_base_is_scored_with_its_own_buffers_by_every_replica():
    fleet = Fleet(replicas=2, rounds=2, sync_every=4, quorum="all")

    def score(model: torch.nn.Module, items: Iterable[Any]) -> list[float]:
        return [float(model.get_buffer(MEAN).sum()) for _ in items]

    attach = {"heldout": score, "heldout_items": list(range(8)), "in_loop": "reward"}
    models = together([lambda i=i: train(fleet, i, **attach) for i in range(2)])  # type: ignore[misc]
    scores = [manifest(fleet, 3, replica_id).scores[0].mean for replica_id in range(2)]
    assert scores[0] == scores[1] == float(in_snapshot(fleet, 2)[MEAN].sum())
    assert not torch.equal(models[0].get_buffer(MEAN), models[1].get_buffer(MEAN))  # trained with one's own


def test_a_buffer_with_nan_is_not_published_and_comes_back():
    fleet = lone()

    def poison(model: torch.nn.Module, batch: int) -> None:
        if batch == 7:
            model.get_buffer(MEAN).fill_(float("nan"))

    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with context_of(fleet, 0).attach(model, optimizer) as session:
        for batch in session.batches(Counted()):
            poison(model, batch)
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
    assert manifest(fleet, 2).kind == "abstention" and MEAN in manifest(fleet, 2).reason
    assert all(torch.isfinite(each).all() for each in in_snapshot(fleet, RunLog(fleet.store).snapshots()[-1]).values())


def test_buffers_that_do_not_change_or_are_not_persistent_are_not_published():
    fleet = lone()
    model = torch.nn.Linear(3, 3)
    model.register_buffer("mask", torch.tensor([float("nan"), -0.0]))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with context_of(fleet, 0).attach(model, optimizer) as session:
        for _ in session.batches(Counted()):
            model.scratch.add_(1.0)
            optimizer.step()
    assert all(manifest(fleet, round_).buffers is None for round_ in (1, 2, 3))
    assert not [info.key for info in fleet.store.list(keys.states(0)) if "buffers" in info.key]
    assert sorted(in_snapshot(fleet, 3)) == ["bias", "mask", "weight"]


def test_a_replica_with_other_first_buffers_takes_those_of_the_first_snapshot():
    fleet = Fleet(replicas=2)
    fleet.join(0, model=normalised())
    other = normalised()
    other.get_buffer(MEAN).fill_(3.0)
    fleet.join(1, model=other)
    assert other.get_buffer(MEAN).tolist() == [0.0] * 3


# -- frozen tensors ---------------------------------------------------------------------------------------------------


def half_frozen(value: float = 1.0) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
        parameter.fill_(value)
    return model


def test_a_replica_over_another_frozen_base_is_refused():
    fleet = Fleet(replicas=2)
    fleet.join(0, model=half_frozen())
    frozen = fleet.start().frozen
    assert frozen is not None and (frozen.tensors, frozen.size) == (2, 48)
    fleet.join(1, model=half_frozen())
    with pytest.raises(ModelMismatch, match=r"replica 1 has 2 frozen tensors .* Load the same model"):
        fleet.join(1, model=half_frozen(1.5))


def test_a_model_without_frozen_tensors_and_buffers_has_no_digests():
    fleet = Fleet(replicas=1)
    answer(fleet.join(0), 1.0)
    start = fleet.start()
    assert (start.frozen, start.buffers, start.adapter) == (None, None, None)


def test_a_digest_covers_names_dtypes_shapes_and_bytes_and_a_tied_tensor_counts_once():
    one = {"w": torch.zeros(2, 3)}
    others = [{"v": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2)}, {"w": torch.zeros(2, 3, dtype=torch.int32)}]
    assert len({digest_of(each) for each in [one, *others, {"w": torch.full((2, 3), -0.0)}]}) == 5
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    tied.requires_grad_(False)
    untrained = Untrained(tied, set())
    assert sorted(untrained.frozen) == ["a.bias", "a.weight", "b.bias"] and untrained.tied == {"b.weight": "a.weight"}


def test_a_buffer_that_grows_is_restored():
    model = torch.nn.Module()
    model.register_buffer("queue", torch.zeros(2))
    live = LiveBuffers(model, ["queue"])
    model.queue = torch.ones(5)
    changed = live.changed()
    live.load({})
    assert model.get_buffer("queue").tolist() == [0.0, 0.0]
    live.load(changed)
    assert model.get_buffer("queue").tolist() == [1.0] * 5


def test_retention_treats_buffers_as_the_state_of_their_round():
    assert keys.parse_state(keys.buffers(3, 7, 2)) == keys.parse_state(keys.state(3, 7, 2)) == (3, 7, 2)
