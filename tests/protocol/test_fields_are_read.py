"""Every field of a record is read by our code, or is for people who look into the bucket, with the reason here."""

import ast
import inspect
from pathlib import Path

from diloco_orchestrator.protocol import attempt_records, records
from diloco_orchestrator.protocol.record_format import Part, Record

ROOT = Path(__file__).parents[2]
SCHEMAS = (records, attempt_records)
FOR_READERS: dict[str, str] = {}  # the reason, by the field


def fields() -> dict[str, str]:
    """The class that has a field, by the field's name; those that every record has are left out."""
    classes = [each for schema in SCHEMAS for each in vars(schema).values() if inspect.isclass(each)]
    own = [each for each in classes if issubclass(each, Part) and each.__module__ in {s.__name__ for s in SCHEMAS}]
    return {name: each.__name__ for each in own for name in each.model_fields if name not in Record.model_fields}


def names_read() -> set[str]:
    """The names of all attributes that our code reads, whatever they are attributes of."""
    packages = ("diloco_orchestrator", "replica", "executors")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_field_of_a_record_is_read_by_our_code_or_has_a_reason_to_be_there():
    read = names_read()
    unread = {name: whose for name, whose in fields().items() if name not in read}
    assert unread.keys() == FOR_READERS.keys(), unread
