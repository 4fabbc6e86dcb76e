"""`HeldoutSplit`: decides which items are held out, by a keyed hash of their group.

The decision about a group depends on no other group, on no order and not on the number of items, so that data may be
added later. `split.files` reads and writes files.
"""

import hashlib
import hmac
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from diloco_orchestrator.errors import ConfigError, nearest
from diloco_orchestrator.split.content import ItemHash, item_hash, json_in, kind_of, merkle_root
from diloco_orchestrator.split.manifest import HeldoutItem, HeldoutManifest, SplitSettings
from diloco_orchestrator.split.near_duplicates import Rule, find_near


class Side(StrEnum):
    """The set into which a split puts an item."""

    TRAIN = "train"
    HELDOUT = "heldout"
    EXCLUDED = "excluded"  # neither: equal or close to a held-out item, so it can be neither trained on nor scored


@dataclass(frozen=True)
class SplitItem:
    """One item of the data to split: its content, the group that stays together, and the items it was made from."""

    id: str  # unique
    content: Any  # text, bytes or JSON
    group: Any = None  # items of one group lie on one side, such as a repository; None: the item is its own group
    parents: tuple[str, ...] = ()  # ids of the items that it was made from


@dataclass(frozen=True)
class Exclusion:
    """Reason for which an item is excluded: it is too close to the held-out item with the id `heldout`."""

    rule: Rule
    heldout: str
    similarity: float = 1.0  # 0 to 1, as `find_near` measures it

    def __str__(self) -> str:
        words = _WORDS[self.rule].format(self.heldout)
        return words if self.rule is Rule.EQUAL else f"{words} ({self.similarity:.0%})"


_WORDS = {
    Rule.EQUAL: "equal to {}",
    Rule.SIMILAR: "similar to {}",
    Rule.CONTAINS: "longer and holds most of {}",
    Rule.PART: "mostly part of {}",
}


@dataclass(frozen=True)
class Splitting:
    """The result of a split: the set of each item, in the given order, reasons for excluded ones, and the manifest."""

    sides: tuple[Side, ...]
    why: Mapping[str, Exclusion]  # by id, of excluded items
    manifest: HeldoutManifest
    spellings: tuple[tuple[str, ...], ...] = ()  # group keys that were taken for one, such as ("Repo3", "repo3")

    def count(self, side: Side) -> int:
        return self.sides.count(side)


@dataclass(frozen=True)
class HeldoutSplit:
    """Splits items into training and held-out ones.

    A group is held out if HMAC-SHA256(salt, its key) lies in the lowest `share` of all values. An item without a group
    has its content as its key; one that was made from others, theirs. Groups that lineage joins, and those whose keys
    are one in normal form ("Repo 3" and "repo 3", 7 and "7"), lie on one side: they are held out if the key of any of
    them says so.

    Args:
        share: expected share of the groups that are held out, above 0 and below 1.
        salt: another salt gives an independent split of the same data.
        near_duplicates: training texts that share so much with a held-out one (0 to 1, the threshold of `find_near`)
            are excluded; None: only equal ones.
    """

    share: float = 0.1
    salt: str = "diloco"
    near_duplicates: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  # of `SplitSettings`, recorded in the manifest

    def __post_init__(self) -> None:
        for name, value in (("share", self.share), ("near_duplicates", self.near_duplicates)):
            if value is not None and not (0 < value < 1 or (value == 1 and name == "near_duplicates")):
                allowed = "above 0 and below 1" if name == "share" else "above 0 and at most 1"
                raise ConfigError(f"{name}={value!r} of a split must be {allowed}, such as 0.1 for a tenth.")

    def holds_out(self, group: Any) -> bool:
        """Whether the split holds out the group with this key, text or JSON, in exactly this spelling."""
        return self._falls(_drawn_by(group))

    def split(self, items: Sequence[SplitItem]) -> Splitting:
        """Decide every item's set. Raises `ConfigError` for a repeated id, an unknown parent, and an empty set."""
        hashes = [item_hash(each.content) for each in items]
        chosen, spellings = self._chosen(items)
        # One of equal held-out items is scored; which one does not depend on their order.
        kept: dict[ItemHash, str] = {}
        for item, each, is_held in zip(items, hashes, chosen, strict=True):
            if is_held:
                kept[each] = min(kept.get(each, item.id), item.id)
        why = {
            item.id: Exclusion(Rule.EQUAL, kept[each])
            for item, each in zip(items, hashes, strict=True)
            if each in kept and kept[each] != item.id
        }
        why |= self._near(items, chosen, why)
        sides = tuple(
            Side.EXCLUDED if item.id in why else Side.HELDOUT if is_held else Side.TRAIN
            for item, is_held in zip(items, chosen, strict=True)
        )
        if not {Side.TRAIN, Side.HELDOUT} <= set(sides):
            raise self._one_sided(items, sides)
        return Splitting(sides, why, self._manifest(items, hashes, sides, kept), spellings)

    # -- which groups --------------------------------------------------------------------------------------------

    def _falls(self, key: bytes) -> bool:
        drawn = hmac.new(self.salt.encode(), key, hashlib.sha256).digest()
        return int.from_bytes(drawn[:8], "big") < math.floor(self.share * 2**64)

    def _chosen(self, items: Sequence[SplitItem]) -> tuple[list[bool], tuple[tuple[str, ...], ...]]:
        """Whether the group of each item is held out, and the group keys of several spellings."""
        place = {item.id: index for index, item in enumerate(items)}
        if len(place) != len(items):
            raise _id_twice(items)
        families = _Families()
        keys: list[bytes] = []
        spellings: dict[ItemHash, dict[bytes, str]] = {}  # by normal form: the keys that have it
        for item in items:
            keys.append(key := _key_of(item))
            families.add(key, self._falls(key) if item.group is not None or not item.parents else False)
            if item.group is not None:
                spelled = spellings.setdefault(_group_form(item.group), {})
                spelled.setdefault(key, str(item.group))
                families.join(key, next(iter(spelled)))
        for item, key in zip(items, keys, strict=True):
            for parent in item.parents:
                if parent not in place:
                    close = nearest(parent, place)
                    raise ConfigError(
                        f"item {item.id!r} was made from {parent!r}, which is none of the {len(items)} items"
                        f"{f' (the nearest id is {close!r})' if close else ''}. Split an item together with what it "
                        "was made from, or name the field that holds the ids."
                    )
                families.join(key, keys[place[parent]])
        several = sorted(tuple(sorted(each.values())) for each in spellings.values() if len(each) > 1)
        return [families.is_chosen(key) for key in keys], tuple(several)

    # -- what is too close ---------------------------------------------------------------------------------------

    def _near(
        self, items: Sequence[SplitItem], chosen: Sequence[bool], why: Mapping[str, Exclusion]
    ) -> dict[str, Exclusion]:
        """The reason why each training text that is too similar to a held-out one is excluded, by item id.

        `chosen`: whether each item is held out. `why`: reasons for items that are excluded already.
        """
        if self.near_duplicates is None:
            return {}
        # By id: of equally similar held-out texts the first one is named, whatever the order of the items.
        both = sorted(zip(items, chosen, strict=True), key=lambda pair: pair[0].id)
        held = [item for item, is_held in both if is_held and item.id not in why]
        others = [item for item, is_held in both if not is_held and item.id not in why]
        found = find_near(
            [text_of(each.content) for each in held], [text_of(each.content) for each in others], self.near_duplicates
        )
        return {
            others[index].id: Exclusion(near.rule, held[near.index].id, near.similarity)
            for index, near in found.items()
        }

    # -- results -------------------------------------------------------------------------------------------------

    def _manifest(
        self,
        items: Sequence[SplitItem],
        hashes: Sequence[ItemHash],
        sides: Sequence[Side],
        kept: Mapping[ItemHash, str],
    ) -> HeldoutManifest:
        excluded: dict[ItemHash, str] = {}
        for item, each, side in zip(items, hashes, sides, strict=True):
            if side is Side.EXCLUDED and each not in kept:
                excluded[each] = min(excluded.get(each, item.id), item.id)
        return HeldoutManifest(
            settings=SplitSettings(
                share=self.share, salt=self.salt, near_duplicates=self.near_duplicates, **self.fields
            ),
            kind="/".join(sorted({kind_of(item.content) for item in items})),
            items=_entries(kept),
            excluded=_entries(excluded),
            train_items=list(sides).count(Side.TRAIN),
            root=merkle_root(kept),
        )

    def _one_sided(self, items: Sequence[SplitItem], sides: Sequence[Side]) -> ConfigError:
        missing = "training" if Side.TRAIN not in sides else "held-out"
        groups = len({_key_of(item) for item in items})
        return ConfigError(
            f"the split of {len(items)} items in {groups} groups with share={self.share:g} and salt={self.salt!r} has "
            f"no {missing} item. Groups lie on one side as a whole, so give more of them, or another share or salt."
        )


def text_of(content: Any) -> str:
    """The text of an item, for the search of near-duplicates: of JSON all its texts and numbers, by name."""
    if isinstance(content, str):
        parsed = json_in(content)
        return content if parsed is None else text_of(parsed)
    if isinstance(content, Mapping):
        return "\n".join(text_of(content[name]) for name in sorted(content))
    if isinstance(content, list | tuple):
        return "\n".join(map(text_of, content))
    return str(content) if isinstance(content, int | float) else ""


def _drawn_by(group_or_content: Any) -> bytes:
    """The hash that decides a group's set: `item_hash` in form 1, so that splits of earlier versions stay the same."""
    return item_hash(group_or_content, form=1)


def _key_of(item: SplitItem) -> bytes:
    return _drawn_by(item.content if item.group is None else item.group)


def _group_form(group: Any) -> ItemHash:
    """A hash that is equal for all spellings of a group's key. A number and its digits are one key."""
    if isinstance(group, float) and group.is_integer():
        group = int(group)
    return item_hash(str(group) if isinstance(group, int | float) else group)


def _entries(found: Mapping[ItemHash, str]) -> tuple[HeldoutItem, ...]:
    return tuple(HeldoutItem(hash=each.hex(), id=found[each]) for each in sorted(found))


def _id_twice(items: Iterable[SplitItem]) -> ConfigError:
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            return ConfigError(
                f"two items have the id {item.id!r}: ids name what was found in training, and parents. Make them "
                "unique, or leave the id field out to use file and line."
            )
        seen.add(item.id)
    raise AssertionError("all ids differ")


class _Families:
    """Groups of items joined by lineage (union-find). A family is held out if one of its groups is."""

    def __init__(self) -> None:
        self._above: dict[bytes, bytes] = {}
        self._chosen: set[bytes] = set()

    def add(self, key: bytes, chosen: bool) -> None:
        self._above.setdefault(key, key)
        if chosen:
            self._chosen.add(self._root(key))

    def join(self, one: bytes, other: bytes) -> None:
        first, second = self._root(one), self._root(other)
        if first != second:
            self._above[first] = second
            if first in self._chosen:
                self._chosen.add(second)

    def is_chosen(self, key: bytes) -> bool:
        return self._root(key) in self._chosen

    def _root(self, key: bytes) -> bytes:
        while self._above[key] != key:
            self._above[key] = self._above[self._above[key]]
            key = self._above[key]
        return key
