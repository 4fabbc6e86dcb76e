"""Rounds between real participants over one store: agreement, bad answers, stops, restarts. No training."""

import json
import os
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from protocol_fleet import Fleet, answer, close, delta, play, report, tiny_model, together
from stored_snapshots import complete_snapshots

from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import (
    ConfigError,
    ModelMismatch,
    Preempted,
    QuorumLost,
    RecordInvalid,
    RoundReused,
    StoreUnavailable,
    Superseded,
)
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Intent
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Contribution, Halt, Result
from diloco_orchestrator.protocol.rounds import result_of
from diloco_orchestrator.replica.attempt.attempt import cpu_threads
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.store.memory import MemoryStore
from replica.interop.torchft import ObjectStoreManager

STAMP = Stamp("test", lambda: 0.0)


def halt(fleet: Fleet, reason: str) -> None:
    fleet.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="test", reason=reason).to_bytes())


def stepped(before: Base, average: float, fleet: Fleet) -> torch.Tensor:
    """The bias after an outer step with an average that is the same everywhere."""
    gradients = {"bias": torch.full((3,), average), "weight": torch.full((3, 3), average)}
    return step(before, gradients, fleet.config.outer).parameters["bias"]


# -- a healthy run ----------------------------------------------------------------------------------------------------


def test_a_run_goes_from_start_to_result():
    fleet = Fleet(replicas=3, rounds=2)
    participants = fleet.join_all()
    for round_ in (1, 2, 3):
        play(participants, [1.0, 2.0, 3.0])
        assert {p.open.round for p in participants} == {round_ + 1}
    together([p.finish_leg for p in participants])
    commits = fleet.commits()
    assert [(c.applied, c.outer_step, c.stop) for c in commits] == [
        (True, 1, "none"),
        (True, 2, "none"),
        (False, 2, "completed"),
    ]
    result = Result.from_bytes(fleet.store.get(keys.result(1)), "result")
    assert (result.status, result.round, result.outer_steps) == ("completed", 3, 2)
    assert complete_snapshots(fleet.store) == [0, 2]


def test_everyone_holds_the_outer_step_of_the_mean_of_what_the_commit_names():
    fleet = Fleet(replicas=2)
    participants = fleet.join_all()
    expected = Base.fresh(trainable(tiny_model()), fleet.config.outer)
    for values in ([1.0, 2.0], [-0.5, 0.25]):
        before = expected.digest()
        play(participants, values)
        mean = sum(values) / 2
        expected = step(
            expected, {"bias": torch.full((3,), mean), "weight": torch.full((3, 3), mean)}, fleet.config.outer
        )
        assert {p.digest for p in participants} == {expected.digest()}
        assert fleet.commits()[-1].base_digest == before  # of the base from which the round started


def test_a_positive_pseudo_gradient_lowers_the_base():
    """base - local > 0 means that training went down, so the outer step must go down: p' = p - 0.7 (1.9 g)."""
    fleet = Fleet(replicas=1)
    participant = fleet.join(0)
    before = participant.base.parameters["bias"].clone()
    play([participant], [1.0])
    assert torch.allclose(participant.base.parameters["bias"], before - 0.7 * 1.9)


def test_the_log_is_a_hash_chain_from_run_to_last_commit():
    fleet = Fleet(replicas=2)
    participants = fleet.join_all()
    for _ in range(3):
        play(participants, [1.0, 1.0])
    start = json.loads(fleet.store.get(keys.START))
    assert start["run_sha256"] == sha256_hex(fleet.store.get(keys.RUN))
    previous = sha256_hex(fleet.store.get(keys.START))
    for round_ in (1, 2, 3):
        data = fleet.store.get(keys.commit(round_))
        commit = json.loads(data)
        assert commit["previous"] == previous
        assert commit["begin_sha256"] == sha256_hex(fleet.store.get(keys.begin(1)))
        for each in commit["answers"]:
            manifest = fleet.store.get(keys.contribution(round_, each["replica_id"]))
            assert each["manifest_sha256"] == sha256_hex(manifest)
        previous = sha256_hex(data)


def test_the_same_run_again_gives_the_same_bases():
    def digests() -> list[str]:
        fleet = Fleet(replicas=3, rounds=3)
        participants = fleet.join_all()
        rng = random.Random(5)
        for _ in range(3):
            play(participants, [rng.uniform(-1, 1) for _ in participants])
        return [commit.base_digest for commit in fleet.commits()]

    assert digests() == digests()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_whoever_joins_first_decides_the_first_base_for_all(order):
    fleet = Fleet(replicas=3)
    joined = {i: fleet.join(i, model=tiny_model(seed=i)) for i in order}
    first = Base.fresh(trainable(tiny_model(seed=order[0])), fleet.config.outer)
    assert {p.digest for p in joined.values()} == {first.digest()}


def test_first_bases_may_race():
    for _ in range(10):
        fleet = Fleet(replicas=4)
        joined = together([partial(fleet.join, i, model=tiny_model(seed=i)) for i in range(4)])
        assert len({p.digest for p in joined}) == 1
        play(joined, [1.0] * 4)
        assert len(fleet.commits()) == 1


# -- models that differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.nn.Linear(3, 4), r"at parameter 'bias': here float32\[4\], in the run float32\[3\]"),
        (tiny_model(dtype=torch.bfloat16), r"'bias': here bfloat16\[3\], in the run float32\[3\]"),
        (torch.nn.Linear(3, 3, bias=False), r"'bias': here absent"),
        (torch.nn.Sequential(torch.nn.Linear(3, 3)), r"'0.bias': here float32\[3\], in the run absent"),
    ],
)
def test_another_model_is_refused_naming_the_first_difference(other, words):
    fleet = Fleet()
    fleet.join(0)
    with pytest.raises(ModelMismatch, match=words):
        fleet.join(1, model=other)


# -- answers that do not count ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_pseudo_gradient_that_is_not_finite_becomes_an_abstention_and_nobody_is_averaged(bad):
    fleet = Fleet(replicas=2)
    participants = fleet.join_all()
    before = participants[0].digest
    play(participants, [1.0, bad])
    commit = fleet.commits()[0]
    assert [a.kind for a in commit.answers] == ["delta", "abstention"]
    assert not commit.applied and commit.empty_rounds == 1 and "abstention" in commit.reason
    assert {p.digest for p in participants} == {before} == {commit.base_digest}
    assert not any("payload/1/" in info.key for info in fleet.store.list("rounds/"))
    play(participants, [1.0, 1.0])
    assert fleet.commits()[1].applied and fleet.commits()[1].outer_step == 1


def test_three_rounds_in_a_row_that_name_nobody_fail_the_run():
    fleet = Fleet(replicas=2, rounds=9)
    participants = fleet.join_all()
    play(participants, [1.0, float("nan")])
    play(participants, [1.0, 1.0])
    for _ in range(3):
        play(participants, [1.0, float("nan")])
    assert [c.stop for c in fleet.commits()] == ["none"] * 4 + ["failed"]
    assert all(p.open.stopped for p in participants)


def test_bf16_overflow_is_found_before_it_is_published():
    fleet = Fleet(replicas=1, codec="bf16")
    participant = fleet.join(0)
    assert answer(participant, 3.4e38).kind == "abstention"


def corrupt(fleet: Fleet, key: str) -> None:
    data = bytearray(fleet.store.get(key))
    data[-1] ^= 1
    fleet.store.put(key, bytes(data))


def test_a_corrupted_payload_is_never_averaged():
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    answer(one, 1.0)
    corrupt(fleet, keys.payload(1, 0, 1, 0))
    answer(two, 1.0)
    commit = close(two).commit
    assert [(a.kind, a.averaged) for a in commit.answers] == [("unverifiable", False), ("delta", False)]
    assert not commit.applied and "replica 0: unverifiable" in commit.reason


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"base_digest": "b3:" + "0" * 64}, "wrong_base"),
        ({"round": 9}, "unverifiable"),
        ({"replica_id": 0}, "unverifiable"),
        ({"leg": 2}, "unverifiable"),
        ({"fragment": 1}, "unverifiable"),
        ({"payload": None}, "unverifiable"),
    ],
)
def test_a_manifest_that_does_not_fit_is_an_answer_but_no_contribution(change, kind):
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    standing = answer(two, 1.0)
    fleet.store.put(keys.contribution(1, 1), standing.model_copy(update=change).to_bytes())
    answer(one, 1.0)
    commit = close(one).commit
    assert commit.answers[1].kind == kind and not commit.applied


def test_a_manifest_that_is_no_record_is_an_answer_but_no_contribution():
    fleet = Fleet(replicas=2)
    one, _ = fleet.join_all()
    fleet.store.put(keys.contribution(1, 1), b"not json")
    answer(one, 1.0)
    commit = close(one).commit
    assert (commit.answers[1].kind, commit.answers[1].attempt) == ("unverifiable", 0)


def test_a_manifest_of_a_newer_version_costs_its_author_the_round_and_nobody_else_anything(caplog):
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    body = json.loads(answer(two, 1.0).to_bytes())
    fleet.store.put(keys.contribution(1, 1), json.dumps({**body, "schema_version": 3}).encode())
    answer(one, 1.0)
    one.close()
    (commit,) = fleet.commits()
    assert [each.kind for each in commit.answers] == ["delta", "unverifiable"] and "Upgrade" in caplog.text


def test_a_broken_chain_is_refused():
    fleet = Fleet(replicas=1)
    participant = fleet.join(0)
    play([participant], [1.0])
    body = json.loads(fleet.store.get(keys.commit(1)))
    fleet.store.put(keys.commit(1), json.dumps({**body, "reason": "changed by hand"}).encode())
    for _ in range(2):
        answer(participant, 1.0)
        participant.close()  # does not read round 1 again
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        fleet.join(0)


def test_a_commit_that_claims_another_base_than_whom_it_names_is_void_and_makes_nobody_rebuild(caplog):
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    answer(one, 1.0)
    answer(two, 1.0)
    two.close()
    body = json.loads(fleet.store.get(keys.commit(1)))
    fleet.store.put(keys.commit(1), json.dumps({**body, "base_digest": "b3:" + "0" * 64}).encode())
    before = one.digest
    assert not one.close().applied and one.digest == before
    assert "it claims another base than replica 0" in caplog.text and "elsewhere; rebuilding" not in caplog.text


def test_token_weights_weigh_each_contribution_by_what_it_saw():
    """(1 * 300 + 5 * 100) / 400 = 2, where equal weights give 3."""
    fleet = Fleet(replicas=2, weights="tokens", clip="off")
    participants = fleet.join_all()
    before = participants[0].base.copy()
    play(participants, [1.0, 5.0], [replace(report(), tokens=300), replace(report(), tokens=100)])
    assert torch.allclose(participants[0].base.parameters["bias"], stepped(before, 2.0, fleet))
    assert [a.weight for a in fleet.commits()[0].answers] == [300, 100]
    assert fleet.join(0).digest == participants[0].digest  # rebuilt with the same weights


def test_token_weights_without_tokens_are_told():
    fleet = Fleet(replicas=1, weights="tokens")
    with pytest.raises(ConfigError, match=r"observe\(tokens=...\) reported no token"):
        answer(fleet.join(0), 1.0)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_round_without_quorum_ends_in_an_error_that_names_who_is_missing():
    fleet = Fleet(replicas=3, timing={"round_timeout_s": 60.0, "startup_timeout_s": 60.0})
    clock = ManualClock()
    waiting = fleet.join(1, clock=clock)
    answer(waiting, 1.0)
    with pytest.raises(QuorumLost, match=r"round 1: no quorum \(3\) after 60 s; missing: 0, 2") as caught:
        waiting.close()
    assert caught.value.missing == (0, 2) and clock.now() >= 60


@pytest.mark.parametrize(("halted", "until_s"), [(False, 600.0), (True, 60.0)])
def test_a_replica_waits_on_while_a_missing_one_is_being_launched_unless_the_leg_shall_halt(halted, until_s):
    """The provider has been down since: a coordinator has intended the attempt, and no process has claimed it."""
    patience = {"retry": {"unavailable_for_s": 600.0}, "timing": {"round_timeout_s": 60.0, "startup_timeout_s": 60.0}}
    fleet, clock = Fleet(replicas=2, **patience), ManualClock()
    waiting, gone = fleet.join(1, clock=clock), fleet.join(0, clock=clock)
    number = gone._attempt.number + 1
    intended = Intent(**STAMP(), replica_id=0, attempt=number, leg=1, executor="test", why="test")
    fleet.store.create(keys.intent(0, number), intended.to_bytes())
    if halted:
        halt(fleet, "enough")
    answer(waiting, 1.0)
    with pytest.raises(QuorumLost, match=r"round 1: no quorum \(2\) after 60 s; missing: 0"):
        waiting.close()
    assert until_s <= clock.now() < until_s + 100.0


def test_time_spent_training_is_no_time_without_quorum():
    fleet = Fleet(replicas=2, timing={"round_timeout_s": 60.0, "startup_timeout_s": 60.0})
    clock = ManualClock()
    slow = fleet.join(1, clock=clock)
    clock.advance(3600.0)  # an hour of inner steps
    answer(slow, 1.0)
    with pytest.raises(QuorumLost):
        slow.close()
    assert clock.now() >= 3660.0


def test_a_waiting_replica_leaves_when_it_is_asked_to():
    fleet = Fleet(replicas=2)
    leaving = fleet.join(0, should_leave=lambda: True)
    answer(leaving, 1.0)
    with pytest.raises(Preempted, match="what it finished is published"):
        leaving.close()
    assert Contribution.from_bytes(fleet.store.get(keys.contribution(1, 0)), "").kind == "delta"


def test_a_waiting_attempt_leaves_when_a_later_one_claims_its_place():
    fleet = Fleet(replicas=2)
    old = fleet.join(0, clock=ManualClock())
    answer(old, 1.0)
    fleet.join(0)
    with pytest.raises(Superseded, match="attempt 2 of replica 0 took over from attempt 1"):
        old.close()


def test_one_attempt_cannot_be_claimed_twice():
    fleet = Fleet()
    fleet.join(0, attempt=1)
    with pytest.raises(Superseded, match="attempt 1 of replica 0 is claimed by another process"):
        fleet.join(0, attempt=1)


class Outage(MemoryStore):
    """A bucket that nobody reaches for a while."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock, self.until = clock, 0.0

    def _reach(self) -> None:
        if self.clock.now() < self.until:
            raise StoreUnavailable("no route to host.")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._reach()
        return super().get(key, start, end)

    def create(self, key: str, data: bytes) -> bool:
        self._reach()
        return super().create(key, data)

    def list(self, prefix: str, start_after: str = ""):
        self._reach()
        return super().list(prefix, start_after)


@pytest.mark.parametrize(("seconds", "survives"), [(60, True), (600, False)])
def test_a_minute_without_network_in_mid_round_is_ridden_out_and_ten_are_told(seconds, survives):
    clock = ManualClock()
    bucket = Outage(clock)
    fleet = Fleet(replicas=1, store=bucket, clock=clock)
    participant = fleet.join(0, clock=clock)
    bucket.until = clock.now() + seconds
    if survives:
        answer(participant, 1.0)
        bucket.until = clock.now() + seconds
        assert close(participant).commit.applied
    else:
        with pytest.raises(StoreUnavailable, match=r"no route to host\. Tried \d+ times in 9\d s"):
            answer(participant, 1.0)


class AnHourOff(ManualClock):
    def wall_time(self) -> float:
        return super().wall_time() - 3600.0


def test_a_clock_that_is_off_by_an_hour_changes_nothing():
    digests = []
    for kind in (ManualClock, AnHourOff):
        fleet = Fleet(replicas=2)
        participants = [fleet.join(0), fleet.join(1, clock=kind(start=1e6))]
        for value in (1.0, -2.0):
            play(participants, [value, 0.5])
        digests.append([commit.base_digest for commit in fleet.commits()])
    assert digests[0] == digests[1]


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restarted_attempt_stands_where_the_others_stand():
    fleet = Fleet(replicas=2, rounds=5, snapshot_every=2)
    one, two = fleet.join_all()
    for round_ in range(3):
        play([one, two], [0.1 * round_, 1.0])
        one.write_snapshot_if_due()
    assert complete_snapshots(fleet.store) == [0, 2]
    again = fleet.join(1)
    assert again._attempt.number == 2
    assert (again.open.round, again.digest) == (one.open.round, one.digest)
    play([one, again], [1.0, 1.0])
    assert one.digest == again.digest


def test_an_answer_left_by_an_earlier_attempt_is_adopted_and_counted_once():
    fleet = Fleet(replicas=2)
    one, dying = fleet.join_all()
    answer(dying, 5.0, report(inner_steps=77))
    again = fleet.join(1)
    standing = again.history.of_open_round()
    assert standing is not None and standing.attempt == 1
    newest = again.history.newest()
    assert newest is not None
    progress = newest.progress
    assert progress is not None and progress.inner_steps == 77
    stands = answer(again, -5.0)  # its own work, were it to do any, would be dropped
    assert stands.attempt == 1
    before = again.base.copy()
    together([lambda: (answer(one, 5.0), one.close()), again.close])
    named = fleet.commits()[0].answers[1]
    assert named.attempt == 1
    assert torch.allclose(again.base.parameters["bias"], stepped(before, 5.0, fleet))


def test_a_repeated_answer_of_one_attempt_is_the_same_answer():
    fleet = Fleet(replicas=2)
    one, _ = fleet.join_all()
    assert answer(one, 1.0) == answer(one, 1.0)
    with pytest.raises(RoundReused):
        answer(one, 2.0)


def test_a_commit_once_written_is_followed_by_all_whoever_wrote_it():
    for _ in range(20):
        fleet = Fleet(replicas=3, rounds=1)
        participants = fleet.join_all()
        entries = play(participants, [1.0, 2.0, 3.0])
        assert len({entry.sha256 for entry in entries}) == 1
        assert len({p.digest for p in participants}) == 1


# -- stops ------------------------------------------------------------------------------------------------------------


def test_a_halt_request_stops_everybody_after_the_open_round_which_is_applied():
    fleet = Fleet(replicas=2, rounds=9)
    participants = fleet.join_all()
    play(participants, [1.0, 1.0])
    halt(fleet, "lunch")
    play(participants, [1.0, 1.0])
    commit = fleet.commits()[-1]
    assert (commit.round, commit.stop, commit.applied, commit.outer_step) == (2, "halted", True, 2)
    assert commit.reason == "halt requested: lunch" and all(p.open.stopped for p in participants)
    together([p.finish_leg for p in participants])
    assert complete_snapshots(fleet.store)[-1] == 2


def test_a_collapse_stops_everybody_at_the_same_round_unapplied():
    guard = {"min_steps": 2, "ema_alpha": 0.0, "max_proxy_real_gap": 0.3}
    fleet = Fleet(replicas=2, rounds=9, guard=guard, scored=True)
    participants = fleet.join_all()
    digests = []
    for round_ in range(9):
        digests.append(participants[0].digest)
        good = min(round_, 3) - 2 * max(0, round_ - 3)  # the score of the base: up, then down
        reports = [report(i, 0.1 * good, in_loop=0.1 * round_) for i in range(2)]
        play(participants, [1.0, 1.0], reports)
        if participants[0].open.stopped:
            break
    assert all(p.open.stopped for p in participants)
    commit = fleet.commits()[-1]
    assert commit.stop == "halted" and not commit.applied and "Hacking Gap" in commit.reason
    assert commit.fired
    assert {p.digest for p in participants} == {digests[-1]} == {commit.base_digest}
    together([p.finish_leg for p in participants])
    result = Result.from_bytes(fleet.store.get(keys.result(1)), "result")
    assert result.status == "halted" and result.verdict is not None
    start = json.loads(fleet.store.get(keys.START))["base_digest"]
    last_good = complete_snapshots(fleet.store)[-1]
    assert last_good == commit.round - 1
    snapshot = StoredSnapshot(fleet.store, last_good, RunLog(fleet.store).snapshot(last_good))
    assert snapshot.base(fleet.start()).digest() == commit.base_digest != start


def test_nothing_is_published_after_a_stop():
    fleet = Fleet(replicas=2, rounds=1)
    participants = fleet.join_all()
    for _ in range(2):
        play(participants, [1.0, 1.0])
    together([p.finish_leg for p in participants])
    assert not [info.key for info in fleet.store.list("rounds/") if info.key > "rounds/00000003"]


def test_a_result_says_what_the_last_commit_says():
    fleet = Fleet(replicas=1, rounds=1)
    participant = fleet.join(0)
    for _ in range(2):
        play([participant], [1.0])
    assert result_of(fleet.commits()[-1], "0" * 64, STAMP()).status == "completed"


# -- the library form -------------------------------------------------------------------------------------------------


def test_library_users_who_mean_different_runs_are_told(tmp_path):
    from diloco_orchestrator.errors import RunFolderTaken

    ObjectStoreManager.join(str(tmp_path), 0, 2, rounds=3)
    ObjectStoreManager.join(str(tmp_path), 1, 2, rounds=3)
    with pytest.raises(RunFolderTaken, match=r"another configuration: rounds is 3 there, 4 here\. Use"):
        ObjectStoreManager.join(str(tmp_path), 1, 2, rounds=4)


def test_a_payload_of_the_wrong_length_is_unverifiable():
    fleet = Fleet(replicas=2)
    one, two = fleet.join_all()
    two._contributor.contribute_delta(FlatTensors([torch.ones(5)]), report())
    answer(one, 1.0)
    commit = close(one).commit
    assert commit.answers[1].kind == "unverifiable"


def test_shards_smaller_than_tensors_change_no_bit(tmp_path):
    model = torch.nn.Linear(600, 500)  # over 1 MiB of fp32, cut at 1 MiB
    values: list[list[torch.Tensor]] = []
    for shard_mib in (1, 64):
        fleet = Fleet(replicas=1, shard_mib=shard_mib)
        participant = fleet.join(0, model=model)
        generator = torch.Generator().manual_seed(1)
        shapes = [(500,), (500, 600)]
        participant._contributor.contribute_delta(
            FlatTensors([torch.randn(s, generator=generator) for s in shapes]), report()
        )
        participant.close()
        base = participant.base
        values.append([*base.parameters.values(), *base.momenta.values()])
        shards = [info for info in fleet.store.list("rounds/") if info.key.endswith(".bin")]
        assert len(shards) == {1: 2, 64: 1}[shard_mib]
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


def test_delta_helper_matches_the_model():
    assert delta(1.0).numel == sum(p.numel() for p in tiny_model().parameters())


@pytest.mark.parametrize(("value", "threads"), [("4", 4), ("4,2", 4), (" 3 ", 3)])
def test_a_list_of_threads_as_openmp_knows_it_ends_no_replica(value: str, threads: int):
    assert cpu_threads({"OMP_NUM_THREADS": value}) == threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system ties no process to cores")
@pytest.mark.parametrize("value", ["", "0", "many"])
def test_a_process_that_may_use_one_core_takes_one_thread(value: str):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cpu_threads({"OMP_NUM_THREADS": value}) == 1
    finally:
        os.sched_setaffinity(0, before)
