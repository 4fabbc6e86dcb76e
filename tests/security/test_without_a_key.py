"""What SECURITY.md says that writers to the bucket can do, tried in a signed run by one without a key, row by row.

Runs of the real code on virtual time. Whatever is written, before the run and again and again while it goes on, the log
has the bytes of the undisturbed run, and the run sends the same calls to the bucket. Then the same by who holds the key
of one replica, with the rights of infra/iam/one-replica.json.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from iam_server import Question, allows
from record_examples import EXAMPLES
from simulation_plan import NextLeg, Plan
from simulation_signed import KEY, SignedSimulation

from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.kinds import kind_of
from diloco_orchestrator.protocol.record_format import By
from diloco_orchestrator.protocol.records import Begin, Commit, Contribution, FileInfo, Halt, Result, Snapshot
from diloco_orchestrator.protocol.signatures import Signature, named_bytes, signed_bytes, split_signed, to_text
from diloco_orchestrator.protocol.signed_objects import is_named, is_signed, parse_stored, stored_name
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.store.memory import MemoryStore

SETTINGS = {"quorum": "all", "sync_every": 4, "fragments": 1, "fragment_sync_delay": 0, "late": "carry"}
SETTINGS |= {"snapshot_every": 2, "retention": {}}
PLAN = Plan(seed=3, replicas=3, rounds=4, paces=(1.0, 1.1, 1.3), settings=SETTINGS)
SCATTER = dataclasses.replace(PLAN, settings={**PLAN.settings, "path": "scatter_reduce"})
# Two of three replicas are killed, so that the third commits round 4 and the end alone.
ALONE = dataclasses.replace(PLAN, settings={**PLAN.settings, "quorum": 1}, kills=((25.0, 0), (25.0, 2)))
# The guard halts round 3, and the run is resumed from the base of round 1, which has the best score.
HALTED = dataclasses.replace(PLAN, rounds=8, collapse=True, next_leg=NextLeg(rounds=2))
STAMP = {"write_id": "forged", "at": 0.0}
Objects = Iterator[tuple[str, bytes]]
POLICY = json.loads(
    (Path(__file__).parents[2] / "infra" / "iam" / "one-replica.json").read_text().replace("REPLICA", "1")
)


class Attacked(SignedSimulation):
    """A signed run into whose bucket an attacker writes before it begins and every few seconds."""

    def __init__(self, plan: Plan, attack: Callable[["Attacked"], Objects] | None) -> None:
        super().__init__(plan)
        self.attack = attack
        self.written: set[str] = set()
        for when in (0.0, *(1.0 + 3 * number for number in range(13))):  # time that passes where nobody attacks, too
            self.time.at(when, self.strike)

    def strike(self) -> None:
        for name, data in self.attack(self) if self.attack is not None else ():
            if MemoryStore.create(self.bucket.stored, name, data):
                self.written.add(name)

    @property
    def sent(self) -> dict[str, bytes]:
        """Contents of genuine objects by key, which anybody can read."""
        return self.bucket.sent

    @property
    def round(self) -> int:
        """The open round."""
        return len(self.bucket.commits) + 1

    def _score(self, model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
        """A loss, the lowest for the base of round 1 where the run is one that halts."""
        if self.plan is not HALTED:
            return super()._score(model, items)
        (who,) = self._newest(self.computing())
        round_ = self.sessions[who].round if who in self.sessions else 1
        return [1.0 + 0.1 * abs(round_ - 2) + 0.001 * item for item in items]


# -- without a key ----------------------------------------------------------------------------------------------------


def outside(make: Callable[[Attacked], Objects]) -> Callable[[Attacked], Objects]:
    """The objects of `make` under their keys, guessed and copied names, without and with a copied signature."""

    def attack(run: Attacked) -> Objects:
        genuine = [info.key for info in run.bucket.stored.list("") if parse_stored(info.key) is not None][-6:]
        lines = [found[1] for name in genuine if (found := split_signed(run.bucket.stored.get(name))) is not None]
        for key, data in make(run):
            names = {key, f"{key}/{'A' * 86}", f"{key}/1.{'A' * 86}"}
            names |= {f"{key}/{name.rpartition('/')[2]}" for name in genuine}
            for number, name in enumerate(sorted(names)):
                yield name, data + (lines[-1].line() if lines and number % 2 else b"")

    return attack


def manifests(run: Attacked) -> Objects:
    for replica_id in range(3):
        if genuine := run.sent.get(keys.contribution(run.round - 1, replica_id)):
            record = Contribution.from_bytes(genuine, "genuine")
            yield keys.contribution(run.round, replica_id), record.model_copy(update={"round": run.round}).to_bytes()
        yield keys.contribution(run.round, replica_id), b"{}"
        yield keys.contribution(run.round + 1, replica_id), b"junk"


def commits(change: dict[str, object] | bytes) -> Callable[[Attacked], Objects]:
    def attack(run: Attacked) -> Objects:
        for round_ in range(run.round, run.round + 3):
            if isinstance(change, bytes):
                yield keys.commit(round_), change
            elif newest := run.bucket.commits.get(keys.commit(run.round - 1)):
                genuine = Commit.from_bytes(newest, "genuine")
                right = {"round": round_, "previous": sha256_hex(newest), "outer_step": genuine.outer_step + 1}
                yield keys.commit(round_), genuine.model_copy(update={**right, **change}).to_bytes()

    return attack


def attempts(run: Attacked) -> Objects:
    """Intents, handles, claims, exits, cancels and heartbeats of attempts that live and that are to come."""
    for name in ("intent", "handle", "waiting", "claim", "heartbeat", "cancel", "exit"):
        record = EXAMPLES[name]
        for replica_id in range(3):
            for attempt in range(1, 5):
                fields = {"replica_id": replica_id, "attempt": attempt}
                own = record.model_copy(update={k: v for k, v in fields.items() if hasattr(record, k)})
                key = keys.claim(replica_id, attempt, "0" * 16) if name == "claim" else kind_of(own).key(own)
                yield str(key), own.to_bytes()


def of_legs(run: Attacked) -> Objects:
    for leg in (1, 2, 999):
        yield keys.halt(leg), Halt(**STAMP, leg=leg, by="user", reason="forged").to_bytes()
        fields = {"status": "completed", "round": run.round - 1, "outer_steps": 1, "reason": "forged"}
        yield keys.result(leg), Result(**STAMP, leg=leg, **fields).to_bytes()
        for name in ("out", "scale", "begin"):
            record = EXAMPLES[name].model_copy(update={"leg": leg})
            yield str(kind_of(record).key(record)), record.to_bytes()


def of_averages(run: Attacked) -> Objects:
    for replica_id in range(3):
        for round_ in (run.round, run.round + 1):
            yield keys.reduced(round_, replica_id), EXAMPLES["reduced"].to_bytes()
            checked = EXAMPLES["checked"].model_copy(update={"round": round_, "replica_id": replica_id, "number": 1})
            yield keys.checked(round_, replica_id, 1), checked.to_bytes()
            for shard in range(6):
                yield keys.reduced_shard(round_, shard), b"\0" * 8


def offers(run: Attacked) -> Objects:
    for replica_id in range(3):
        name = f"dl-simulation-r{replica_id}-a1"
        offer = EXAMPLES["offer"].model_copy(update={"replica_id": replica_id, "attempt": 1, "run_id": "simulation"})
        yield keys.join_offer(name), offer.to_bytes()
        yield keys.join_record(name, sha256_hex(offer.to_bytes()), keys.JOIN_TAKEN), EXAMPLES["taken"].to_bytes()


def bulk(run: Attacked) -> Objects:
    for replica_id in range(3):
        for round_ in (run.round, run.round + 1):
            for take in (1, 2, 3, 4):
                yield keys.payload(round_, replica_id, 1, 0, take), b"other bytes"
            yield keys.state(replica_id, round_, 1), b"other bytes"
            yield keys.want(round_, replica_id, 1, 0, 2), EXAMPLES["want"].to_bytes()


def starts(run: Attacked) -> Objects:
    genuine = run.sent.get(keys.START, EXAMPLES["start"].to_bytes())
    yield keys.START, genuine
    yield keys.start_take("0" * 16), genuine
    for replica_id in range(3):
        yield keys.began(replica_id, 1), EXAMPLES["began"].to_bytes()
        yield keys.follows(replica_id), EXAMPLES["follows"].to_bytes()


def of_the_run(run: Attacked) -> Objects:
    yield keys.RETENTION, EXAMPLES["retention"].to_bytes()
    yield keys.KL_RECORD, EXAMPLES["probe"].to_bytes()
    for round_ in range(6):
        yield keys.snapshot(round_, keys.SNAPSHOT_RECORD), EXAMPLES["snapshot"].to_bytes()
    yield str(keys.SegmentKey(1, 10, "commits")), b"{}\n"


def base_named_alone(run: Attacked) -> Objects:
    """Whole snapshots of another base, and a manifest and a commit of one replica that name it."""
    if not (sessions := [run.sessions[who] for who in sorted(run.sessions)]):
        return
    participant = sessions[0]._rounds
    base = participant.base.copy()
    for shard in base.shards(0):
        shard.parameters.fill_(7.0)
    files = {each.name: each.encode() for each in participant._snapshots._files.planned(base)}
    infos = {name: FileInfo(digest=bulk_digest(data), size=len(data)) for name, data in files.items()}
    said = {"base_digest": base.digest()}
    for round_ in (run.round - 1, run.round):
        record = Snapshot(**STAMP, round=round_, by=1, files=infos, **said)
        for take in (keys.SHARED_TAKE, "r1", "123456789"):
            yield from ((keys.snapshot(round_, name, take), data) for name, data in files.items())
            yield keys.snapshot(round_, keys.SNAPSHOT_RECORD, take), record.to_bytes()
        if genuine := run.sent.get(keys.contribution(run.round - 1, 1)):
            manifest = Contribution.from_bytes(genuine, "genuine").model_copy(update={"round": round_ + 1, **said})
            yield keys.contribution(round_ + 1, 1), manifest.to_bytes()
    if newest := run.bucket.commits.get(keys.commit(run.round - 1)):
        alone = tuple(answer for answer in Commit.from_bytes(newest, "genuine").answers if answer.replica_id == 1)
        yield from commits({**said, "answers": alone})(run)


def strays(run: Attacked) -> Objects:
    for prefix in (keys.contributions(run.round), keys.attempts(1), keys.outs(1), keys.LEGS, keys.STARTS, keys.LOG):
        for number in range(60):
            yield f"{prefix}{number}", b"x"


def thousand_rounds(run: Attacked) -> Objects:
    if not run.written:
        for round_ in range(1, 1001):
            yield keys.commit(round_), b"junk"
            yield keys.contribution(round_, round_ % 3), b"{}"


ABSENT = EXAMPLES["commit"].answers
OUTSIDE: dict[str, Callable[[Attacked], Objects]] = {
    "manifests": manifests,
    "claims, intents, exits and heartbeats": attempts,
    "requests to halt, results, who is out, legs": of_legs,
    "commits: garbage": commits(b"junk"),
    "commits: of a newer schema": commits(b'{"record":"commit","schema_version":99}\n'),
    "commits: well-formed copies of the last": commits({}),
    "commits: contradictions": commits({"previous": "0" * 64}),
    "commits: names that do not exist": commits({"answers": ABSENT}),
    "commits: void weights": commits({"empty_rounds": 2, "applied": False}),
    "commits: the end": commits({"stop": "completed"}),
    "commits: by a coordinator": commits({"stop": "halted", "applied": False, "by": By(None, "coordinator on h")}),
    "reduced shards and check records": of_averages,
    "offers to machines that join": offers,
    "payloads, states and requests for them": bulk,
    "start records and votes": starts,
    "snapshots, segments, retention": of_the_run,
    "stray keys": strays,
    "names of a thousand rounds": thousand_rounds,
}


PLANS = {"gather": PLAN, "scatter_reduce": SCATTER, "quorum=1": ALONE, "halted": HALTED}


@cache
def undisturbed(plan: str) -> Attacked:
    run = Attacked(PLANS[plan], None)
    run.play() if plan == "halted" else run.run()
    assert len(run.bucket.commits) == (4 if plan == "halted" else 5)
    return run


def attacked(plan: str, make: Callable[[Attacked], Objects]) -> Attacked:
    """The run with the attack by who has no key, once it was seen that nothing of it differs from the undisturbed."""
    run, twin = Attacked(PLANS[plan], outside(make)), undisturbed(plan)
    run.play() if plan == "halted" else run.run()
    assert run.bucket.commits == twin.bucket.commits
    assert run.digest.hexdigest() == twin.digest.hexdigest(), "the same calls to the bucket"
    assert len(run.written) > 20
    return run


@pytest.mark.parametrize("row", OUTSIDE)
def test_credentials_without_a_key_change_nothing(row: str):
    run = attacked("scatter_reduce" if row == "reduced shards and check records" else "gather", OUTSIDE[row])
    done = verify_run(run.bucket)
    named = {words.partition(": ")[0] for words in [*done.unsigned, *done.foreign]}
    debris = {name for name in run.written if is_named(name)}
    assert not done.disagreement and (debris <= named or len(debris) > 500)


def a_million(run: Attacked) -> Objects:
    if not run.written:
        for prefix in (keys.contributions(1), keys.contributions(2), keys.attempts(1), keys.LEGS):
            for number in range(66_666):  # each under four names
                yield f"{prefix}{number}", b"x"


@pytest.mark.slow
def test_a_million_stray_keys_change_nothing():
    """Listed at every poll. Some seven minutes of CPU time, and 1 GiB of memory."""
    run = attacked("gather", a_million)
    assert len(run.written) > 1_000_000 and verify_run(run.bucket).agrees


def model_of(run: Attacked, folder: Path) -> dict[str, bytes]:
    copy_model(RunLog(run.bucket), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("row", ["manifests", "commits: well-formed copies of the last", "commits: the end"])
def test_where_one_contribution_is_enough_nobody_without_a_key_commits_alone(row: str):
    twin = undisturbed("quorum=1")
    alone = [Commit.from_bytes(data, key) for key, data in sorted(twin.bucket.commits.items())][3]
    assert alone.applied and [answer.replica_id for answer in alone.answers] == [1]
    assert verify_run(attacked("quorum=1", OUTSIDE[row]).bucket).agrees


def test_where_one_contribution_is_enough_nobody_without_a_key_names_a_snapshots_base_alone(tmp_path: Path):
    """Files of snapshots are not signed: who creates them first has writers use other takes, and no more."""
    twin, run = undisturbed("quorum=1"), Attacked(ALONE, outside(base_named_alone))
    run.play()
    assert bases_of(run) == bases_of(twin)
    assert model_of(run, tmp_path / "attacked") == model_of(twin, tmp_path / "undisturbed")
    assert {keys.snapshot(round_, "model.safetensors") for round_ in (2, 4)} <= run.written
    log = RunLog(run.bucket)
    assert ConfirmedSnapshots(log).newest(2, range(5)) == [2, 4] and len(log.unsigned()) > 20


def better_scores(run: Attacked) -> Objects:
    """Manifests and commits that score the newest base best, and a begin of the next leg from it."""
    for replica_id in range(3):
        if genuine := run.sent.get(keys.contribution(run.round - 1, replica_id)):
            record = Contribution.from_bytes(genuine, "genuine")
            scores = tuple(each.model_copy(update={"sum": 9.0}) for each in record.scores)
            for round_ in (run.round - 1, run.round):
                yield keys.contribution(round_, replica_id), record.model_copy(update={"scores": scores}).to_bytes()
    newest, begin = run.bucket.commits.get(keys.commit(run.round - 1)), run.sent.get(keys.begin(1))
    if newest is None or begin is None:
        return
    commit = Commit.from_bytes(newest, "genuine")
    verdict = dataclasses.replace(commit.verdict, value=9.0) if commit.verdict is not None else None
    for change in ({"stop": "none", "applied": True}, {"stop": commit.stop}):
        yield from commits({**change, "verdict": verdict})(run)
    last = {"after_round": commit.round, "previous": sha256_hex(newest), "base_digest": commit.base_digest}
    from_it = {**last, "leg": 2, "from_round": commit.round - 1, "from_outer_step": commit.outer_step}
    yield keys.begin(2), Begin.from_bytes(begin, "genuine").model_copy(update=from_it).to_bytes()


AFTER_A_HALT = {
    "scores": better_scores,
    **{row: OUTSIDE[row] for row in ("requests to halt, results, who is out, legs", "commits: the end", "manifests")},
}


@pytest.mark.parametrize("row", AFTER_A_HALT)
def test_a_signed_run_is_resumed_after_a_halt_from_the_base_that_signed_records_name(row: str):
    run = attacked("halted", AFTER_A_HALT[row])
    begin = RunLog(run.bucket).begin(2)
    assert begin is not None and (begin.record.after_round, begin.record.from_round) == (3, 1)


# -- with the key of replica 1, and what infra/iam/one-replica.json allows -------------------------------------------


def inside(make: Callable[[Attacked], Objects]) -> Callable[[Attacked], Objects]:
    """The objects of `make` under their first names, signed by replica 1 whether it may or not, and unsigned."""

    def attack(run: Attacked) -> Objects:
        signer = KEY.operator(run.run_sha256).of_attempt(run.run_sha256, 1, 1)
        for number, (key, data) in enumerate(make(run)):
            if is_signed(key) and number % 2:
                signature = signer.key.sign(signed_bytes(run.run_sha256, key, data))
                data += Signature(certificate=signer.certificate, signature=to_text(signature)).line()
            for take in range(3 if is_signed(key) else 1):
                name = stored_name(key, take, signer.names[0].sign(named_bytes(run.run_sha256, key, take)))
                if allows(POLICY, Question("s3:PutObject", f"arn:aws:s3:::BUCKET/PREFIX/{name}", {})):
                    yield name, data

    return attack


def unsigned_own(run: Attacked) -> Objects:
    """Junk that nobody signed, under every name of a record that replica 1 knows and may create."""
    private = KEY.operator(run.run_sha256).of_attempt(run.run_sha256, 1, 1).names[0]
    own = [form(1, attempt) for attempt in (1, 2, 3) for form in (keys.exit_record, keys.began, keys.heartbeat)]
    own += [keys.follows(1), keys.START, keys.LINK, keys.result(1)]
    for round_ in (run.round, run.round + 1):
        own += [keys.contribution(round_, 1), keys.checked(round_, 1, 1), keys.checked(round_, 1, 2)]
        own += [keys.reduced(round_, 1), keys.commit(round_), keys.want(round_, 0, 1, 0, 2)]
        own += [keys.snapshot(round_, keys.SNAPSHOT_RECORD, take) for take in ("", "r1")]
    for key in own:
        for take in range(2 if is_signed(key) else 1):
            name = stored_name(key, take, private.sign(named_bytes(run.run_sha256, key, take)))
            if allows(POLICY, Question("s3:PutObject", f"arn:aws:s3:::BUCKET/PREFIX/{name}", {})):
                yield name, b"junk"


def bases_of(run: Attacked) -> list[str | None]:
    return [Commit.from_bytes(data, key).base_digest for key, data in sorted(run.bucket.commits.items())]


def attempts_of_others(run: Attacked) -> set[tuple[int, int]]:
    found = (keys.intent.parse(key) for key in run.sent)
    return {who for who in found if who is not None and who[0] != 1}  # type: ignore[misc]


@pytest.mark.parametrize(
    "plan", [pytest.param(PLAN, marks=pytest.mark.slow), SCATTER], ids=["gather", "scatter_reduce"]
)
def test_names_that_a_replica_takes_without_a_signature_end_nobody(plan: Plan):
    """Such a name is listed, and what is there does not exist: who read it ended with `ObjectMissing`, and its next
    attempt as well.
    """
    run = Attacked(plan, unsigned_own)
    run.play()
    assert (
        bases_of(run) == bases_of(undisturbed("scatter_reduce" if plan is SCATTER else "gather"))
        and len(run.written) > 100
    )
    assert attempts_of_others(run) == {(0, 1), (2, 1)}
    assert len(verify_run(run.bucket).unsigned) > 50


OF_OTHERS = {"by": By((0, 1))}  # commits in its own name are judged as those of an honest replica
INSIDE: dict[str, Callable[[Attacked], Objects]] = {
    **{row: OUTSIDE[row] for row in OUTSIDE if not row.startswith(("commits: ", "offers", "stray"))},
    "commits: garbage": commits(b"junk"),
    "commits: of a newer schema": commits(b'{"record":"commit","schema_version":99}\n'),
    "commits: in the names of others": commits(OF_OTHERS),
    "commits: the end, in the names of others": commits({"stop": "completed", **OF_OTHERS}),
    "commits: by a coordinator": OUTSIDE["commits: by a coordinator"],
}


@pytest.mark.slow
@pytest.mark.parametrize("row", INSIDE)
def test_the_key_of_one_replica_changes_no_base(row: str):
    plan = "scatter_reduce" if row == "reduced shards and check records" else "gather"
    run = Attacked(PLANS[plan], inside(INSIDE[row]))
    run.play()
    assert bases_of(run) == bases_of(undisturbed(plan)) and run.written
    assert attempts_of_others(run) == {(0, 1), (2, 1)}


def signed_snapshots(run: Attacked) -> Objects:
    """Records of snapshots signed by replica 1, before the others': of rounds without one, and of a base, but empty."""
    signer = KEY.operator(run.run_sha256).of_attempt(run.run_sha256, 1, 1)
    for round_ in range(1, 7):
        for take in (keys.SHARED_TAKE, keys.own_take(1)):
            key = keys.snapshot(round_, keys.SNAPSHOT_RECORD, take)
            record = Snapshot(**STAMP, round=round_, base_digest=bulk_digest(b"any"), by=1, files={})
            data = b"junk\n" if round_ in (1, 2, 5, 6) else record.to_bytes()
            signature = to_text(signer.key.sign(signed_bytes(run.run_sha256, key, data)))
            name = stored_name(key, 0, signer.names[0].sign(named_bytes(run.run_sha256, key, 0)))
            yield name, data + Signature(certificate=signer.certificate, signature=signature).line()


@pytest.mark.parametrize("attack", [signed_snapshots, inside(of_the_run)], ids=["signed", "unsigned"])
def test_records_of_snapshots_that_hold_nothing_make_no_disagreement(attack):
    """By who holds the key of replica 1. `verify` disagreed at the first one, though every base was right."""
    run = Attacked(PLAN, attack)
    run.play()
    assert bases_of(run) == bases_of(undisturbed("gather")) and len(run.written) > 10
    done = verify_run(run.bucket)
    assert done.disagreement is None and done.bases == {0, 1, 2, 3, 4}
