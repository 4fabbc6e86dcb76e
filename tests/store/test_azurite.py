"""A genuine Azurite: unusual letters, refusals, a public container, a whole run. `test_contract` has the contract."""

from pathlib import Path
from uuid import uuid4

import pytest
from genuine_azurite import Azurite
from real_runs import FAST, digests

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch
from diloco_orchestrator.errors import StoreDenied, StoreError
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.store.open_store import INTERACTIVE, open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def container(azurite: Azurite) -> str:
    return azurite.make_container(f"container-{uuid4().hex[:12]}")


@pytest.mark.parametrize("folder", ["a b~*%20c", "ü/a+b=c&d,e;it's (one)!:@$"])
def test_a_folder_with_unusual_letters_is_one_folder(azurite: Azurite, container: str, folder: str):
    store = open_store(f"az://{container}/{folder}", azurite.options())
    assert store.create(f"k/{folder}", b"0123") and not store.create(f"k/{folder}", b"other")
    assert store.get(f"k/{folder}", 1, 3) == b"12" and [info.key for info in store.list("k/")] == [f"k/{folder}"]
    assert [info.key for info in open_store(f"az://{container}", azurite.options()).list("")] == [
        f"{folder}/k/{folder}"
    ]


def test_a_wrong_key_and_a_missing_container_are_told(azurite: Azurite, container: str):
    wrong = open_store(f"az://{container}/x", azurite.options(account_key="d3Jvbmc="), retry=INTERACTIVE)
    with pytest.raises(StoreDenied):
        wrong.create("key", b"x")
    with pytest.raises(StoreError, match=r"Check the container's name"):
        open_store("az://nobody-made-it/x", azurite.options(), retry=INTERACTIVE).create("key", b"x")


def test_a_public_container_is_read_without_credentials(azurite: Azurite, monkeypatch: pytest.MonkeyPatch):
    name = azurite.make_container(f"public-{uuid4().hex[:12]}", public=True)
    open_store(f"az://{name}/x", azurite.options()).put("a/key", b"v")
    for variable in ("STORAGE_ENDPOINT", "STORAGE_ACCOUNT_NAME", "SKIP_SIGNATURE"):
        option = {"STORAGE_ENDPOINT": azurite.endpoint, "SKIP_SIGNATURE": "true"}.get(variable, "devstoreaccount1")
        monkeypatch.setenv(f"AZURE_{variable}", option)
    store = open_store(f"az://{name}/x")
    assert store.get("a/key") == b"v" and [info.key for info in store.list("a/")] == ["a/key"]
    with pytest.raises(StoreError):
        store.create("other", b"x")


def test_a_whole_run_has_the_bits_of_one_in_a_folder(azurite: Azurite, container: str, tmp_path: Path):
    given = {**FAST, "replicas": 2, "rounds": 2, "sync_every": 3, "env": {"OMP_NUM_THREADS": "1"}}
    executor = LocalProcessExecutor(tmp_path / "executor")
    launch("tiny_workloads:train", store=str(tmp_path / "bucket"), executor=executor, **given).wait()
    url, options = f"az://{container}/runs/a b", azurite.options()
    run = launch("tiny_workloads:train", store=url, storage_options=options, executor=executor, **given)
    assert run.wait().status == "completed"
    reader = RunReader(open_store(url, options))
    assert [commit.base_digest for commit in reader.commits()] == digests(tmp_path / "bucket")
    assert verify_run(reader.store).agrees
