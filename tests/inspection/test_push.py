"""`diloco push`: snapshots as commits of a repository on the Hub, with a card; refusals in words; no token in sight."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback_hub import LoopbackHub, Repository
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.inspection.model_card import README, CardFacts, base_of_a_machine, card_files, curves, tag_of
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import FileInfo, Snapshot
from diloco_orchestrator.store.open_store import open_store

ROOT = Path(__file__).parent.parent.parent
CODE = "import sys; from diloco_orchestrator.cli.main import main; main()"


@pytest.fixture(scope="module")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run of four rounds, three of which took an outer step; without transformers."""
    folder = tmp_path_factory.mktemp("run")
    fleet = Fleet(replicas=2, rounds=3, store=open_store(str(folder)), scored=True, snapshot_every=2)
    participants = fleet.join_all()
    for round_ in range(4):
        said = [report(i, score=0.1 * round_, in_loop=0.1 * round_) for i in range(2)]
        play(participants, [0.1 * round_, 0.2], said)
        for participant in participants:
            participant.write_snapshot_if_due()
    for participant in participants:
        participant.finish_leg()
        participant.leave()
    return str(folder)


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as made:
        yield made


def push(hub: LoopbackHub, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, **hub.environ, "PYTHONPATH": str(ROOT), "HF_HOME": "/nonexistent/hf", **environ}
    command = [sys.executable, "-c", CODE, "push", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_snapshot_arrives_with_its_card_and_the_outer_state_stays(hub: LoopbackHub, run_url: str):
    done = push(hub, run_url, "ada/tiny")
    assert done.returncode == 0, done.stderr[-2000:]
    repository = hub.repositories["ada/tiny"]
    assert repository.private and repository.tags == {"round-3": repository.commits[-1][0]}
    assert sorted(repository.files) == ["README.md", "curves.svg", "model.safetensors"]
    store = open_store(run_url)
    assert repository.files["model.safetensors"] == store.get(keys.snapshot(3, "model.safetensors"))
    card, reader = repository.files["README.md"].decode(), RunReader(store)
    entry = reader.log.newest(reader.log.begins()[-1])
    facts = [
        "library_name: pytorch",
        "| run | run-1 |",
        "| round | 3 of 3 |",
        "| replicas | 2 |",
        "model.load_state_dict(tensors)",
    ]
    assert entry is not None
    for text in (*facts, entry.sha256, reader.log.snapshot(3).base_digest, "![training"):
        assert text in card
    assert run_url not in card
    assert f"{hub.endpoint}/ada/tiny/commit/" in done.stdout
    assert hub.token not in done.stdout + done.stderr


@pytest.mark.slow
def test_no_file_that_somebody_put_into_a_snapshot_is_sent(hub: LoopbackHub, run_url: str, tmp_path: Path):
    """Another model with its digest in the record, under the base digest of the log; and code beside it."""
    store = open_store(str(shutil.copytree(run_url, tmp_path / "run")))
    key = keys.snapshot(3, keys.SNAPSHOT_RECORD)
    record, forged = Snapshot.from_bytes(store.get(key), key), {"model.safetensors": b"a pickle", "evil.py": b"evil()"}
    infos = {name: FileInfo(digest=bulk_digest(data), size=len(data)) for name, data in forged.items()}
    for name, data in forged.items():
        store.put(keys.snapshot(3, name), data)
    store.put(key, record.model_copy(update={"files": {**record.files, **infos}}).to_bytes())
    done = push(hub, str(tmp_path / "run"), "ada/tiny")
    assert done.returncode == 0, done.stderr[-2000:]
    files = hub.repositories["ada/tiny"].files
    assert sorted(files) == ["README.md", "curves.svg", "model.safetensors"]
    assert files["model.safetensors"] == open_store(run_url).get(keys.snapshot(3, "model.safetensors"))


@pytest.mark.slow
def test_several_snapshots_are_commits_with_tags_and_the_newest_is_main(hub: LoopbackHub, run_url: str):
    hub.repositories["ada/tiny"] = Repository(private=True)
    hub.repositories["ada/tiny"].add("old", {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"})
    done = push(hub, run_url, "ada/tiny", "--round", "3", "--round", "1", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    repository = hub.repositories["ada/tiny"]
    assert [each["tag"] for each in json.loads(done.stdout)["pushed"]] == ["round-1", "round-3"]
    assert [message for _, message, _ in repository.commits[2:]] == [f"Round {r} of the run run-1" for r in (1, 3)]
    first, newest = (repository.at(tag) for tag in ("round-1", "round-3"))
    assert first is not None and newest is not None and newest[1] == repository.files
    assert first[1]["model.safetensors"] != newest[1]["model.safetensors"]
    assert "`round-1`" in repository.files["README.md"].decode()
    assert "notes.txt" in repository.files and "model-00001-of-00002.safetensors" not in repository.files
    again = push(hub, run_url, "ada/tiny", "--round", "3")
    assert again.returncode == 2 and "has the tag round-3 already: that round was sent before" in again.stderr


@pytest.mark.slow
def test_what_cannot_be_sent_is_refused_in_words(hub: LoopbackHub, run_url: str):
    hub.repositories["ada/open"] = Repository(private=False)
    refused = {
        ("ada/open",): "ada/open is public on the Hub",
        ("tiny",): "'tiny' names no user or organisation. Write it as user/model.",
        ("ada/a/b",): "is no name of a repository",
        ("ada/tiny", "--round", "9"): "round 9 of",
    }
    for words, expected in refused.items():
        done = push(hub, run_url, *words)
        assert done.returncode == 2 and expected in done.stderr, done.stderr[-2000:]
    assert "Run `hf auth login`" in push(hub, run_url, "ada/tiny", HF_TOKEN="").stderr
    assert push(hub, run_url, "ada/open", "--public").returncode == 0
    denied = push(hub, run_url, "bob/tiny")
    assert denied.returncode == 1 and "its right to write there" in denied.stderr
    other = push(hub, run_url, "ada/tiny", HF_TOKEN="hf_another_token_5512")
    assert other.returncode == 1 and "hf_another_token_5512" not in other.stderr
    hub.failing = 400
    failed = push(hub, run_url, "ada/tiny")
    assert failed.returncode == 1 and "sending round 3 failed: refused the request" in failed.stderr
    assert hub.token not in failed.stdout + failed.stderr
    gone = push(hub, run_url, "ada/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert gone.returncode == 1 and "Check that this machine reaches the Hub" in gone.stderr


def test_a_card_names_the_library_the_base_and_the_rows(tmp_path: Path, run_url: str):
    rows = RunReader(open_store(run_url)).rows()
    common: dict[str, Any] = {"repo_id": "ada/tiny", "run_id": "r", "replicas": 2, "sync_every": 30, "version": "1"}
    facts = CardFacts(**common, round=2, rows=rows * 20, heldout=0.5, base_digest="b3:1", head_sha256="2", others=(1,))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    card = card_files(facts, tmp_path)["README.md"]
    assert 'LlamaForCausalLM.from_pretrained("ada/tiny", revision="round-2")' in card
    assert "library_name: transformers" in card and card.count("\n| 1 |") <= 20
    (tmp_path / "config.json").unlink()
    for base, named in (("meta/base-1b", True), ("/home/me/base", False), (None, False)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        (tmp_path / "README.md").write_text("An adapter.")
        card = card_files(facts, tmp_path)["README.md"]
        assert "library_name: peft" in card and "An adapter." in card and ("base_model: " in card) is named
    assert curves(rows).startswith("<svg xmlns=") and curves([]) == ""
    assert tag_of(3) == "round-3"


FACTS = CardFacts("ada/tiny", "r", 2, 2, 30, [], 0.5, "b3:1", "2", "1")
LLAMA = '{"architectures": ["LlamaForCausalLM"]}'


@pytest.mark.parametrize(
    ("base", "is_path"),
    [
        ("/home/ada/llama", True),
        ("../llama", True),
        ("C:\\models\\llama", True),
        ("meta/llama", False),
        ("gpt2", False),
    ],
)
def test_an_adapter_whose_base_is_a_path_of_the_machine_that_trained_is_told_apart(base, is_path, tmp_path: Path):
    assert base_of_a_machine(tmp_path) == ""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert base_of_a_machine(tmp_path) == (base if is_path else "")


@pytest.mark.parametrize(
    "base",
    [
        "a/b\nlicense: mit",
        "a/b\n---\n# Title",
        "a/b: {x: y}",
        "a/b #",
        "a/<script>",
        "../b",
        "~/b",
        3,
        ["a/b"],
        "a/b/c",
    ],
)
def test_what_is_no_name_of_a_base_model_is_not_in_a_card(tmp_path: Path, base: Any):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (tmp_path / README).write_text("An adapter.")
    _, front, _ = card_files(FACTS, tmp_path)[README].split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "peft", "tags": ["diloco"]}


def test_a_readme_of_the_bucket_is_text_in_a_card(tmp_path: Path):
    (tmp_path / README).write_text("````\n<script>alert(1)</script>\x1b[31m\u202e\n```python\nx\n```")
    card = card_files(FACTS, tmp_path)[README]
    _, inside, _ = card.split("`````")
    assert "<script>" in inside and "<script>" not in card.replace(inside, "")
    assert "\x1b" not in card and "\u202e" not in card


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, "{", "{}", '{"architectures": []}', '{"architectures": 3}', '{"architectures": [3]}',
     '{"architectures": ["X; import os"]}', '{"architectures": ["X\\n"]}', '{"architectures": {"0": "X"}}', "\xff"],
)  # fmt: skip
def test_a_broken_config_makes_an_error_and_nothing_in_a_card(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(RecordInvalid, match=r"config\.json of this snapshot .*push another round"):
        card_files(FACTS, tmp_path)
    if text not in ("{}", '{"architectures": []}') and not text.startswith('{"arch'):
        (tmp_path / "adapter_config.json").write_text(text, encoding="latin-1")
        (tmp_path / "config.json").write_text(LLAMA)
        with pytest.raises(RecordInvalid, match=r"adapter_config\.json of this snapshot"):
            card_files(FACTS, tmp_path)
