"""Attacks by somebody who may create objects: under a commit's key lies what is none. It is void, for everybody."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forged_commits import STAMP, Fields, after_two_rounds, completed, forge, scores
from protocol_fleet import Fleet, HurriedClock, answer, play

from diloco_orchestrator.errors import RecordInvalid, RecordTooNew
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys, kinds
from diloco_orchestrator.protocol.records import Commit, Origin
from diloco_orchestrator.run_log.append import request_halt
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.rounds.participant import Participant

Bytes = Callable[[bytes], bytes]  # what is put under the next commit's key, from the bytes of the last commit


def changed(**fields: object) -> Bytes:
    """The last commit with other fields; None leaves one out."""

    def change(data: bytes) -> bytes:
        body = {**json.loads(data), **fields}
        return json.dumps({name: value for name, value in body.items() if value is not None}).encode()

    return change


NO_COMMITS: dict[str, Bytes] = {
    "nothing": lambda last: b"",
    "no JSON": lambda last: b"\x00garbage",
    "not Unicode": lambda last: b'{"a": "\xff"}',
    "a list": lambda last: b"[]\n",
    "JSON nested too deeply": lambda last: b"[" * 100_000,
    "more bytes than a commit may have": lambda last: b" " * (kinds.most_bytes(keys.commit(3)) + 9),
    "another record": lambda last: changed(record="begin")(last),
    "a field too few": changed(round=3, stop=None, verdict=None, roster=None),
    "a field too many": changed(round=3, more=1),
    "a field of another type": changed(round="3"),
    "a number too large": changed(round=3, outer_step=10**300),
    "a copy of the commit before": lambda last: last,
    "another round": changed(round=30),
    "a commit that follows another": changed(round=3, previous="0" * 64),
    "a commit that follows nothing": changed(round=3, previous=""),
}


def put(fleet: Fleet, made: Bytes, round_: int = 3) -> None:
    data = made(fleet.store.get(keys.commit(round_ - 1)))
    assert fleet.engine.create(keys.commit(round_), data)


def follow(participants: list[Participant]) -> None:
    """Let all answer the open round, whose key is taken, and close it."""
    for participant in participants:
        answer(participant, 1.0)
    for participant in participants:
        assert not participant.close().applied


@pytest.mark.parametrize("made", NO_COMMITS.values(), ids=NO_COMMITS)
def test_what_is_no_commit_costs_a_round_and_nobody_reads_it_otherwise(made: Bytes, tmp_path: Path):
    fleet, participants = after_two_rounds()
    before, guard = participants[0].digest, participants[0].open.guard
    put(fleet, made)
    follow(participants)
    for each in participants:
        assert (each.open.round, each.digest, each.open.guard, each.open.roster) == (4, before, guard, (0, 1))
        assert not each.open.stopped
    play(participants, [1.0, 0.5])
    restarted = fleet.join(1)
    assert restarted.digest == participants[0].digest == participants[1].digest != before
    reader = RunReader(fleet.store)
    status = reader.status()
    assert (status.state, status.round, status.outer_step) == ("running", 4, 3)
    assert [row.applied for row in status.rounds] == [True, True, False, True]
    log = RunLog(fleet.store)
    assert not EndOfLeg(log, log.newest_begin(), STAMP).reached()
    assert copy_model(log, tmp_path / "model", 4) == 4
    commits = [participants[0]._attempt.log.commit(3), log.commit(3), reader.log.commit(3)]
    assert len({(each.commit, each.sha256) for each in commits if each}) == 1 and None not in commits
    assert commits[0].commit.reason.startswith("void") and commits[0].commit.empty_rounds == 1
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.commit(3)


def first(**fields: object) -> Callable[[Commit], Fields]:
    """Forge the first answer of a commit."""

    def change(commit: Commit) -> Fields:
        return {"answers": (commit.answers[0].model_copy(update=fields), *commit.answers[1:])}

    return change


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize(
    "forged",
    [
        first(tokens=99),
        first(norm=1.5),
        first(payload="b3:" + "1" * 64),
        first(attempt=2),
        first(origins=(Origin(round=3, steps=29),), weight=29),
    ],
    ids=["tokens", "norm", "payload", "attempt", "steps"],
)
def test_a_commit_that_says_other_than_the_manifests_it_names_is_void(forged: Callable[[Commit], Fields], scored: bool):
    fleet, participants = after_two_rounds(scored, sync_every=30)
    before, guard = participants[0].digest, participants[0].open.guard
    for participant, said in zip(participants, scores(3), strict=True):
        answer(participant, 1.0, said if scored else None)
    forge(fleet, forged)
    for each in participants:
        assert not each.close().applied
        assert (each.open.round, each.digest, each.open.guard, each.open.stopped) == (4, before, guard, False)
    play(participants, [1.0, 0.5], scores(4) if scored else None)
    assert fleet.join(1).digest == participants[0].digest == participants[1].digest != before
    status = RunReader(fleet.store).status()
    assert (status.state, status.outer_step, status.rounds[-1].applied) == ("running", 3, True)
    log = RunLog(fleet.store)
    assert not EndOfLeg(log, log.newest_begin(), STAMP).reached()
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key.startswith("rounds/00000003/")


def test_its_work_is_carried_into_the_next_round():
    fleet, participants = after_two_rounds(quorum=1)
    put(fleet, NO_COMMITS["no JSON"])
    follow(participants)
    play(participants, [1.0, 0.5])
    origins = {answer.origins for answer in fleet.commits()[-1].answers}
    assert [{origin.round for origin in each} for each in origins] == [{3, 4}] * len(origins)


def test_a_coordinator_stops_a_run_after_what_is_no_commit():
    fleet, _ = after_two_rounds()
    put(fleet, NO_COMMITS["no JSON"])
    log = RunLog(fleet.store)
    end = EndOfLeg(log, log.newest_begin(), STAMP)
    end.commit_stop("halted", "test")
    end.finalize()
    assert RunReader(fleet.store).status().state == "halted" and len(fleet.commits()) == 4


@pytest.mark.parametrize("made", [*[NO_COMMITS[name] for name in ("no JSON", "another round")], None])
def test_three_in_a_row_fail_the_run_which_can_be_resumed(made: Bytes | None):
    fleet, participants = after_two_rounds()
    for round_ in (3, 4, 5):
        if made is not None:
            put(fleet, made, round_)
        for participant in participants:
            answer(participant, 1.0)
        if made is None:
            forge(fleet, completed, round_)
        for participant in participants:
            participant.close()
    assert all(participant.open.stopped for participant in participants)
    before, log = participants[0].digest, RunLog(fleet.store)
    end = EndOfLeg(log, log.newest_begin(), STAMP)
    assert end.reached()
    end.finalize()
    status = RunReader(fleet.store).status()
    assert status.state == "failed"
    assert "See who wrote rounds/00000005/commit.json" in status.reason and "resume the run" in status.reason
    begin_next_leg(RunLog(fleet.store), rounds=2, from_round=None, by="test", why="test", stamp=STAMP)
    again = [fleet.join(replica_id, 2) for replica_id in (0, 1)]
    assert [each.digest for each in again] == [before, before]
    play(again, [1.0, 0.5])
    assert fleet.join(0, 3).digest == again[0].digest != before
    last = fleet.commits()[-1]
    assert (last.round, last.leg, last.applied) == (6, 2, True)
    log = RunLog(fleet.store)
    assert (found := log.result(1)) is not None and found.status == "failed" and log.result(2) is None


@pytest.mark.parametrize("version", [99, 1])
def test_a_commit_of_another_version_is_no_void_one(version: int):
    fleet, participants = after_two_rounds(clock=HurriedClock())
    put(fleet, changed(round=3, schema_version=version))
    for participant in participants:
        answer(participant, 1.0)
        with pytest.raises(RecordInvalid, match="schema version"):
            participant.close()
    if version == 99:
        with pytest.raises(RecordTooNew):
            RunReader(fleet.store).status()


# -- what was a commit and is none any more ---------------------------------------------------------------------------


@pytest.mark.parametrize("made", [NO_COMMITS["no JSON"], changed(reason="another"), changed(outer_step=7)])
def test_a_commit_that_was_changed_later_is_named_and_not_void(made: Bytes):
    fleet, participants = after_two_rounds()
    play(participants, [1.0, 0.5])
    play(participants, [1.0, 0.5])
    fleet.store.put(keys.commit(2), made(fleet.store.get(keys.commit(2))))
    for read in (lambda: RunReader(fleet.store).status(), fleet.commits, lambda: fleet.join(1)):
        with pytest.raises(RecordInvalid, match="changed after it was written"):
            read()


def test_a_newest_commit_that_was_changed_and_followed_divides_nobody():
    """Only until the next commit, which names other bytes, the changed one can be taken for void."""
    fleet, participants = after_two_rounds()
    fresh = RunLog(fleet.store)
    data = fleet.store.get(keys.commit(2))
    fleet.store.put(keys.commit(2), b"garbage")
    assert [each.applied for each in fresh.commits()] == [True, False]
    play(participants, [1.0, 0.5])
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        fresh.commits()
    fleet.store.put(keys.commit(2), data)
    assert [each.applied for each in RunLog(fleet.store).commits()] == [True, True, True]


class OneWrongRead(MemoryStore):
    """A bit is wrong in the first read of an object."""

    wrong = ""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        if key != self.wrong:
            return data
        self.wrong = ""
        return bytes([data[0] ^ 1]) + data[1:]


def test_a_commit_that_one_reader_reads_with_a_wrong_bit_is_not_void_for_it():
    fleet, participants = after_two_rounds(store=OneWrongRead())
    play(participants, [1.0, 0.5])
    fleet.engine.wrong = keys.commit(3)
    with pytest.raises(RecordInvalid, match="read with an error"):
        fleet.commits()
    assert [each.applied for each in fleet.commits()] == [True, True, True]


def test_a_reader_with_a_wrong_commit_does_not_call_the_next_one_void():
    fleet, participants = after_two_rounds(store=OneWrongRead())
    log = RunLog(fleet.store)
    log.commits()
    play(participants, [1.0, 0.5])
    honest = fleet.store.get(keys.commit(2))
    wrong = Commit.from_bytes(honest, "").model_copy(update={"reason": "a wrong bit"})
    reader = RunLog(fleet.store)
    reader.remember_commit(2, wrong.to_bytes())
    with pytest.raises(RecordInvalid, match="read with an error"):
        reader.commits()


def test_an_unlinked_commit_that_the_next_one_continues_as_it_is_written_is_no_void_one():
    fleet, participants = after_two_rounds()
    for round_, fields in ((3, {"previous": "0" * 64}), (4, {})):  # outer steps 3 and 4
        for participant in participants:
            answer(participant, 1.0)
        forge(fleet, lambda commit, fields=fields: fields, round_)
        if round_ == 3:
            for participant in participants:
                assert not participant.close().applied
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        participants[0].close()
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        fleet.commits()


def test_a_run_that_is_asked_to_halt_after_what_is_no_commit_halts():
    fleet, participants = after_two_rounds()
    put(fleet, NO_COMMITS["a list"])
    follow(participants)
    request_halt(RunLog(fleet.store), "test", "enough", STAMP)
    play(participants, [1.0, 0.5])
    assert all(participant.open.stopped for participant in participants)
    assert RunReader(fleet.store).status().state == "halted"
