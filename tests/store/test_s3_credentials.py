"""Credentials of S3 that end, are renewed, or are written anew by another program: no call is lost to them."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.credentials import Credentials
from real_runs import wait_for
from s3_server import EVERYTHING, ROLE, S3Server, running_server
from tokens import AsObstore, Source

from diloco_orchestrator.clock import ManualClock, random_token
from diloco_orchestrator.errors import ObjectMissing, StoreDenied, StoreError
from diloco_orchestrator.store.fsspec_engine import open_fsspec
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.retrying import RetryPolicy
from diloco_orchestrator.store.s3 import open_s3
from diloco_orchestrator.store.s3_credentials import BotocoreCredentials

MINUTE = 60.0


@pytest.mark.parametrize(
    ("life_s", "ahead_s", "every_s"),
    [
        (4.0, 4.0, 0.3),  # an STS that gives a new one whenever it is asked
        (15 * MINUTE, 15 * MINUTE, 7.0),
        (16 * MINUTE, 16 * MINUTE, 7.0),
        (60 * MINUTE, 60 * MINUTE, 31.0),
        (60 * MINUTE, 5 * MINUTE, 31.0),  # an instance's role: the next ones are there five minutes before the end
        (6 * 60 * MINUTE, 5 * MINUTE, 61.0),
    ],
)
def test_no_request_is_signed_with_a_token_that_has_ended(life_s: float, ahead_s: float, every_s: float):
    """Whatever was left of the first token when the process began; requests for two lives and a half."""
    for share in range(0, 100, 3):
        clock = ManualClock(1e9)
        source = Source(clock, life_s, ahead_s, age_s=life_s * share / 100)
        used = AsObstore(source)
        for _ in range(int(2.5 * life_s / every_s)):
            assert used.token_ends() > clock.now(), f"{share}% of its life were over at the start"
            clock.advance(every_s)


def test_a_token_of_fifteen_minutes_is_not_asked_for_with_every_request():
    clock = ManualClock(1e9)
    source = Source(clock, 15 * MINUTE, 15 * MINUTE, age_s=0.0)
    used = AsObstore(source)
    for _ in range(7200):
        used.token_ends()
        clock.advance(1.0)
    assert source.asked <= 2 * 60 / 5 + 2


def test_static_credentials_are_used_as_they_are():
    now = datetime(2026, 11, 23, tzinfo=UTC)
    given = BotocoreCredentials(Credentials("AKIA", "secret"), now=lambda: now)()
    assert (given["access_key_id"], given["secret_access_key"], given["token"]) == ("AKIA", "secret", None)
    assert given["expires_at"] == now + timedelta(minutes=10)  # and asked for again then, not with every request


# -- against a server that checks signatures and ends tokens -----------------------------------------------------------


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Writes the default profile of this user."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def written(server: S3Server, key: str, secret: str, role: str = "") -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        (tmp_path / "credentials").write_text(f"[user]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        assumed = f"role_arn = {role}\nsource_profile = user\n" if role else ""
        keys = "" if role else f"aws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        (tmp_path / "config").write_text(f"[default]\nregion = us-east-1\n{assumed}{keys}")

    return written


@pytest.fixture(scope="module")
def short_tokens() -> Iterator[S3Server]:
    with running_server(token_s=3.0) as server:
        server.make_bucket("short-tokens")
        yield server


@pytest.mark.slow
def test_tokens_of_seconds_are_renewed_before_they_end(short_tokens: S3Server, profile):
    """The engine alone: nothing is retried, and every request is signed with a token that has not ended."""
    profile(short_tokens, short_tokens.key, short_tokens.secret, role=ROLE)
    store = open_s3("s3://short-tokens/run", {}, single_put_limit=2**20)
    began = time.monotonic()
    for number in itertools.count():
        assert store.create(f"objects/{number}", b"xyz")
        assert store.get("objects/0", 1, 2) == b"y"
        if number % 40 == 0:
            assert store.create(f"large/{number}", bytes(2**20 + 1))
        if time.monotonic() - began > 8.0:
            break


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_a_token_that_has_ended_is_a_refusal_to_every_call(short_tokens: S3Server, engine: str):
    """Also to those that begin with a HEAD request, whose answer is a 400 without a body."""
    given = short_tokens.client("sts").assume_role(RoleArn=ROLE, RoleSessionName="test")["Credentials"]
    names = {"key": "AccessKeyId", "secret": "SecretAccessKey", "token": "SessionToken"}
    options = {**{name: given[theirs] for name, theirs in names.items()}, "endpoint_url": short_tokens.url}
    store = (
        open_s3("s3://short-tokens/x", options, single_put_limit=10)
        if engine == "auto"
        else open_fsspec("s3://short-tokens/x", options, "fsspec+s3://short-tokens/x")
    )
    wait_for(lambda: refused(lambda: list(store.list(""))), "the token's end")
    for call in (
        lambda: store.get("key"),
        lambda: store.get("key", 1, 3),
        lambda: store.create("key", b"x"),
        lambda: store.create("large", bytes(20)),
        lambda: store.put("key", b"x"),
        lambda: store.put("large", bytes(20)),
        lambda: store.delete("key"),
    ):
        assert refused(call)


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreDenied:
        return True
    except ObjectMissing:
        return False
    return False


class User:
    """With a key of its own, for as long as nobody withdraws it."""

    def __init__(self, server: S3Server) -> None:
        self.iam, self.name = server.client("iam"), f"user-{random_token()}"
        self.iam.create_user(UserName=self.name)
        self.iam.put_user_policy(UserName=self.name, PolicyName="everything", PolicyDocument=json.dumps(EVERYTHING))
        made = self.iam.create_access_key(UserName=self.name)["AccessKey"]
        self.key, self.secret = made["AccessKeyId"], made["SecretAccessKey"]

    def withdraw(self) -> None:
        self.iam.delete_access_key(UserName=self.name, AccessKeyId=self.key)


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_a_credentials_file_that_is_written_anew_is_read_again(s3_server: S3Server, bucket: str, profile, engine: str):
    first, second = User(s3_server), User(s3_server)
    profile(s3_server, first.key, first.secret)
    clock = Rotating(lambda: profile(s3_server, second.key, second.secret))
    store = open_store(f"s3://{bucket}/run", engine=engine, clock=clock, rng=random.Random(1))
    store.put("key", b"1")
    first.withdraw()
    store.put("key", b"2")
    assert store.get("key") == b"2"


class Rotating(ManualClock):
    """A clock by which another program writes the file while the process waits for the second time."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(time.time())
        self.write, self.slept = write, 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.slept += 1
        if self.slept == 2:
            self.write()


def test_a_credentials_file_that_is_half_written_is_waited_for(
    s3_server: S3Server, bucket: str, profile, tmp_path: Path
):
    user = User(s3_server)
    profile(s3_server, user.key, user.secret)
    clock = Rotating(lambda: profile(s3_server, s3_server.key, s3_server.secret))
    store = open_store(f"s3://{bucket}/run", clock=clock, rng=random.Random(1))
    store.put("key", b"1")
    user.withdraw()
    (tmp_path / "config").write_text("[default]\naws_access_key_id = AKIA\n[us")
    store.put("key", b"2")
    assert clock.slept >= 2


def test_credentials_that_cannot_be_read_are_told_with_the_files_to_check(profile, s3_server: S3Server, tmp_path: Path):
    profile(s3_server, "AKIA", "secret")
    (tmp_path / "config").write_text("[default]\naws_access_key_id = AKIA\n")
    with pytest.raises(StoreError, match=r"cannot get S3 credentials for s3://b/x: .*Check the profile's files"):
        open_store("s3://b/x", retry=RetryPolicy(total_s=0.1))
