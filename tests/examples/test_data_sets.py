"""The example of data sets: shares and positions; runs from a folder, from S3, by a stream, from mounted volumes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import clouds
import fsspec
import pytest
from loopback_eks import CLUSTER, REGION
from s3_server import S3Server

from diloco_orchestrator import RunReader, open_store
from executors.contract import LaunchRequest

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES, LINES = 4, 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import data_sets

    return data_sets


def write_corpus(folder: str, options: dict[str, Any]) -> None:
    files = {f"train-{n}.jsonl": [f"file {n}, line {i}: abcabcabc" for i in range(LINES)] for n in range(FILES)}
    for name, texts in {**files, "heldout.jsonl": ["unseen, line 0: abcabc", "unseen, line 1: abcabc"]}.items():
        with fsspec.open(f"{folder}/{name}", "w", **options) as file:
            file.write("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (folder := tmp_path / "corpus").mkdir()
    write_corpus(str(folder), {})
    return str(folder)


def test_shares_are_disjoint_and_whole(module: ModuleType, corpus: str):
    shares = [list(module.Shards(corpus, replica, 3, {})) for replica in range(3)]
    assert [len(share) for share in shares] == [2 * LINES, LINES, LINES]
    assert len({text for share in shares for text in share}) == FILES * LINES
    with pytest.raises(FileNotFoundError, match="for replica 4 of 5"):
        module.Shards(corpus, 4, 5, {})


@pytest.mark.parametrize("position", range(2 * LINES + 1))
def test_a_reader_goes_on_where_another_stopped(module: ModuleType, corpus: str, position: int):
    first, second = (module.Shards(corpus, 1, 2, {}) for _ in range(2))
    seen = list(islice(iter(first), position))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again = iter(module.Shards(corpus, 1, 2, {}))
    assert [*seen, *second] == list(again)
    assert list(second) == [*seen, *module.Shards(corpus, 1, 2, {})][position:]  # the next epoch is whole


@pytest.mark.parametrize(
    ("place", "volume", "shown"),
    [
        ("local", None, []),
        ("modal", "corpus", ["'/data': 'corpus'"]),
        ("hf-jobs", "hf://datasets/org/text", ["'source': 'org/text'", "'mount_path': '/data'"]),
        ("eks", "corpus", ["'claimName': 'corpus'", "'mountPath': '/data'"]),
        ("kubernetes", "corpus", ["'claimName': 'corpus'", "'mountPath': '/data'"]),
        ("slurm", None, ["sbatch"]),
    ],
)
def test_every_place_has_an_executor_with_the_volume_mounted(
    place: str, volume: str | None, shown: list[str], module: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    for name in ("DATA_SETS_CLUSTER", "DATA_SETS_IMAGE", "AWS_REGION"):
        monkeypatch.setenv(name, "any")
    executor = module.executor_of(place, volume, "/data")
    plan = str(executor.plan(LaunchRequest("run", 0, 1, ["python"])))
    assert executor.name == place and [words for words in shown if words not in plan] == []


def program(*given: str, **environ: str) -> str:
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "data_sets.py"), *given],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digest(store: str, options: dict[str, Any] | None = None) -> str:
    reader = RunReader(open_store(store, options or {}))
    assert reader.commits()[-1].stop == "completed"
    return reader.commits()[-1].base_digest


@pytest.mark.slow
def test_folder_bucket_and_mounted_volume_give_one_model(
    corpus: str, tmp_path: Path, s3_server: S3Server, bucket: str, mounted: tuple[list[str], dict[str, str], Any]
):
    """The same lines in the same order wherever they lie, so the same bits."""
    options = s3_server.options()
    program("local", str(tmp_path / "run"), "--data", corpus)
    here = digest(str(tmp_path / "run"))

    write_corpus(f"s3://{bucket}/corpus", options)
    told = program(
        "local", str(tmp_path / "run3"), "--data", f"s3://{bucket}/corpus", DATA_STORAGE_OPTIONS=json.dumps(options)
    )
    assert "completed: held-out" in told and digest(str(tmp_path / "run3")) == here
    assert options["secret"] not in (tmp_path / "run3" / "run.json").read_text()

    given, environ, volumes = mounted
    store, own = f"s3://{bucket}/run", {**environ, "DILOCO_STORAGE_OPTIONS": json.dumps(options)}
    program(given[0], store, "--data", corpus, *given[1:], **own)
    assert digest(store, options) == here
    assert volumes() == [corpus, corpus]  # where each replica asked for the volume; loopback services mount nothing


@pytest.fixture(params=["modal", "hf-jobs", "eks"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str], Any]]:
    """A place with a volume: options of the program, environment, and where the service was asked to mount it."""
    with {"modal": modal, "hf-jobs": hf_jobs, "eks": eks}[request.param](tmp_path) as found:
        yield found


@contextmanager
def modal(folder: Path) -> Iterator[tuple[list[str], dict[str, str], Any]]:
    from loopback_modal import LoopbackModal

    with LoopbackModal() as server:
        server.named_volumes.add("corpus")

        def volumes() -> list[str]:
            made = [each.definition for each in server.sandboxes.values()]
            return [volume.mount_path for each in made for volume in each.volume_mounts]

        yield ["modal", "--volume", "corpus"], dict(server.environ()), volumes


@contextmanager
def hf_jobs(folder: Path) -> Iterator[tuple[list[str], dict[str, str], Any]]:
    from loopback_hf import LoopbackHF

    with LoopbackHF() as service:

        def volumes() -> list[str]:
            return [volume["mountPath"] for job in service.jobs.values() for volume in job.spec["volumes"]]

        yield ["hf-jobs", "--volume", "hf://datasets/org/text"], dict(service.environ), volumes


@contextmanager
def eks(folder: Path) -> Iterator[tuple[list[str], dict[str, str], Any]]:
    import loopback_eks

    with (
        loopback_eks.running_aws() as aws,
        clouds.exported(loopback_eks.environ(aws)),
        loopback_eks.running_cluster(aws) as cluster,
    ):

        def volumes() -> list[str]:
            jobs = [body for method, path, body in cluster.requests if method == "POST" and path.endswith("/jobs")]
            (containers,) = zip(*(job["spec"]["template"]["spec"]["containers"] for job in jobs), strict=True)
            found = [volume for each in containers for volume in each["volumeMounts"]]
            return [volume["mountPath"] for volume in found if volume["name"] == "corpus"]

        names = {"DATA_SETS_CLUSTER": CLUSTER, "DATA_SETS_IMAGE": "any", "AWS_REGION": REGION}
        yield ["eks", "--volume", "corpus"], {**loopback_eks.environ(aws), **names}, volumes


@pytest.mark.slow
def test_the_stream_of_a_hub_is_shared_and_goes_on(corpus: str, tmp_path: Path, module: ModuleType):
    """`datasets` streams a folder as it streams a repository of the Hub."""
    pytest.importorskip("datasets", reason="the extra [trl] is not installed")
    shares = [list(module.Stream(corpus, replica, 2)) for replica in range(2)]
    assert len(set(shares[0]) | set(shares[1])) == FILES * LINES and not set(shares[0]) & set(shares[1])
    first, second = (module.Stream(corpus, 0, 2) for _ in range(2))
    seen = list(islice(iter(first), 4))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [*seen, *second] == shares[0]
    second.set_epoch(1)
    assert list(second) == shares[0]
    program("local", str(tmp_path / "run"), "--data", f"hub:{corpus}")
    digest(str(tmp_path / "run"))
