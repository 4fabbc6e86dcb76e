"""Keys of all objects in a run's folder: functions that build a key and functions that parse one.

The contents of the objects are in `protocol.records`; which keys hold JSON records is in `protocol.kinds`. Rounds,
attempts and legs (start or resume to stop) count from 1. Snapshot 0 holds the first base.
"""

import re
from dataclasses import dataclass, replace
from typing import Any


def round_name(round_: int) -> str:
    """The number of a round in keys, zero-padded, so that a listing in key order is in round order."""
    return f"{round_:08d}"


# A number as it is written here: a key counts only if it is built to the same text again. Parsing refuses leading
# zeros, digits of other scripts, and numbers that no run reaches.
_N = "(?:0|[1-9][0-9]{0,8})"
_ROUND = "[0-9]{8}"
_JOB = "dl-[a-z0-9-]{1,60}"  # the name of an offered attempt, as `attempt_name` of executors makes it
_OFFER_DIGITS = 32  # of the digest of an offer, in the keys of the records about it
# Takes "2" to "9" are of earlier versions; those of nine digits are random, where somebody was in the way: of the first
# base, and of any in a signed run.
_TAKE = rf"[2-9]|[1-9][0-9]{{8}}|r{_N}|rebuilt"
_WORDS = {  # parts of keys that are no numbers
    "token": "[0-9a-f]{16}",
    "sha256": "[0-9a-f]{64}",
    "job": _JOB,
    "offer": f"[0-9a-f]{{{_OFFER_DIGITS}}}",
    "identity": "[0-9a-f]{32}",
    "take": _TAKE,
    "record": r"[a-z]+\.json",
    "about": r"(?:taken|lease|cancel|end)\.json",
    "text": r"[a-z]+\.(?:json|txt)",
    "part": "[0-9]{6}",
    "kind": "commits|manifests",
    "name": "[^/]+",
    "path": ".*",
}
_PARTS = {"round": _ROUND, "version": "[2-9]", **_WORDS}  # of keys; the others are numbers


class Form:
    """A pattern of object keys, such as "legs/<leg>/begin.json", that builds and parses the keys of this pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names = re.findall("<([a-z0-9]+)>", text)
        self._template = re.sub("<[a-z0-9]+>", "{}", text)
        self._rounds = [index for index, name in enumerate(self.names) if name == "round"]
        groups = [f"({_PARTS.get(name, _N)})" for name in self.names]
        self._pattern = re.compile(re.escape(self._template).replace(r"\{\}", "{}").format(*groups), re.DOTALL)

    def __call__(self, *parts: int | str) -> str:
        """The key with these values for the pattern's placeholders, in order."""
        written = list(parts)
        for index in self._rounds:
            written[index] = round_name(int(written[index]))
        if len(written) != len(self.names):
            raise ValueError(f"{self.text} has {len(self.names)} parts, not {len(written)}")
        return self._template.format(*written)

    def parse(self, key: str) -> tuple[Any, ...] | None:
        """The values of the placeholders in a key of this pattern, numbers as int; None for any other key."""
        found = self._pattern.fullmatch(key)
        if found is None:
            return None
        named = zip(self.names, found.groups(), strict=True)
        return tuple(part if name in _WORDS else int(part) for name, part in named)


RUN = "run.json"
START = "start.json"
STARTS = "start/"  # the replicas' votes on the start record, and start records besides start.json
REPLICAS = "replicas/"
SNAPSHOTS = "snapshots/"
LEGS = "legs/"
ROUNDS = "rounds/"
LOG = "log/"
RETENTION = "retention.json"
KL_REFERENCE = "probe.safetensors"
KL_RECORD = "probe.json"
PROBE = ".probe/"  # test objects of `store.probe`, deleted at once
DOCTOR = ".doctor/"  # test objects of `diloco doctor`, deleted at once
KEYS = "keys/"  # records about the keys of a signed run
rotation = Form("keys/<epoch>.json")
colleague = Form("keys/colleagues/<identity>.<epoch>.json")
code = Form("code/<sha256>.zip")  # the code archive with this digest, which replicas on other machines fetch

# -- legs -------------------------------------------------------------------------------------------------------------

begin = Form("legs/<leg>/begin.json")
halt = Form("legs/<leg>/halt.json")
result = Form("legs/<leg>/result.json")
scale = Form("legs/<leg>/scale/<number>.json")
outs = Form("legs/<leg>/out/")  # the prefix of the records of replicas that are out of a leg
out = Form("legs/<leg>/out/<id>.json")

_of_leg = Form("legs/<leg>/<record>")


def parse_leg(key: str) -> tuple[int, str] | None:
    """(leg, file name) of a record of a leg (start or resume to stop), or None for any other key."""
    return _of_leg.parse(key)


# -- the start --------------------------------------------------------------------------------------------------------

began = Form("start/<id>/began.<attempt>.json")
follows = Form("start/<id>/follows.json")
# A start record if start.json holds another one. The token: 16 random hex digits.
start_take = Form("start/takes/<token>.json")
LINK = "start/link.json"  # of a run with path="auto", and of an all-reduce


def is_start(key: str) -> bool:
    """Whether this is the key of a start record, which describes a first base: start.json, or one of start/takes/."""
    return key == START or start_take.parse(key) is not None


# -- replicas ---------------------------------------------------------------------------------------------------------

CLAIM, INTENT, HANDLE, EXIT = "claim.json", "intent.json", "handle.json", "exit.json"  # names of an `AttemptKey`
HEARTBEAT, LOG_TEXT = "heartbeat.json", "log.txt"

attempts = Form("replicas/<id>/attempts/")  # the prefix of all objects of one replica's attempts
intent = Form("replicas/<id>/attempts/<attempt>/intent.json")
handle = Form("replicas/<id>/attempts/<attempt>/handle.json")
waiting = Form("replicas/<id>/attempts/<attempt>/waiting.json")  # overwritten
cancel = Form("replicas/<id>/attempts/<attempt>/cancel.json")
exit_record = Form("replicas/<id>/attempts/<attempt>/exit.json")
log_text = Form("replicas/<id>/attempts/<attempt>/log.txt")
heartbeat = Form("replicas/<id>/attempts/<attempt>/heartbeat.json")  # overwritten
CLAIMS = (
    Form("replicas/<id>/attempts/<attempt>/claim.<token>.json"),
    Form("replicas/<id>/attempts/<attempt>/claim.json"),  # of runs of earlier versions
)


def claim(replica_id: int, attempt: int, token: str) -> str:
    """The key of the claim by which a process becomes an attempt. `token`: 16 hex digits; empty in old runs.

    The token is random and named in the attempt's intent, so that nobody can create the claim before the intent exists.
    """
    return CLAIMS[0](replica_id, attempt, token) if token else CLAIMS[1](replica_id, attempt)


@dataclass(frozen=True)
class AttemptKey:
    """The parts of the key of an object about an attempt: replica, attempt number and file name."""

    replica_id: int
    attempt: int
    name: str  # "claim.json", of any claim; "exit.json", …
    token: str = ""  # of a claim


_of_attempt = Form("replicas/<id>/attempts/<attempt>/<text>")


def parse_attempt(key: str) -> AttemptKey | None:
    """The parts of the key of an object about an attempt, or None for any other key."""
    if claimed := CLAIMS[0].parse(key):
        return AttemptKey(claimed[0], claimed[1], CLAIM, claimed[2])
    found = _of_attempt.parse(key)
    return AttemptKey(*found) if found else None


states = Form("replicas/<id>/state/")  # the prefix of a replica's saved states and buffers
# The state (optimizer, schedules) that a replica saved with its contribution, pieces of one that is too large for one
# object, the buffers (BatchNorm's statistics) that the replica had then, and the residual of the contribution.
state = Form("replicas/<id>/state/<round>/<attempt>.safetensors")
state_piece = Form("replicas/<id>/state/<round>/<attempt>/<piece>.bin")
buffers = Form("replicas/<id>/state/<round>/<attempt>.buffers.safetensors")
residual = Form("replicas/<id>/state/<round>/<attempt>/residual.<shard>.bin")


def parse_state(key: str) -> tuple[int, int, int] | None:
    """(replica_id, round, attempt) of a saved state, a piece of one, saved buffers or a residual; else None."""
    found = state.parse(key) or state_piece.parse(key) or buffers.parse(key) or residual.parse(key)
    return (found[0], found[1], found[2]) if found else None


# -- machines that join -----------------------------------------------------------------------------------------------

JOINS = "join/attempts/"  # attempts that are offered to machines that join
JOIN_OFFER, JOIN_TAKEN, JOIN_LEASE = "offer.json", "taken.json", "lease.json"
JOIN_CANCEL, JOIN_END = "cancel.json", "end.json"
join_offer = Form("join/attempts/<job>/offer.json")
INVITATIONS = "join/invited/"  # strangers' rights to run one replica of a signed run
REVOCATIONS = "join/revoked/"
invitation = Form("join/invited/<epoch>/<id>.<identity>.json")
revocation = Form("join/revoked/<epoch>/<id>.<identity>.json")
GRANTS = "join/granted/"  # temporary credentials of the store for who was invited
grant = Form("join/granted/<epoch>/<id>.<identity>.<number>.json")
WINDOWS = "join/windows/"  # signed requests to the store, where it mints no credentials, for who was invited
window = Form("join/windows/<epoch>/<id>.<identity>.json")  # overwritten


def parse_invited(key: str) -> tuple[int, int, str] | None:
    """(epoch, replica_id, identity) of a record about an invitation, such as its revocation; None for any other key.

    The epoch counts from 1, and one more after each replacement of the run's keys.
    """
    found = invitation.parse(key) or revocation.parse(key) or grant.parse(key) or window.parse(key)
    return (found[0], found[1], found[2]) if found else None


join_output = Form("join/output/<job>/")  # the prefix of the pieces of an offered attempt's output
_piece_of_output = Form("join/output/<job>/<part>.txt")
_about_offer = Form("join/attempts/<job>/<offer>.<about>")


def about_offer(record: str) -> Form:
    """The key pattern of a record about an offer (an attempt for machines that join), such as "taken.json"."""
    return Form(_about_offer.text.replace("<about>", record))


def join_record(name: str, offer_sha256: str, record: str) -> str:
    """The key of a record about the offer (an attempt for machines that join) whose bytes have this sha256."""
    return _about_offer(name, offer_sha256[:_OFFER_DIGITS], record)


def join_piece(name: str, piece: int) -> str:
    """The key of one piece of the output of an attempt on a joined machine. Pieces count from 0, in key order."""
    return _piece_of_output(name, f"{piece:06d}")


_JOB_OF_ATTEMPT = re.compile(rf"dl-.+-r({_N})-a({_N})")
_OF_JOB = re.compile(rf"join/(?:attempts|output)/{_JOB_OF_ATTEMPT.pattern}/.*", re.DOTALL)


def parse_joined(key: str) -> tuple[int, int] | None:
    """(replica_id, attempt) of any object about an attempt that is offered to machines; None for any other key."""
    found = _OF_JOB.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class JoinKey:
    """The parts of the key of an offer (an attempt for machines that join), or of a record about one."""

    name: str  # of the attempt
    offer: str  # the first digits of the offer's digest; empty for the offer itself
    record: str  # "offer.json", "taken.json", …

    def is_about(self, offer_sha256: str) -> bool:
        """Whether the key is that of a record about the offer (an attempt for machines that join) with this sha256."""
        return bool(self.offer) and offer_sha256.startswith(self.offer)

    @property
    def who(self) -> tuple[int, int] | None:
        """(replica_id, attempt), parsed from the name of the offered attempt; None if the name has another form."""
        found = _JOB_OF_ATTEMPT.fullmatch(self.name)
        return (int(found[1]), int(found[2])) if found else None


def parse_join_record(key: str) -> JoinKey | None:
    """The parts of the key of an offer (an attempt for machines that join) or of a record about one; else None."""
    if offered := join_offer.parse(key):
        return JoinKey(offered[0], "", JOIN_OFFER)
    found = _about_offer.parse(key)
    return JoinKey(*found) if found else None


def is_join_piece(key: str) -> bool:
    """Whether this is the key of a piece of the output of an attempt that runs on a machine that joined."""
    return _piece_of_output.parse(key) is not None


# -- rounds -----------------------------------------------------------------------------------------------------------

commit = Form("rounds/<round>/commit.json")
unfounded = Form("rounds/<round>/unfounded.json")  # about its commit
contributions = Form("rounds/<round>/contributions/")  # the prefix of a round's manifests
contribution = Form("rounds/<round>/contributions/<id>.json")
payloads = Form("rounds/<round>/payload/")  # the prefix of a round's payload shards
payloads_of = Form("rounds/<round>/payload/<id>/<attempt>/")  # the prefix of those that one attempt published
wants = Form("rounds/<round>/want/")  # the prefix of the requests for payloads of a round
want = Form("rounds/<round>/want/<id>/<attempt>/<shard>.<version>.json")  # to upload a shard again, as that version
_first_payload = Form("rounds/<round>/payload/<id>/<attempt>/<shard>.bin")
_later_payload = Form("rounds/<round>/payload/<id>/<attempt>/<shard>.<version>.bin")
checks = Form("rounds/<round>/checked/")  # the prefix of what dealers found in payload shards
checked = Form("rounds/<round>/checked/<id>.<number>.json")  # numbered per replica, from 1
MAX_TAKES = 4  # of one payload shard, and of one reduced shard
reduced_shards = Form("rounds/<round>/reduced/")  # the prefix of averages of shards, and of the records about them
reduced = Form("rounds/<round>/reduced/<id>.json")  # which averages one replica, or rank of an all-reduce, has made
_first_reduced = Form("rounds/<round>/reduced/<shard>.bin")
_later_reduced = Form("rounds/<round>/reduced/<shard>.<version>.bin")


def payload(round_: int, replica_id: int, attempt: int, shard: int, take: int = 1) -> str:
    """The key of a payload shard. `take`: version, 1 for the author's upload, higher for later uploads of it."""
    where = round_, replica_id, attempt, shard
    return _first_payload(*where) if take == 1 else _later_payload(*where, take)


def reduced_shard(round_: int, shard: int, take: int = 1) -> str:
    """The key of a shard's average that one replica computed for the others.

    `take`: version; above 1 where somebody else has put other bytes under the keys of the versions before.
    """
    return _first_reduced(round_, shard) if take == 1 else _later_reduced(round_, shard, take)


def parse_reduced_shard(key: str) -> tuple[int, int] | None:
    """(round, shard) from the key of a shard's average computed for others; None for any other key."""
    found = _first_reduced.parse(key) or _later_reduced.parse(key)
    return (found[0], found[1]) if found else None


def end_of_round(round_: int) -> str:
    """A key after all objects of a round and before those of the next one, for `start_after` of a listing.

    It uses "0", the character after "/": clients encode "~" in different ways, which breaks request signatures.
    """
    return f"{ROUNDS}{round_name(round_)}0"


@dataclass(frozen=True)
class PayloadKey:
    """The parts of the key of a payload shard, or of a request to upload one again."""

    round: int
    replica_id: int
    attempt: int
    shard: int
    take: int = 1

    @property
    def first_take(self) -> "PayloadKey":
        """The key parts of version 1 of the same shard, which its author uploaded."""
        return replace(self, take=1)

    def __str__(self) -> str:
        return payload(self.round, self.replica_id, self.attempt, self.shard, self.take)


def parse_payload(key: str) -> PayloadKey | None:
    """The parts of the key of a payload shard, or None for any other key."""
    found = _first_payload.parse(key) or _later_payload.parse(key)
    return PayloadKey(*found) if found else None


def parse_want(key: str) -> PayloadKey | None:
    """The payload shard and version that the request with this key asks to be uploaded again; else None."""
    found = want.parse(key)
    return PayloadKey(*found) if found else None


_of_round = Form("rounds/<round>/<path>")


def parse_round(key: str) -> int | None:
    """The round in the key of a round's object, a saved state or a snapshot; None for any other key.

    For a segment (an object that joins the records of ten or a hundred rounds), its last round.
    """
    if found := _of_round.parse(key):
        return int(found[0])
    if (saved := parse_state(key)) is not None:
        return saved[1]
    segment, of_snapshot = parse_segment(key), parse_snapshot_file(key)
    return segment.last if segment else of_snapshot[0] if of_snapshot else None


# -- segments of the log ----------------------------------------------------------------------------------------------


_segment = Form("log/<round>-<round>.<kind>.jsonl")


@dataclass(frozen=True)
class SegmentKey:
    """The parts of the key of a segment, which joins the commits or manifests (`kind`) of rounds `first` to `last`."""

    first: int
    last: int
    kind: str  # "commits" or "manifests"

    def __str__(self) -> str:
        return _segment(self.first, self.last, self.kind)


def parse_segment(key: str) -> SegmentKey | None:
    """The parts of the key of a segment, which joins the commits or manifests of ten or a hundred rounds; else None."""
    found = _segment.parse(key)
    return SegmentKey(*found) if found and 1 <= found[0] <= found[1] else None


# -- snapshots --------------------------------------------------------------------------------------------------------

SNAPSHOT_RECORD = "snapshot.json"
SNAPSHOT_RECORDS = (Form("snapshots/<round>/snapshot.json"), Form("snapshots/<round>.<take>/snapshot.json"))
_file_of_snapshot = Form("snapshots/<round>/<path>")
_file_of_version = Form("snapshots/<round>.<take>/<path>")
_replay = Form("snapshots/<round>/replays/<name>.json")
SHARED_TAKE = ""  # the version of a snapshot that every replica may write; only the first complete one counts


def own_take(replica_id: int | None) -> str:
    """The name of the version of a snapshot that only this replica writes; None: for processes that are no replica."""
    return "rebuilt" if replica_id is None else f"r{replica_id}"


def unforeseen_take(hex_digits: str) -> str:
    """The name of a version of a snapshot that nobody else can have used. `hex_digits`: 16 random ones."""
    return str(10**8 + int(hex_digits, 16) % (9 * 10**8))


def snapshot(round_: int, name: str, take: str = SHARED_TAKE) -> str:
    """The key of one file of a snapshot. `take`: the version, by default the one that all writers share."""
    return _file_of_version(round_, take, name) if take else _file_of_snapshot(round_, name)


def snapshot_url(store_url: str, round_: int, take: str = SHARED_TAKE) -> str:
    """The URL of the folder of a snapshot's version `take`, for people and for `from_pretrained`."""
    return f"{store_url}/{snapshot(round_, '', take)}".removesuffix("/")


def is_take(take: str) -> bool:
    """Whether `take` is a valid name for a version of a snapshot."""
    return take == SHARED_TAKE or re.fullmatch(_TAKE, take) is not None


def parse_snapshot_file(key: str) -> tuple[int, str] | None:
    """(round, version) of the snapshot to which the file at `key` belongs, or None for any other key."""
    if found := _file_of_snapshot.parse(key):
        return found[0], SHARED_TAKE
    found = _file_of_version.parse(key)
    return (found[0], found[1]) if found else None


def parse_snapshot_record(key: str) -> tuple[int, str] | None:
    """(round, version) of the key of a `snapshot.json`, else None. The shared version has the name ""."""
    return parse_snapshot_file(key) if any(form.parse(key) for form in SNAPSHOT_RECORDS) else None


def is_replay(key: str) -> bool:
    """Whether this is the key of a record of rebuilt bases, which only earlier versions wrote and nothing reads."""
    return _replay.parse(key) is not None
