"""The records between a coordinator and machines that join: an attempt is offered, taken, renewed, cancelled, ended.

Keys of the records about an offer hold the first digits of its digest, which nobody knows before the offer is there.
"""

from typing import ClassVar

from pydantic import Field

from diloco_orchestrator.protocol.record_format import Record


class Offer(Record):
    """join/attempts/<name>/offer.json: an attempt that waits for a machine. Holds no secret, only names of secrets."""

    record: ClassVar[str] = "offer"
    run_id: str
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    command: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str]
    secret_names: tuple[str, ...] = ()  # variables that the machine must have
    code: str | None = None  # key of the code archive that the machine fetches; None: the command needs none
    timeout_s: float | None = Field(default=None, gt=0)


class Taken(Record):
    """join/attempts/<name>/<offer>.taken.json: a machine runs the offered attempt, or nobody may any more."""

    record: ClassVar[str] = "taken"
    by: str  # the machine's random id; empty: the offer was withdrawn before a machine had taken it
    host: str = ""
    pid: int = 0  # of `diloco join`


class Lease(Record):
    """join/attempts/<name>/<offer>.lease.json, overwritten: the machine is there while `counter` keeps increasing."""

    record: ClassVar[str] = "lease"
    counter: int = Field(ge=1)


class JoinCancel(Record):
    """join/attempts/<name>/<offer>.cancel.json: a request to the machine to end the attempt."""

    record: ClassVar[str] = "join_cancel"


class JoinEnd(Record):
    """join/attempts/<name>/<offer>.end.json: how the attempt ended, by its machine, or by who has lost that."""

    record: ClassVar[str] = "join_end"
    state: str  # a value of `ReplicaState` that is an end
    reason: str
    code: int | None = None  # exit code; negative: killed by that signal; None: unknown
    message: str = ""
