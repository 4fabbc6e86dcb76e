"""Records about the keys of a signed run: rotations, and certificates of further operators. The run's key signs them.

`protocol.signatures` has certificates and signed bytes, docs/inside/signed-runs.md the model of keys.
"""

import re
from typing import ClassVar

from pydantic import Field

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.protocol.signatures import Operator, PublicKey

_OF_LEG = re.compile(r"legs/([0-9]+)/.*", re.DOTALL)


class Rotation(Record):
    """Record keys/<epoch>.json: from a leg (start or resume to stop) on only signatures by new keys are valid.

    Signatures by the keys before stay valid for objects of earlier legs, rounds and attempts.
    """

    record: ClassVar[str] = "rotation"
    later_fields: ClassVar[frozenset[str]] = frozenset({"no_commits_by"})
    epoch: int = Field(ge=2)  # that begins
    names: PublicKey  # signs names of the epoch's objects
    from_leg: int = Field(ge=2)  # the first leg of the epoch
    after_round: int = Field(ge=0)  # the last round of the epochs before; 0: none was committed
    commit_sha256: Sha256 | None  # of that round's commit
    attempts: dict[str, int]  # by replica id: the number of the newest attempt of the epochs before
    # Ids of replicas whose attempts sign no commits from here on: those before wrote void ones. None: nobody's.
    no_commits_by: tuple[int, ...] | None = None
    by: str
    why: str

    def is_before(self, key: str) -> bool:
        """Whether this rotation comes before the object `key`: whether that is signed with its keys, or with later
        ones.

        An object whose key names no leg, round or attempt is signed with the first keys.
        """
        if (leg := _OF_LEG.fullmatch(key)) is not None:
            return int(leg[1]) >= self.from_leg
        if (invited := keys.parse_invited(key)) is not None:
            return invited[0] >= self.epoch
        named = keys.parse_attempt(key)
        who = (named.replica_id, named.attempt) if named else keys.began.parse(key) or keys.parse_joined(key)
        if who is not None:
            return int(who[1]) > self.attempts.get(str(who[0]), 0)
        round_ = keys.parse_round(key)
        return round_ is not None and round_ > self.after_round


class Colleague(Record):
    """Record keys/colleagues/<identity>.<epoch>.json: a certificate by which another user may launch and supervise the
    run.

    That user signs with a key of their own.
    """

    record: ClassVar[str] = "colleague"
    epoch: int = Field(ge=1)  # until whose end
    identity: str = Field(pattern="^[0-9a-f]{32}$")  # digest of the identity's text, as `signing.identity` has it
    operator: Operator  # certifies the colleague's key
    sealed: str  # the private name keys, for the colleague alone, in URL-safe base64
    by: str


def why_no_commit(replica_id: int, rotations: tuple[Rotation, ...]) -> str:
    """Reason why no attempt of a replica may commit after `rotations` of the run's keys; empty if it may."""
    numbers = [each.epoch for each in rotations if replica_id in (each.no_commits_by or ())]
    return f"replica {replica_id} commits nothing since {keys.rotation(numbers[0])}" if numbers else ""


def epoch_of(key: str, rotations: tuple[Rotation, ...]) -> int:
    """The epoch of the keys that name and sign the object `key`: 1, and one more after each rotation. `rotations`: all
    of the run, in order.
    """
    return 1 + sum(rotation.is_before(key) for rotation in rotations)
