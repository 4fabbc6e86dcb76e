"""`HeldoutSplit`: which items are held out, and that nothing of them is left in training."""

import random
import unicodedata
from dataclasses import replace
from hashlib import sha256

import pytest

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.split.content import item_hash, merkle_root
from diloco_orchestrator.split.manifest import HeldoutManifest
from diloco_orchestrator.split.near_duplicates import grams
from diloco_orchestrator.split.split import HeldoutSplit, Side, SplitItem


def items(count: int, groups: int = 0, words: int = 40) -> list[SplitItem]:
    rng = random.Random(count)
    return [
        SplitItem(
            id=f"item{i:04d}",
            content=" ".join(f"w{rng.randrange(10_000)}" for _ in range(words)),
            group=f"repo{i % groups}" if groups else None,
        )
        for i in range(count)
    ]


def side_of(split: HeldoutSplit, given: list[SplitItem]) -> dict[str, Side]:
    return dict(zip((item.id for item in given), split.split(given).sides, strict=True))


# -- the same item ----------------------------------------------------------------------------------------------------


def test_reformatting_does_not_make_another_item():
    composed, decomposed = "caf\u00e9  au\tlait\n", "cafe\u0301 au lait"
    assert composed != decomposed == unicodedata.normalize("NFD", "café au lait")
    assert item_hash(composed) == item_hash(decomposed) != item_hash("Café au lait")
    assert item_hash({"q": composed, "n": 1}) == item_hash({"n": 1, "q": decomposed})
    assert item_hash("1") != item_hash(1) != item_hash(b"1")


def test_the_hash_is_pinned():
    assert item_hash("a  b") == sha256(b"text\0a b").digest()
    assert item_hash({"b": " c", "a": 1}) == sha256(b'json\0{"a":1,"b":"c"}').digest()


def test_the_merkle_root_is_that_of_rfc_6962_by_hand():
    leaves = [bytes([i]) * 32 for i in range(3)]
    hashed = [sha256(b"\0" + leaf).digest() for leaf in leaves]
    pair = sha256(b"\1" + hashed[0] + hashed[1]).digest()
    assert merkle_root(reversed(leaves)) == sha256(b"\1" + pair + hashed[2]).hexdigest()
    assert merkle_root([]) == sha256(b"").hexdigest() and merkle_root(leaves * 2) == merkle_root(leaves)


# -- which items ------------------------------------------------------------------------------------------------------


def test_the_side_of_an_item_depends_neither_on_order_nor_on_how_many_there_are():
    split, given = HeldoutSplit(share=0.3), items(300)
    whole = side_of(split, given)
    shuffled = random.Random(1).sample(given, len(given))
    assert side_of(split, shuffled) == whole
    assert split.split(shuffled).manifest.to_bytes() == split.split(given).manifest.to_bytes()
    assert side_of(split, given[:100]) == {item.id: whole[item.id] for item in given[:100]}
    assert 60 <= list(whole.values()).count(Side.HELDOUT) <= 120


def test_a_group_lies_on_one_side_and_another_salt_splits_independently():
    given = items(400, groups=40)
    sides = side_of(HeldoutSplit(share=0.3), given)
    of_group = {item.group: {sides[other.id] for other in given if other.group == item.group} for item in given}
    assert all(len(found) == 1 for found in of_group.values())
    held = {group for group, found in of_group.items() if found == {Side.HELDOUT}}
    assert held == {group for group in of_group if HeldoutSplit(share=0.3).holds_out(group)}
    other = {group for group in of_group if HeldoutSplit(share=0.3, salt="other").holds_out(group)}
    assert held != other and held & other != held


def test_what_was_made_from_a_held_out_item_is_held_out_and_so_are_its_ancestors():
    split, given = HeldoutSplit(share=0.2), items(60)
    alone = side_of(split, given)
    child = SplitItem("child", "paraphrase of another", parents=("item0000",))
    grandchild = SplitItem("grandchild", "paraphrase of a paraphrase", parents=("child",))
    sides = side_of(split, [*given, grandchild, child])
    assert sides["grandchild"] == sides["child"] == sides["item0000"]
    held = next(name for name, side in alone.items() if side is Side.HELDOUT)
    of_held = side_of(split, [*given, replace(child, parents=(held,)), grandchild])
    assert of_held["child"] is of_held["grandchild"] is Side.HELDOUT
    # A group joins its members: one of them made from a held-out item takes the others with it.
    trained = next(g for g in (f"g{i}" for i in range(99)) if not split.holds_out(g))
    member, other = SplitItem("m", "m text", trained, (held,)), SplitItem("o", "o text", trained)
    joined = side_of(split, [*given, member, other])
    assert joined["m"] is joined["o"] is Side.HELDOUT
    assert side_of(split, [*given, replace(member, parents=()), other])["o"] is Side.TRAIN
    # What a held-out item was made from gives it away too.
    holding = next(g for g in (f"h{i}" for i in range(99)) if split.holds_out(g))
    made = SplitItem("made", "made text", holding, ("o",))
    assert side_of(split, [*given, other, made])["o"] is Side.HELDOUT


def test_equal_items_in_several_groups_are_not_on_both_sides_and_are_scored_once():
    split, given = HeldoutSplit(share=0.3), items(100)
    held = next(item for item, side in zip(given, split.split(given).sides, strict=True) if side is Side.HELDOUT)
    trained = next(group for group in (f"g{i}" for i in range(99)) if not split.holds_out(group))
    copies = [SplitItem("z1", held.content + " ", trained), SplitItem("z2", "  " + held.content, held.group)]
    done = split.split([*given, *copies])
    assert done.sides[-2:] == (Side.EXCLUDED, Side.EXCLUDED)
    assert done.why["z1"] == done.why["z2"] == f"equal to {held.id}"
    training = {item_hash(i.content) for i, s in zip([*given, *copies], done.sides, strict=True) if s is Side.TRAIN}
    assert not training & set(done.manifest.forbidden())
    assert len(done.manifest.items) == done.count(Side.HELDOUT)


def test_near_duplicates_of_held_out_texts_are_left_out_of_training():
    pytest.importorskip("datasketch", reason="needs the extra data")
    split, given = HeldoutSplit(share=0.3, near_duplicates=0.5), items(80, words=100)
    held = [item for item, side in zip(given, split.split(given).sides, strict=True) if side is Side.HELDOUT]
    trained = next(group for group in (f"g{i}" for i in range(99)) if not split.holds_out(group))
    words = held[0].content.split()
    near = SplitItem("near", " ".join([*words[:10], "other", *words[11:]]).upper(), trained)
    far = SplitItem("far", " ".join(words[:40] + ["x"] * 60), trained)
    done = split.split([*given, near, far])
    assert done.sides[-2:] == (Side.EXCLUDED, Side.TRAIN)
    assert done.why["near"].startswith(f"near {held[0].id} (similarity about 0.")
    assert item_hash(near.content) in done.manifest.forbidden() and len(done.why) == 1
    assert side_of(replace(split, near_duplicates=None), [*given, near])["near"] is Side.TRAIN


def test_grams_are_of_thirteen_words():
    text = " ".join(map(str, range(20)))
    assert len(grams(text)) == 8 and grams("One, two.") == {b"one two"} and grams("--") == set()


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_split_is_refused_with_what_to_do():
    split = HeldoutSplit(share=0.3)
    with pytest.raises(ConfigError, match=r"share=1\.0 of a split must be above 0 and below 1"):
        HeldoutSplit(share=1.0)
    with pytest.raises(ConfigError, match=r"near_duplicates=0 .* at most 1"):
        HeldoutSplit(near_duplicates=0)
    with pytest.raises(ConfigError, match=r"two items have the id 'a'.* unique"):
        split.split([SplitItem("a", "1"), SplitItem("a", "2")])
    with pytest.raises(ConfigError, match=r"made from 'itemX'.*nearest id is 'item00\d\d'.*Split an item together"):
        split.split([*items(50), SplitItem("b", "text", parents=("itemX",))])
    with pytest.raises(ConfigError, match=r"4 items in 1 groups .* has no (training|held-out) item\. .*give more"):
        split.split(items(4, groups=1))


# -- the manifest -----------------------------------------------------------------------------------------------------


def test_a_manifest_reads_back_and_a_changed_one_is_refused(tmp_path):
    manifest = HeldoutSplit(share=0.3).split(items(50)).manifest
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest.to_bytes())
    assert HeldoutManifest.read(path) == HeldoutManifest.read(tmp_path) == manifest
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if '"hash"' in line)
    for text, words in (
        ("\n".join([*lines[:first], *lines[first + 1 :]]), "not those of its root"),
        (path.read_text().replace('"kind"', '"kin"'), "has a wrong kin"),
        ("{}", "is not a held-out manifest of version 1"),
        ("{", "is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            HeldoutManifest.read(path)
    with pytest.raises(ConfigError, match=r"cannot be read .*`diloco split` writes one"):
        HeldoutManifest.read(tmp_path / "other.json")


def test_a_scored_item_that_the_manifest_does_not_hold_is_refused():
    given = items(50)
    done = HeldoutSplit(share=0.3).split(given)
    held = [item.content for item, side in zip(given, done.sides, strict=True) if side is Side.HELDOUT]
    done.manifest.check_holds(held)
    with pytest.raises(ConfigError, match=f"item {len(held)} of heldout_items is not in the held-out manifest"):
        done.manifest.check_holds([*held, "a text of training"])
