"""`split_files`: splits data files into a folder with training files, held-out files and the manifest.

`split.split` has the rule, `split.sources` the formats.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import ConfigError, unknown_name
from diloco_orchestrator.split.content import item_hash
from diloco_orchestrator.split.manifest import NAME
from diloco_orchestrator.split.sources import Source, open_source
from diloco_orchestrator.split.split import HeldoutSplit, Side, SplitItem, Splitting

_TEXT = "text"  # the text field, unless another is given


@dataclass(frozen=True)
class Fields:
    """The names of the fields of a record with a special role. Records that are plain text have none."""

    text: str | None = None  # the item; None: "text" where all records have it, else the whole record
    group: str | None = None
    id: str | None = None  # None: file and line
    parent: str | None = None  # the id of the item that this one was made from, or a list of ids


def split_files(paths: Sequence[Path], out: Path, rule: HeldoutSplit, fields: Fields) -> Splitting:
    """Split all files together, and write `out`/train, `out`/heldout, `out`/excluded and `out`/manifest.json.

    Every file is written in its own format under its own name. The same inputs give the same manifest, whatever their
    order. Raises `ConfigError` before anything is written: for files that cannot be read, fields that a record lacks,
    and a folder `out` that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and is not empty: a split never overwrites. Choose another folder, or remove it."
        )
    sources = _open(paths)
    read = [list(source.records()) for source in sources]
    fields = replace(fields, text=_text_field(fields.text, [record for records in read for _, record in records]))
    items = [_item(place, record, fields) for records in read for place, record in records]
    recorded = {
        "text_field": fields.text,
        "group_field": fields.group,
        "id_field": fields.id,
        "parent_field": fields.parent,
    }
    done = replace(rule, fields={name: value for name, value in recorded.items() if value}).split(items)
    sides = iter(done.sides)
    for source, records in zip(sources, read, strict=True):
        _write(source, [next(sides) for _ in records], out)
    # Last: a folder with a manifest is complete.
    (out / NAME).write_bytes(done.manifest.to_bytes())
    return done


def _open(paths: Sequence[Path]) -> list[Source]:
    sources = [open_source(path) for path in paths]
    names = [source.name for source in sources]
    for source, path in zip(sources, paths, strict=True):
        if names.count(source.name) > 1:
            raise ConfigError(
                f"two inputs are called {source.name} (one is {path}), and would be written to one file. Rename one."
            )
    return sources


def _write(source: Source, sides: Sequence[Side], out: Path) -> None:
    for side in Side:
        selection = [index for index, each in enumerate(sides) if each is side]
        if selection:
            (out / side).mkdir(parents=True, exist_ok=True)
            source.write(selection, out / side)


def _text_field(given: str | None, records: Iterable[Any]) -> str | None:
    """The name of the field with an item's text: `given`, else "text" if every record that is not plain text has it."""
    objects = [record for record in records if isinstance(record, dict)]
    if given is not None or not objects:
        return given if objects else None
    return _TEXT if all(isinstance(record.get(_TEXT), str) for record in objects) else None


def _item(place: str, record: Any, fields: Fields) -> SplitItem:
    if not isinstance(record, dict):
        for option, name in (("group", fields.group), ("id", fields.id), ("parent", fields.parent)):
            if name is not None:
                raise ConfigError(
                    f"{place} is text and has no field {name!r}: --{option} needs JSONL, Parquet or a dataset."
                )
        return SplitItem(id=place, content=record)
    content = record if fields.text is None else _value(record, fields.text, place)
    if fields.text is not None and not isinstance(content, str):
        raise ConfigError(
            f"field {fields.text!r} of {place} holds a {type(content).__name__}, not text: name the text field with "
            "--text."
        )
    group = None if fields.group is None else _value(record, fields.group, place)
    id_ = place if fields.id is None else str(_value(record, fields.id, place))
    for value in (content, group):
        try:
            item_hash(value)
        except TypeError as error:
            raise ConfigError(f"{place} cannot be compared: {error} Or name its text field with --text.") from None
    return SplitItem(id_, content, group, _parents(record, fields.parent))


def _value(record: dict[str, Any], name: str, place: str) -> Any:
    if record.get(name) is None:
        what = f"field {name!r} is empty" if name in record else unknown_name("field", name, record)
        raise ConfigError(
            f"{place}: {what}. Every record needs it: correct the record, or the option that names the field."
        )
    return record[name]


def _parents(record: dict[str, Any], field: str | None) -> tuple[str, ...]:
    """The ids of the items that a record was made from; a record without the field was made from none."""
    value = None if field is None else record.get(field)
    if value is None or value == "":
        return ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
