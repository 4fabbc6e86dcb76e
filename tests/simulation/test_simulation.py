"""Whole runs on virtual time, with faults from a seed: the invariants hold, and known bugs are caught."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from simulation import MOST_CLOSES, Simulation, simulate, simulate_forged, simulate_wide
from simulation_checks import RightBases
from simulation_plan import NextLeg, Plan, calm, plan_of, wide_plan_of
from simulation_residuals import FEEDBACK
from simulation_store import InvariantBroken
from virtual_time import _Worker

from diloco_orchestrator.allreduce import aggregate, agreement
from diloco_orchestrator.config import OuterConfig, RunConfig
from diloco_orchestrator.guard import FoldResult
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.arithmetic import nesterov_step
from diloco_orchestrator.protocol import keys, weights
from diloco_orchestrator.protocol.records import Answer, Commit, Contribution
from diloco_orchestrator.protocol.weights import Shares, shares_of
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from replica.attempt.attempt import Attempt
from replica.rounds import close_round
from replica.rounds.contribute import Contributor
from replica.rounds.contribution_history import ContributionHistory
from replica.rounds.debt import Debt
from replica.rounds.participant import Participant
from replica.training.checkpoint import Checkpoint
from replica.training.session import TrainingSession

SEEDS = 100  # in groups of ten; the first group is in the quick suite


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A hundred runs with faults say much."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_the_invariants_hold_whatever_goes_wrong(first):
    for seed in range(first, first + 10):
        simulate(seed)


@pytest.mark.parametrize(
    "aggregate", ["agreeing_mean", *(pytest.param(each, marks=pytest.mark.slow) for each in ("median", "trimmed_mean"))]
)
def test_the_invariants_hold_with_an_aggregate_that_leaves_out(aggregate: str):
    """`verify` derives every base of them again."""
    for seed in range(SEEDS + 20, SEEDS + (21 if aggregate == "agreeing_mean" else 32)):
        assert simulate(seed, replicas=4, aggregate=aggregate).plan.settings["aggregate"] == aggregate


@pytest.mark.slow
def test_the_invariants_hold_where_contributions_are_clipped():
    """Gradients of a replica differ by more than the factor, so that rounds are clipped by chance."""
    clipped = 0
    for seed in range(SEEDS + 40, SEEDS + 50):
        run = simulate(seed, replicas=4, clip_factor=1.05)
        clipped += sum(len(commit.clipped) for commit in RunLog(run.bucket).commits())
    assert clipped > 5


OVERLAP = [  # most of a round passes between publishing and synchronising
    {"sync_every": 4, "fragments": 1, "fragment_sync_delay": 3},
    {"sync_every": 8, "fragments": 2, "fragment_sync_delay": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", OVERLAP, ids=["one fragment", "two fragments"])
def test_the_invariants_hold_though_crashes_hit_rounds_in_flight(settings: dict[str, Any]):
    hits = sum(simulate(seed, **settings).hit_in_flight for seed in range(SEEDS, SEEDS + 8))
    assert hits > 1


@pytest.mark.parametrize(
    "seed", [570, 500195, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (677, 2068, 2161))]
)
def test_seeds_that_once_found_a_bug(seed: int):
    """A predecessor that publishes while its successor reads where to continue; one that wins with an overlap, with a
    pseudo-gradient or with an abstention.
    """
    simulate(seed)


@pytest.mark.parametrize(
    "seed", [130007963, *(pytest.param(s, marks=pytest.mark.slow) for s in (130014896, 130015373))]
)
def test_a_lone_replica_goes_on_from_what_it_trained_from_a_wrong_base_until_it_rebuilds_that(seed: int):
    """It abstains in between, and so loads the state of its last contribution."""
    simulation = simulate(seed)
    right = RightBases.of(simulation, RunLog(simulation.bucket).commits())
    manifest, (round_, held) = simulation.loaded[0], simulation.held[0]
    assert not right.is_right(manifest) and held != right.before[round_]


OUTLIVED = [
    pytest.param(plan_of(2_000_000), id="its manifest comes after those that its successor has read"),
    pytest.param(dataclasses.replace(plan_of(135), seed=1025), id="likewise, in another run", marks=pytest.mark.slow),
    pytest.param(dataclasses.replace(plan_of(135), seed=1047), id="its manifest comes while its successor reads them"),
]


@pytest.mark.parametrize("plan", OUTLIVED)
def test_no_work_is_lost_or_counts_twice_though_an_attempt_that_was_called_dead_lives_on_beside_its_successor(plan):
    """It contributes to a round that is closed already: what nobody averages its successor trains again."""
    simulation = Simulation(plan)
    simulation.run()
    assert plan.lies and {attempt for replica_id, attempt in simulation.replicas if replica_id == plan.lies[0][1]} > {1}


def test_machines_that_join_are_lost_told_to_leave_and_replaced():
    """Machine 0 goes with its replica, machine 1 gets SIGTERM; then a new leg needs machines again."""
    plan = calm(machines=3, machine_kills=((12.0, 0),), machine_notices=((18.0, 1),), next_leg=NextLeg(rounds=1))
    simulation = Simulation(plan)
    commits = simulation.run()
    assert [commit.leg for commit in commits if commit.stop == "completed"] == [1, 2]
    assert len(simulation.replicas) > 2 * 3 and len(list(simulation.bucket.list(keys.JOINS))) > 4 * 6


ADAPTED = [{}, {"codec": "int4"}, {"codec": "2bit"}]
ADAPTED += [{"weights": "tokens", "fragment_sync_delay": 1, "codec": codec} for codec in ("bf16", "topk64")]


@pytest.mark.parametrize("settings", ADAPTED)
def test_exactly_averaged_adapters_are_those_of_plain_arithmetic(settings: dict[str, Any]):
    plan = calm(width=5, tokens=(1, 3, 7), settings={"adapters": "exact", **settings}, kills=((14.0, 1),))
    simulation = Simulation(plan)
    simulation.run()
    (pair,) = RunLog(simulation.bucket).start().record.adapters  # type: ignore[union-attr]
    assert pair.residual == "layer.lora_residual.default" and len(simulation.replicas) == 4
    assert bool(simulation.paid) == (settings.get("codec") in FEEDBACK)


def after_commit(plan: Plan, round_: int) -> float:
    """A second after the commit of a round: everybody has taken its outer step, and none the next one."""
    simulation = Simulation(plan)
    simulation.play()
    return simulation.bucket.written_at[keys.commit(round_)] + 1.0


def test_work_of_a_void_round_from_a_wrong_base_is_dropped_once_the_base_is_healed():
    """A bit flips in replica 1's base; a void commit averages nobody, and right work would be carried."""
    plan = calm(rounds=5, no_commits=((3, b"junk"),))
    simulation = Simulation(dataclasses.replace(plan, flips=((after_commit(plan, 1), 1, "after step"),)))
    commits = simulation.run()
    reader = ContributionReader(simulation.bucket)
    later = [manifest for round_ in (4, 5) if (manifest := reader.of(round_, 1)) is not None]
    assert simulation.flipped and commits[-1].stop == "completed"
    assert 3 in {origin.round for manifest in later for origin in manifest.dropped}
    assert 3 not in {origin.round for manifest in later for origin in manifest.origins}


def test_a_new_leg_loads_no_state_that_a_lone_replica_trained_from_a_wrong_base():
    """The bit flips in the average of the last round but one; in the next leg only a rebuild tells that it did."""
    settings = {"quorum": "all", "replica_state": "round"}
    plan = calm(replicas=1, paces=(1.0,), settings=settings, next_leg=NextLeg(rounds=1))
    simulation = Simulation(dataclasses.replace(plan, flips=((after_commit(plan, 2), 0, "average"),)))
    assert simulation.run()[-1].leg == 2 and simulation.flipped
    assert [manifest.round for manifest in simulation.loaded] == [3]  # not the last round's


def test_a_bit_that_flips_in_the_rebuild_by_which_a_lone_replica_corrects_another_is_corrected_too():
    """The second rebuild is the wrong one, and the base that the replica had as well: a third tells which is right."""
    simulate(130008713)


def test_a_leg_ends_though_the_store_lost_a_payload_that_its_last_base_needs():
    """Who held its bytes is gone, and the coordinator cannot write the last snapshot: the result says so."""
    plan = calm(replicas=2, paces=(1.0, 1.0), settings={"retry": {"max_errors": 1, "backoff_s": 1.0}})
    when, lost = after_commit(plan, 3), "rounds/00000003/payload/0/1/0.bin"
    simulation = Simulation(dataclasses.replace(plan, kills=((when, -2),)))
    simulation.time.at(when, lambda: simulation.bucket.delete(lost))
    simulation.play()
    result = RunLog(simulation.bucket).result(1)
    assert result is not None and result.status == "failed"
    assert lost in result.reason and "--from-round 2" in result.reason


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in (29, 2000475, 5000176, 5000475)]
)
def test_wide_seeds_that_once_found_a_bug(seed: int):
    simulate_wide(seed)


@pytest.mark.parametrize("seed", [57, 16, 55, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(58, 90))])
def test_what_somebody_forges_breaks_no_invariant_of_the_others(seed: int):
    """The only replica is killed, and an exit record calls it superseded; replicas are given up, legs are forged, …"""
    assert simulate_forged(seed).forged_keys


def test_the_same_seed_gives_the_same_trace_with_any_number_of_threads():
    before, played = torch.get_num_threads(), list[Simulation]()
    for threads in (1, 3, 3):
        torch.set_num_threads(threads)
        _Worker.idle.clear()  # threads of runs before have their own number
        played.append(simulate(5))
    torch.set_num_threads(before)
    assert len({each.digest.hexdigest() for each in played}) == 1 and played[0].events > 100
    assert simulate(6).digest.hexdigest() != played[0].digest.hexdigest()


FAULTS = [
    pytest.param(calm(storms=((10.0, 50.0),)), id="a 503 storm"),
    pytest.param(calm(listing_lag_s=5.0), id="a listing that lags"),
    pytest.param(calm(stale_s=10.0, machines=3, machine_kills=((12.0, 0),)), id="stale reads of what was overwritten"),
    pytest.param(calm(lose_reply=0.3), id="writes whose reply never comes"),
    pytest.param(calm(no_writes=((15.0, 3615.0),)), id="a bucket that refuses writes for an hour"),
    pytest.param(calm(kills=((12.0, -2), (40.0, -2))), id="everybody killed, twice"),
    pytest.param(
        calm(settings={"quorum": "all"}, no_writes=((15.0, 3615.0),), kills=((3000.0, 1),)),
        id="both",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("plan", FAULTS)
def test_what_a_real_bucket_does_is_survived(plan):
    simulation = Simulation(plan)
    assert simulation.run()[-1].stop == "completed"
    assert (simulation.bucket.stale_reads > 20) == bool(plan.stale_s)


HOUR = (12.0, 3612.0)
FEW_ERRORS = {"retry": {"max_errors": 1, "hung_after_s": 60.0, "backoff_s": 1.0}}


@pytest.mark.parametrize("quorum", [pytest.param("all", marks=pytest.mark.slow), None])
@pytest.mark.parametrize(
    "outage",
    [
        pytest.param({"vendor_down": (HOUR,)}, id="the vendor"),
        pytest.param({"storms": (HOUR,), "no_writes": (HOUR,)}, id="the store", marks=pytest.mark.slow),
        pytest.param({"vendor_down": (HOUR,), "storms": (HOUR,), "no_writes": (HOUR,)}, id="both"),
        pytest.param({"no_network": (HOUR,)}, id="the network", marks=pytest.mark.slow),
    ],
)
def test_an_hour_of_outage_ends_no_run(outage, quorum):
    """A replica is killed just as it begins, and may fail once: the outage spends nothing of that.

    With `quorum="all"` the run ends with the bits of the undisturbed one: the others wait for the killed one, whose
    launch is under way.
    """
    plan = calm(rounds=6, kills=((13.0, 1),), settings={"quorum": quorum, **FEW_ERRORS}, **outage)
    simulation = Simulation(plan)
    last = simulation.run()[-1]
    assert last.stop == "completed"
    assert {attempt for replica_id, attempt in simulation.replicas if replica_id == 1} <= {1, 2}
    healthy = {(replica_id, attempt) for replica_id, attempt in simulation.replicas if replica_id != 1}
    assert {attempt for _, attempt in healthy} == {1}  # nobody is stopped for it
    assert plan.exact == (quorum == "all")
    if "vendor_down" in outage:
        assert simulation.refused_calls >= 10


@pytest.mark.slow
def test_a_replica_without_a_machine_is_gone_on_without_and_joins_when_there_is_one():
    """It is killed, and its vendor has none for it for a while: two of three are the quorum."""
    settings = {"quorum": 2, **FEW_ERRORS}
    plan = calm(rounds=40, kills=((30.0, 1),), no_machine=((30.0, 80.0, 1),), settings=settings)
    simulation = Simulation(plan)
    commits = simulation.run()
    contributors = [{answer.replica_id for answer in commit.answers if answer.averaged} for commit in commits]
    assert commits[-1].stop == "completed"
    without = [number for number, each in enumerate(contributors) if each == {0, 2}]
    assert len(without) >= 10 and 1 in set().union(*contributors[without[-1] :])


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(), ((9.0, -1), (10.0, -1))], ids=["", "its coordinator is killed"])
def test_a_replica_that_is_refused_for_good_is_waited_for_a_minute_at_most(kills: tuple[tuple[float, int], ...]):
    """In a leg's first round, which waits for everybody to start, by default for half an hour."""
    timing = {"poll_s": 0.5, "heartbeat_s": 5.0, "startup_timeout_s": 1800.0, "round_timeout_s": 1800.0}
    simulation = Simulation(calm(refused=(2,), kills=kills, settings={"timing": timing}))
    commits = simulation.run()
    refused_at = simulation.bucket.written_at[keys.exit_record(2, 1)]
    assert simulation.bucket.written_at[keys.commit(1)] < refused_at + 60.0
    assert commits[0].reason.startswith("2 of 3 contributions, out for good: 2") and commits[0].applied
    assert commits[-1].stop == "completed" and all(commit.roster == (0, 1) for commit in commits)
    out = RunLog(simulation.bucket).out(1)
    assert list(out) == [2] and "another model (simulated)" in out[2].reason


def test_a_replica_that_fails_again_and_again_but_gets_on_is_not_given_up():
    kills = tuple((12.0 + 25.0 * number, 1) for number in range(6))
    plan = calm(replicas=2, rounds=20, kills=kills, settings={"quorum": "all", **FEW_ERRORS})
    simulation = Simulation(plan)
    assert simulation.run()[-1].stop == "completed"
    assert len([attempt for replica_id, attempt in simulation.replicas if replica_id == 1]) >= 5


@pytest.mark.slow
def test_a_replica_may_die_when_one_of_two_parallel_writes_is_done():
    """Payload and state are sent together. Whichever arrives first, its restarted attempt ends with the same bits."""
    first_written = set()
    for seed in range(8):
        plan = calm(seed=seed, latency_s=0.5, settings={"quorum": "all", "replica_state": "round"})
        calls = {"payload": keys.payload(2, 1, 1, 0), "state": keys.state(1, 2, 1)}
        undisturbed = Simulation(plan)
        undisturbed.run()
        written = sorted((undisturbed.bucket.written_at[key], name) for name, key in calls.items())
        between = (written[0][0] + written[1][0]) / 2
        killed = Simulation(dataclasses.replace(plan, kills=((between, 1),)))
        killed.run()
        assert [name for name, key in calls.items() if key in killed.bucket.written_at] == [written[0][1]]
        first_written.add(written[0][1])
    assert first_written == {"payload", "state"}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_invariants_hold_with_more_replicas_settings_and_faults(first):
    """Thousands of seeds are `make simulate WIDE=1 SEEDS=…`."""
    for seed in range(first, first + 10):
        simulate_wide(seed)


@pytest.mark.parametrize("reported_s", [5e6, pytest.param(0.0, marks=pytest.mark.slow)])
def test_of_two_replicas_one_that_reports_a_time_that_is_not_so_holds_nobody_up(reported_s):
    """It trains as fast as the other one, is killed in the third round, and gets no machine again: the other goes on
    alone, and would wait for a month if it believed the report. With the report of no time nobody is cut off.
    """
    settings = {"quorum": 1, **FEW_ERRORS}
    plan = calm(replicas=2, paces=(1.0, 1.0), rounds=8, settings=settings, reports_s=((1, reported_s),))
    together = Simulation(plan)
    commits = together.run()
    assert all(len([a for a in commit.answers if a.averaged]) == 2 for commit in commits[:-1])
    alone = Simulation(dataclasses.replace(plan, kills=((20.0, 1),), no_machine=((20.0, 1e5, 1),)))
    assert alone.run()[-1].stop == "completed"
    last = keys.commit(len(commits))
    waited_s = alone.bucket.written_at[last] - together.bucket.written_at[last]
    assert 0 < waited_s < 120.0  # one straggler deadline


# -- arithmetic -------------------------------------------------------------------------------------------------------

SLOW = pytest.mark.slow
EVERY_RULE = [  # of weights, averages and outer steps
    pytest.param({"settings": {"clip_factor": 1.05}}, id="clip"),
    pytest.param({"settings": {"weights": "tokens"}, "tokens": (1, 2, 3, 100)}, id="tokens", marks=SLOW),
    pytest.param({"settings": {"codec": "bf16", "fragments": 2, "sync_every": 8}}, id="bf16"),
    pytest.param({"settings": {"outer": {"nesterov": False}}, "paces": (1.0, 1.0, 1.0, 3.0)}, id="partial", marks=SLOW),
    pytest.param({"settings": {"outer": {"momentum": 0.0}}, "nan": ((5, 1),)}, id="abstention", marks=SLOW),
    pytest.param({"settings": {"aggregate": "agreeing_mean"}}, id="agreeing_mean"),
    pytest.param({"settings": {"aggregate": "median"}}, id="median", marks=SLOW),
    pytest.param({"settings": {"aggregate": "trimmed_mean"}}, id="trimmed_mean", marks=SLOW),
]


def rule_by_rule(**changes: Any) -> Plan:
    return calm(**{"replicas": 4, "paces": (1.0,) * 4, "width": 5, "rounds": 4, **changes})


@pytest.mark.parametrize("changes", EVERY_RULE)
def test_plain_arithmetic_gives_every_base_of_a_run(changes: dict[str, Any]):
    commits = Simulation(rule_by_rule(**changes)).run()
    assert commits[-1].stop == "completed" and sum(commit.applied for commit in commits) == 4


@pytest.mark.slow
def test_plain_arithmetic_gives_every_base_of_a_run_with_several_payload_shards():
    assert Simulation(rule_by_rule(width=140_000, settings={"shard_mib": 1})).run()[-1].stop == "completed"


def wrong_clip(round_: int, averaged: Sequence[Answer], config: RunConfig, *before: Any) -> Shares:
    return shares_of(round_, averaged, config.model_copy(update={"clip_factor": 3.0}), *before)


def plain_momentum(parameter: Any, momentum: Any, gradient: Any, outer: OuterConfig) -> None:
    nesterov_step(parameter, momentum, gradient, outer.model_copy(update={"nesterov": False}))


@pytest.mark.parametrize(
    ("module", "name", "wrong", "changes"),
    [
        (weights, "shares_of", wrong_clip, {"settings": {"clip_factor": 1.05}}),
        (weights, "_MOST_TOKENS", 400, {"settings": {"weights": "tokens"}, "tokens": (1, 2, 3, 100)}),
        (weights, "_by_steps", lambda round_, origins, config: config.sync_every, {"paces": (1.0, 1.0, 1.0, 3.0)}),
        (outer_step, "nesterov_step", plain_momentum, {}),
        (aggregate, "trimmed", lambda how, count: 0, {"settings": {"aggregate": "median"}}),
        (agreement, "_LARGEST", 0.0, {"settings": {"aggregate": "agreeing_mean"}}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_arithmetic_that_is_wrong_everywhere_alike_is_caught(monkeypatch, module, name, wrong, changes):
    """`verify`, rebuilds and the other replicas compute the same, so that nothing disagrees with anything."""
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(InvariantBroken, match="plain arithmetic gives"):
        Simulation(rule_by_rule(**changes)).run()


# -- bugs that must be caught -----------------------------------------------------------------------------------------


def caught(seeds: range = range(200), **settings: Any) -> str:
    """The first complaint of the simulation about a planted bug."""
    for seed in seeds:
        try:
            simulate(seed, **settings)
        except InvariantBroken as broken:
            assert f"reproduce: make simulate SEED={seed}" in str(broken)
            return str(broken)
    raise AssertionError(f"the bug was not caught in {len(seeds)} seeds")


def test_a_commit_that_is_overwritten_is_caught(monkeypatch):
    def overwrite(log: RunLog, commit: Commit) -> CommitEntry:
        log.store.put(keys.commit(commit.round), commit.to_bytes())
        return log.remember_commit(commit.round, commit.to_bytes())

    monkeypatch.setattr(close_round, "append_commit", overwrite)
    assert "I1: rounds/" in caught(replicas=3)


def test_a_guard_folded_twice_is_caught(monkeypatch):
    def twice(state: Any, *args: Any) -> FoldResult | None:
        once = fold_round(state, *args)
        return fold_round(once.state, *args) if once is not None else None

    monkeypatch.setattr(close_round, "fold_round", twice)
    assert "its guard is not what the scores in its manifests give" in caught()


def test_an_older_state_on_the_newest_base_is_caught(monkeypatch):
    """The restarted attempt goes on from its manifest before the last: batches count twice."""

    def older(self: ContributionHistory) -> Contribution | None:
        open_round = self._tip.open.round
        found = [m for r in range(open_round, 0, -1) if (m := self.of(r)) is not None and m.progress]
        return found[1] if len(found) > 1 else (found[0] if found else None)

    monkeypatch.setattr(ContributionHistory, "newest", older)
    assert "I4:" in caught()


@pytest.mark.slow
def test_two_live_attempts_that_both_count_are_caught(monkeypatch):
    """Of two attempts that answered the same round, the one that lost carries its work all the same."""
    create = Contributor._create

    def insist(self: Contributor, kind: str, fields: Any, **contents: Any) -> Contribution:
        existing, attempt = create(self, kind, fields, **contents), self._attempt
        if existing.attempt != attempt.number and kind == "delta":
            author = {"attempt": attempt.number, "claim_sha256": attempt.claim_sha256}
            ours = existing.model_copy(update={**author, "payload": contents["payload"]})
            self._debt._carried[ours.fragment] = ours
        return existing

    def forget(self: Debt, manifest: Contribution, commit: Commit, is_right: Any) -> bool:
        carried = self._carried.get(manifest.fragment)
        if carried is None or carried.round != manifest.round:
            return settle(self, manifest, commit, is_right)
        return False

    settle = Debt.settle
    monkeypatch.setattr(Debt, "settle", forget)
    monkeypatch.setattr(Contributor, "_create", insist)
    monkeypatch.setattr(Attempt, "check_superseded", lambda self: None)
    with pytest.raises(InvariantBroken, match=r"I4|again, after round"):
        for seed in range(40):
            when = 14.0 + seed
            Simulation(calm(settings={"quorum": 1}, rounds=20, lies=((when, 1),), seed=seed, latency_s=1.0)).run()


def test_a_replica_that_heals_in_mid_round_is_caught(monkeypatch):
    """It takes the newest base under its feet: the next pseudo-gradient undoes the others' progress."""

    end_round_early = TrainingSession._end_round_early

    def heal(self: TrainingSession) -> None:
        taking = self._rounds
        ending = taking.open.outer_step + 2 >= taking._attempt.outer_steps
        if ending or not taking.elastic or not self._loop.inner_step or not taking.committed():
            end_round_early(self)
            return
        taking.close()  # and local parameters stay those that were trained from the base before

    monkeypatch.setattr(TrainingSession, "_end_round_early", heal)
    assert "I4: round" in caught(quorum=1, replicas=3, fragments=1, fragment_sync_delay=0)


def test_a_position_that_moves_under_training_while_a_round_is_in_flight_is_caught(monkeypatch):
    """The fragment that training installs is another than the one which the round moved."""
    monkeypatch.setattr(Participant, "open", property(lambda self: self._tip.open))
    monkeypatch.setattr("simulation._undisturbed", {})  # digests of such runs are not those of others
    assert "I5: " in caught(quorum="all", **OVERLAP[1])


def test_an_attempt_that_closes_a_round_again_and_again_is_caught(monkeypatch):
    """As one did for ever that continued behind a contribution of a round before the one that it had lost."""
    note = Simulation.note_closed

    def note_too_often(self: Simulation, replica_id: int, attempt: int, round_: int) -> None:
        for _ in range(MOST_CLOSES + 1):
            note(self, replica_id, attempt, round_)

    monkeypatch.setattr(Simulation, "note_closed", note_too_often)
    with pytest.raises(InvariantBroken, match=r"attempt 1 of replica \d closes round 1 again and again\. Of the last"):
        Simulation(calm()).run()


def test_a_run_that_waits_for_ever_is_ended_with_the_calls_that_it_repeats(monkeypatch):
    """One of three replicas gets no machine, and all are needed."""
    monkeypatch.setattr("simulation.MOST_CALLS", 100)
    plan = calm(settings={"quorum": "all"}, no_machine=((0.0, 1e9, 1),))
    with pytest.raises(InvariantBroken, match=r"I10: no commit in 401 calls\..* list rounds/00000001/contributions/"):
        Simulation(plan).run()


def test_a_state_that_is_not_saved_beside_a_snapshot_is_caught(monkeypatch):
    monkeypatch.setattr(Checkpoint, "encode_if_due", lambda self: None)
    with pytest.raises(InvariantBroken, match="I5: replica 0 saved no state in round 2"):
        Simulation(calm()).run()


def test_wide_plans_cover_what_they_should():
    plans = [wide_plan_of(seed) for seed in range(600)]
    assert {p.replicas for p in plans} == {1, 2, 3, 4, 5, 6, 8} and max(p.rounds for p in plans) == 10
    for name, values in {
        "aggregate": {"mean", "agreeing_mean", "median", "trimmed_mean", "contributors_mean"},
        "weights": {"uniform", "tokens"},
        "clip": {"median_norm", "off"},
        "codec": {"fp32", "bf16", "2bit", "topk64"},
        "fragment_update_alpha": {0.0, 0.25, 0.5},
    }.items():
        assert {p.settings[name] for p in plans} == values, name
    drawn = ("next_leg", "no_network", "coordinators", "vendor_down", "no_machine", "full", "rots", "lost_payloads")
    of_machines = ("machines", "machine_kills", "machine_notices", "other_arithmetic", "reports_s")
    for what in (*drawn, *of_machines, "no_commits", "forged", "stale_s", "buffer", "tokens", "adapted"):
        assert sum(bool(getattr(p, what)) for p in plans) > 10, what
    assert sum(p.width > 2**17 for p in plans) > 3  # several payload shards
    assert sum(p.exact for p in plans) > 60


def test_plans_differ_and_cover_what_they_should():
    plans = [plan_of(seed) for seed in range(300)]
    assert {p.replicas for p in plans} == {1, 2, 3, 4}
    assert {p.settings["quorum"] for p in plans} == {"all", None, 1}
    assert sum(p.exact for p in plans) > 60
    for what in ("kills", "stops", "notices", "storms", "no_writes", "corrupt_payloads", "nan", "collapse", "fail"):
        assert sum(bool(getattr(p, what)) for p in plans) > 10, what


def longest_s(commits: list[Commit]) -> float:
    """The longest time between two commits that follow each other."""
    return max(after.at - before.at for before, after in pairwise(commits))


@pytest.mark.parametrize(
    ("slow_s", "steps"), [(1.3, 6), pytest.param(4.0, 2, marks=SLOW), pytest.param(9.0, 1, marks=SLOW)]
)
def test_in_equal_time_a_slow_replica_trains_what_fits_and_nobody_waits_for_it(slow_s: float, steps: int):
    """In the first round, which ends with its fastest replica; and behind a kill. A first step is always taken."""
    settings = {"steps": "equal_time", "quorum": 3, "sync_every": 8}
    plan = calm(rounds=8, settings=settings, kills=((25.0, 2),))
    simulation, equals = Simulation(dataclasses.replace(plan, paces=(1.0, 1.0, slow_s))), Simulation(plan)
    commits, of_equals = simulation.run(), equals.run()
    assert simulation.time.now < 1.15 * equals.time.now
    assert longest_s(commits[3:]) < 1.06 * longest_s(of_equals[3:])
    assert min(a.origins[-1].steps for a in commits[0].answers) < 8
    taken = {(a.replica_id, a.origins[-1].steps) for commit in commits[3:-1] for a in commit.answers}
    assert taken == {(0, 8), (1, 8), (2, steps)}
