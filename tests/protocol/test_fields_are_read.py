"""Every field of a record is read by our code, or is for people who look into the bucket, with the reason here."""

import inspect
from pathlib import Path

from attribute_reads import fields_read

from diloco_orchestrator.protocol import attempt_records, records
from diloco_orchestrator.protocol.kinds import _FIELDS, KINDS
from diloco_orchestrator.protocol.record_format import Part, Record

ROOT = Path(__file__).parents[2]
SCHEMAS = (records, attempt_records)
_EARLIER = "people who look into a run of an earlier version; this one writes no such record"
_WHO = "people who ask who wrote it; nothing shows a program that it is true"
FOR_READERS = {  # by class and field: for whom it is, beside our code
    "Contribution.snapshot_round": "people who look for the machine that rebuilt a base wrongly",
    "Halt.by": _WHO,
    "Out.by": _WHO,
    "Probe.items": _EARLIER,
    "Probe.size": _EARLIER,
    "Probe.tokens": _EARLIER,
    "Retention.by": _WHO,
    "Retention.payloads": "one value today, which the record's name does not say",
    "ReuploadRequest.by": _WHO,
    "ReuploadRequest.reason": "people who look for the store's fault",
    "Snapshot.by": _WHO,
    "Taken.by": _WHO,
    "Unfounded.by": _WHO,
    "Taken.host": _WHO,
    "Taken.pid": _WHO,
}


def fields() -> set[tuple[str, str]]:
    """Class and field of all records and their parts, without those that every record has or that its key says."""
    classes = [each for schema in SCHEMAS for each in vars(schema).values() if inspect.isclass(each)]
    own = [each for each in classes if issubclass(each, Part) and each.__module__ in {s.__name__ for s in SCHEMAS}]
    named = {(k.record.__name__, _FIELDS.get(name, name)) for k in KINDS for form in k.forms for name in form.names}
    named |= {(k.record.__name__, name) for k in KINDS if k.by_itself for name in ("replica_id", "attempt")}
    found = {(each.__name__, name) for each in own for name in vars(each).get("__annotations__", {})}
    return {(whose, name) for whose, name in found - named if name in getattr(_class(own, whose), "model_fields", {})}


def _class(own: list[type], name: str) -> type:
    return next(each for each in own if each.__name__ == name)


def test_every_field_of_a_record_is_read_by_our_code_or_has_a_reason_to_be_there():
    packages = ("diloco_orchestrator", "replica", "executors")
    read = fields_read(path for package in packages for path in sorted((ROOT / package).rglob("*.py")))
    unread = {f"{whose}.{name}" for whose, name in fields() - read if name not in Record.model_fields}
    assert unread == FOR_READERS.keys(), unread ^ FOR_READERS.keys()


def test_a_field_is_read_where_its_class_is_and_not_where_another_has_the_name(tmp_path):
    (tmp_path / "two.py").write_text(
        "class One:\n    at: float\n    by: str\n\n\nclass Two:\n    at: float\n    by: str\n    parts: list[One]\n\n\n"
        "def first(found: Two | None) -> list[float]:\n    return [each.at for each in sorted(found.parts)]\n\n\n"
        "def second(given: dict[str, Two]) -> str:\n    for name, one in given.items():\n        return one.by\n"
    )
    assert fields_read([tmp_path / "two.py"]) == {("Two", "parts"), ("One", "at"), ("Two", "by")}
