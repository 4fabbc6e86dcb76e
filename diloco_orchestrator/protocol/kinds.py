"""All kinds of JSON records of a run: schema, keys, who may write one, and the most bytes that readers accept of one.

docs/reference/protocol.md, section 2, has the table, and `run_log.writer` enforces who writes. Objects in the bucket
are not signed, so readers check authorship by other rules (`run_log.attempts.Authors`).
"""

import functools
from dataclasses import dataclass
from enum import StrEnum

from diloco_orchestrator.protocol import allreduce_records as of_averages
from diloco_orchestrator.protocol import attempt_records as of_attempts
from diloco_orchestrator.protocol import check_records as of_checks
from diloco_orchestrator.protocol import key_records as of_keys
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol import records as of_runs
from diloco_orchestrator.protocol import start_records as of_starts
from diloco_orchestrator.protocol.keys import Form
from diloco_orchestrator.protocol.record_format import Record

MIB = 2**20


class Role(StrEnum):
    """A role that a process has when it writes a record."""

    LAUNCHER = "launcher"  # a process that creates a run, begins a leg, or starts a replica by hand
    COORDINATOR = "coordinator"
    ATTEMPT = "attempt"  # the process of a replica
    MACHINE = "machine"  # that joins
    ANYBODY = "anybody"


@dataclass(frozen=True)
class Kind:
    """One kind of record: its schema, the keys that it may have, who may write it, and how large it may be."""

    record: type[Record]
    forms: tuple[Form, ...]  # of its keys
    writers: tuple[Role, ...]
    most_bytes: int = MIB
    by_itself: bool = False  # whether only the attempt that the record is about writes it

    def key(self, record: Record) -> str | None:
        """The key of `record`, from its fields; None where they do not determine it.

        They do not if a part of the key is no field, such as the token of a claim, or if the kind has several forms of
        keys.
        """
        fields = [_FIELDS.get(name, name) for name in self.forms[0].names]
        if len(self.forms) > 1 or not all(hasattr(record, field) for field in fields):
            return None
        return self.forms[0](*(getattr(record, field) for field in fields))

    def named_in(self, key: str) -> dict[str, int]:
        """Replica id and attempt number in `key`, a key of this kind of record, by the names of the record's fields."""
        for form in self.forms:
            if (parts := form.parse(key)) is not None:
                fields = zip(form.names, parts, strict=True)
                return {_FIELDS.get(name, name): part for name, part in fields if name in ("id", "attempt")}
        return {}

    def has(self, key: str) -> bool:
        """Whether `key` is a key of this kind of record."""
        return any(form.parse(key) is not None for form in self.forms)


_FIELDS = {"id": "replica_id", "version": "take"}  # of records, where parts of keys have other names
_LAUNCHER, _COORDINATOR, _ATTEMPT, _MACHINE, _ANYBODY = ((role,) for role in Role)
# The most bytes, of which JSON takes up to ten times as many in memory. Ours stay far below: the manifest of a model
# of 70 billion parameters has 500 KiB, the start record of a model of 50,000 tensors 8 MiB.
_LARGE, _LARGER = 8 * MIB, 16 * MIB
KINDS: tuple[Kind, ...] = (
    Kind(of_runs.Run, (Form(keys.RUN),), _LAUNCHER),
    Kind(of_starts.Start, (Form(keys.START), keys.start_take), _ATTEMPT, _LARGER),
    Kind(of_starts.Began, (keys.began,), _ATTEMPT, by_itself=True),
    Kind(of_starts.Follows, (keys.follows,), _ATTEMPT, by_itself=True),
    Kind(of_averages.MeasuredLink, (Form(keys.LINK),), _ATTEMPT),
    Kind(of_runs.Probe, (Form(keys.KL_RECORD),), ()),  # of earlier versions
    Kind(of_runs.Begin, (keys.begin,), _LAUNCHER),
    Kind(of_runs.Halt, (keys.halt,), _ANYBODY),
    Kind(of_runs.Scale, (keys.scale,), _ANYBODY),
    Kind(of_runs.Out, (keys.out,), _COORDINATOR),
    Kind(of_runs.Result, (keys.result,), _ATTEMPT + _COORDINATOR),
    Kind(of_attempts.Intent, (keys.intent,), _COORDINATOR + _LAUNCHER),
    Kind(of_attempts.Handle, (keys.handle,), _COORDINATOR),
    Kind(of_attempts.Waiting, (keys.waiting,), _COORDINATOR),
    Kind(of_attempts.Claim, keys.CLAIMS, _ATTEMPT, by_itself=True),
    Kind(of_attempts.Heartbeat, (keys.heartbeat,), _ATTEMPT, by_itself=True),
    Kind(of_attempts.Cancel, (keys.cancel,), _COORDINATOR),
    Kind(of_attempts.Exit, (keys.exit_record,), _ATTEMPT, by_itself=True),
    Kind(of_attempts.Offer, (keys.join_offer,), _COORDINATOR),
    Kind(of_attempts.Invitation, (keys.invitation, keys.revocation), _LAUNCHER),
    Kind(of_attempts.Grant, (keys.grant,), _LAUNCHER + _COORDINATOR),
    Kind(of_attempts.Window, (keys.window,), _LAUNCHER + _COORDINATOR, _LARGER),
    Kind(of_attempts.Taken, (keys.about_offer(keys.JOIN_TAKEN),), _MACHINE + _COORDINATOR),
    Kind(of_attempts.Lease, (keys.about_offer(keys.JOIN_LEASE),), _MACHINE),
    Kind(of_attempts.JoinCancel, (keys.about_offer(keys.JOIN_CANCEL),), _COORDINATOR),
    Kind(of_attempts.JoinEnd, (keys.about_offer(keys.JOIN_END),), _MACHINE + _COORDINATOR),
    Kind(of_runs.Contribution, (keys.contribution,), _ATTEMPT, _LARGE, by_itself=True),
    Kind(of_checks.Checked, (keys.checked,), _ATTEMPT, _LARGE, by_itself=True),
    Kind(of_averages.Reduced, (keys.reduced,), _ATTEMPT, _LARGE),
    Kind(of_runs.ReuploadRequest, (keys.want,), _ATTEMPT),
    Kind(of_runs.Commit, (keys.commit,), _ATTEMPT + _COORDINATOR, _LARGE),
    Kind(of_runs.Unfounded, (keys.unfounded,), _COORDINATOR),
    Kind(of_runs.Snapshot, keys.SNAPSHOT_RECORDS, _ANYBODY, _LARGER),
    Kind(of_keys.Rotation, (keys.rotation,), _LAUNCHER),
    Kind(of_keys.Colleague, (keys.colleague,), _LAUNCHER),
    Kind(of_runs.Retention, (Form(keys.RETENTION),), _ANYBODY),
)
_KIND_OF = {kind.record: kind for kind in KINDS}
_FOLDERS = {form.text.partition("/")[0] for kind in KINDS for form in kind.forms}  # first parts of keys
_IN_FOLDER = {
    folder: tuple(kind for kind in KINDS if any(form.text.partition("/")[0] == folder for form in kind.forms))
    for folder in sorted(_FOLDERS)
}


def kind_of(record: Record) -> Kind:
    """The kind (schema, keys, writers, size) of a record, by its class."""
    return _KIND_OF[type(record)]


@functools.lru_cache(maxsize=4096)  # whoever polls asks about a few keys again and again
def kind_at(key: str) -> Kind | None:
    """The kind of record that belongs under `key`; None if no record does."""
    return next((kind for kind in _IN_FOLDER.get(key.partition("/")[0], ()) if kind.has(key)), None)


def most_bytes(key: str) -> int:
    """The most bytes that a reader accepts of the object at `key`: one record, many joined ones, or a log.txt."""
    if keys.parse_segment(key) is not None:
        return 256 * MIB  # the commits or manifests of 100 rounds, which are parsed one by one
    kind = kind_at(key)
    return MIB if kind is None else kind.most_bytes
