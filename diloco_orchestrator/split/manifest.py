"""`HeldoutManifest`: the held-out items by hash, and the settings of the split that chose them.

A split writes it; replicas compare their training items with it. The file has no time and no machine name: the same
inputs and settings give the same bytes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.split.content import NEWEST_FORM, Form, ItemHash, item_hash, kind_of, merkle_root

NAME = "manifest.json"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class HeldoutItem(_Part):
    """One held-out item, which must not be trained on: its id and its hash."""

    hash: str = Field(pattern="^[0-9a-f]{64}$")  # `item_hash`, as hex digits
    id: str  # the user's, or file and line


class SplitSettings(_Part):
    """The settings of a split of a data set into training and held-out items, with which it can be repeated."""

    share: float
    salt: str
    group_field: str | None = None
    text_field: str | None = None  # None: the whole record is the item
    id_field: str | None = None
    parent_field: str | None = None
    near_duplicates: float | None = None  # threshold of `find_near`; None: not searched


class HeldoutManifest(_Part):
    """Held-out items and settings of a split. `excluded`: in neither set, because too similar to a held-out item.

    `version` is the form of `item_hash` in which items are compared. A manifest of an earlier version goes on being
    compared in its own form.
    """

    version: Form = NEWEST_FORM
    settings: SplitSettings
    kind: str  # of all items: "text", "json", …
    items: tuple[HeldoutItem, ...]  # by hash
    excluded: tuple[HeldoutItem, ...] = ()  # by hash
    train_items: int = Field(ge=0)
    root: str  # Merkle root over the hashes of `items`

    @classmethod
    def of(cls, items: Sequence[Any], ids: Sequence[str] = ()) -> Self:
        """The manifest of a held-out set that no split made. `ids`: of the items; by default their numbers."""
        found = {item_hash(each): name for each, name in zip(items, ids or _numbers(len(items)), strict=True)}
        entries = tuple(HeldoutItem(hash=each.hex(), id=found[each]) for each in sorted(found))
        kinds = sorted({kind_of(each) for each in items})
        settings = SplitSettings(share=1.0, salt="")
        return cls(settings=settings, kind="/".join(kinds), items=entries, train_items=0, root=merkle_root(found))

    def to_bytes(self) -> bytes:
        """The manifest as JSON, one item on a line."""
        body = {"record": "heldout-manifest", **self.model_dump(mode="json")}
        lists = {name: body.pop(name) for name in ("items", "excluded")}
        head = json.dumps(body, sort_keys=True, ensure_ascii=False, indent=1)[:-2]
        for name in sorted(lists):
            lines = ",\n".join("  " + json.dumps(each, sort_keys=True, ensure_ascii=False) for each in lists[name])
            head += f',\n "{name}": [\n{lines}\n ]' if lines else f',\n "{name}": []'
        return f"{head}\n}}\n".encode()

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The manifest in a file or a split's folder. Raises `ConfigError` if it is missing, changed or too new."""
        path = Path(path)
        path = path / NAME if path.is_dir() else path
        try:
            body = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"the held-out manifest {path} cannot be read ({error.strerror}). `diloco split` writes one, beside "
                "the files train and heldout; pass its path."
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"the held-out manifest {path} is not JSON ({error}): write it again by `diloco split`."
            ) from None
        if (
            not isinstance(body, dict)
            or body.pop("record", None) != "heldout-manifest"
            or body.get("version") not in get_args(Form)
        ):
            raise ConfigError(
                f"{path} is not a held-out manifest of version 1 to {NEWEST_FORM}: pass the manifest.json that "
                "`diloco split` of this version, or an earlier one, wrote."
            )
        try:
            manifest = cls.model_validate_json(json.dumps(body))
        except ValidationError as error:
            field = ".".join(map(str, error.errors()[0]["loc"]))
            raise ConfigError(
                f"the held-out manifest {path} has a wrong {field}: write it again by `diloco split`."
            ) from None
        if merkle_root(manifest.hashes()) != manifest.root:
            raise ConfigError(
                f"the items of the held-out manifest {path} are not those of its root {manifest.root[:12]}: the file "
                "was changed after the split. Write it again by `diloco split`."
            )
        return manifest

    def hashes(self) -> dict[ItemHash, str]:
        """The id of every held-out item, by its hash."""
        return {bytes.fromhex(each.hash): each.id for each in self.items}

    def forbidden(self) -> dict[ItemHash, str]:
        """Id of every item that must not be trained on, by its hash: those held out, or excluded as too similar."""
        return {bytes.fromhex(each.hash): each.id for each in (*self.excluded, *self.items)}

    def content_of(self, record: Any) -> Any:
        """Part of a record that is compared with held-out items: its text field, or the whole record if it has none."""
        field = self.settings.text_field
        return record[field] if field is not None and isinstance(record, Mapping) and field in record else record

    def hash_of(self, record: Any) -> ItemHash:
        """The hash by which a record is compared with the held-out items."""
        return item_hash(self.content_of(record), self.version)

    def check_holds(self, items: Sequence[Any]) -> None:
        """Raise `ConfigError` unless every item that is scored is one of the held-out items."""
        known = self.hashes()
        for index, item in enumerate(items):
            if self.hash_of(item) not in known:
                raise ConfigError(
                    f"item {index} of heldout_items is not in the held-out manifest with root {self.root[:12]}, so "
                    "that nothing keeps it out of training. Score the items in heldout/ that the split wrote, or split "
                    "again."
                )


def _numbers(count: int) -> list[str]:
    return [f"item {number}" for number in range(count)]
