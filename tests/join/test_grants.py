"""Temporary credentials of invited machines: renewed in the bucket while their seat lasts, for nobody else to read."""

import json
import os
import subprocess
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path

import click
import pytest
from join_scene import HOUR, KEY, STAMP, Invited
from signed_fleet import Fleet

from diloco_orchestrator.cli.join_command import _lent_by, join
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.errors import ConfigError, ObjectMissing
from diloco_orchestrator.join.grants import LentCredentials, create_grant, renew_grants
from diloco_orchestrator.join.invitations import create_invitation, revoke
from diloco_orchestrator.join.link import Credentials, Link
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Grant, Invitation
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.signatures import to_text
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.signing.identity import Identity
from diloco_orchestrator.store.retrying import RetryPolicy

LIFE_S = 1000.0


class Seat(Invited):
    """An invited replica whose machine has credentials of `LIFE_S`, and whoever supervises the run."""

    def __init__(self, folder: Path, lasts_s: float = 10 * HOUR) -> None:
        super().__init__()
        self.asked: list[tuple[int, float, str | None]] = []
        self.now, self.clock = 1000.0, ManualClock(1000.0)  # of the supervisor; of the machine
        self.user, self.invitation = create_invitation(self.log, 3, lasts_s, STAMP)
        first = self.mint(3, LIFE_S, "role")
        create_grant(self.log.store, self.invitation, 1, first, LIFE_S, "role", self.stamp)
        self.lent = self.machine_of(self.user, folder, first)

    def machine_of(self, user: Identity, folder: Path, first: Credentials) -> LentCredentials:
        folder.mkdir(exist_ok=True)
        return LentCredentials(self.link_of(user, first), first, folder, self.clock)

    def link_of(self, user: Identity, first: Credentials) -> Link:
        return Link(
            url=self.url,
            run_sha256=self.log.run_sha256,
            code_sha256="1" * 64,
            signed_by=KEY.signed_by.key,
            replica_id=3,
            seed=to_text(user.seed),
            credentials=first,
            not_after=self.invitation.not_after,
        )

    @property
    def stamp(self) -> Stamp:
        return Stamp("supervisor", lambda: self.now)

    def mint(self, replica_id: int, lasts_s: float, role: str | None) -> Credentials:
        """What a store's token service would: other credentials each time, for as long as is asked for."""
        self.asked.append((replica_id, lasts_s, role))
        number = len(self.asked)
        return Credentials(
            key=f"ASIA{number:016d}",
            secret=f"S3CRET{number}" * 4,
            token=f"T0KEN{number}" * 4,
            not_after=self.now + lasts_s,
        )

    def renew(self, later_s: float = 0.0) -> None:
        """Supervise, so much later, and let the machine look."""
        self.now += later_s
        self.clock.advance(later_s)
        renew_grants(self.log.store, self.mint, self.stamp)
        self.lent.look(of_run(self.store, {}))


def in_use(lent: LentCredentials) -> str:
    """The id of the credentials that an AWS SDK on the machine reads: what the program of each profile prints."""
    config = ConfigParser()
    config.read(lent.environ({})["AWS_CONFIG_FILE"])
    programs = [config[each]["credential_process"] for each in ("default", "profile diloco-writing")]
    said, writing = (json.loads(subprocess.check_output(each, shell=True)) for each in programs)
    assert said == writing and said["Version"] == 1
    return str(said["AccessKeyId"][-1])


@pytest.fixture
def seat(tmp_path: Path) -> Seat:
    return Seat(tmp_path / "files")


def test_a_machine_gets_new_credentials_at_half_of_the_life_of_those_it_has_until_its_invitation_ends(seat: Seat):
    seat.renew(LIFE_S / 2 - 1)
    assert in_use(seat.lent) == "1" and len(seat.asked) == 1
    seat.renew(1)
    assert in_use(seat.lent) == "1" and len(seat.asked) == 2  # the machine has looked a second before
    seat.renew(LIFE_S / 10)
    assert in_use(seat.lent) == "2" and len(seat.asked) == 2
    while seat.now < seat.invitation.not_after:
        seat.renew(LIFE_S / 4)
    assert seat.asked[-1][1] >= 900.0 and len(seat.asked) > 36 * 1.9
    asked = len(seat.asked)
    seat.renew(LIFE_S / 2)
    assert len(seat.asked) == asked
    assert all(each[::2] == (3, "role") for each in seat.asked)


def test_nobody_reads_them_in_the_bucket_and_only_this_user_on_the_machine(seat: Seat, tmp_path: Path):
    seat.renew(LIFE_S / 2)
    everything = b"".join(seat.store.get(info.key) for info in seat.store.list(""))
    assert not any(secret.encode() in everything for secret in seat.lent.secrets.values())
    assert len(seat.lent.secrets) == 4  # of both, so that no output shows them
    assert (tmp_path / "files/credentials.json").stat().st_mode & 0o077 == 0
    other = seat.machine_of(Identity(bytes([9] * 32)), tmp_path / "other", seat.mint(3, LIFE_S, None))
    key = keys.grant(1, 3, seat.invitation.identity, 2)
    with pytest.raises(ConfigError, match="cannot be opened"):
        other._identity.opened(key, Grant.from_bytes(seat.log.store.get(key), key).sealed)


def test_a_machine_uses_no_account_of_its_user(seat: Seat):
    mine = {"AWS_PROFILE": "work", "AWS_ACCESS_KEY_ID": "mine", "AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "HOME": "/home/me"}
    environ = seat.lent.environ(mine)
    assert environ.keys() == {*("HOME", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "DILOCO_WRITING_PROFILE")}
    with seat.lent.in_this_process():
        assert os.environ["AWS_CONFIG_FILE"] == environ["AWS_CONFIG_FILE"]
    assert "AWS_CONFIG_FILE" not in os.environ


def _revoked(seat: Seat) -> None:
    assert revoke(seat.log, 3, STAMP) == 1


def _expired(seat: Seat) -> None:
    seat.now = seat.invitation.not_after


def _without(seat: Seat) -> None:
    seat.store.delete(next(info.key for info in seat.store.list(keys.GRANTS)))  # as with --own-credentials


@pytest.mark.parametrize("end", [_revoked, _expired, _without])
def test_who_is_invited_no_more_or_was_lent_none_gets_none(end: Callable[[Seat], None], seat: Seat):
    end(seat)
    seat.renew(LIFE_S / 2)
    assert len(seat.asked) == 1 and in_use(seat.lent) == "1"


def test_one_of_two_supervisors_mints_what_counts(seat: Seat):
    raced: list[int] = []

    def mint(replica_id: int, lasts_s: float, role: str | None) -> Credentials:
        if not raced:
            raced.append(replica_id)
            renew_grants(seat.log.store, seat.mint, seat.stamp)
        return seat.mint(replica_id, lasts_s, role)

    seat.now += LIFE_S / 2
    renew_grants(seat.log.store, mint, seat.stamp)
    seat.renew(LIFE_S / 4)
    assert len(seat.asked) == 3 and in_use(seat.lent) == "2"


def test_a_refusal_leaves_others_their_credentials_and_is_told(seat: Seat):
    _, second = create_invitation(seat.log, 3, 10 * HOUR, STAMP)
    create_grant(seat.log.store, second, 1, seat.mint(3, LIFE_S, "gone"), LIFE_S, "gone", seat.stamp)

    def mint(replica_id: int, lasts_s: float, role: str | None) -> Credentials:
        if role == "gone":
            raise ConfigError("no such role")
        return seat.mint(replica_id, lasts_s, role)

    seat.now += LIFE_S / 2
    with pytest.raises(ConfigError, match="no such role"):
        renew_grants(seat.log.store, mint, seat.stamp)
    numbers = [keys.grant.parse(info.key)[2:] for info in seat.log.store.list(keys.GRANTS)]  # type: ignore[index]
    assert sorted(number for who, number in numbers if who == seat.invitation.identity) == [1, 2]
    assert [number for who, number in numbers if who == second.identity] == [1]


# -- attacks ----------------------------------------------------------------------------------------------------------


def _grants(fleet: Fleet, seat_of: int) -> tuple[Identity, Invitation]:
    user = Identity(bytes([seat_of] * 32))
    fields = {"write_id": "w", "at": 1000.0, "epoch": 1, "replica_id": seat_of, "not_after": 90000.0}
    return user, Invitation(**fields, identity=user.public.digest, public=user.public.text())


def test_a_grant_of_another_that_is_sent_again_is_nobodys(seat: Seat, tmp_path: Path):
    """By one with the credentials of a whole bucket, who copies it under the names of the next one and of another's."""
    seat.renew(LIFE_S / 2)
    other, invited = create_invitation(seat.log, 3, 10 * HOUR, STAMP)
    first = seat.mint(3, LIFE_S, None)
    create_grant(seat.log.store, invited, 1, first, LIFE_S, None, seat.stamp)
    machine = seat.machine_of(other, tmp_path / "other", first)
    key = keys.grant(1, 3, seat.invitation.identity, 2)
    stored = next(info.key for info in seat.store.list(key + "/"))
    signed = seat.log.store
    for target in (keys.grant(1, 3, seat.invitation.identity, 3), keys.grant(1, 3, invited.identity, 2)):
        name = signed._name(signed._rules(target), target)  # type: ignore[attr-defined]  # which strangers know, too
        seat.store.create(name, seat.store.get(stored))
    for lent, number in ((machine, first.key[-1]), (seat.lent, "2")):
        seat.clock.advance(LIFE_S / 4)
        lent.look(of_run(seat.store, {}))
        assert in_use(lent) == number
    seat.now += LIFE_S / 2
    renew_grants(signed, seat.mint, seat.stamp)  # under the next take of the names that were taken
    for lent in (machine, seat.lent):
        seat.clock.advance(LIFE_S / 4)
        lent.look(of_run(seat.store, {}))
    assert {in_use(machine), in_use(seat.lent)} == {"4", "5"}


def test_a_strangers_key_signs_no_grant():
    fleet = Fleet(invited=(1,))
    user, invited = _grants(fleet, 1)
    key = keys.grant(1, 1, user.public.digest, 1)
    secret = Credentials(key="k", secret="s" * 20, token="t" * 20, not_after=9e9)
    with pytest.raises(TypeError, match="is not this process's to write"):
        create_grant(fleet.replica(1), invited, 1, secret, LIFE_S, None, STAMP)
    sealed = user.public.seal(key, secret.model_dump_json().encode())
    fields = {
        "epoch": 1,
        "replica_id": 1,
        "identity": user.public.digest,
        "number": 1,
        "not_after": 9e9,
        "lasts_s": 900.0,
    }
    body = Grant(**STAMP(), **fields, sealed=sealed).to_bytes()
    fleet.stored.create(fleet.name(key), fleet.sealed(fleet.signer(1), body, key))
    with pytest.raises(ObjectMissing, match="was not signed"):
        fleet.reader.get(key)


FALSE = Credentials(key="ASIAFALSE9", secret="false" * 8, token="false" * 8, not_after=9e9)


def _replaced_run(seat: Seat) -> None:
    """An unsigned run.json in place of the run's, and credentials of somebody else for whom the link invites."""
    seat.store.put(keys.RUN, seat.log.run.model_copy(update={"signed_by": None}).to_bytes())
    create_grant(of_run(seat.store, {}), seat.invitation, 9, FALSE, LIFE_S, None, seat.stamp)


def test_a_machine_uses_no_credentials_of_another_run_than_its_link_names(seat: Seat, tmp_path: Path):
    """`diloco join` reads them before it opens the run's folder, and compared the run only after that."""
    _replaced_run(seat)
    link = seat.link_of(seat.user, seat.mint(3, LIFE_S, None))
    with click.Context(join), pytest.raises(ConfigError, match="another run than the link names"):
        _lent_by(link, seat.clock, RetryPolicy(), 1.0)


def test_a_machine_whose_runs_record_is_gone_uses_no_credentials_that_nobody_has_signed(seat: Seat):
    seat.store.delete(keys.RUN)
    create_grant(of_run(seat.store, {}), seat.invitation, 9, FALSE, LIFE_S, None, seat.stamp)
    program = seat.program()
    link = seat.link_of(seat.user, seat.mint(3, LIFE_S, None))
    seat.run_by(link, program, lent=seat.lent, hours=LIFE_S / 3600)
    assert not program.started and in_use(seat.lent) == "1"
