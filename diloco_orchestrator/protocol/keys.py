"""The names of all objects in a run's folder: builds keys and parses them back.

What the objects hold is in `protocol.records`. Rounds, attempts and legs count from 1, and snapshot 0 is the first
base. Round numbers are zero-padded, so that a listing in key order is in round order.
"""

import re
from dataclasses import dataclass, replace

RUN = "run.json"
START = "start.json"
STARTS = "start/"  # what replicas say about the start, and starts where start.json is somebody else's
REPLICAS = "replicas/"
SNAPSHOTS = "snapshots/"
LEGS = "legs/"
ROUNDS = "rounds/"
LOG = "log/"
CLAIM = "claim.json"
INTENT = "intent.json"
RETENTION = "retention.json"
KL_REFERENCE = "probe.safetensors"
KL_RECORD = "probe.json"
PROBE = ".probe/"  # test objects of `store.probe`, deleted at once
DOCTOR = ".doctor/"  # test objects of `diloco doctor`, deleted at once


def round_name(round_: int) -> str:
    return f"{round_:08d}"


# -- legs -------------------------------------------------------------------------------------------------------------


def begin(leg: int) -> str:
    return f"legs/{leg}/begin.json"


def halt(leg: int) -> str:
    return f"legs/{leg}/halt.json"


def result(leg: int) -> str:
    return f"legs/{leg}/result.json"


# A number as the functions here write it: a key counts only if it is built to the same text again. Parsing refuses
# leading zeros, digits of other scripts, and numbers that no run reaches.
_N = "(?:0|[1-9][0-9]{0,8})"


def out(leg: int, replica_id: int) -> str:
    return f"{outs(leg)}{replica_id}.json"


def outs(leg: int) -> str:
    """The prefix of the records of replicas that are out of a leg."""
    return f"legs/{leg}/out/"


_OUT = re.compile(rf"legs/({_N})/out/({_N})\.json")


def parse_out(key: str) -> tuple[int, int] | None:
    """(leg, replica_id) of an `Out` record, or None for any other key."""
    found = _OUT.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


_BEGIN = re.compile(rf"legs/({_N})/begin\.json")


def parse_begin(key: str) -> int | None:
    """The leg whose `Begin` record has this key, or None for any other key."""
    found = _BEGIN.fullmatch(key)
    return int(found[1]) if found else None


def code(sha256: str) -> str:
    """The key of the code archive with this digest, which replicas on other machines fetch."""
    return f"code/{sha256}.zip"


_OF_LEG = re.compile(rf"legs/({_N})/([a-z]+\.json)")


def parse_leg(key: str) -> tuple[int, str] | None:
    """(leg, file name) of any record of a leg, or None for any other key."""
    found = _OF_LEG.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


# -- the start --------------------------------------------------------------------------------------------------------


def began(replica_id: int, attempt: int) -> str:
    return f"{STARTS}{replica_id}/began.{attempt}.json"


def follows(replica_id: int) -> str:
    return f"{STARTS}{replica_id}/follows.json"


def start_take(token: str) -> str:
    """The key of a start where start.json holds another. `token`: 16 hex digits that nobody can foresee."""
    return f"{STARTS}takes/{token}.json"


_BEGAN = re.compile(rf"start/({_N})/began\.({_N})\.json")
_FOLLOWS = re.compile(rf"start/({_N})/follows\.json")
_START_TAKE = re.compile(r"start/takes/[0-9a-f]{16}\.json")


def parse_began(key: str) -> tuple[int, int] | None:
    """(replica_id, attempt) of the record of what an attempt began with, or None for any other key."""
    found = _BEGAN.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


def parse_follows(key: str) -> int | None:
    """The replica whose record of the start that it follows has this key, or None for any other key."""
    found = _FOLLOWS.fullmatch(key)
    return int(found[1]) if found else None


def is_start(key: str) -> bool:
    """Whether this is the key of a start, whether or not it counts."""
    return key == START or _START_TAKE.fullmatch(key) is not None


# -- replicas ---------------------------------------------------------------------------------------------------------


def attempts(replica_id: int) -> str:
    """The prefix of all objects of one replica's attempts."""
    return f"replicas/{replica_id}/attempts/"


def intent(replica_id: int, attempt: int) -> str:
    return f"{attempts(replica_id)}{attempt}/{INTENT}"


def handle(replica_id: int, attempt: int) -> str:
    return f"{attempts(replica_id)}{attempt}/handle.json"


def claim(replica_id: int, attempt: int, token: str) -> str:
    """The key of an attempt's claim. `token`: of its intent, 16 hex digits; empty in runs of earlier versions.

    Nobody can create the claim of an attempt that counts before its intent is there.
    """
    return f"{attempts(replica_id)}{attempt}/{f'claim.{token}.json' if token else CLAIM}"


def cancel(replica_id: int, attempt: int) -> str:
    return f"{attempts(replica_id)}{attempt}/cancel.json"


def exit_record(replica_id: int, attempt: int) -> str:
    return f"{attempts(replica_id)}{attempt}/exit.json"


def log_text(replica_id: int, attempt: int) -> str:
    return f"{attempts(replica_id)}{attempt}/log.txt"


def heartbeat(replica_id: int, attempt: int) -> str:
    """The key of an attempt's heartbeat, the only object that is overwritten."""
    return f"{attempts(replica_id)}{attempt}/heartbeat.json"


def state(replica_id: int, round_: int, attempt: int) -> str:
    """The key of the state (optimizer, schedules) that a replica saved with its contribution to a round."""
    return f"{states(replica_id)}{round_name(round_)}/{attempt}.safetensors"


def state_piece(replica_id: int, round_: int, attempt: int, piece: int) -> str:
    """The key of one piece of a state that is too large for one object."""
    return f"{states(replica_id)}{round_name(round_)}/{attempt}/{piece}.bin"


def buffers(replica_id: int, round_: int, attempt: int) -> str:
    """The key of the buffers (BatchNorm's statistics) that a replica had when it contributed to a round."""
    return f"{states(replica_id)}{round_name(round_)}/{attempt}.buffers.safetensors"


def states(replica_id: int) -> str:
    """The prefix of a replica's saved states and buffers."""
    return f"replicas/{replica_id}/state/"


_STATE = re.compile(rf"replicas/{_N}/state/([0-9]{{8}})/{_N}(?:(?:\.buffers)?\.safetensors|/{_N}\.bin)")


def parse_state(key: str) -> int | None:
    """The round of a saved state or of buffers, or None for any other key."""
    found = _STATE.fullmatch(key)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class AttemptKey:
    """The parts of the key of an attempt's object, such as its claim."""

    replica_id: int
    attempt: int
    name: str  # "claim.json", of any claim; "exit.json", …
    token: str = ""  # of a claim


_ATTEMPT = re.compile(rf"replicas/({_N})/attempts/({_N})/(?:claim\.([0-9a-f]{{16}})\.json|([a-z]+\.(?:json|txt)))")


def parse_attempt(key: str) -> AttemptKey | None:
    """The parts of the key of an attempt's object, or None for any other key."""
    found = _ATTEMPT.fullmatch(key)
    return AttemptKey(int(found[1]), int(found[2]), found[4] or CLAIM, found[3] or "") if found else None


# -- machines that join -----------------------------------------------------------------------------------------------

JOINS = "join/attempts/"  # attempts that are offered to machines that join
JOIN_OFFER, JOIN_TAKEN, JOIN_LEASE = "offer.json", "taken.json", "lease.json"
JOIN_CANCEL, JOIN_END = "cancel.json", "end.json"


def join_offer(name: str) -> str:
    """The key of an offered attempt. `name`: of the attempt, as `attempt_name` makes it."""
    return f"{JOINS}{name}/{JOIN_OFFER}"


def join_record(name: str, offer_sha256: str, record: str) -> str:
    """The key of a record about the offer with this digest: nobody can write it before the offer is there."""
    return f"{JOINS}{name}/{offer_sha256[:_OFFER_DIGITS]}.{record}"


def join_output(name: str) -> str:
    """The prefix of the pieces of an offered attempt's output."""
    return f"join/output/{name}/"


def join_piece(name: str, piece: int) -> str:
    """The key of one piece of an offered attempt's output. Pieces count from 0, and key order is their order."""
    return f"{join_output(name)}{piece:06d}.txt"


_JOIN_NAME = "dl-[a-z0-9-]{1,60}"
_OFFER_DIGITS = 32  # of the digest of an offer, in the keys of the records about it
_JOIN_RECORD = re.compile(
    rf"join/attempts/({_JOIN_NAME})/(?:([0-9a-f]{{{_OFFER_DIGITS}}})\.)?((?:offer|taken|lease|cancel|end)\.json)"
)
_JOIN_PIECE = re.compile(rf"join/output/{_JOIN_NAME}/[0-9]{{6}}\.txt")


@dataclass(frozen=True)
class JoinKey:
    """The parts of the key of an offer, or of a record about one."""

    name: str  # of the attempt
    offer: str  # the first digits of the offer's digest; empty for the offer itself
    record: str  # "offer.json", "taken.json", …

    def is_about(self, offer_sha256: str) -> bool:
        """Whether this is a record about the offer with this digest."""
        return bool(self.offer) and offer_sha256.startswith(self.offer)


def parse_join_record(key: str) -> JoinKey | None:
    """The parts of the key of an offer or of a record about one, or None for any other key."""
    found = _JOIN_RECORD.fullmatch(key)
    if found is None or bool(found[2]) == (found[3] == JOIN_OFFER):
        return None
    return JoinKey(found[1], found[2] or "", found[3])


def is_join_piece(key: str) -> bool:
    """Whether this is the key of a piece of an offered attempt's output."""
    return _JOIN_PIECE.fullmatch(key) is not None


# -- rounds -----------------------------------------------------------------------------------------------------------


def payload(round_: int, replica_id: int, attempt: int, shard: int, take: int = 1) -> str:
    """The key of a payload shard. Takes count from 1; a later one holds the same bytes, put again on request."""
    name = f"{shard}" if take == 1 else f"{shard}.{take}"
    return f"{payloads(round_)}{replica_id}/{attempt}/{name}.bin"


def payloads(round_: int) -> str:
    """The prefix of a round's payload shards."""
    return f"{ROUNDS}{round_name(round_)}/payload/"


def want(round_: int, replica_id: int, attempt: int, shard: int, take: int) -> str:
    """The key of a request to put a payload shard again, as `take`."""
    return f"{wants(round_)}{replica_id}/{attempt}/{shard}.{take}.json"


def wants(round_: int) -> str:
    """The prefix of the requests for payloads of a round."""
    return f"{ROUNDS}{round_name(round_)}/want/"


def contributions(round_: int) -> str:
    """The prefix of a round's manifests."""
    return f"{ROUNDS}{round_name(round_)}/contributions/"


def contribution(round_: int, replica_id: int) -> str:
    return f"{contributions(round_)}{replica_id}.json"


def commit(round_: int) -> str:
    return f"{ROUNDS}{round_name(round_)}/commit.json"


def end_of_round(round_: int) -> str:
    """A key after all objects of a round and before those of the next one, for `start_after` of a listing.

    "0" is the character after "/". One that clients encode in different ways, such as "~", breaks request signatures.
    """
    return f"{ROUNDS}{round_name(round_)}0"


def is_commit(key: str) -> bool:
    """Whether this is the key of a round's commit."""
    return _COMMIT.fullmatch(key) is not None


_COMMIT = re.compile(r"rounds/[0-9]{8}/commit\.json")
_PAYLOAD = re.compile(rf"rounds/([0-9]{{8}})/payload/({_N})/({_N})/({_N})(?:\.([2-9]))?\.bin")
_WANT = re.compile(rf"rounds/([0-9]{{8}})/want/({_N})/({_N})/({_N})\.([2-9])\.json")


@dataclass(frozen=True)
class PayloadKey:
    """The parts of the key of a payload shard, or of a request for one."""

    round: int
    replica_id: int
    attempt: int
    shard: int
    take: int = 1

    @property
    def first_take(self) -> "PayloadKey":
        """The key that the shard's author wrote."""
        return replace(self, take=1)

    def __str__(self) -> str:
        return payload(self.round, self.replica_id, self.attempt, self.shard, self.take)


def parse_payload(key: str) -> PayloadKey | None:
    """The parts of the key of a payload shard, or None for any other key."""
    found = _PAYLOAD.fullmatch(key)
    return PayloadKey(*(int(part or 1) for part in found.groups())) if found else None


def parse_want(key: str) -> PayloadKey | None:
    """The payload shard and take that the request with this key asks for, or None for any other key."""
    found = _WANT.fullmatch(key)
    return PayloadKey(*(int(part) for part in found.groups())) if found else None


_CONTRIBUTION = re.compile(rf"rounds/([0-9]{{8}})/contributions/({_N})\.json")


def parse_contribution(key: str) -> tuple[int, int] | None:
    """(round, replica_id) of a manifest, or None for any other key."""
    found = _CONTRIBUTION.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


_OF_ROUND = re.compile(r"rounds/([0-9]{8})/.*")


def parse_round(key: str) -> int | None:
    """The last round that an object is made from: of a round, state, segment or snapshot; None for any other key."""
    if found := _OF_ROUND.fullmatch(key):
        return int(found[1])
    if (state := parse_state(key)) is not None:
        return state
    segment, snapshot = parse_segment(key), parse_snapshot_file(key)
    return segment.last if segment else snapshot[0] if snapshot else None


# -- segments of the log ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentKey:
    """The parts of the key of a segment: rounds `first` to `last`, and what its lines are."""

    first: int
    last: int
    kind: str  # "commits" or "manifests"

    def __str__(self) -> str:
        return f"{LOG}{round_name(self.first)}-{round_name(self.last)}.{self.kind}.jsonl"


_SEGMENT = re.compile(r"log/([0-9]{8})-([0-9]{8})\.(commits|manifests)\.jsonl")


def parse_segment(key: str) -> SegmentKey | None:
    """The parts of the key of a segment of the log, or None for any other key."""
    found = _SEGMENT.fullmatch(key)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return None
    return SegmentKey(int(found[1]), int(found[2]), found[3])


# -- snapshots --------------------------------------------------------------------------------------------------------

SNAPSHOT_RECORD = "snapshot.json"
MAX_TAKES = 4  # of one payload shard


SHARED_TAKE = ""  # of a snapshot: the one that every replica may write, and that all but the first leave as it is


def own_take(replica_id: int | None) -> str:
    """The take of a snapshot that one replica alone writes; None: whoever rebuilds a base and is no replica."""
    return "rebuilt" if replica_id is None else f"r{replica_id}"


def snapshot(round_: int, name: str, take: str = SHARED_TAKE) -> str:
    """The key of a file of a snapshot, of its shared take or of the own one of a replica."""
    return f"{SNAPSHOTS}{_snapshot_name(round_, take)}/{name}"


def snapshot_url(store_url: str, round_: int, take: str = SHARED_TAKE) -> str:
    """The address of a snapshot's folder, for people and for `from_pretrained`."""
    return f"{store_url}/{SNAPSHOTS}{_snapshot_name(round_, take)}"


def _snapshot_name(round_: int, take: str) -> str:
    return f"{round_name(round_)}.{take}" if take else round_name(round_)


# Takes "2" to "9" are of earlier versions; those of nine digits are of the first base, where somebody was in the way.
_TAKE = rf"[2-9]|[1-9][0-9]{{8}}|r{_N}|rebuilt"
_SNAPSHOT = rf"snapshots/([0-9]{{8}})(?:\.({_TAKE}))?/"
_SNAPSHOT_FILE = re.compile(_SNAPSHOT)
_SNAPSHOT_RECORD = re.compile(_SNAPSHOT + r"snapshot\.json")


def is_take(take: str) -> bool:
    """Whether a snapshot may have a take of this name."""
    return take == SHARED_TAKE or re.fullmatch(_TAKE, take) is not None


def parse_snapshot_file(key: str) -> tuple[int, str] | None:
    """(round, take) of the snapshot that a file belongs to, or None for any other key."""
    return _round_and_take(_SNAPSHOT_FILE.match(key))


def parse_snapshot_record(key: str) -> tuple[int, str] | None:
    """(round, take) of a `snapshot.json`, which makes a snapshot complete, or None for any other key."""
    return _round_and_take(_SNAPSHOT_RECORD.fullmatch(key))


def _round_and_take(found: re.Match[str] | None) -> tuple[int, str] | None:
    return (int(found[1]), found[2] or SHARED_TAKE) if found else None


_REPLAY = re.compile(r"snapshots/[0-9]{8}/replays/[^/]+\.json")


def is_replay(key: str) -> bool:
    """Whether this is the key of a record of rebuilt bases, which earlier versions wrote and nobody reads."""
    return _REPLAY.fullmatch(key) is not None
