"""Invitations, links, machines with keys: who may run a replica of a signed run, until when, and what it writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from iam_server import Question, allows
from join_scene import HOUR, KEY, STAMP, Invited, Scene
from record_examples import EXAMPLES
from signed_fleet import Fleet
from signed_s3 import running_signed_s3

from diloco_orchestrator.cli.invite_command import invite
from diloco_orchestrator.cli.join_command import join, only_code_of
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.join.invitations import REVOKED, check_may_invite, revoke
from diloco_orchestrator.join.link import Credentials, Link
from diloco_orchestrator.join.temporary_credentials import mint, policy_of
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Offer
from diloco_orchestrator.protocol.key_records import Rotation
from diloco_orchestrator.protocol.record_format import By
from diloco_orchestrator.protocol.signatures import from_text
from diloco_orchestrator.protocol.signed_objects import why_not_by
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import of_run, stored_names, unsigned_in
from diloco_orchestrator.signing.identity import Identity
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY
from diloco_orchestrator.signing.keys import RunKey
from diloco_orchestrator.store.memory import MemoryStore
from executors.contract import ReplicaState


@pytest.fixture
def scene() -> Invited:
    return Invited()


# -- machines with keys -----------------------------------------------------------------------------------------------


def test_a_machine_whose_line_the_launcher_names_gets_the_keys_of_an_attempt_and_no_other_does():
    me, other = Identity(bytes(32)), Identity(bytes([1] * 32))
    scene = Invited(machines=(me.public.text(),))
    handle, program = scene.offer(), scene.program()
    scene.machine(program, user=other, once=False, hours=0.01).run()
    assert not program.started and "its keys are for" in " ".join(scene.said)
    assert scene.machine(program, user=me).run() == 0
    assert (
        program.started[0][ENV_ATTEMPT_KEY]
        == KEY.operator(scene.log.run_sha256).of_attempt(scene.log.run_sha256, 3, 1).text()
    )
    assert scene.executor.poll(handle).state is ReplicaState.SUCCEEDED
    assert not unsigned_in(scene.log.store)
    open_text = b"".join(scene.store.get(info.key) for info in scene.store.list(""))
    assert program.started[0][ENV_ATTEMPT_KEY].encode() not in open_text


def test_what_nobody_signed_about_a_machine_does_not_exist(scene: Invited):
    link, handle = scene.link(), scene.offer()
    for record, kind in ((keys.JOIN_TAKEN, "taken"), (keys.JOIN_CANCEL, "join_cancel"), (keys.JOIN_END, "join_end")):
        key = keys.join_record(handle.native_id, handle.native["offer"], record)
        scene.store.create(key, EXAMPLES[kind].to_bytes())
    forged = Offer(**STAMP(), run_id="run-1", replica_id=3, attempt=9, command=("rm", "-r", "/"), env={})
    scene.store.create(keys.join_offer("dl-run-1-r3-a9"), forged.to_bytes())
    program = scene.program()
    assert scene.run_by(link, program) == 0 and len(program.started) == 1
    assert scene.executor.poll(handle).state is ReplicaState.SUCCEEDED


def test_a_machine_that_names_a_key_runs_nothing_of_a_folder_without_a_run():
    scene = Scene()
    scene.executor.launch(scene.request())
    program = scene.program()
    scene.machine(program, signed_by=KEY.signed_by.key, once=False, hours=0.01).run()
    assert not program.started
    assert scene.machine(program).run() == 0 and program.started


# -- a link -----------------------------------------------------------------------------------------------------------


def test_whoever_has_a_link_runs_the_replica_also_one_that_was_offered_before(scene: Invited):
    before = scene.offer()
    link = Link.parse(scene.link().text())
    program = scene.program()
    scene.run_by(link, program)
    assert not program.started
    assert scene.executor.poll(before).state is ReplicaState.PREEMPTED  # and its next attempt is launched
    handle = scene.offer(2)
    assert scene.run_by(link, program) == 0 and len(program.started) == 1
    assert scene.executor.poll(handle).state is ReplicaState.SUCCEEDED


def test_an_invitation_that_comes_while_its_replica_is_being_offered_is_not_missed(scene: Invited):
    """After the offer's keys were sealed, and before the offer is there for who invites to withdraw."""
    links: list[Link] = []

    class Racing:
        def __getattr__(self, name: str) -> Any:
            return getattr(scene.store, name)

        def create(self, key: str, data: bytes) -> bool:
            if "/offer.json" in key and not links:
                links.append(scene.link())
            return scene.store.create(key, data)

    scene.executor._opened[scene.url] = of_run(Racing())
    missed, program = scene.offer(), scene.program()
    assert scene.executor.poll(missed).state is ReplicaState.PREEMPTED
    scene.offer(2)
    assert scene.run_by(links[0], program) == 0 and len(program.started) == 1


@pytest.mark.parametrize("late_s", [0.0, HOUR + 1])
def test_an_expired_link_gets_no_keys_whatever_the_machines_clock_says(late_s: float):
    scene = Invited(clock_s=1000.0 + late_s)
    link, program = scene.link(), scene.program()
    scene.offer()
    scene.clock.sleep(50 * HOUR)  # the machine's
    scene.run_by(link, program, once=False, hours=0.01)
    assert bool(program.started) is not bool(late_s)
    assert ("was revoked or has expired" in " ".join(scene.said)) is bool(late_s)


def test_a_link_that_is_used_twice_runs_one_replica(scene: Invited):
    link = scene.link()
    scene.offer()
    second = scene.program()
    first = scene.program(on_wait=lambda: scene.run_by(link, second, once=False, hours=0.001))
    assert scene.run_by(link, first) == 0
    assert (len(first.started), len(second.started)) == (1, 0)


def test_a_revoked_link_ends_its_attempt_and_gets_no_further_keys(scene: Invited):
    link, revoked = scene.link(), []
    handle = scene.offer()
    program = scene.program(code=None, on_wait=lambda: revoked.append(revoke(scene.log, 3, STAMP)))
    scene.run_by(link, program)
    assert revoked[0] == 1 and program.signals[0] == "TERM"
    found = scene.executor.poll(handle)
    assert (found.state, found.message) == (ReplicaState.PREEMPTED, "its invitation was revoked")
    scene.offer(2)
    again = scene.program()
    scene.run_by(link, again, once=False, hours=0.01)
    assert not again.started
    scene.offer(3)
    fresh = scene.link()
    scene.offer(4)
    assert scene.run_by(fresh, again) == 0 and again.started


def test_a_link_that_is_revoked_while_its_replica_is_being_offered_gets_no_keys(scene: Invited):
    """After the offer's keys were sealed, and before the offer is there for who revokes to end."""
    link, revoked = scene.link(), []

    class Racing:
        def __getattr__(self, name: str) -> Any:
            return getattr(scene.store, name)

        def create(self, key: str, data: bytes) -> bool:
            if "/offer.json" in key and not revoked:
                revoked.append(revoke(scene.log, 3, STAMP))
            return scene.store.create(key, data)

    scene.executor._opened[scene.url] = of_run(Racing())
    handle, program = scene.offer(), scene.program()
    scene.run_by(link, program, once=False, hours=0.01)
    assert revoked == [1] and not program.started
    assert scene.executor.poll(handle).message == REVOKED


def test_a_revocation_that_was_interrupted_is_completed_by_another_one(scene: Invited):
    """As its process dies between the record and the attempt's end."""
    link, handle, ended = scene.link(), scene.offer(), []

    class Dies:
        def __getattr__(self, name: str) -> Any:
            return getattr(scene.store, name)

        def list(self, prefix: str, start_after: str = "") -> Any:
            if prefix == keys.JOINS and any(scene.store.list(keys.REVOCATIONS)):
                raise KeyboardInterrupt
            return scene.store.list(prefix, start_after)

    def revoke_twice() -> None:
        if not ended:
            with pytest.raises(KeyboardInterrupt):
                revoke(RunLog(of_run(Dies())), 3, STAMP)
            ended.append(revoke(scene.log, 3, STAMP))

    program = scene.program(code=None, on_wait=revoke_twice)
    scene.run_by(link, program)
    assert ended == [0] and program.signals[0] == "TERM"
    assert scene.executor.poll(handle).message == REVOKED


def test_who_knows_the_names_alone_revokes_nothing(scene: Invited):
    """A stranger with credentials of the whole bucket, who puts junk under the name of another one's revocation."""
    link, store = scene.link(), scene.log.store
    key = keys.revocation(1, 3, Identity(from_text(link.seed, 32)).public.digest)
    (name,) = stored_names(store, key)
    assert scene.store.create(name, b"junk")
    scene.offer()
    program = scene.program()
    assert scene.run_by(link, program) == 0 and program.started
    assert revoke(scene.log, 3, STAMP) == 1, "under the next of its names"
    scene.offer(2)
    again = scene.program()
    scene.run_by(link, again, once=False, hours=0.01)
    assert not again.started


def test_an_invitation_ends_with_the_keys_of_its_epoch():
    fields = {"names": KEY.signed_by.names, "from_leg": 2, "after_round": 3, "commit_sha256": None, "attempts": {}}
    rotation = Rotation(**STAMP(), epoch=2, **fields, by="x", why="y")
    for form in (keys.invitation, keys.revocation):
        assert not rotation.is_before(form(1, 3, "0" * 32)) and rotation.is_before(form(2, 3, "0" * 32))
    assert rotation.is_before(keys.join_offer("dl-run-1-r3-a1"))


def _another_run(link: Link) -> str:
    return link.model_copy(update={"run_sha256": "2" * 64}).text()


def _another_key(link: Link) -> str:
    return link.model_copy(update={"signed_by": RunKey(bytes(32)).signed_by.key}).text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda link: link.text()[:-1], "was cut or changed"),
        (lambda link: link.text()[:200], "was cut or changed"),
        (lambda link: link.text()[:40] + "A" + link.text()[41:], "was cut or changed"),
        (lambda link: "diloco-link-", "was cut or changed"),
        (_another_run, "another run than the link names"),
        (_another_key, "is the address right"),
    ],
)
def test_a_damaged_or_foreign_link_is_refused_and_not_shown(changed: Callable[[Link], str], said: str, scene: Invited):
    text = changed(scene.link())
    done = CliRunner().invoke(join, [text, "--hours", "0.0001"], standalone_mode=False)
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)
    assert len(text) < 20 or text not in str(done.exception)


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_a_machine_whose_clock_is_an_hour_off_is_asked_whether_it_is_right(scene: Invited, seconds: float):
    """By a server that refuses such requests as S3 does, which a link that works is sent to."""
    with running_signed_s3() as server, server.ahead_by(seconds):
        options = server.options()
        credentials = Credentials(key=options["key"], secret=options["secret"], token="T0KEN")
        changes = {"url": "s3://bucket/run", "endpoint_url": server.url, "credentials": credentials}
        text = scene.link().model_copy(update=changes).text()
        done = CliRunner().invoke(join, [text, "--hours", "0.01"], standalone_mode=False)
    assert isinstance(done.exception, ConfigError) and "is this machine's clock right?" in str(done.exception)
    assert "clock is too far off" in str(done.exception)


def test_a_link_is_a_secret_of_one_line_that_mail_may_break(scene: Invited):
    link = scene.link().model_copy(update={"credentials": Credentials(key="A", secret="S3CRET", token="T0KEN")})
    text = link.text()
    assert Link.parse(f" {text[:76]}\n{text[76:]}\n") == link
    assert text not in redact(f"diloco join {text}", {}) and "S3CRET" not in repr(link)


def test_a_machine_with_a_link_runs_no_other_code(scene: Invited):
    link = scene.link()
    offer = Offer.from_bytes(RunLog(scene.log.store).store.get(keys.join_offer(scene.offer().native_id)), "offer")
    why_not = only_code_of(link, scene.log.store)
    assert not why_not(offer)
    for forged in ({"command": ("sh",)}, {"env": {"LD_PRELOAD": "x"}}, {"code": f"code/{'9' * 64}.zip"}):
        assert why_not(offer.model_copy(update=forged))
    assert only_code_of(link.model_copy(update={"code_sha256": "9" * 64}), scene.log.store)(offer)


# -- who can be invited -----------------------------------------------------------------------------------------------


def test_only_replicas_that_the_launch_has_named_can_be_invited_and_only_with_keys(
    scene: Invited, monkeypatch, tmp_path
):
    with pytest.raises(ConfigError, match="is not for strangers"):
        check_may_invite(scene.log, 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="an invitation needs keys"):
        check_may_invite(RunLog(of_run(scene.store)), 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas": 4, "invited": [4]}, "the run has replicas 0 to 3"),
        ({"replicas": 4, "invited": [1, 2, 3]}, "leaves 1 of 4 replicas"),
        ({"replicas": 4, "invited": "3,x"}, "invited"),
    ],
)
def test_a_run_keeps_two_replicas_that_are_no_strangers(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        make_config({"entrypoint": "m:f", **settings})


def test_with_strangers_the_quarter_that_agrees_least_is_left_out_by_default():
    assert make_config({"entrypoint": "m:f", "replicas": 8, "invited": "5,6,7"}).aggregate == "agreeing_mean"
    assert make_config({"entrypoint": "m:f", "replicas": 8, "invited": [7], "aggregate": "mean"}).aggregate == "mean"
    assert "invited" not in json.loads(make_config({"entrypoint": "m:f"}).model_dump_json())


@pytest.mark.parametrize("text", ["24", "h", "0h", "-1h", "1.5h", "1w"])
def test_a_time_without_a_unit_is_refused_before_anything_is_read(text: str):
    done = CliRunner().invoke(invite, ["/nowhere", "--replica", "3", "--expires", text], standalone_mode=False)
    assert isinstance(done.exception, click.UsageError) and "90m, 24h or 7d" in str(done.exception)


# -- what a stranger's key says ---------------------------------------------------------------------------------------

OWN = ("contribution", "claim", "heartbeat", "exit", "began", "follows", "checked")


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_strangers_key_signs_what_its_replica_says_about_itself_and_nothing_else(name: str):
    from diloco_orchestrator.protocol.kinds import KINDS

    kind = next((each for each in KINDS if each.record.record == name), None)
    if kind is None:
        return
    words = {"token": "0" * 16, "job": "dl-r-r3-a1", "offer": "0" * 32, "identity": "0" * 32, "sha256": "0" * 64}
    key = kind.forms[0](*({**words, "id": 3, "attempt": 1}.get(part, 2) for part in kind.forms[0].names))
    fields = {"replica_id": 3, "attempt": 1, "by": "replica 3, attempt 1"}
    body = json.dumps({**json.loads(EXAMPLES[name].to_bytes()), **fields}).encode()
    said = why_not_by((3, 1), key, body, is_invited=True)
    of_machine = ("taken", "lease", "join_end", "want")
    assert (said == "") == (name in (*OWN, *of_machine)), said


def test_a_commit_that_a_stranger_has_signed_does_not_exist():
    for invited in ((), (1,)):
        fleet = Fleet(invited=invited)
        commit = EXAMPLES["commit"].model_copy(update={"round": 7, "by": By((1, 1))})
        key = keys.commit(7)
        fleet.stored.create(fleet.name(key), fleet.sealed(fleet.signer(1), commit.to_bytes(), key))
        found = list(fleet.reader.list(keys.ROUNDS))
        assert bool(found)  # its name is right
        if invited:
            assert fleet.replica(0).create(key, commit.model_copy(update={"by": By((0, 1))}).to_bytes())
        else:
            assert fleet.reader.get(key) == commit.to_bytes()


# -- temporary credentials --------------------------------------------------------------------------------------------


def test_the_policy_of_a_stranger_is_short_and_lets_it_write_its_own_objects_alone():
    policy = policy_of("bucket", "runs/a-folder-of-some-length/for-one-run", 3)
    assert len(json.dumps(policy, separators=(",", ":"))) < 2048
    here = "arn:aws:s3:::bucket/runs/a-folder-of-some-length/for-one-run/"
    signed = "A" * 86

    def may(key: str, action: str = "s3:PutObject") -> bool:
        return allows(policy, Question(action, f"{here}{key}", {}))

    own = [keys.claim(3, 1, "0" * 16), keys.contribution(7, 3), keys.payload(7, 3, 1, 0), keys.began(3, 1)]
    own += [keys.join_record("dl-run-1-r3-a2", "0" * 64, keys.JOIN_LEASE), keys.state(3, 7, 1), keys.heartbeat(3, 1)]
    assert all(may(f"{key}/{signed}") for key in own)
    others = [keys.commit(7), keys.result(1), keys.contribution(7, 1), keys.payload(7, 1, 1, 0), keys.START]
    others += [keys.snapshot(7, "x"), keys.invitation(1, 3, "0" * 32), keys.join_offer("dl-run-1-r4-a1"), keys.RUN]
    others += [keys.contribution(7, 33), keys.reduced_shard(7, 0), "log/x"]
    assert not any(may(f"{key}/{signed}") or may(key) for key in others)
    assert may(keys.commit(7), "s3:GetObject") and not may(keys.contribution(7, 3), "s3:DeleteObject")


def test_stores_without_a_token_service_say_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match="--own-credentials"):
        mint(MemoryStore(str(tmp_path)), 3, HOUR, None)
    with pytest.raises(ConfigError, match="folder's name is too long"):
        mint(MemoryStore(f"s3://bucket/{'x' * 300}"), 3, HOUR, None)
