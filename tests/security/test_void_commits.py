"""An insider writes void commits in a signed run: whoever holds the key of one replica, and nothing else of the run.

Runs of the real code on virtual time. The insider spends some rounds, and at most one leg: then its key signs no commit
any more, and the run goes on to its end. Nobody removes an object, and no reader raises an error.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from simulation_plan import Plan
from simulation_signed import KEY, SignedSimulation
from virtual_time import VirtualClock

from diloco_orchestrator.errors import ConfigError, ObjectMissing, RecordInvalid, StoreUnavailable
from diloco_orchestrator.inspection.audit.findings import ranges_of
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.record_format import By, Stamp, canonical_json, parse_json
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.protocol.signatures import Signature, named_bytes, signed_bytes, to_text
from diloco_orchestrator.protocol.signed_objects import is_signed, stored_name
from diloco_orchestrator.protocol.weights import norms_after
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import rotations_of
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, ENV_RUN_KEY
from diloco_orchestrator.signing.signed_store import SignedStore
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from diloco_orchestrator.supervision.next_leg import auto_resume, begin_next_leg
from diloco_orchestrator.supervision.rotation import void_authors
from diloco_orchestrator.supervision.unfounded_commits import UnfoundedCommits

SETTINGS = {"quorum": 2, "sync_every": 4, "fragments": 1, "fragment_sync_delay": 0, "late": "carry"}
SETTINGS |= {"snapshot_every": 2, "retention": {}, "aggregate": "mean"}
PLAN = Plan(seed=3, replicas=3, rounds=6, paces=(1.0, 1.1, 1.3), settings=SETTINGS)
INSIDER = 1
ENVIRON = {ENV_RUN_KEY: KEY.text()}
STAMP = Stamp("test", lambda: 0.0)
Made = Iterator[tuple[int, bytes]]  # round and content


class Attacked(SignedSimulation):
    """A signed run in which replica 1 also commits what `attack` gives, as soon as it can; its user keeps attached."""

    def __init__(self, attack: Callable[["Attacked"], Made], plan: Plan = PLAN, period_s: float = 0.25) -> None:
        super().__init__(plan)
        self.attack = attack
        self.view, self._last = SignedStore(self.bucket.stored, ENVIRON), 0
        self.view.get(keys.RUN)
        for number in range(int(150 / period_s)):
            self.time.at(10.0 + period_s * number, self.strike)

    def strike(self) -> None:
        if 1 + len(list(self.bucket.stored.list(keys.KEYS))) > self.epoch:
            self.view.learn_anew()
            self.view.get(keys.RUN)
            self._last = self.view.rotations[-1].after_round
        for round_, body in self.attack(self):
            self.write(round_, body)

    @property
    def epoch(self) -> int:
        return 1 + len(self.view.rotations)

    def write(self, round_: int, body: bytes) -> None:
        """Create the commit under its first two names, with the keys that the insider's newest attempt has."""
        attempt = max((each[1] for each in self.replicas if each[0] == INSIDER), default=1)
        self.create(keys.commit(round_), body.replace(b"attempt 1", b"attempt %d" % attempt), attempt)

    def boast(self) -> None:
        """Overwrite the heartbeat of replica 1 by one that says it is many rounds ahead."""
        beat = {"replica_id": INSIDER, "attempt": 1, "counter": 99, "phase": "training", "round": 99, "inner_step": 0}
        body, key = Heartbeat(write_id="w", at=0.0, **beat).to_bytes(), keys.heartbeat(INSIDER, 1)
        secret = KEY.operator(self.run_sha256).of_attempt(self.run_sha256, INSIDER, 1).text()
        SignedStore(self.bucket.stored, {ENV_ATTEMPT_KEY: secret}).put(key, body)

    def create(self, key: str, body: bytes, attempt: int = 1) -> None:
        """Create any record so."""
        signer = KEY.operator(self.run_sha256, self.epoch).of_attempt(self.run_sha256, INSIDER, attempt)
        signature = to_text(signer.key.sign(signed_bytes(self.run_sha256, key, body)))
        for take in (0, 1):
            name = stored_name(key, take, signer.names[-1].sign(named_bytes(self.run_sha256, key, take)))
            data = body + Signature(certificate=signer.certificate, signature=signature).line()
            MemoryStore.create(self.bucket.stored, name, data)

    @property
    def newest(self) -> tuple[dict[str, Any], bytes] | None:
        """The fields of the last commit, void or not, and its bytes, once there is one."""
        with suppress(ObjectMissing):
            while self.view.get(keys.commit(self._last + 1)):
                self._last += 1
        if not self._last:
            return None
        data = self.view.get(keys.commit(self._last))
        return parse_json(data), data

    def _supervise(self, clock: VirtualClock) -> None:
        means = Means(self.executor(clock), clock, self.stamp(clock))
        while True:
            coordinator = Coordinator(RunReader(self.network(clock)), means)
            while not coordinator.step():
                clock.sleep(1.0)
            if auto_resume(RunLog(self.network(clock)), means.stamp) is None:
                return
            self.leg = 2
            self.last_digests.clear()


def following(run: Attacked, **change: object) -> tuple[int, dict[str, object]] | None:
    """Round and fields of a commit that names the last one, with some changed."""
    if (newest := run.newest) is None or newest[0]["stop"] != "none":
        return None
    last, data = newest
    fields = {"round": last["round"] + 1, "previous": sha256_hex(data), "by": str(By((INSIDER, 1)))}
    return last["round"] + 1, {**last, **fields, **change}


def linked(run: Attacked) -> Made:
    if (made := following(run, outer_step=99)) is not None:
        yield made[0], canonical_json(made[1])


def unreadable(run: Attacked) -> Made:
    if (made := following(run, fragment="none")) is not None:
        yield made[0], canonical_json(made[1])


def every_second(run: Attacked) -> Made:
    if (made := following(run, outer_step=99)) is not None and made[0] % 2:
        yield made[0], canonical_json(made[1])


def ahead(run: Attacked) -> Made:
    """Of rounds to come, whose record before nobody can know; the second names the first."""
    if (made := following(run, previous="0" * 64)) is not None:
        round_, fields = made
        for more in range(1, 5):
            body = canonical_json({**fields, "round": round_ + more, "outer_step": 2 + more})
            fields["previous"] = sha256_hex(body)
            yield round_ + more, body


def later_schema(run: Attacked) -> Made:
    if (made := following(run, schema_version=3)) is not None:
        for more in range(3):
            yield made[0] + more, canonical_json({**made[1], "round": made[0] + more})


def false(run: Attacked) -> Made:
    """What follows from the commits before, and from no manifest: it claims another base than those that it names."""
    if (made := following(run)) is None:
        return
    round_, fields = made
    norms = norms_after(Commit.from_bytes(run.newest[1], "last"), run.config)
    for each in fields["answers"]:
        try:
            data = run.view.get(keys.contribution(round_, each["replica_id"]))
        except ObjectMissing:
            return
        said = Contribution.from_bytes(data, "manifest")
        if said.payload is None:
            return
        each |= {name: said.model_dump(mode="json")[name] for name in ("origins", "train_s", "tokens")}
        each |= {"manifest_sha256": sha256_hex(data), "payload": said.payload.digest, "norm": said.payload.norm}
    fields |= {"outer_step": fields["outer_step"] + 1, "norms": norms.model_dump(mode="json")}
    yield round_, canonical_json({**fields, "base_digest": bulk_digest(b"another")})


def false_and_more(run: Attacked) -> Made:
    """After three of the former, with which the leg has failed for who reads manifests, one that is void for all."""
    for round_, body in false(run):
        yield round_, body
        before = [parse_json(run.view.get(keys.commit(each))) for each in range(max(1, round_ - 2), round_)]
        if [each["base_digest"] for each in before] == 2 * [bulk_digest(b"another")]:
            fields = {**parse_json(body), "round": round_ + 1, "previous": sha256_hex(body), "outer_step": 99}
            yield round_ + 1, canonical_json(fields)


def absent(run: Attacked) -> Made:
    """It averages replica 0 by a manifest that nobody has written, as soon as the round opens."""
    if (made := following(run)) is None:
        return
    round_, fields = made
    run.boast()
    for each in fields["answers"]:
        each["manifest_sha256"] = "0" * 64
    norms = norms_after(Commit.from_bytes(run.newest[1], "last"), run.config)
    fields |= {"outer_step": fields["outer_step"] + 1, "norms": norms.model_dump(mode="json")}
    yield round_, canonical_json(fields)


def absent_once(run: Attacked) -> Made:
    return iter(()) if run._last > 1 else absent(run)


ATTACKS = {
    attack.__name__: attack
    for attack in (linked, unreadable, every_second, ahead, later_schema, false, false_and_more, absent, absent_once)
}


def played(run: Attacked) -> Attacked:
    run.play()
    return run


def check(run: Attacked) -> list[Commit]:
    """The commits of a run that has completed all outer steps, though the insider has spent some rounds of one leg."""
    commits = list(RunLog(SignedStore(run.bucket.stored, {})).commits())
    void = [each for each in commits if each.reason.startswith("void")]
    assert (commits[-1].stop, commits[-1].outer_step) == ("completed", PLAN.rounds)
    assert all(each.by.who[0] == INSIDER and each.leg == 1 for each in void) and len(void) <= 5
    later = [each for each in commits if each.leg == 2]
    assert all(each.by.who[0] != INSIDER for each in later)
    assert not later or any(INSIDER in [a.replica_id for a in each.answers if a.averaged] for each in later)
    for environ in (ENVIRON, {}):
        store = SignedStore(run.bucket.stored, environ)
        done = verify_run(store)
        assert done.disagreement is None
        assert sum("is void" in note for note in done.notes) == len(void)
        log = RunLog(store)
        for each in ranges_of(log.commits(), log.void_authors):  # what was trained in void rounds is nobody's fault
            ContributionReader(store).exact(each.round, each.replica_id, each.manifest_sha256)
        assert RunReader(store).status().state == "completed"
    return commits


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_insider_spends_a_few_rounds_once_and_stops_nobody(attack: str):
    run = played(Attacked(ATTACKS[attack]))
    assert check(run)[-1].leg == (1 if attack in ("later_schema", "absent_once") else 2)
    assert set(run.exit_codes.values()) == {0}, "nor does the insider's process, which is honest, try to commit"


def rotated_and_begun(run: Attacked) -> tuple[float, float]:
    """When the new keys were written, and when the leg that they count from."""
    log = RunLog(SignedStore(run.bucket.stored, {}))
    (rotation,) = rotations_of(log.store)
    return rotation.at, log.begin_of(2).record.at


@pytest.mark.slow
def test_a_coordinator_that_dies_at_any_time_around_the_legs_end_leaves_it_to_the_next_one():
    """Also between the rotation that names the insider and the begin of the next leg."""
    first, last = rotated_and_begun(played(Attacked(linked)))
    apart = []
    for step in range(-1, 9):
        when = first + step * (last - first) / 7
        run = Attacked(linked, dataclasses.replace(PLAN, kills=((when, -1),)))
        rotated, begun = rotated_and_begun(played(run))
        assert check(run)[-1].leg == 2
        apart.append(begun - rotated)
    assert max(apart) > 15.0 > min(apart), "the next coordinator comes after 20 s"


def once(run: Attacked) -> Made:
    return iter(()) if run._last > 1 else false(run)


class Framed(Attacked):
    """The insider may delete, too: it commits a false round, and removes what shows that once others have read it."""

    def strike(self) -> None:
        super().strike()
        for round_ in range(2, self._last + 1):
            later = [keys.contribution(round_ + 1, each) for each in range(3)]
            is_false = parse_json(self.view.get(keys.commit(round_)))["base_digest"] == bulk_digest(b"another")
            if is_false and all(list(self.bucket.stored.list(f"{each}/")) for each in later):
                for info in list(self.bucket.stored.list(f"{keys.contribution(round_, INSIDER)}/")):
                    MemoryStore.delete(self.bucket.stored, info.key)


class Late(Attacked):
    """Replica 1 is slow, and the insider commits an empty round by an abstention of it that is not there yet.

    The insider brings that once a coordinator has found that it is missing.
    """

    brought = b""

    def strike(self) -> None:
        super().strike()
        with suppress(ObjectMissing):
            if self.view.get(keys.unfounded(2)):
                self.create(keys.contribution(2, INSIDER), self.brought)

    @staticmethod
    def commit(run: Attacked) -> Made:
        if run._last > 1 or (made := following(run)) is None:
            return
        assert isinstance(run, Late)
        last = Contribution.from_bytes(run.view.get(keys.contribution(1, 0)), "manifest")
        said = {"round": 2, "kind": "abstention", "payload": None, "state": None, "origins": (), "tokens": 0}
        run.brought = last.model_copy(update={**said, "replica_id": INSIDER, "reason": "I had nothing"}).to_bytes()
        answer = {**made[1]["answers"][0], "kind": "abstention", "averaged": False, "weight": 0, "norm": 0.0}
        answer |= {"replica_id": INSIDER, "payload": "", "origins": [], "tokens": 0, "reason": "I had nothing"}
        answer |= {"manifest_sha256": sha256_hex(run.brought)}
        norms = norms_after(Commit.from_bytes(run.newest[1], "last"), run.config)
        empty = {"applied": False, "answers": [answer], "empty_rounds": 1, "base_digest": None, "roster": [0, 1, 2]}
        empty |= {"norms": norms and norms.model_dump(mode="json")}
        yield made[0], canonical_json({**made[1], **empty, "figures": None})


def test_what_a_commit_names_is_brought_too_late_once_a_coordinator_has_judged_it():
    run = played(Late(Late.commit, dataclasses.replace(PLAN, paces=(1.0, 30.0, 1.3))))
    assert "names what is not there" in check(run)[1].reason
    assert run.brought and run.view.get(keys.contribution(2, INSIDER)) != run.brought


def empty_and_absent(run: Attacked) -> Made:
    """Every second round an empty one, by an abstention that is not there: no later commit contradicts it."""
    if (made := following(run)) is None or made[0] % 2:
        return
    answer = {**made[1]["answers"][0], "kind": "abstention", "averaged": False, "weight": 0, "norm": 0.0, "tokens": 0}
    answer |= {"replica_id": INSIDER, "payload": "", "origins": [], "manifest_sha256": "0" * 64}
    norms = norms_after(Commit.from_bytes(run.newest[1], "last"), run.config)
    empty = {"applied": False, "answers": [answer], "empty_rounds": 1, "base_digest": None, "roster": [0, 1, 2]}
    empty |= {"norms": norms and norms.model_dump(mode="json"), "figures": None}
    yield made[0], canonical_json({**made[1], **empty})


def test_whoever_wrote_three_commits_that_only_a_coordinator_found_void_commits_no_more():
    """The next leg is begun by a process that has not checked the verdicts of the leg before."""
    run = played(Attacked(empty_and_absent, dataclasses.replace(PLAN, rounds=9)))
    log = RunLog(SignedStore(run.bucket.stored, {}))
    assert [each.no_commits_by for each in rotations_of(log.store)] == [(INSIDER,)]
    assert (log.commits()[-1].stop, log.commits()[-1].leg) == ("completed", 2)


def thousand_checks(run: Attacked) -> Made:
    for round_, body in absent_once(run):
        checks = [{"replica_id": INSIDER, "number": each, "sha256": "0" * 64} for each in range(1, 1001)]
        yield round_, canonical_json({**parse_json(body), "checks": checks})


def test_a_commit_that_names_a_thousand_records_costs_its_judge_one():
    run = played(Attacked(thousand_checks))
    assert any("names what is not there" in each.reason for each in check(run))
    there = [info.key for info in run.view.list(keys.ROUNDS)]
    void = [found[0] for key in there if (found := keys.unfounded.parse(key))]
    nothing = [key for key in there if keys.parse_round(key) in void and b"nothing was here" in run.view.get(key)]
    assert len(nothing) <= len(void) and not [key for key in there if keys.checked.parse(key)]


def unsigned_check(run: Attacked) -> Made:
    """It names a check record with a number beyond those of keys, so that the object there needs no signature."""
    for round_, body in absent(run) if run.newest is not None and run._last == 1 else ():
        check = {"replica_id": 10**30, "number": 1, "sha256": "0" * 64}
        assert not is_signed(keys.checked(round_, 10**30, 1))
        yield round_, canonical_json({**parse_json(body), "checks": [check]})


def test_a_commit_that_names_what_nobody_need_sign_is_no_commit():
    run = played(Attacked(unsigned_check))
    assert any("cannot be read" in each.reason or "checks" in each.reason for each in check(run))
    assert not [info.key for info in run.view.list(keys.ROUNDS) if keys.unfounded.parse(info.key)]


def test_replicas_that_all_start_while_a_commit_is_not_judged_wait_for_that():
    def attack(run: Attacked) -> Made:
        return absent_once(run) if run.time.now > 20.6 else iter(())

    run = played(Attacked(attack, dataclasses.replace(PLAN, kills=((20.4, 0), (20.4, 1), (20.4, 2)))))
    commits = check(run)
    assert any("names what is not there" in each.reason for each in commits) and commits[-1].leg == 1
    assert [max(each[1] for each in run.replicas if each[0] == replica_id) for replica_id in range(3)] == [2, 2, 2]


def test_replicas_wait_until_a_coordinator_has_read_that_they_do_though_rounds_time_out_earlier():
    timing = {"poll_s": 0.5, "heartbeat_s": 5.0, "round_timeout_s": 6.0, "startup_timeout_s": 120.0}
    plan = dataclasses.replace(PLAN, paces=(10.0, 10.1, 10.2), settings={**SETTINGS, "timing": timing})
    run = Attacked(absent_once, plan)
    run.play()
    commits = RunLog(SignedStore(run.bucket.stored, {})).commits()
    assert any("names what is not there" in each.reason for each in commits)
    assert commits[-1].stop == "completed" and {each[1] for each in run.replicas} == {1}


class Left(Attacked):
    """The coordinator leaves in the first round; then the insider halts the leg by a commit that is never judged."""

    def _supervise(self, clock: VirtualClock) -> None:
        coordinator = Coordinator(RunReader(self.network(clock)), Means(self.executor(clock), clock, self.stamp(clock)))
        while self.newest is None:
            coordinator.step()
            clock.sleep(0.1)

    @staticmethod
    def halt(run: Attacked) -> Made:
        for round_, body in absent_once(run):
            yield round_, canonical_json({**parse_json(body), "stop": "halted", "reason": "halt requested: enough"})

    @classmethod
    def played(cls) -> "Left":
        run = cls(cls.halt)
        run.play()
        return run


def test_nobody_resumes_after_a_halt_that_names_what_is_not_there():
    log = RunLog(SignedStore(Left.played().bucket.stored, ENVIRON))
    with pytest.raises(ConfigError, match="goes on"):
        begin_next_leg(log, rounds=None, from_round=None, by="test", why="test", stamp=STAMP)
    assert log.commits()[-1].reason.startswith("void") and log.commits()[-1].stop == "none"


class Fails(SignedStore):
    """Its next GET of a manifest fails once it is told so."""

    fails = False

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if keys.contribution.parse(key) and self.fails:
            self.fails = False
            raise StoreUnavailable("busy")
        return super().get(key, start, end)


def test_a_judgement_that_the_store_interrupts_is_repeated():
    store = Fails(Left.played().bucket.stored, ENVIRON)
    log = RunLog(store)
    judge = UnfoundedCommits(log, log.newest_begin().record, "coordinator", STAMP)
    log.newest(log.newest_begin().record)
    store.fails = True
    with pytest.raises(StoreUnavailable):
        judge.judge()
    assert judge.judge() and not judge.judge()


class Stopped(Attacked):
    """The insider commits one void round, and a limit of dollars stops the run before anybody has followed it."""

    def _supervise(self, clock: VirtualClock) -> None:
        coordinator = Coordinator(RunReader(self.network(clock)), Means(self.executor(clock), clock, self.stamp(clock)))
        while not coordinator.step():
            newest = self.newest
            if newest is not None and newest[0]["round"] == 2 and newest[0]["by"] == str(By((INSIDER, 1))):
                coordinator.stop("halted", "the dollars are spent")
            clock.sleep(0.05)


@pytest.mark.parametrize("attack", ["once", "absent_once"])
def test_a_stop_of_the_coordinator_after_a_void_commit_is_of_the_log(attack: str):
    run = played(Stopped({"once": once, "absent_once": absent_once}[attack]))
    commits = list(RunLog(SignedStore(run.bucket.stored, {})).commits())
    assert commits[-2].reason.startswith("void") and commits[-2].by.who == (INSIDER, 1)
    assert (commits[-1].stop, commits[-1].by_coordinator) == ("halted", True)
    for environ in (ENVIRON, {}):
        assert verify_run(SignedStore(run.bucket.stored, environ)).disagreement is None
        assert RunReader(SignedStore(run.bucket.stored, environ)).status().state == "halted"


def test_nobody_is_kept_from_committing_for_having_read_what_was_removed_since():
    run = Framed(once)
    run.play()
    log = RunLog(SignedStore(run.bucket.stored, ENVIRON))
    void = {each.by.who[0] for each in log.commits() if each.reason.startswith("void")}
    assert void - {INSIDER}, "who reads the log now takes the false round as it is written, and those after it as void"
    assert void_authors(log, log.newest_begin().record) <= {INSIDER}


def test_two_commits_of_rounds_to_come_that_follow_each_other_lead_no_reader_ahead():
    """With a segment, an object of many commits, that names these rounds."""
    run = played(Attacked(later_schema, dataclasses.replace(PLAN, rounds=11)))
    fields = {**parse_json(run.bucket.get(keys.commit(11))), "by": str(By((INSIDER, 1))), "previous": "0" * 64}
    body = canonical_json({**fields, "round": 99, "empty_rounds": 0})
    run.write(99, body)
    norms = norms_after(Commit.from_bytes(body, "far"), run.config).model_dump(mode="json")
    answers = [{**each, "averaged": False} for each in fields["answers"]]
    fields |= {"round": 100, "previous": sha256_hex(body), "norms": norms, "answers": answers, "applied": False}
    run.write(100, canonical_json({**fields, "stop": "completed"}))
    secret = KEY.operator(run.run_sha256).of_attempt(run.run_sha256, INSIDER, 1).text()
    segment = str(keys.SegmentKey(91, 100, "commits"))
    assert SignedStore(run.bucket.stored, {ENV_ATTEMPT_KEY: secret}).create(segment, b"{}")
    log = RunLog(SignedStore(run.bucket.stored, ENVIRON))
    assert log.newest(log.newest_begin().record).commit.round == 12


def test_a_log_that_was_changed_is_still_noticed_where_two_replicas_have_followed_it():
    """The insider replaces a commit of the past by one of its own, which its key has signed."""
    run = played(Attacked(later_schema))
    commits = RunLog(SignedStore(run.bucket.stored, {})).commits()
    at = next(each.round for each, after in itertools.pairwise(commits) if each.by != after.by and each.round > 1)
    assert commits[at - 1].by != commits[at].by
    fields = {**parse_json(run.bucket.get(keys.commit(at - 1))), "by": str(By((INSIDER, 1))), "reason": "another"}
    for info in list(run.bucket.stored.list(f"{keys.commit(at - 1)}/")):
        MemoryStore.delete(run.bucket.stored, info.key)
    run.write(at - 1, canonical_json(fields))
    log = RunLog(SignedStore(run.bucket.stored, {}))
    log.doubt()
    with pytest.raises(RecordInvalid, match="changed after it was written"):
        log.commits()
