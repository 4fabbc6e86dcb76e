"""`diloco demo`: real text, real model, real processes, shortened."""

import json
from pathlib import Path

import pytest
from cli_support import diloco
from s3_server import S3Server

from diloco_orchestrator.demo.text import load_corpus
from diloco_orchestrator.demo.workload import BATCH_SIZE, CONTEXT, Batches
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.open_store import open_store


def test_training_shards_and_held_out_text_share_no_file():
    corpus = load_corpus()
    assert len(corpus.training) > 200 and len(corpus.heldout) > 10
    assert not set(corpus.training) & set(corpus.heldout)
    shards = [corpus.training[i::4] for i in range(4)]
    assert sorted(text for shard in shards for text in shard) == sorted(corpus.training)
    assert corpus.shard(1, 4) == b"\n".join(shards[1])


def test_held_out_items_are_distinct_windows():
    items = load_corpus().heldout_items(96, CONTEXT + 1)
    assert len(set(items)) == len(items) == 96 and {len(item) for item in items} == {CONTEXT + 1}


def test_a_folder_of_ones_own_is_read_whole_and_duplicates_count_once(tmp_path: Path):
    for name, letter in (("a.txt", "x"), ("sub/b.md", "y"), ("copy.txt", "x"), ("sub/copy.md", "y")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(letter * 150_000)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0" * 1000)
    corpus = load_corpus(str(tmp_path))
    assert {len(text) for text in (*corpus.training, *corpus.heldout)} == {150_000}
    assert len(corpus.training) == len(corpus.heldout) == 1


def test_batches_depend_on_seed_and_position_alone():
    text = load_corpus().shard(0, 4)
    straight, resumed = Batches(text, seed=3), Batches(text, seed=3)
    stream = iter(straight)
    first = [next(stream) for _ in range(5)]
    assert straight.state_dict() == {"next": 5} and first[0].shape == (BATCH_SIZE, CONTEXT + 1)
    resumed.load_state_dict({"next": 3})
    assert all(bool((a == b).all()) for a, b in zip(iter(resumed), first[3:], strict=False))
    assert bool((next(iter(Batches(text, seed=4))) != first[0]).any())


@pytest.mark.slow
def test_a_short_demo_lowers_the_held_out_loss_and_leaves_a_loadable_model(tmp_path: Path):
    done = diloco("demo", "--rounds", "2", "--replicas", "2", "--store", "run", "--kill-one", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result, log = json.loads(done.stdout), keys.log_text(0, 1)
    scores = [row["heldout"] for row in result["metrics"]]
    assert scores[0] > 5 and scores[-1] < 4
    assert "2 rounds are fewer than the guard's min_steps=20" in open_store(str(tmp_path / "run")).get(log).decode()
    assert "nats per byte, on files that no replica trained on" in done.stderr
    assert result["snapshot"] in done.stderr
    from transformers import AutoModelForCausalLM

    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(result["snapshot"]).parameters()) > 200_000


@pytest.mark.slow
def test_demo_kill_one_recovers(tmp_path: Path):
    done = diloco("demo", "--rounds", "10", "--store", "run", "--kill-one", cwd=tmp_path)
    assert done.returncode == 0 and "was killed -9 in round" in done.stdout
    assert "took part again from round" in done.stdout and "Participation: 9" in done.stdout


@pytest.mark.slow
def test_the_strict_demo_ends_with_the_same_model_whether_a_replica_was_killed_or_not(tmp_path: Path):
    options = ["--rounds", "5", "--replicas", "2", "--seed", "7", "--quorum", "all", "--json"]
    models = []
    for store, kill in (("undisturbed", []), ("killed", ["--kill-one"])):
        done = diloco("demo", "--store", store, *options, *kill, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("the round has its contribution, none was lost" in done.stderr) == bool(kill)
        models.append((Path(json.loads(done.stdout)["snapshot"]) / "model.safetensors").read_bytes())
    assert models[0] == models[1]


@pytest.mark.slow
def test_demo_hack_halts_as_meant_and_explains(tmp_path: Path):
    done = diloco("demo", "--hack", "--store", "run", cwd=tmp_path)
    assert done.returncode == 0 and "the guard fired: Hacking Gap" in done.stdout
    assert "All replicas stopped at round" in done.stdout and "min_steps=3 and ema_alpha=0.5" in done.stderr


@pytest.mark.slow
def test_the_demo_runs_in_a_bucket_of_an_s3_server(tmp_path: Path, s3_server: S3Server, bucket: str):
    url = f"s3://{bucket}/demo"
    options = ["--rounds", "6", "--replicas", "2", "--store", url, "--kill-one", "--json"]
    done = diloco("demo", *options, cwd=tmp_path, environ=s3_server.environ())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["url"] == url and "was killed -9 in round" in done.stderr
    status = diloco("status", url, "--json", cwd=tmp_path, environ=s3_server.environ())
    assert json.loads(status.stdout)["state"] == "completed"
