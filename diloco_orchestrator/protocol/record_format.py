"""The format that all JSON records share: canonical bytes, strict parsing, limits, and a unique id for every write.

A record is one line of JSON with sorted keys, its own name and the schema version. The fields of each record are in
`protocol.records` and `protocol.attempt_records`.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError

from diloco_orchestrator.clock import random_token
from diloco_orchestrator.errors import RecordInvalid, RecordTooNew, RecordTooOld
from diloco_orchestrator.protocol.version import VERSION

SCHEMA_VERSION = 2
_LAST_TO_READ = {1: "0.2.x"}  # by older schema version: the last version of this package that reads it

# Limits for readers, against objects that no writer of ours made. Those of bytes are in `protocol.kinds`.
# Beyond it sums of whole numbers do not fit into a float. A data cursor may hold the 128 bits of a random generator.
_WHOLE_NUMBERS = 10**100
_DIGITS = 101  # of such a number, sign included
# The largest norm of a pseudo-gradient: sums of fewer than 2**27 of them stay finite in fp32, momenta included.
MOST_NORM = 2.0**100
LONGEST_REASON = 300  # characters of what a commit quotes of a manifest or an error
MOST_COUNTED = 2**53  # steps, tokens or bytes that one manifest names: what is derived from them stays below the above


def canonical_json(body: dict[str, Any]) -> bytes:
    """JSON as one line with the same bytes for equal content: sorted keys, no spaces, UTF-8, a newline at the end."""
    return _CANONICAL.encode(body).encode() + b"\n"


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class Part(BaseModel):
    """A nested value of a record: immutable; parsing refuses unknown fields, other types, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Record(Part):
    """A JSON object of the bucket with a schema. It never changes, unless it is a heartbeat or a machine's lease."""

    record: ClassVar[str]  # its name in the JSON
    later_fields: ClassVar[frozenset[str]] = frozenset()  # left out where None: earlier versions do not know them

    write_id: str  # differs between any two writes; shows whether a create whose reply was lost had succeeded
    at: float  # seconds since 1970 on the writer's clock

    def to_bytes(self) -> bytes:
        """The record as canonical JSON, with its name and the schema version."""
        absent = {name for name in self.later_fields if getattr(self, name) is None}
        body = self.model_dump(mode="json", exclude=absent)
        return canonical_json({"record": self.record, "schema_version": SCHEMA_VERSION, **body})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Parse the record in `data`. `where`: the object's key, for errors.

        Raises `RecordInvalid` if `data` is not this record, `RecordTooNew` for a later schema version, and
        `RecordTooOld`, naming the version that reads it, for an earlier one.
        """
        body = _json_object(data, where)
        name, version = body.pop("record", None), body.pop("schema_version", None)
        if name != cls.record:
            raise RecordInvalid(f"{where} holds a record named {name!r}, not {cls.record!r}: was it put there by hand?")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise RecordInvalid(f"{where} has schema version {version!r}; versions are whole numbers from 1.")
        if version > SCHEMA_VERSION:
            raise RecordTooNew(
                f"{where} has schema version {version}; this package reads up to {SCHEMA_VERSION}. "
                "Upgrade diloco-orchestrator to the version that wrote it; if there is none, the record was changed."
            )
        if version < SCHEMA_VERSION:
            reader = _LAST_TO_READ[version]
            raise RecordTooOld(
                f"{where} has schema version {version}; this package reads version {SCHEMA_VERSION} only. "
                f"diloco-orchestrator {reader} reads it: install 'diloco-orchestrator=={reader.replace('x', '*')}' to "
                "inspect or resume this run, or start a new run."
            )
        try:
            return cls.model_validate_json(json.dumps(body))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            words = f"{where}: field {field!r} of this {cls.record} record is wrong: {first['msg'].rstrip('.')}."
            if (writer := body.get("package_version", VERSION)) != VERSION:
                words += f" diloco-orchestrator {writer} wrote it, and this is {VERSION}: read the run with that one."
            raise RecordInvalid(words) from None


@dataclass(frozen=True)
class By:
    """The author of a record: an attempt (launched process) of a replica, or a named process such as a coordinator."""

    who: tuple[int, int] | None  # replica_id, attempt
    name: str = ""  # of a process that is no attempt, such as "coordinator on host"

    @classmethod
    def parse(cls, text: object) -> Self:
        """The author that `text`, the stored form, names. Raises `ValueError` if it is no string."""
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            raise ValueError("it is no text")
        found = _BY_ATTEMPT.fullmatch(text)
        return cls((int(found[1]), int(found[2]))) if found else cls(None, text)

    @property
    def is_coordinator(self) -> bool:
        return self.name.startswith("coordinator")

    def __str__(self) -> str:
        return self.name if self.who is None else "replica {}, attempt {}".format(*self.who)


_BY_ATTEMPT = re.compile(r"replica (0|[1-9][0-9]{0,8}), attempt ([1-9][0-9]{0,8})", re.ASCII)
AsText: TypeAlias = Annotated[By, PlainValidator(By.parse), PlainSerializer(By.__str__)]


def parse_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises `ValueError` for text that is not JSON or not Unicode, and for JSON that no record holds: whole numbers of
    more than 100 digits, numbers that are not finite, nesting deeper than the interpreter follows.
    """
    try:
        value = _STRICT.decode(data.decode(json.detect_encoding(data), "surrogatepass"))  # as `json.loads` does
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair, which cannot be written again
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(text: str) -> int:
    if len(text) > _DIGITS or not -_WHOLE_NUMBERS <= (number := int(text)) < _WHOLE_NUMBERS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is not finite")
    return number


def _refuse(text: str) -> float:
    raise ValueError(f"the number {text}")


_STRICT = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_refuse)


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        body = parse_json(data)
    except ValueError as error:
        raise RecordInvalid(f"{where} is not JSON ({error}): it was changed after it was written.") from None
    if not isinstance(body, dict):
        raise RecordInvalid(f"{where} holds a JSON {type(body).__name__}, not an object.")
    return body


class Stamp:
    """Generates the unique id (`write_id`) and the time (`at`) of each record that one process writes.

    `token` must differ between processes.
    """

    def __init__(self, token: str, wall_time: Callable[[], float], random_hex: Callable[[], str] | None = None) -> None:
        # 16 hex digits that nobody can foresee who has read all that this process wrote.
        self.unforeseen = random_hex or random_token
        self._token = token
        self._wall_time = wall_time
        self._count = 0

    def __call__(self) -> "StampFields":
        self._count += 1
        return {"write_id": f"{self._token}-{self._count}", "at": self._wall_time()}


class StampFields(TypedDict):
    """The fields that a `Stamp` sets in every record (unique id and time of the write), as keyword arguments."""

    write_id: str
    at: float
