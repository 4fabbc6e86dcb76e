"""Windows: requests that are signed for a stranger's machine, on servers of S3, Azure and GCS that check each one."""

import base64
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit
from uuid import uuid4

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from genuine_azurite import Azurite
from genuine_gcs import Gcs
from join_scene import HOUR, KEY, STAMP, Invited
from protocol_fleet import BY_HAND, Fleet, answer, close
from real_runs import wait_for
from signed_s3 import SignedS3, running_signed_s3

from diloco_orchestrator.cli.invite_command import invite
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ConfigError, ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.join.invitations import create_invitation, revoke
from diloco_orchestrator.join.link import Link
from diloco_orchestrator.join.windows import MOST_READS, ROUNDS, LentRequests, Windows, may_read, may_write
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Intent, Window
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.signatures import to_text
from diloco_orchestrator.run_log.run_store import of_run, stored_names
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.signing.identity import Identity
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.obstore_engine import open_cloud
from diloco_orchestrator.store.presigned import CREATES, PresignedStore, Requests
from diloco_orchestrator.store.s3 import open_s3
from diloco_orchestrator.store.signers import Operation, Signs, signer_of

URL = "s3://bucket/runs/a"
LIFE_S = 1000.0
OVER = 400, 403  # GCS's and others' answer to a request whose time is over
TOKEN = "0" * 16


class Seat(Invited):
    """A signed run with an invited replica, whose first attempt is offered, and whoever supervises it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.now, self.asked = 1000.0, 0
        fields = {"replica_id": 3, "attempt": 1, "leg": 1, "executor": "join", "why": "test", "claim_token": TOKEN}
        Writer(self.log.store, Role.COORDINATOR).create(Intent(**STAMP(), **fields))
        self.user, self.invitation = create_invitation(self.log, 3, 10 * HOUR, STAMP)
        self.handle = self.offer()
        self.windows = Windows(self.log.store, self, Stamp("supervisor", lambda: self.now))
        self.folder = folder

    def url_of(self, operation: Operation, key: str, lasts_s: float) -> str:
        """As a signer's, which says when it was asked."""
        self.asked += 1
        return f"https://s3/{key}?{operation}&number={self.asked}"

    def machine_with(self, requests: Requests) -> LentRequests:
        link = Link(
            url=self.url,
            run_sha256=self.log.run_sha256,
            code_sha256="1" * 64,
            signed_by=KEY.signed_by.key,
            replica_id=3,
            seed=to_text(self.user.seed),
            requests=base64.urlsafe_b64encode(requests.to_bytes()).decode(),
            not_after=self.invitation.not_after,
        )
        self.folder.mkdir(exist_ok=True)
        return LentRequests(Link.parse(link.text()), self.folder)

    def in_use(self) -> Requests:
        return Requests.from_bytes((self.folder / "requests").read_bytes())

    def name(self, key: str) -> str:
        return stored_names(self.log.store, key)[0]


@pytest.fixture
def seat(tmp_path: Path) -> Seat:
    return Seat(tmp_path / "files")


def found(machine: LentRequests, store: Store) -> None:
    machine.look(of_run(store, {}))


# -- what is signed ---------------------------------------------------------------------------------------------------


def test_requests_are_signed_anew_at_half_of_their_life_until_the_invitation_ends(seat: Seat):
    machine = seat.machine_with(seat.windows.open(seat.invitation, LIFE_S))
    found(machine, seat.store)
    first = seat.in_use()
    asked, seat.now = seat.asked, seat.now + LIFE_S / 2 - 1
    seat.windows.renew()
    assert seat.asked == asked
    seat.now += 1
    seat.windows.renew()
    found(machine, seat.store)
    second = seat.in_use()
    assert seat.asked > asked and second.ends == first.ends + LIFE_S / 2
    assert second.read.keys() == first.read.keys() and not set(second.create.values()) & set(first.create.values())
    while seat.now < seat.invitation.not_after + LIFE_S:
        seat.now += LIFE_S / 2
        seat.windows.renew()
    found(machine, seat.store)
    assert seat.in_use().ends == seat.invitation.not_after


def test_what_is_new_in_the_run_is_signed_at_the_next_look_and_the_rest_is_not_signed_again(seat: Seat):
    machine = seat.machine_with(seat.windows.open(seat.invitation, LIFE_S))
    asked, began = seat.asked, keys.began(0, 1)
    seat.log.store.beneath.create(seat.name(began), b"{}")  # type: ignore[attr-defined]
    seat.windows.renew()
    found(machine, seat.store)
    assert seat.asked == asked + 1 and seat.in_use().read[seat.name(began)][0] == 2


def _revoked(seat: Seat) -> None:
    assert revoke(seat.log, 3, STAMP) == 1


def _expired(seat: Seat) -> None:
    seat.now = seat.invitation.not_after


@pytest.mark.parametrize("end", [_revoked, _expired])
def test_who_is_invited_no_more_gets_nothing_new(end: object, seat: Seat):
    machine = seat.machine_with(seat.windows.open(seat.invitation, 10 * HOUR))
    found(machine, seat.store)
    before, asked = seat.in_use(), seat.asked
    end(seat)  # type: ignore[operator]
    seat.log.store.beneath.create(seat.name(keys.began(0, 1)), b"{}")  # type: ignore[attr-defined]
    seat.windows.renew()
    found(machine, seat.store)
    assert seat.asked == asked and seat.in_use() == before


def test_a_window_is_read_by_the_machine_with_the_link_alone(seat: Seat, tmp_path: Path):
    seat.machine_with(seat.windows.open(seat.invitation, LIFE_S))
    assert (tmp_path / "files/requests").stat().st_mode & 0o077 == 0
    everything = b"".join(seat.store.get(info.key) for info in seat.store.list(""))
    assert b"https://s3/" not in everything
    key = keys.window(1, 3, seat.invitation.identity)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Identity(bytes([9] * 32)).opened(key, Window.from_bytes(seat.log.store.get(key), key).sealed)


def test_a_machine_uses_no_account_of_its_user(seat: Seat):
    machine = seat.machine_with(seat.windows.open(seat.invitation, LIFE_S))
    environ = machine.environ(
        {
            "AWS_PROFILE": "work",
            "AWS_ACCESS_KEY_ID": "mine",
            "AZURE_STORAGE_ACCOUNT_KEY": "mine",
            "GOOGLE_APPLICATION_CREDENTIALS": "/mine",
            "HOME": "/home/me",
        }
    )
    nothing = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    assert environ == {"HOME": "/home/me", "DILOCO_SIGNED_REQUESTS": str(seat.folder / "requests"), **nothing}


def test_a_window_that_the_runs_keys_have_not_signed_does_not_exist(seat: Seat):
    """By one who may overwrite objects, and who knows to whom it has to be encrypted."""
    machine = seat.machine_with(seat.windows.open(seat.invitation, LIFE_S))
    found(machine, seat.store)
    before, key = seat.in_use(), keys.window(1, 3, seat.invitation.identity)
    evil = Requests(9e9, {keys.RUN: (1, "https://evil/")}, {}, {})
    fields = {"epoch": 1, "replica_id": 3, "identity": seat.invitation.identity, "lasts_s": 1.0}
    record = Window(**STAMP(), **fields, sealed=seat.user.public.seal(key, evil.to_bytes()))
    seat.store.put(seat.name(key), record.to_bytes())
    found(machine, seat.store)
    assert seat.in_use() == before


def test_a_window_has_all_that_its_replica_writes_in_the_next_rounds_and_does_not_grow_with_the_run():
    fleet = Fleet(replicas=2, rounds=20, timing=BY_HAND, clock=ManualClock(1000.0), store=MemoryStore(URL))
    theirs = re.compile(r"rounds/\d+/(payload/1/.*|contributions/1\.json|checked/1\..*)|replicas/1/state/.*")
    participants, counted, signed, late = fleet.join_all(), [], set[str](), set[str]()
    for round_ in range(1, 9):
        there = {info.key: info.size for info in fleet.store.list("")} | {keys.join_piece("dl-run-1-r1-a1", 0): 0}
        creates = {key for operation, key in may_write(fleet.store, there, 1) if operation == "create"}
        assert {number for key in creates if (number := keys.parse_round(key))} == set(
            range(max(1, round_ - 1), round_ - 1 + ROUNDS)
        )
        counted.append(len(creates - there.keys()))
        signed |= creates
        for participant in participants:
            answer(participant, 1.0)
        for participant in participants:
            close(participant)
        written = {info.key for info in fleet.store.list("") if theirs.fullmatch(info.key)}
        late |= written - signed
    # The first shard is signed once another's payload says how many there are.
    assert len(written) >= 16 and late == {keys.payload(1, 1, 1, 0)}
    assert max(counted[1:]) - min(counted[1:]) <= 4 and max(counted) < 100, counted


def test_a_window_reads_the_run_but_no_output_and_no_saved_state_of_others():
    read = [keys.RUN, keys.commit(1), keys.payload(1, 0, 1, 0), keys.state(3, 1, 1), keys.heartbeat(0, 1), keys.START]
    others = [keys.state(0, 1, 1), keys.residual(0, 1, 1, 0), keys.log_text(0, 1), keys.join_piece("dl-run-1-r3-a1", 0)]
    assert all(may_read(key, 3) for key in read) and not any(may_read(key, 3) for key in others)


def test_a_run_of_too_many_objects_is_refused(seat: Seat):
    for each in range(MOST_READS):
        seat.store.put(keys.snapshot(7, f"file-{each}"), b"x")
    with pytest.raises(ConfigError, match="at most"):
        seat.windows.open(seat.invitation, LIFE_S)


# -- in a bucket ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[SignedS3]:
    with running_signed_s3() as running:
        yield running


@dataclass(frozen=True)
class Account:
    """Of a store, by which its requests are signed."""

    url: str  # of the run's folder
    bucket: Store
    signer: Signs
    creates: Mapping[str, str]  # headers of a request that creates


class InBucket:
    """The run of a `Seat` in a bucket, and a machine with the link, which has no account there."""

    def __init__(self, seat: Seat, account: Account, life_s: float = LIFE_S, stamp: Stamp = STAMP) -> None:
        bucket, self.account = account.bucket, account
        self.bucket = bucket
        for info in self.bucket.list(""):
            self.bucket.delete(info.key)
        for info in seat.store.list(""):
            self.bucket.put(info.key, seat.store.get(info.key))
        self.seat, self.store = seat, of_run(self.bucket)
        self.windows = Windows(self.store, account.signer, stamp)
        self.machine = seat.machine_with(self.windows.open(seat.invitation, life_s))
        self.presigned = PresignedStore(account.url, seat.folder / "requests")

    def look(self) -> None:
        self.windows.renew()
        self.machine.look(of_run(self.presigned, {}))


@pytest.fixture(scope="module", params=["s3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("az", "gs"))])
def account(request: pytest.FixtureRequest, server: SignedS3) -> Account:
    if request.param == "s3":
        options = server.options()
        return Account(URL, open_s3(URL, options), signer_of(URL, options), CREATES["s3"])
    if request.param == "az":
        azurite: Azurite = request.getfixturevalue("azurite")
        url, options = f"az://{azurite.make_container(f'joined-{uuid4().hex}')}/runs/a", azurite.options()
        return Account(
            url,
            open_cloud(url, options),
            signer_of(url, options),
            {**CREATES["az"], "x-ms-blob-type": "BlockBlob"},
        )
    gcs: Gcs = request.getfixturevalue("gcs")
    url = f"gs://{gcs.make_bucket(f'joined-{uuid4().hex}')}/runs/a"
    signer = signer_of(url, {"base_url": gcs.front, "service_account_key": json.dumps(gcs.account)})
    return Account(url, open_cloud(url, gcs.options(url)), signer, CREATES["gs"])


@pytest.fixture
def scene(seat: Seat, account: Account) -> InBucket:
    return InBucket(seat, account)


def own(seat: Seat) -> list[str]:
    job, offer = seat.handle.native_id, seat.handle.native["offer"]
    found = [
        keys.claim(3, 1, TOKEN),
        keys.began(3, 1),
        keys.log_text(3, 1),
        keys.exit_record(3, 1),
        keys.contribution(1, 3),
        keys.state(3, 2, 1),
        keys.checked(1, 3, 2),
    ]
    return [*found, keys.join_record(job, offer, keys.JOIN_TAKEN), keys.join_piece(job, 0)]


OTHERS = [keys.commit(1), keys.START, keys.result(1), keys.contribution(1, 2), keys.contribution(99, 3)]
OTHERS += [keys.claim(3, 2, TOKEN), keys.heartbeat(2, 1), keys.rotation(2)]


def test_a_machine_without_an_account_reads_the_run_and_creates_objects_of_its_own_alone(scene: InBucket):
    assert {info.key for info in scene.presigned.list("")} == {
        keys.RUN, *stored_names(scene.store, keys.window(1, 3, scene.seat.invitation.identity))
    }  # by the link  # fmt: skip
    scene.look()
    store, seat = scene.presigned, scene.seat
    assert {info.key for info in store.list("")} == {info.key for info in scene.bucket.list("")}
    assert store.get(keys.RUN) == scene.bucket.get(keys.RUN) and store.get(keys.RUN, 2, 9) == store.get(keys.RUN)[2:9]
    assert store.get(keys.RUN, 10**6) == b""
    for key in own(seat):
        name = seat.name(key)
        assert store.create(name, b"x") and not store.create(name, b"y"), key
        assert scene.bucket.get(name) == b"x" and name in {info.key for info in store.list("")}
    store.put(seat.name(keys.heartbeat(3, 1)), b"1")
    store.put(seat.name(keys.heartbeat(3, 1)), b"2")
    assert scene.bucket.get(seat.name(keys.heartbeat(3, 1))) == b"2"
    before = {info.key for info in scene.bucket.list("")}
    for key in OTHERS:
        with pytest.raises(StoreUnavailable, match="no request for it is signed"):
            store.create(seat.name(key), b"x")
    with pytest.raises(StoreDenied):
        store.delete(keys.RUN)
    assert {info.key for info in scene.bucket.list("")} == before


def test_an_object_of_another_process_is_there_for_a_create_and_after_the_next_look_for_a_read(scene: InBucket):
    scene.look()
    name = scene.seat.name(keys.contribution(1, 3))
    scene.bucket.create(name, b"another's")
    with pytest.raises(ObjectMissing):
        scene.presigned.get(name)
    assert not scene.presigned.create(name, b"ours") and scene.bucket.get(name) == b"another's"
    with pytest.raises(StoreUnavailable):
        scene.presigned.get(name)  # a create whose reply was lost is read back once it is signed
    scene.look()
    assert scene.presigned.get(name) == b"another's"


def _sent(url: str, data: bytes | None, headers: dict[str, str]) -> int:
    request = urllib.request.Request(url, data, headers, method="GET" if data is None else "PUT")
    try:
        with urllib.request.urlopen(request) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_request_is_for_one_object_one_operation_and_no_overwriting(scene: InBucket):
    scene.look()
    name, other = (scene.seat.name(keys.contribution(1, each)) for each in (3, 2))
    path = quote(name)
    url, once = scene.seat.in_use().create[name], dict(scene.account.creates)
    always = {"x-ms-blob-type": "BlockBlob"}
    assert path in url and _sent(url.replace(path, quote(other)), b"x", once) == 403
    assert _sent(url, None, once) == 403  # it reads nothing
    assert _sent(re.sub("(Expires=|se=2)", r"\g<1>9", url), b"x", once) in (400, 403)
    assert _sent(scene.seat.in_use().read[keys.RUN][1], b"x", always) == 403
    assert not {info.key for info in scene.bucket.list("")} & {name, other}
    assert _sent(url, b"x", once) in (200, 201) and _sent(url, b"y", once) in (412, 403)
    assert _sent(url, b"y", always) == 403 and scene.bucket.get(name) == b"x"  # nor does it overwrite


@pytest.mark.parametrize("account", ["s3"], indirect=True)
def test_a_request_that_creates_needs_its_condition_on_s3(scene: InBucket):
    scene.look()
    url = scene.seat.in_use().create[scene.seat.name(keys.contribution(1, 3))]
    assert _sent(url, b"x", {}) == _sent(url, b"x", {"If-None-Match": '"an-etag"'}) == 403


def test_what_keeps_a_create_from_overwriting_is_signed_on_azure_and_gcs():
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    account = json.dumps({"client_email": "me@lab.example", "private_key": key.decode()})
    azure = signer_of("az://container/run", {"account_name": "me", "account_key": "a2V5"})
    gcs = signer_of("gs://bucket/run", {"service_account_key": account})

    def said(signer: Signs, name: str) -> list[str]:
        operations: list[Operation] = ["read", "create", "put"]
        return [dict(parse_qsl(urlsplit(signer.url_of(each, "key", 60.0)).query))[name] for each in operations]

    assert said(azure, "sp") == ["r", "c", "cw"] and said(azure, "spr") == ["https"] * 3
    assert said(gcs, "X-Goog-SignedHeaders") == ["host", "host;x-goog-if-generation-match", "host"]


@pytest.mark.parametrize("account", ["s3"], indirect=True)
def test_requests_whose_time_is_over_or_has_not_begun_are_refused_and_said_so(scene: InBucket, server: SignedS3):
    """Also where the clock of whoever signs is off by an hour. The machine's own clock is asked by nobody."""
    scene.look()
    for ahead_s in (LIFE_S + 60.0, HOUR, -HOUR):
        with server.ahead_by(ahead_s), pytest.raises(StoreDenied, match=r"requests end at .* unless they are renewed"):
            scene.presigned.get(keys.RUN)
        with server.ahead_by(ahead_s), pytest.raises(StoreDenied):
            scene.presigned.create(scene.seat.name(keys.contribution(1, 3)), b"x")
    assert scene.presigned.get(keys.RUN)


@pytest.mark.slow  # the store's clock has to pass the end of real requests
def test_a_machine_whose_requests_are_renewed_reads_and_writes_after_the_end_of_the_first(seat: Seat, account: Account):
    began, life_s = time.monotonic(), 8.0
    scene = InBucket(seat, account, life_s, Stamp("supervisor", lambda: 1000.0 + time.monotonic() - began))
    scene.look()
    first = seat.in_use()
    wait_for(lambda: time.monotonic() - began > 0.6 * life_s, "half of their life")
    scene.look()
    wait_for(lambda: _sent(first.read[keys.RUN][1], None, {}) in OVER, "the end of the first requests")
    name = seat.name(keys.contribution(1, 3))
    assert _sent(first.create[name], b"x", dict(account.creates)) in OVER
    assert scene.presigned.get(keys.RUN) and scene.presigned.create(name, b"x")
    wait_for(lambda: _sent(seat.in_use().read[keys.RUN][1], None, {}) in OVER, "the end of the second ones")
    with pytest.raises(StoreDenied, match="unless they are renewed"):
        scene.presigned.get(keys.RUN)


@pytest.mark.parametrize("account", ["s3"], indirect=True)
def test_a_file_of_requests_that_is_cut_is_refused(scene: InBucket):
    file = scene.seat.folder / "requests"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(StoreError, match="cannot read the signed requests"):
        PresignedStore(URL, file)


def test_nothing_is_signed_for_other_stores_and_beside_credentials(seat: Seat, monkeypatch: pytest.MonkeyPatch):
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="S3, GCS and Azure alone"):
        signer_of("hf://buckets/me/bucket/run", {})
    with pytest.raises(ConfigError, match="without a signature"):
        signer_of(URL, {"anon": True})
    with pytest.raises(ConfigError, match="key of a service account alone: name its JSON file"):
        signer_of("gs://bucket/run", {"service_account_key": '{"type": "authorized_user"}'})
    with pytest.raises(ConfigError, match="the account's key alone: set AZURE_STORAGE_ACCOUNT_NAME and"):
        signer_of("az://container/run", {"account_name": "me"})
    options = [seat.url, "--replica", "3", "--presigned"]
    refused = CliRunner().invoke(invite, [*options, "--own-credentials"])
    assert refused.exit_code == 2 and "mints no credentials" in refused.output
