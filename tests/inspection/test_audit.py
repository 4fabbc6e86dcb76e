"""What an audit draws, what it concludes from a re-run, what it refuses, and what a re-run sees of the bucket."""

from dataclasses import replace
from itertools import combinations
from math import comb, isclose
from pathlib import Path

import pytest
from audited_simulation import audited, played
from protocol_fleet import Fleet, play, report
from simulation_plan import calm

from diloco_orchestrator.errors import ConfigError, ObjectMissing
from diloco_orchestrator.inspection.audit import audit
from diloco_orchestrator.inspection.audit.auditor import Auditor, state_bytes
from diloco_orchestrator.inspection.audit.findings import (
    Audit,
    AuditOutcome,
    RangeFinding,
    TrainingRange,
    bound_of,
    caught_probability,
    drawn,
    fraction_caught,
    judged,
    ranges_of,
)
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.replica.training.tensor_tree import state_file
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.launched_here import remember
from diloco_orchestrator.run_log.point_in_time_view import PointInTimeView
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from replica.attempt.attempt import differences, hardware_here, versions_here
from replica.process.range_record import RangeRecord
from replica.process.rerun_result import RerunResult

HEAD = Head(12, "ab" * 32)
RANGES = [TrainingRange(round_, replica_id) for round_ in range(1, 9) for replica_id in range(3)]
OTHER_CLASS = ("cpu A there, B here",)
SEEDS = 1000
ERROR = 1e-6  # probability with which a right draw would fail one comparison of frequencies


def tails(count: int, n: int, p: float) -> float:
    """The probability that a binomial number is as far from its mean as `count`, on `count`'s side, at least; twice."""
    mass = [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    return 2 * min(sum(mass[: count + 1]), sum(mass[count:]))


# -- the draw ---------------------------------------------------------------------------------------------------------


def test_the_draw_is_a_function_of_seed_and_head():
    first = drawn(RANGES, 5, 7, HEAD)
    assert first == drawn(list(reversed(RANGES)), 5, 7, HEAD) and len(set(first)) == 5
    assert first != drawn(RANGES, 5, 8, HEAD) and first != drawn(RANGES, 5, 7, replace(HEAD, round=13))
    assert drawn(RANGES, 4, 7, HEAD) == first[:4]  # to draw more adds ranges
    assert sorted(drawn(RANGES, 100, 7, HEAD)) == RANGES


@pytest.mark.parametrize(("dishonest", "draw"), [(1, 5), (3, 5), (12, 2)])
def test_dishonest_segments_are_drawn_as_often_as_the_formula_says(dishonest, draw):
    liars = set(RANGES[:: len(RANGES) // dishonest][:dishonest])
    caught = sum(bool(liars & set(drawn(RANGES, draw, seed, HEAD))) for seed in range(SEEDS))
    expected = caught_probability(len(RANGES), dishonest, draw)
    assert expected >= 1 - (1 - dishonest / len(RANGES)) ** draw
    assert tails(caught, SEEDS, expected) > ERROR


def test_the_probability_counts_all_draws():
    for dishonest, draw in ((1, 2), (2, 3), (5, 1), (6, 4)):
        draws = list(combinations(range(6), draw))
        hits = sum(any(each < dishonest for each in chosen) for chosen in draws)
        assert isclose(caught_probability(6, dishonest, draw), hits / len(draws))
    assert fraction_caught(24, 24) == 1 and fraction_caught(24, 1) == 23 and fraction_caught(24, 0) is None


def test_every_segment_that_an_outer_step_contains_can_be_drawn_late_ones_too():
    fleet = Fleet(replicas=2, rounds=3)
    participants = fleet.join_all()
    for _ in range(4):
        play(participants, [1.0, 2.0])
    commits = fleet.commits()
    found = ranges_of(commits)
    assert found == sorted(found) and [(s.round, s.replica_id) for s in found] == [
        (round_, replica_id) for round_ in (1, 2, 3) for replica_id in (0, 1)
    ]
    # Replica 1's work of round 1 was late: the commit of round 1 does not name it, that of round 2 carries it.
    first = commits[0].model_copy(update={"answers": commits[0].answers[:1]})
    late = (
        commits[1]
        .answers[1]
        .model_copy(update={"origins": (commits[0].answers[1].origins[0], *commits[1].answers[1].origins)})
    )
    second = commits[1].model_copy(update={"answers": (commits[1].answers[0], late)})
    assert {s.round: s.manifest_sha256 for s in ranges_of([first, second]) if s.replica_id == 1} == {
        1: None,
        2: late.manifest_sha256,
    }
    unapplied = [commit.model_copy(update={"applied": False}) for commit in commits]
    assert ranges_of(unapplied) == []


# -- the judgement ----------------------------------------------------------------------------------------------------

SAME = RerunResult(payload="x", distance=0.0)
FAR = RerunResult(payload="y", differing=("payload", "state"), distance=0.3, state_distance=0.1)
NEAR = replace(FAR, distance=1e-6, state_distance=1e-5)


@pytest.mark.parametrize(
    ("found", "again", "options", "expected"),
    [
        (SAME, None, {}, AuditOutcome.EQUAL),
        (FAR, FAR, {}, AuditOutcome.DIFFERS),
        (NEAR, NEAR, {}, AuditOutcome.DIFFERS),  # on the same class every bit counts
        (replace(SAME, differing=("scores",)), SAME, {}, AuditOutcome.DIFFERS),
        (replace(SAME, other_class=OTHER_CLASS), None, {}, AuditOutcome.EQUAL),
        (replace(NEAR, other_class=OTHER_CLASS), None, {}, AuditOutcome.WITHIN_BOUND),
        (replace(FAR, other_class=OTHER_CLASS), None, {}, AuditOutcome.DIFFERS),
        (replace(NEAR, state_distance=0.2, other_class=OTHER_CLASS), None, {}, AuditOutcome.DIFFERS),
        (replace(NEAR, differing=("payload", "cursor"), other_class=OTHER_CLASS), None, {}, AuditOutcome.DIFFERS),
        # Two re-runs that differ from each other: training is not deterministic.
        (NEAR, replace(NEAR, payload="z", noise=1e-6), {}, AuditOutcome.WITHIN_BOUND),
        (FAR, replace(FAR, payload="z", noise=1e-6), {}, AuditOutcome.DIFFERS),
        (FAR, replace(FAR, payload="z", noise=0.2), {}, AuditOutcome.NOT_AUDITABLE),
        (RerunResult(not_auditable="gone"), None, {}, AuditOutcome.NOT_AUDITABLE),
        (RerunResult(lost="removed"), None, {}, AuditOutcome.DIFFERS),
        # A round that was cut, perhaps between two batches of one step.
        (replace(SAME, differing=("cursor",), micro_batches=True), None, {"partial": True}, AuditOutcome.EQUAL),
        (replace(SAME, differing=("cursor",)), None, {"partial": True}, AuditOutcome.DIFFERS),
        (replace(FAR, micro_batches=True), None, {"after_cut": True}, AuditOutcome.NOT_AUDITABLE),
        (FAR, FAR, {"after_cut": True}, AuditOutcome.DIFFERS),
    ],
)
def test_what_follows_from_a_rerun(found, again, options, expected):
    outcome, words = judged(found, bound_of(10), again, **options)
    assert outcome is expected and bool(words) is (outcome is not AuditOutcome.EQUAL)


def test_the_findings_say_what_they_prove():
    done = Audit("url", str(HEAD), 7, 24, {"abstentions": 2})
    done.findings = [RangeFinding(range_, AuditOutcome.EQUAL, "") for range_ in RANGES[:5]]
    assert done.agrees and "12 or more of them been dishonest" not in done.words() and "2 abstentions" in done.words()
    assert done.to_json()["caught"]["50%"] == caught_probability(24, 12, 5)
    done.findings.append(RangeFinding(RANGES[5], AuditOutcome.NOT_AUDITABLE, "gone"))
    assert done.agrees and done.audited == 5 and "1 not auditable" in done.words()
    assert "Of those that could not be audited nothing is known" in done.words()
    done.findings.append(RangeFinding(RANGES[6], AuditOutcome.DIFFERS, "payload differ"))
    assert not done.agrees and done.to_json()["findings"][-1]["outcome"] == "DIFFERS"


# -- refusals ---------------------------------------------------------------------------------------------------------


def run_in(folder: Path, **settings) -> Fleet:
    fleet = Fleet(replicas=1, rounds=2, store=open_store(str(folder)), entrypoint="tiny_workloads:train", **settings)
    play([fleet.join(0)], [1.0])
    return fleet


def test_a_run_of_somebody_else_is_not_trained_here(tmp_path):
    fleet = run_in(tmp_path)
    with pytest.raises(ConfigError, match=r"you did not launch this run on this machine.*--trust-bucket"):
        audit(fleet.store.url)
    Auditor(fleet.store, trust_bucket=True)
    remember(RunLog(fleet.store))
    Auditor(fleet.store)


def test_without_saved_states_the_refusal_says_what_they_cost(tmp_path):
    fleet = run_in(tmp_path, quorum=None)
    size = 2 * 4 * (3 + 9)  # two moments of 12 parameters
    assert state_bytes(fleet.start().parameters, keeps_local=False) == size
    with pytest.raises(ConfigError, match=rf'replica_state="round".*{size} bytes a round and replica, 192 bytes in'):
        audit(fleet.store.url, trust_bucket=True)


def test_what_cannot_be_audited_at_all_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Draw at least 1"):
        audit(str(tmp_path), draw=0)
    empty = Fleet(replicas=1, store=open_store(str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match="no commit yet"):
        Auditor(empty.store, trust_bucket=True)
    nowhere = Fleet(replicas=1, rounds=1, store=open_store(str(tmp_path / "nowhere")), entrypoint="no_module_x:f")
    play([nowhere.join(0)], [1.0])
    with pytest.raises(ConfigError, match="no_module_x"):
        Auditor(nowhere.store, trust_bucket=True)


# -- the machine ------------------------------------------------------------------------------------------------------


def test_a_machine_is_of_its_own_class_and_of_no_other(tmp_path):
    assert differences(versions_here(), hardware_here()) == []
    assert any("cpu" in each for each in differences(versions_here(), {**hardware_here(), "cpu": "Z80"}))
    assert any("torch" in each for each in differences({**versions_here(), "torch": "1.0"}, hardware_here()))
    assert differences({**versions_here(), "obstore": "0"}, hardware_here()) == []
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Big One\nprocessor : 1\nmodel name\t: Big One\n")
    for number in "01":
        card = tmp_path / f"driver/nvidia/gpus/{number}"
        card.mkdir(parents=True)
        (card / "information").write_text("Model: \t\t Fast Card\nIRQ: 7\n")
    assert hardware_here(tmp_path) == {"cpu": "Big One", "gpu": "Fast Card, Fast Card"}


# -- the bucket as it was ---------------------------------------------------------------------------------------------


def test_a_point_in_time_view_shows_the_bucket_of_then_and_keeps_what_is_written():
    store, created = MemoryStore(), []
    shown = [
        *(keys.RUN, keys.START, keys.begin(1), keys.result(1), keys.begin(2), keys.commit(4), keys.contribution(4, 1)),
        *(keys.contribution(5, 0), keys.payload(4, 1, 1, 0), keys.state(1, 4, 1), keys.snapshot(4, "snapshot.json")),
        *(
            str(keys.SegmentKey(1, 4, "commits")),
            keys.intent(0, 3),
            keys.claim(0, 3, "0" * 16),
            keys.claim(1, 2, "0" * 16),
        ),
    ]
    hidden = [
        *(keys.result(2), keys.halt(2), keys.begin(3), keys.commit(5), keys.contribution(5, 1)),
        *(keys.handle(0, 1), keys.claim(1, 3, "0" * 16)),
        *(keys.payload(5, 0, 1, 0), keys.state(1, 5, 1), keys.snapshot(5, "snapshot.json"), keys.commit(6)),
        str(keys.SegmentKey(1, 5, "commits")),
    ]
    for key in (*shown, *hidden):
        store.create(key, b"old")
    view = PointInTimeView(store, leg=2, round_=5, replica_id=1, attempt=2, on_create=created.append)
    assert [info.key for info in view.list("")] == sorted(shown)
    for key in hidden:
        with pytest.raises(ObjectMissing):
            view.get(key)
    assert not view.create(keys.commit(4), b"new") and view.create(keys.contribution(5, 1), b"new")
    view.put(keys.heartbeat(1, 1), b"new")
    view.delete(keys.commit(4))
    assert created == [keys.contribution(5, 1)] and view.get(keys.contribution(5, 1)) == b"new"
    assert [info.key for info in view.list(keys.contributions(5))] == [keys.contribution(5, i) for i in (0, 1)]
    assert {info.key: store.get(info.key) for info in store.list("")} == dict.fromkeys([*shown, *hidden], b"old")


def test_a_simulated_run_with_a_preemption_is_repeated_bit_for_bit(tmp_path):
    plan = calm(settings={"replica_state": "round"}, replicas=2, rounds=3, paces=(1.0, 1.0), notices=((9.0, 1),))
    found = audited(played(plan), tmp_path)
    assert {outcome for outcome, _, _ in found.values()} == {AuditOutcome.EQUAL} and len(found) >= 4
    assert any(result.follows > 0 for _, _, result in found.values())


@pytest.mark.parametrize(
    ("payloads", "do", "words"),
    [
        ("all", "remove", "was removed, though the run keeps all"),
        ("all", "change", "was changed"),
        ("needed", "change", "was changed"),
        ("needed", "remove", ""),  # retention may have done it
        ("all", "nothing", ""),
    ],
)
def test_a_state_that_was_taken_away_is_no_segment_that_cannot_be_audited(payloads, do, words):
    fleet = Fleet(replicas=1, rounds=9, retention={"payloads": payloads})
    participant = fleet.join(0)
    for _ in range(2):
        play([participant], [1.0], [replace(report(), state=state_file({"of": 1}))])
    key = keys.state(0, 1, 1)
    if do == "remove":
        fleet.store.delete(key)
    elif do == "change":
        fleet.store.put(key, fleet.store.get(key)[:-1] + b"x")
    log = RunLog(fleet.store)
    manifest = ContributionReader(fleet.store).of(2, 0)
    assert manifest is not None
    record = RangeRecord(log, manifest)
    assert words in record.why_lost() and bool(words) == bool(record.why_lost())
    assert bool(record.why_not()) == (do != "nothing")
