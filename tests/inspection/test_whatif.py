"""`whatif`: the bits of a run that decided so, from the bucket of one that did not; and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import diloco_here
from decided_runs import (
    STAMP,
    ReadOnly,
    asked,
    buffer_score,
    claimed,
    collect,
    contribution,
    filled,
    normalised,
    play_round,
    played,
    train,
    train_adapters,
    train_normalised,
    trained,
)
from in_one_process import SmallRun
from protocol_fleet import BY_HAND, Fleet, play, report
from tiny_workloads import heldout, mlp

from diloco_orchestrator import whatif
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.inspection.verify.loading import OwnCode
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Halt, Origin, Score
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.context import ReplicaContext

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def usual() -> Fleet:
    return played()


# -- the bits of a run that decided so --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_without_a_replica_the_base_is_that_of_a_run_in_which_it_was_not_averaged(codec):
    usual, other = played(1, codec=codec), played(1, {(1, 3)}, codec=codec)
    found = asked(usual.store, 1, without=[3])
    assert (found.digest, found.digest_as_it_was) == (claimed(other, 1), claimed(usual, 1))
    assert found.digest != found.digest_as_it_was and found.difference > 0


def test_a_decision_in_one_round_alone_and_the_rounds_after_it_as_they_were(usual):
    other = played(absent={(2, 0)})
    assert asked(usual.store, 2, without=[0]).digest == claimed(other, 2)
    found = asked(usual.store, 2, {"until": 3}, without=[0])
    assert (found.digest, found.rounds, found.after) == (claimed(other, 3), [2], 3)


def test_onward_is_every_round_to_the_newest_base(usual):
    settings = {"lr": 0.4, "momentum": 0.5, "nesterov": False}
    other = played(absent={(2, 1), (3, 1)})
    assert asked(usual.store, 2, {"onward": True}, without=[1]).digest == claimed(other, 3)
    for until in (2, 3):
        found = asked(usual.store, 1, {"onward": True, "until": until}, outer=settings)
        assert found.digest == claimed(played(outer=settings), until) and found.rounds == list(range(1, until + 1))


def test_options_combine(usual):
    other = played(1, {(1, 0), (1, 2)}, outer={"lr": 0.4})
    found = asked(usual.store, 1, without=[2, 0], outer={"lr": 0.4})
    assert found.digest == claimed(other, 1) and found.decision == "without replica 0 and 2, outer.lr=0.4"


@pytest.mark.parametrize("settings", [{"aggregate": "median"}, {"aggregate": "trimmed_mean"}, {"clip": "off"}])
def test_another_average_and_no_clipping(settings):
    usual, other = played(1, loud=2), played(1, {(1, 3)}, loud=2, **settings)
    assert usual.commits()[0].clipped[0].replica_id == 2
    found = asked(usual.store, 1, without=[3], **settings)
    assert found.digest == claimed(other, 1) != asked(usual.store, 1, without=[3]).digest


def test_the_mean_of_those_that_agree():
    usual, other = played(1, loud=2), played(1, loud=2, aggregate="agreeing_mean")
    found = asked(usual.store, 1, aggregate="agreeing_mean")
    assert found.digest == claimed(other, 1) != claimed(usual, 1)


def test_the_mean_over_those_that_sent_an_element():
    usual, other = (played(1, codec="topk64", outer=outer) for outer in ({"lr": 1.0, "momentum": 0.0}, "sparse"))
    found = asked(usual.store, 1, aggregate="contributors_mean")
    assert found.digest == claimed(other, 1) != claimed(usual, 1)
    assert verify_run(other.store).disagreement is None


def test_the_weight_of_a_clipped_contribution_follows_from_those_that_are_left():
    """Among the other three the median norm is another one."""
    usual, other = played(1, loud=2), played(1, {(1, 1)}, loud=2)
    assert asked(usual.store, 1, without=[1]).digest == claimed(other, 1)


def test_a_later_round_with_the_settings_that_a_resume_gave_it():
    def resumed(**change: Any) -> Fleet:
        fleet = Fleet(replicas=4, rounds=6, quorum=2, guard="off")
        participants = fleet.join_all()
        play_round(participants)
        fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason="x").to_bytes())
        play_round(participants)
        log = RunLog(fleet.store)
        begin_next_leg(log, rounds=2, from_round=1, by="t", why="x", stamp=STAMP, change=change)
        participants = fleet.join_all()
        for _ in range(3):
            play_round(participants, absent=absent)
        return fleet

    absent: set[tuple[int, int]] = set()
    usual, slower = resumed(), resumed(**{"outer.lr": 0.25})
    assert asked(usual.store, 3, outer={"lr": 0.25}).digest == claimed(slower, 3)
    assert asked(slower.store, 3, outer={"lr": 0.7}).digest == claimed(usual, 3)
    absent = {(4, 2)}  # the leg's own learning rate stays where another thing is decided otherwise
    other = resumed(**{"outer.lr": 0.25})
    assert asked(slower.store, 4, without=[2]).digest == claimed(other, 4)
    # The line from round 1 to 4 goes over the leg's base, not over round 2, which no later base descends from.
    found = asked(slower.store, 1, {"until": 4}, without=[2])
    assert found.digest != found.digest_as_it_was == claimed(slower, 4)
    with pytest.raises(ConfigError, match=r"round 2 of .* left no base"):
        asked(slower.store, 2, without=[2])


def played_with_a_late_replica(rounds: int, silent: tuple[int, int] = (0, 0), **settings: Any) -> Fleet:
    """Replica 3 answers round 2 after its commit, and carries that work into round 3. `silent`: a round, and who
    abstains in it."""
    clock = ManualClock()
    fleet = Fleet(**{"replicas": 4, "rounds": 9, "quorum": None, "timing": BY_HAND, "guard": "off", **settings})
    participants = [fleet.join(replica_id, clock=clock) for replica_id in range(4)]
    for round_ in range(1, rounds + 1):
        clock.advance(2.0)
        in_time, late = (participants[:3], participants[3:]) if round_ == 2 else (participants, [])
        for taking in (in_time, late):
            for replica_id, each in ((p._attempt.replica_id, p) for p in taking):
                delta = contribution(round_, replica_id)
                if (round_, replica_id) == silent:
                    delta = FlatTensors([torch.full((12,), float("nan"))])
                each._contributor.contribute_delta(delta, replace(report(), tokens=100 + replica_id))
            for each in taking:
                each.close()
    return fleet


@pytest.mark.parametrize("settings", [{}, {"weights": "tokens", "codec": "bf16"}])
def test_in_later_rounds_with_carried_contributions_and_without_each_replica(settings):
    usual = played_with_a_late_replica(5, **settings)
    carried = usual.commits()[2].answers[3]
    assert [origin.round for origin in carried.origins] == [2, 3] and carried.averaged
    for round_, replica_id in ((2, 1), (3, 3), (3, 0), (4, 3)):
        other = played_with_a_late_replica(round_ + 1, (round_, replica_id), **settings)
        assert asked(usual.store, round_, without=[replica_id]).digest == claimed(other, round_)
        onward = asked(usual.store, round_, {"until": 4}, without=[replica_id])
        assert onward.digest_as_it_was == claimed(usual, 4) != onward.digest


def test_real_training_with_other_weights_and_rates_and_the_scores_that_its_replicas_logged():
    usual, other = trained(), trained(weights="tokens", outer={"lr": 0.4})
    scoring = {"code": OwnCode(mlp, heldout, list(range(16)))}
    found = asked(usual.store, 1, scoring, outer={"lr": 0.4}, weights="tokens")
    reader = RunReader(other.store)
    assert found.digest == reader.commits()[1].base_digest != asked(usual.store, 1, outer={"lr": 0.4}).digest
    assert found.heldout == pytest.approx(reader.heldout_of_base(1), abs=1e-6)
    assert found.heldout_as_it_was == pytest.approx(found.logged, abs=1e-6)
    assert found.logged == RunReader(usual.store).heldout_of_base(1) and found.items == 16
    assert abs(found.heldout - found.heldout_as_it_was) > 1e-4


@pytest.mark.parametrize(
    ("last", "logged"),
    [((Score(share=3, sum=5.0, count=10),), 0.5), ((Score(share=3, sum=None, count=10),), None), ((), None)],
)
def test_what_replicas_logged_is_their_mean_if_every_item_has_a_score(last, logged):
    fleet = Fleet(replicas=4, rounds=2, guard="off", scored=True)
    participants = fleet.join_all()
    reports = [report(share=share, score=0.5) for share in range(4)]
    for round_ in (1, 2):
        play(participants, [float(round_)] * 4, [*reports[:3], replace(reports[3], scores=last)])
    assert asked(fleet.store, 1, without=[2]).logged == logged


@pytest.mark.slow
def test_fragments_and_exact_adapters():
    for workload, settings in ((train_adapters, {"adapters": "exact"}), (train, {"fragments": 2, "sync_every": 4})):
        usual, other = (SmallRun(2, guard="off", **settings, **more) for more in ({}, {"outer": {"lr": 0.4}}))
        for run in (usual, other):
            run.train(workload)
        found = asked(usual.store, 1, outer={"lr": 0.4})
        assert found.digest == other.commits()[1].base_digest != usual.commits()[1].base_digest


def with_buffers(lost: int | None = None, **attach: Any) -> SmallRun:
    """Three replicas of a model with buffers; `lost`: the replica whose first round is not finite."""
    run = SmallRun(3, rounds=1, sync_every=3, quorum=2, guard="off")
    run.train(lambda ctx: train_normalised(ctx, lost, **attach))
    return run


def test_the_saved_model_is_the_snapshot_of_a_run_that_decided_so_buffers_included(tmp_path: Path):
    usual, other = with_buffers(), with_buffers(lost=0)
    found = asked(usual.store, 1, {"save": tmp_path / "model"}, without=[0])
    assert found.digest == other.commits()[1].base_digest
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"model.safetensors", "outer.safetensors", "README.md", "whatif.json"}
    for name in names - {"whatif.json"}:
        assert (tmp_path / "model" / name).read_bytes() == other.store.get(keys.snapshot(1, name)), name
    assert json.loads((tmp_path / "model/whatif.json").read_text())["digest"] == found.digest
    with pytest.raises(ConfigError, match="exists already"):
        asked(usual.store, 1, {"save": tmp_path / "model"}, without=[0])


def test_each_base_is_scored_with_the_buffers_of_its_own_round():
    usual, other = (with_buffers(lost, heldout=buffer_score, heldout_items=[1, 2, 3]) for lost in (None, 0))
    more = {"code": OwnCode(normalised, buffer_score, [1, 2, 3])}
    found = asked(usual.store, 1, more, without=[0])
    assert found.heldout_as_it_was == pytest.approx(RunReader(usual.store).heldout_of_base(1))
    assert found.heldout == pytest.approx(RunReader(other.store).heldout_of_base(1))
    assert found.heldout != pytest.approx(found.heldout_as_it_was)


@pytest.mark.slow
def test_a_model_of_transformers_is_scored_without_build_and_saved_for_from_pretrained(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, bos_token_id=None, eos_token_id=None, **sizes)

    def loss(model: Any, seed: int) -> torch.Tensor:
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))
        return torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())

    def score(model: Any, items: list[int]) -> list[float]:
        with torch.no_grad():
            return [float(loss(model, item)) for item in items]

    def workload(ctx: ReplicaContext) -> None:
        model = filled(transformers.LlamaForCausalLM(config))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ctx.attach(model, optimizer, heldout=score, heldout_items=[1, 2, 3, 4], in_loop="loss") as replica:
            for seed in replica.batches([100 * ctx.replica_id + i for i in range(40)]):
                optimizer.zero_grad()
                value = loss(model, seed)
                value.backward()
                optimizer.step()
                replica.observe(loss=value.item())

    run = SmallRun(2, rounds=1, sync_every=3, guard="off")
    run.train(workload)
    more = {"code": OwnCode(score=score, items=[1, 2, 3, 4]), "save": tmp_path / "model"}
    found = asked(run.store, 1, more, without=[1])
    assert found.heldout_as_it_was == pytest.approx(found.logged, abs=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(score(loaded.eval(), [1, 2, 3, 4])) / 4 == pytest.approx(found.heldout, abs=1e-6)


# -- what no run would commit -----------------------------------------------------------------------------------------


def test_fewer_than_the_quorum_are_averaged_with_a_note_and_nobody_leaves_the_base_as_it_is():
    fleet = played(2)
    few = asked(fleet.store, 2, without=[0, 1, 2])
    assert few.below_quorum == [2] and few.nobody == [] and "fewer than the quorum in round 2" in "\n".join(few.lines())
    assert asked(fleet.store, 2, without=[0, 1]).below_quorum == []  # as many as the quorum
    none = asked(fleet.store, 2, without=[0, 1, 2, 3])
    assert none.digest == claimed(fleet, 1) and none.nobody == [2] and none.difference == pytest.approx(none.moved)
    assert asked(fleet.store, 1, {"until": 2}, without=[0, 1, 2, 3]).nobody == [1]


# -- reading only -----------------------------------------------------------------------------------------------------


def test_nothing_is_written_to_the_bucket(usual):
    assert asked(ReadOnly(usual.store), 1, {"onward": True}, without=[3]).rounds == [1, 2, 3]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("round_", "more", "decided", "words"),
    [
        (1, {}, {}, "nothing is decided otherwise. Leave a replica out"),
        (1, {}, {"without": [7]}, "no replica 7: its 4 replicas are 0 to 3"),
        (1, {}, {"outer": {"lrr": 0.4}}, "unknown setting of outer 'lrr': did you mean 'lr'"),
        (1, {}, {"outer": {"lr": -1}}, "setting 'outer.lr' = -1: input should be greater than 0"),
        (1, {}, {"outer": {"momentum": 0.0}}, "switch momentum neither on nor off"),
        (1, {}, {"weights": "tokns"}, "unknown value of weights 'tokns': did you mean 'tokens'"),
        (1, {}, {"aggregate": "medium"}, "unknown value of aggregate 'medium': did you mean 'median'"),
        (1, {}, {"clip_factor": 0.5}, "setting 'clip_factor' = 0.5: input should be greater than 1"),
        (1, {}, {"aggregate": "median", "weights": "tokens"}, 'aggregate="median" with weights="tokens"'),
        (0, {}, {"without": [1]}, "rounds count from 1. The nearest is 1"),
        (9, {}, {"without": [1]}, "round 9 of .* was never committed. The nearest with an outer step is 3"),
        (
            4,
            {},
            {"without": [1]},
            r"round 4 of .* took no outer step \(every outer step is taken.* did is 3",
        ),
        (3, {"until": 2}, {"without": [1]}, "round 2 comes before round 3"),
        (1, {"until": 9}, {"without": [1]}, "round 9 of .* was never committed"),
        (1, {"code": OwnCode(score=heldout)}, {"without": [1]}, "scored no held-out set: leave the scorer out"),
    ],
)
def test_what_cannot_be_decided_is_refused_in_words(usual, round_, more, decided, words):
    with pytest.raises(ConfigError, match=words):
        asked(usual.store, round_, more, **decided)


def test_a_replica_that_was_not_averaged_cannot_be_left_out():
    fleet = played(2, {(1, 3)})
    with pytest.raises(ConfigError, match=r"replica 3 is not averaged in round 1 of .*'abstention'.* 0, 1, 2:"):
        asked(fleet.store, 1, without=[3])
    with pytest.raises(ConfigError, match=r"replica 3 is not averaged in round 1 of"):
        asked(fleet.store, 1, {"until": 2}, without=[3])
    found = asked(fleet.store, 1, {"onward": True}, without=[3])  # it is averaged in round 2
    assert found.digest == claimed(played(2, {(1, 3), (2, 3)}), 2)


def test_a_void_commit_is_named_with_what_is_wrong_with_its_weights():
    fleet = played(2)
    second = RunLog(fleet.store).commit(2)
    assert second is not None
    wrong = tuple(answer.model_copy(update={"weight": 7}) for answer in second.commit.answers)
    fleet.store.put(keys.commit(2), second.commit.model_copy(update={"answers": wrong}).to_bytes())
    fleet.store.delete(keys.commit(3))  # it closes the leg
    with pytest.raises(ConfigError, match=r"round 2 of .* is void.*replica 0 has weight 7.* outer step is 1"):
        asked(fleet.store, 2, without=[1])


def test_rounds_whose_payloads_are_gone_name_the_first_that_has_some():
    fleet = played(6)
    collect(fleet)
    with pytest.raises(ConfigError, match=r"payloads of round 1 of .* were deleted.* Rounds from 6 on have theirs"):
        asked(fleet.store, 2, without=[1])
    assert asked(fleet.store, 6, without=[1]).digest == claimed(played(6, {(6, 1)}), 6)


# -- command and function ---------------------------------------------------------------------------------------------


def test_the_command_and_the_function_compare_score_and_save(tmp_path: Path):
    trained(store=open_store(str(tmp_path / "run")))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "mine.py").write_text((Path(__file__).parents[1] / "support/tiny_workloads.py").read_text() + ITEMS)
    named = ["--score=mine:heldout", "--build=mine:mlp", "--items=mine:ITEMS"]
    given = ["whatif", "run", "--round=1", "--without=1", "--outer-lr=0.4", *named]
    done = diloco_here(*given, "--save=other", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    same = whatif(str(tmp_path / "run"), round=1, without=[1], outer={"lr": 0.4})
    assert (found["digest"], found["saved"], same.heldout) == (same.digest, "other", None)
    assert found["below_quorum"] == [1] and (tmp_path / "other/model.safetensors").exists()
    lines = diloco_here(*given, cwd=tmp_path).stdout.splitlines()
    assert lines[0] == "decided     round 1: without replica 1, outer.lr=0.4"
    assert [line.split()[0] for line in lines[1:]] == ["base", "as", "difference", "held-out", "logged", "note"]
    refused = diloco_here("whatif", "run", "--round=1", "--weights=tokns", cwd=tmp_path)
    assert refused.returncode == 2 and "did you mean 'tokens'" in refused.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before


ITEMS = "\nITEMS = list(range(16))\n"


def test_tokens_of_origins_are_what_weights_follow_from():
    """The weights of a run by tokens are those that `whatif` derives for a run with equal weights."""
    run = trained()
    answers = run.commits()[0].answers
    assert [answer.tokens for answer in answers] == [4 * 8, 4 * 13]
    assert all(answer.origins == (Origin(round=1, steps=4),) for answer in answers)
