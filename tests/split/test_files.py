"""`diloco split` on files: formats, determinism, and errors that name the place."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from diloco_orchestrator.cli.main import diloco
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.split.content import item_hash
from diloco_orchestrator.split.manifest import HeldoutManifest
from diloco_orchestrator.split.split import HeldoutSplit


def rows(count: int = 60) -> list[dict[str, object]]:
    return [{"text": f"item {i} of many", "repo": f"r{i % 20}", "n": i} for i in range(count)]


def jsonl(path: Path, given: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def split(*arguments: object) -> dict[str, object]:
    """What the command reports. Errors are raised."""
    options = ["split", *map(str, arguments), "--near-duplicates", "off", "--json"]
    found = CliRunner().invoke(diloco, options, standalone_mode=False, catch_exceptions=False)
    assert found.exit_code == 0
    return json.loads(found.stdout)


def read_rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_lines_are_kept_as_they_are_and_the_sides_are_disjoint(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", rows())
    said = split(source, "--out", tmp_path / "out", "--group", "repo", "--share", 0.3)
    train, held = (read_rows(tmp_path / "out" / side / "a.jsonl") for side in ("train", "heldout"))
    assert sorted([*train, *held], key=lambda row: row["n"]) == rows()
    assert {row["repo"] for row in train}.isdisjoint(row["repo"] for row in held) and len(held) == said["heldout"] > 0
    lines = (tmp_path / "out/train/a.jsonl").read_bytes() + (tmp_path / "out/heldout/a.jsonl").read_bytes()
    assert sorted(lines.splitlines()) == sorted(source.read_bytes().splitlines())
    manifest = HeldoutManifest.read(tmp_path / "out")
    assert set(manifest.hashes()) == {item_hash(row["text"]) for row in held} and manifest.root == said["root"]
    assert manifest.settings.text_field == "text" and manifest.settings.group_field == "repo"


def test_the_same_inputs_give_the_same_bytes_in_any_order_and_more_data_changes_no_side(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", rows()[:40]), jsonl(tmp_path / "b.jsonl", rows()[40:])
    for name, given in (("1", (a, b)), ("2", (b, a)), ("3", (a,))):
        split(*given, "--out", tmp_path / name, "--share", 0.3)
    files = [path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*") if path.is_file()]
    assert len(files) == 5
    for path in files:
        assert (tmp_path / "1" / path).read_bytes() == (tmp_path / "2" / path).read_bytes()
    assert (tmp_path / "3/train/a.jsonl").read_bytes() == (tmp_path / "1/train/a.jsonl").read_bytes()


def test_a_folder_of_texts_and_a_text_file(tmp_path):
    folder = tmp_path / "docs" / "deep"
    folder.mkdir(parents=True)
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"text {i}\n")
    (tmp_path / "all.txt").write_text("\n\n".join(f"line one of {i}\nline two" for i in range(30)))
    said = split(tmp_path / "docs", tmp_path / "all.txt", "--out", tmp_path / "out", "--share", 0.3)
    copied = list((tmp_path / "out").rglob("docs/deep/*.txt"))
    assert len(copied) == 30 and said["train"] + said["heldout"] == 60
    train, held = ((tmp_path / "out" / side / "all.txt").read_text() for side in ("train", "heldout"))
    assert train.count("line two") + held.count("line two") == 30
    ids = set(HeldoutManifest.read(tmp_path / "out").hashes().values())
    assert any(name.startswith("docs/deep/") for name in ids) and any(name.startswith("all.txt#") for name in ids)


def test_lineage_and_ids_come_from_fields(tmp_path):
    given = [{"text": f"t{i}", "key": f"k{i}", "from": None} for i in range(40)]
    given += [{"text": f"made {i}", "key": f"m{i}", "from": [f"k{i}"]} for i in range(40)]
    source = jsonl(tmp_path / "a.jsonl", given)
    split(source, "--out", tmp_path / "out", "--id", "key", "--parent", "from", "--share", 0.3)
    held = {str(row["key"]) for row in read_rows(tmp_path / "out/heldout/a.jsonl")}
    assert {key[1:] for key in held if key[0] == "k"} == {key[1:] for key in held if key[0] == "m"} != set()
    assert set(HeldoutManifest.read(tmp_path / "out").hashes().values()) == held


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra data")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra data")
    parquet.write_table(pyarrow.Table.from_pylist(rows()), tmp_path / "a.parquet")
    split(tmp_path / "a.parquet", "--out", tmp_path / "out", "--group", "repo", "--share", 0.3)
    train, held = (parquet.read_table(tmp_path / "out" / side / "a.parquet") for side in ("train", "heldout"))
    assert train.schema == parquet.read_table(tmp_path / "a.parquet").schema
    assert sorted([*train.to_pylist(), *held.to_pylist()], key=lambda row: row["n"]) == rows()
    as_lines = split(jsonl(tmp_path / "a.jsonl", rows()), "--out", tmp_path / "o2", "--group", "repo", "--share", 0.3)
    assert as_lines["root"] == HeldoutManifest.read(tmp_path / "out").root


@pytest.mark.slow
def test_a_dataset_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    datasets.Dataset.from_list(rows()).save_to_disk(str(tmp_path / "set"))
    split(tmp_path / "set", "--out", tmp_path / "out", "--group", "repo", "--share", 0.3)
    train, held = (datasets.load_from_disk(str(tmp_path / "out" / side / "set")) for side in ("train", "heldout"))
    assert sorted([*train, *held], key=lambda row: row["n"]) == rows()
    both = datasets.DatasetDict({"train": train, "test": held})
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match=r"holds several datasets \(test, train\): pass those"):
        split(tmp_path / "both", "--out", tmp_path / "out2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--group", "rep"], "a.jsonl:1: unknown field 'rep': did you mean 'repo'?. Every record needs it"),
        (["--text", "n"], "field 'n' of a.jsonl:1 holds a int, not text: name the text field with --text"),
        (["--group", "empty"], "a.jsonl:1: field 'empty' is empty. Every record needs it"),
    ],
)
def test_fields_that_a_record_lacks_are_named_with_their_place(tmp_path, options, words):
    source = jsonl(tmp_path / "a.jsonl", [{**row, "empty": None} for row in rows()])
    with pytest.raises(ConfigError) as error:
        split(source, "--out", tmp_path / "out", *options)
    assert words in str(error.value) and not (tmp_path / "out").exists()


def test_files_that_cannot_be_read_are_named(tmp_path):
    def refused(path: Path, *options: str) -> str:
        with pytest.raises(ConfigError) as error:
            split(path, "--out", tmp_path / "out", *options)
        return str(error.value)

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert "a.jsonl, line 2, is not JSON" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("[1]\n")
    assert "line 1, holds a JSON list: write one object on each line" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"a": NaN}\n')
    assert "a.jsonl:1 cannot be compared" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("a,b\n")
    assert "format that is not known: .csv. Pass .jsonl, .parquet, .txt files" in refused(tmp_path / "a.csv")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refused(tmp_path / "a.txt")
    assert "does not exist: pass" in refused(tmp_path / "b.jsonl")
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    assert "a.txt#1 is text and has no field 'repo': --group needs" in refused(tmp_path / "a.txt", "--group", "repo")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x").touch()
    assert "exists and is not empty: a split never overwrites" in refused(tmp_path / "a.txt")


def test_the_command_says_by_which_rule_items_are_excluded_with_examples_and_which_groups_are_one(tmp_path):
    words = [" ".join(f"word{(7919 * n + 104729 * i * i) % 5003}" for i in range(40)) for n in range(60)]
    given = [{"text": text, "repo": f"Repo{n % 20}"} for n, text in enumerate(words)]
    given += [{"text": text, "repo": f"repo{n % 20}"} for n, text in enumerate(f"another text {n}" for n in range(20))]
    trained = next(f"g{n}" for n in range(99) if not HeldoutSplit(share=0.3).holds_out(f"g{n}"))
    given += [{"text": text.upper() + ".", "repo": trained} for text in words]
    given += [{"text": f"{words[n - 7]} {text} {words[n - 9]}", "repo": trained} for n, text in enumerate(words)]
    source = jsonl(tmp_path / "a.jsonl", given)
    command = ["split", str(source), "--group", "repo", "--share", "0.3", "--out"]
    said = CliRunner().invoke(diloco, [*command, str(tmp_path / "out")], catch_exceptions=False).stdout
    report = json.loads(CliRunner().invoke(diloco, [*command, str(tmp_path / "o2"), "--json"]).stdout.splitlines()[-1])
    by_rule = report["excluded_by"]
    assert by_rule["equal"] > 5 and by_rule["contains"] > 5 and sum(by_rule.values()) == report["excluded"]
    assert re.search(rf"equal +{by_rule['equal']}  a\.jsonl:\d+ is equal to a\.jsonl:\d+; a\.jsonl", said)
    assert re.search(
        rf"contains +{by_rule['contains']}  a\.jsonl:\d+ is longer and holds most of a\.jsonl:\d+ \(", said
    )
    assert "This is more than 10% of the items that are not held out" in said
    assert "20  of several spellings count as one each, such as 'Repo0', 'repo0'" in said
    assert report["groups_of_several_spellings"] == 20
