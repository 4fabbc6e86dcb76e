"""`HeldoutSplit`: which items are held out, and that nothing of them is left in training."""

import json
import random
import unicodedata
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.split.content import item_hash, merkle_root, normal_form
from diloco_orchestrator.split.manifest import HeldoutManifest
from diloco_orchestrator.split.near_duplicates import Rule
from diloco_orchestrator.split.split import Exclusion, HeldoutSplit, Side, SplitItem


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
    assert item_hash(composed) == item_hash(decomposed) != item_hash("cafe au lait")
    assert item_hash({"q": composed, "n": 1}) == item_hash({"n": 1.0, "q": decomposed})
    assert item_hash("1") != item_hash(1) != item_hash(b"1")


@pytest.mark.parametrize(
    "written",
    [
        "THE “FIFTH” OFFICE: No 12 - IT'S OPEN",
        'the "ﬁfth" oﬃce: no 12 - it\'s open.',
        "The \u201efif\u00adth\u201c of\u200bfice: \u2116 12 \u2014 it\u2019s open!",
        "\uff34\uff48\uff45 \u00abfifth\u00bb office: no \uff11\uff12 \u2212 it's open",
        "'The \"fifth\" office: no \u0661\u0662 \u2013 it's open'...",
    ],
)
def test_case_width_invisible_characters_quotes_dashes_and_a_dot_at_the_end_make_no_other_item(written):
    plain = 'the "fifth" office: no 12 - it\'s open'
    assert item_hash(written) == item_hash(plain) == sha256(b"text\0" + plain.encode()).digest()
    assert item_hash(written, form=1) != item_hash(plain, form=1)
    assert item_hash(written.lower().replace("open", "shut")) != item_hash(plain)


def test_json_is_compared_by_its_values_whether_text_or_parsed():
    value = {"question": "Why?", "steps": [1, 2.5, {"a": None}]}
    shuffled = '{ "steps": [1.0, 2.50, {"a": null}],\n "question": "WHY" }'
    assert item_hash(shuffled) == item_hash(value) == item_hash(json.dumps(value))
    assert item_hash(shuffled) != item_hash(shuffled.replace("2.50", "2.51"))
    for broken in ("{not json}", "[NaN]", "[1e999]", "[" * 99_999 + "]" * 99_999, "[" * 400 + "]" * 400, "{\ud800}"):
        assert item_hash(broken) == item_hash(broken + " ") != item_hash("other")


@given(st.text())
def test_a_normal_form_is_its_own_and_that_of_every_canonical_form(text):
    form = normal_form(text)
    assert form == normal_form(form) == normal_form(unicodedata.normalize("NFD", text))


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
    assert done.why["z1"] == done.why["z2"] == Exclusion(Rule.EQUAL, held.id)
    training = {item_hash(i.content) for i, s in zip([*given, *copies], done.sides, strict=True) if s is Side.TRAIN}
    assert not training & set(done.manifest.forbidden())
    assert len(done.manifest.items) == done.count(Side.HELDOUT)


def test_groups_whose_keys_are_one_in_normal_form_lie_on_one_side():
    split = HeldoutSplit(share=0.3)
    keys = [key for n in range(40) for key in (f"Repo{n}", f"repo{n}", n, str(n))]
    given = [SplitItem(f"item{i}", f"text {i}", key) for i, key in enumerate(keys)]
    done = split.split(given)
    sides: dict[str, set[Side]] = {}
    for item, side in zip(given, done.sides, strict=True):
        sides.setdefault(str(item.group).lower(), set()).add(side)
    assert all(len(found) == 1 for found in sides.values()) and len(sides) == 80
    assert len(done.spellings) == 80 and ("Repo7", "repo7") in done.spellings and ("7", "7") in done.spellings
    # Each spelling is drawn as before: what was held out without the others still is.
    for key in ("Repo7", "repo7", 7, "7"):
        if split.holds_out(key):
            assert sides[str(key).lower()] == {Side.HELDOUT}


# -- a split of an earlier version ------------------------------------------------------------------------------------

OLD = Path(__file__).parent / "golden/manifest_v1.json"  # version 0.3.0 before normal forms wrote it


def old_items() -> list[SplitItem]:
    given = [SplitItem(f"i{n:02d}", f"Item  {n} of Many\u00e9.", f"Repo{n % 12}") for n in range(48)]
    return [*given, SplitItem("copy", "item 3 of  Manye\u0301.", "Repo1"), SplitItem("made", "made", "x", ("i05",))]


def test_an_earlier_versions_manifest_keeps_its_bytes_and_its_comparison():
    manifest = HeldoutManifest.read(OLD)
    assert manifest.version == 1 and manifest.to_bytes() == OLD.read_bytes()
    name = next(each.id for each in manifest.items if each.id.startswith("i"))
    held = next(item.content for item in old_items() if item.id == name)
    assert manifest.hashes()[manifest.hash_of({"text": held + "\n"})] == name
    assert manifest.hash_of(held.upper()) not in manifest.forbidden()


def test_a_new_split_of_the_same_data_holds_out_what_the_earlier_one_did_and_records_its_form():
    done = HeldoutSplit(share=0.3, salt="old").split(old_items())
    new, old = (set(manifest.hashes().values()) for manifest in (done.manifest, HeldoutManifest.read(OLD)))
    assert new == old and done.manifest.version == 2
    held = next(item.content for item in old_items() if item.id in new)
    assert done.manifest.hash_of(held.upper() + "!") in done.manifest.forbidden()


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
        ("{}", "is not a held-out manifest of version 1 to 2"),
        (path.read_text().replace('"version": 2', '"version": 3'), "is not a held-out manifest of version 1 to 2"),
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
