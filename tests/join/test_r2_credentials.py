"""Temporary credentials on Cloudflare R2: two sets that an account's keys sign, on a look-alike that enforces them."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from join_scene import HOUR, STAMP, Invited
from loopback_r2 import ACCOUNT, ENDPOINT, KEY, SECRET, LoopbackR2, running_r2
from protocol_fleet import BY_HAND, Fleet, answer, close

from diloco_orchestrator.clock import ManualClock, SystemClock
from diloco_orchestrator.errors import ConfigError, StoreDenied
from diloco_orchestrator.join.grants import LentCredentials, create_grant
from diloco_orchestrator.join.invitations import create_invitation
from diloco_orchestrator.join.link import Credentials, Link
from diloco_orchestrator.join.r2_credentials import WINDOW, account_of, mint_r2
from diloco_orchestrator.join.temporary_credentials import mint
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.signatures import to_text
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.s3 import open_s3

URL = "s3://bucket/runs/a"
PARENT = {"key": KEY, "secret": SECRET, "token": ""}
SIGNED = "A" * 86
OWN = [keys.claim(3, 1, "0" * 16), keys.heartbeat(3, 1), keys.state(3, 7, 1), keys.began(3, 1)]
OWN += [keys.contribution(1, 3), keys.payload(WINDOW, 3, 1, 0), keys.want(2, 0, 1, 0, 2)]
OWN += [keys.join_record("dl-run-1-r3-a2", "0" * 64, keys.JOIN_LEASE), keys.join_piece("dl-run-1-r3-a1", 0)]
OTHERS = [keys.commit(7), keys.START, keys.RUN, keys.result(1), keys.snapshot(7, "x"), keys.reduced_shard(7, 0)]
OTHERS += [keys.contribution(7, 1), keys.contribution(7, 33), keys.payload(7, 1, 1, 0), keys.claim(1, 1, "0" * 16)]
OTHERS += [keys.invitation(1, 3, "0" * 32), keys.join_offer("dl-run-1-r4-a1"), "log/x"]
OTHERS += [keys.payload(WINDOW + 1, 3, 1, 0), keys.contribution(WINDOW + 1, 3)]  # after the window's end


@pytest.fixture(scope="module")
def server() -> Iterator[LoopbackR2]:
    with running_r2() as found:
        yield found


class OnR2(Invited):
    """A run whose launcher's account is on R2, and whose fourth replica is a stranger's."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = opened()
        for info in self.bucket.list(""):
            self.bucket.delete(info.key)
        for info in self.store.list(""):
            self.bucket.put(info.key, self.store.get(info.key))


@pytest.fixture
def scene(server: LoopbackR2, monkeypatch: pytest.MonkeyPatch) -> OnR2:
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    return OnR2()


def opened(url: str = URL, **options: str) -> Store:
    return open_s3(url, {"endpoint_url": ENDPOINT, **options})  # which tries nothing again


def lent(link: Link, folder: Path) -> LentCredentials:
    assert link.credentials is not None
    folder.mkdir()
    return LentCredentials(link, link.credentials, folder, SystemClock())


def invited(scene: OnR2) -> Link:
    """A link as `diloco invite` makes it."""
    log = RunLog(of_run(scene.bucket))
    user, invitation = create_invitation(log, 3, HOUR, STAMP)
    minted = mint_r2(log.store, 3, HOUR, ENDPOINT, PARENT, SystemClock().wall_time())
    create_grant(log.store, invitation, 1, minted, HOUR, None, STAMP)
    changes = {"url": URL, "credentials": minted.reads, "endpoint_url": ENDPOINT, "seed": to_text(user.seed)}
    return scene.link().model_copy(update=changes)


def claims(credentials: Credentials) -> dict[str, Any]:
    web_token = base64.b64decode(credentials.token).decode().removeprefix("jwt/")
    body = web_token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return found


def test_a_machine_with_a_link_reads_the_run_and_creates_objects_of_its_own_alone(scene: OnR2, tmp_path: Path):
    link = invited(scene)
    assert len(link.text()) < 2500  # the set that creates is in the bucket, and not in the link
    machine = lent(link, tmp_path / "files")
    with machine.in_this_process():
        store = opened()
        with pytest.raises(StoreDenied):
            store.create(f"{OWN[0]}/{SIGNED}", b"x")
        machine.find(of_run(store, {}))
        store = opened()
        assert {info.key for info in store.list("")} >= {keys.RUN} and store.get(keys.RUN)
        assert all(store.create(f"{key}/{SIGNED}", b"x") for key in OWN)
        assert not any(store.create(f"{key}/{SIGNED}", b"y") for key in OWN)
        store.put(f"{keys.heartbeat(3, 1)}/{SIGNED}", b"again")
        for key in OTHERS:
            with pytest.raises(StoreDenied):
                store.create(f"{key}/{SIGNED}", b"x")
        for forbidden in (lambda: store.delete(f"{OWN[0]}/{SIGNED}"), lambda: opened("s3://bucket/runs").list("")):
            with pytest.raises(StoreDenied):
                forbidden()
        with pytest.raises(StoreDenied):
            opened("s3://other/runs/a").get(keys.RUN)
    everything = b"".join(scene.bucket.get(info.key) for info in scene.bucket.list(""))
    assert SECRET.encode() not in everything and SECRET not in link.text()
    assert not any(secret.encode() in everything for secret in machine.secrets.values())


def test_the_set_that_creates_ends_while_the_one_that_reads_goes_on(scene: OnR2, server: LoopbackR2, tmp_path: Path):
    machine = lent(invited(scene), tmp_path / "files")
    with machine.in_this_process():
        machine.find(of_run(opened(), {}))
        with server.ahead_by(400.0):  # of its life of 320 s
            store = opened()
            assert store.get(keys.RUN)
            with pytest.raises(StoreDenied):
                store.create(f"{OWN[0]}/{SIGNED}", b"x")


def test_the_rounds_for_which_a_replica_creates_follow_the_log_and_its_pace():
    clock = ManualClock(1000.0)
    fleet = Fleet(replicas=2, rounds=20, timing=BY_HAND, clock=clock, store=MemoryStore(URL))
    participants = fleet.join_all()
    found = []
    for round_ in range(1, 14):
        minted = mint_r2(fleet.store, 1, 10 * HOUR, ENDPOINT, PARENT, 5000.0)
        assert minted.creates is not None
        paths = claims(minted.creates)["paths"]["prefixPaths"]
        rounds = sorted({int(path.split("/")[3]) for path in paths if "/rounds/" in path})
        assert rounds == list(range(max(1, round_ - 1), round_ + WINDOW)), round_
        assert minted.ends == minted.creates.not_after and minted.not_after == 5000.0 + 10 * HOUR
        found.append(minted.creates.not_after - 5000.0)
        clock.advance(3600.0 if round_ == 11 else 60.0)  # an outage, once
        for participant in participants:
            answer(participant, 1.0)
        for participant in participants:
            close(participant)
    assert found[:2] == [320.0, 320.0]  # nothing is known of the pace
    assert all(abs(each - 60.0 * WINDOW / 2) < 10.0 for each in found[2:]), found


@pytest.mark.parametrize("change", ["path", "secret", "bucket", "later"])
def test_a_token_that_the_account_has_not_signed_opens_nothing(change: str, scene: OnR2, tmp_path: Path):
    parent = {**PARENT, "secret": "6" * 64} if change == "secret" else PARENT
    minted = mint_r2(scene.bucket, 3, HOUR, ENDPOINT, parent, SystemClock().wall_time())
    token = base64.b64decode(minted.token).decode()
    header, _, signature = token.removeprefix("jwt/").split(".")
    said = claims(minted)
    said |= {"path": {"paths": {"prefixPaths": [""], "objectPaths": []}}, "bucket": {"bucket": "other"}}.get(change, {})
    said |= {"later": {"exp": said["exp"] + 10**6}}.get(change, {})
    body = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
    changed = base64.b64encode(f"jwt/{header}.{body}.{signature}".encode()).decode()
    used = minted.token if change == "secret" else changed
    with pytest.raises(StoreDenied):
        opened(key=minted.key, secret=minted.secret, token=used).get(keys.RUN)
    assert scene.bucket.get(keys.RUN)


def test_what_r2_cannot_mint_is_refused_before_anything_is_created(scene: OnR2, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="has no roles"):
        mint(scene.bucket, 3, HOUR, "arn:aws:iam::1:role/x")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of a parent that is temporary")
    with pytest.raises(ConfigError, match="are temporary ones"):
        mint(scene.bucket, 3, HOUR, None)


def test_an_account_is_found_in_r2s_addresses_alone():
    host = f"{ACCOUNT}.r2.cloudflarestorage.com"
    for same in (host, host.replace(".r2", ".eu.r2"), f"{host}/"):
        assert account_of(f"https://{same}") == ACCOUNT
    for other in ("", "https://s3.amazonaws.com", f"https://{host}.evil.com", f"https://x{host}", f"https://a/{host}"):
        assert account_of(other) == ""


def test_grants_of_two_sets_are_read_by_one_that_knows_one(scene: OnR2):
    """The form of a grant of one set is that of earlier versions, which refuse unknown fields."""
    user, invitation = create_invitation(scene.log, 3, HOUR, STAMP)
    plain = Credentials(key="k", secret="s" * 20, token="t" * 20, not_after=9e9)
    record = create_grant(scene.log.store, invitation, 1, plain, HOUR, None, STAMP)
    assert record is not None
    opened_again = user.opened(keys.grant(1, 3, invitation.identity, 1), record.sealed)
    assert set(json.loads(opened_again)) == {"key", "secret", "token", "not_after"}
