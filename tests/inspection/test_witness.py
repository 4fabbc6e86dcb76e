"""A witness states heads of a log; a log that its own launcher cut, forked or wrote anew is told by them."""

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cli_support import diloco_here
from kept_run import kept_run
from signed_s3 import Account, running_signed_s3

from diloco_orchestrator import verify
from diloco_orchestrator.errors import ConfigError, StoreDenied
from diloco_orchestrator.inspection.witness import Witness, heads_seen, statements
from diloco_orchestrator.protocol import keys, pace
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.signatures import public_text
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.signing.identity import Identity
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.store.retrying import RetryPolicy

STAMP = Stamp("witness", lambda: 1_700_000_000.0)
ME, OTHER = Identity(bytes(32)), Identity(bytes([1] * 32))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_run(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    """A run of several rounds that has ended."""
    return Path(shutil.copytree(kept, tmp_path / "run"))


class Limited(MemoryStore):
    """A store that limits requests, as Hugging Face's buckets do."""

    requests_allowed = 1000


def test_a_witness_looks_as_seldom_as_a_display_in_a_store_that_limits_requests(folder: Path):
    paused = []
    for store in (MemoryStore(), Limited()):
        for path in folder.rglob("*"):
            if path.is_file():
                store.put(str(path.relative_to(folder)), path.read_bytes())
        watched = Witness(store, MemoryStore(), ME, STAMP)
        watched.look()
        paused.append(watched.apart_s)
    assert paused[0] == 0.0 and paused[1] == pace.apart_s(RunLog(store).run.config, 1000) > 0


def rounds_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("rounds/*/commit.json"))


def cut(folder: Path, rounds: int) -> None:
    """Leave the first rounds of the log, as whoever may delete can, and as it was while the run went on."""
    for path in rounds_of(folder)[rounds:]:
        path.unlink()
    shutil.rmtree(folder / "log", ignore_errors=True)
    shutil.rmtree(folder / "legs" / "2", ignore_errors=True)
    (folder / "legs" / "1" / "result.json").unlink(missing_ok=True)


def witness(folder: Path, place: Store, identity: Identity = ME) -> Witness:
    return Witness(open_store(str(folder)), place, identity, STAMP)


def test_heads_are_stated_as_the_run_goes_on_and_the_log_agrees_with_them(folder: Path, tmp_path: Path):
    earlier = Path(shutil.copytree(folder, tmp_path / "earlier"))
    cut(earlier, 2)
    place = open_store(str(tmp_path / "place"))
    first = witness(earlier, place).look()
    assert first.stated.round == 2 and not first.is_over and not first.contradiction
    watched = witness(folder, place)
    later = watched.look()
    assert later.stated.round > 2 and not later.contradiction and watched.look().stated is None
    assert [each.round for each in statements(place)] == [2, later.stated.round]
    done = verify(str(folder), witness=str(tmp_path / "place"), witnessed_by=ME.public.key)
    assert done.agrees and done.checked["noted heads"] == 2


@pytest.mark.parametrize("has_result", [True, False])
def test_the_last_commit_is_stated_though_the_run_ends_while_it_is_read(folder: Path, has_result: bool):
    """A run is over with that commit too: a coordinator that has died writes no result."""
    last = rounds_of(folder)[-1]
    result = max((folder / "legs").glob("*/result.json"))
    end = [(each.relative_to(folder).as_posix(), each.read_bytes()) for each in (last, result)[: 1 + has_result]]
    shutil.rmtree(folder / "log", ignore_errors=True)
    last.unlink()
    result.unlink()

    class Ends(MemoryStore):
        def get(self, key: str, start: int = 0, end_at: int | None = None) -> bytes:
            if key == result.relative_to(folder).as_posix():
                for each in end:
                    self.create(*each)
            return super().get(key, start, end_at)

    store, place = Ends(), MemoryStore()
    for info in open_store(str(folder)).list(""):
        store.create(info.key, open_store(str(folder)).get(info.key))
    watched = Witness(store, place, ME, STAMP)
    for _ in range(9):
        if watched.look().is_over:
            break
    else:
        pytest.fail("the run is not over")
    assert statements(place)[-1].round == int(last.parent.name)


def test_a_log_that_was_cut_is_told(folder: Path, tmp_path: Path):
    place = open_store(str(tmp_path / "place"))
    stated = witness(folder, place).look().stated
    cut(folder, 2)
    found = witness(folder, place).look()
    assert "is gone" in found.contradiction and found.stated.round == 2
    done = verify(str(folder), witness=str(tmp_path / "place"))
    assert done.disagreement.key == keys.commit(3) and f"seen by {ME.public.key[:24]}" in done.disagreement.words
    assert stated.head.short in done.disagreement.words


def test_another_log_is_told(folder: Path, tmp_path: Path):
    """The same rounds with another last commit, as only who launched the run could sign it."""
    place = open_store(str(tmp_path / "place"))
    cut(folder, 2)
    witness(folder, place).look()
    path = rounds_of(folder)[1]
    path.write_bytes(path.read_bytes().replace(b'"write_id":"', b'"write_id":"again ', 1))
    assert "is another one" in witness(folder, place).look().contradiction
    done = verify(str(folder), witness=str(tmp_path / "place"))
    assert done.disagreement.key == keys.commit(2) and "was seen by" in done.disagreement.words
    assert len(statements(place)) == 2, "both heads are kept, each signed"


def test_a_fork_that_has_grown_beyond_the_last_statement_is_told_again_after_a_restart(folder: Path, tmp_path: Path):
    """It was the last statement then, and whoever started the witness again saw nothing wrong."""
    earlier = Path(shutil.copytree(folder, tmp_path / "earlier"))
    cut(earlier, 2)
    path = rounds_of(earlier)[1]
    path.write_bytes(path.read_bytes().replace(b'"write_id":"', b'"write_id":"again ', 1))
    place = open_store(str(tmp_path / "place"))
    witness(earlier, place).look()
    for _ in range(2):
        found = witness(folder, place).look()
        assert "is another one" in found.contradiction
    assert found.stated is None and len(statements(place)) == 2


def test_another_run_in_the_same_folder_is_told(folder: Path, tmp_path: Path):
    place = open_store(str(tmp_path / "place"))
    witness(folder, place).look()
    path = folder / keys.RUN
    path.write_bytes(path.read_bytes().replace(b'"run_id":"', b'"run_id":"x', 1))
    done = verify(str(folder), witness=str(tmp_path / "place"))
    assert done.disagreement.key == keys.RUN and "another run" in done.disagreement.words


def test_statements_that_somebody_has_changed_or_made_are_refused(folder: Path, tmp_path: Path):
    place = MemoryStore()
    witness(folder, place).look()
    (info,) = place.list("")
    genuine = place.get(info.key)
    with pytest.raises(ConfigError, match="not by ed25519:AAAA"):
        heads_seen(place, public_text(bytes(32)))
    with pytest.raises(ConfigError, match="Give each witness a folder of its own"):
        witness(folder, place, OTHER)
    for changed in (genuine.replace(b'"round":', b'"round":1', 1), genuine[:-30], b"{}\n", genuine + b"\n"):
        place.put(info.key, changed)
        with pytest.raises(ConfigError, match="no statement of a witness"):
            heads_seen(place, None)
    with pytest.raises(ConfigError, match="has no statement"):
        heads_seen(MemoryStore(), None)


def test_the_commands(folder: Path, tmp_path: Path):
    place = str(tmp_path / "place")
    said = diloco_here("witness", str(folder), "--to", place, "--every", "0.1", cwd=tmp_path)
    assert said.returncode == 0 and "head " in said.stdout, said.stderr
    assert diloco_here("verify", str(folder), "--witness", place, cwd=tmp_path).returncode == 0
    cut(folder, 2)
    assert diloco_here("verify", str(folder), "--witness", place, cwd=tmp_path).returncode == 4
    said = diloco_here("witness", str(folder), "--to", place, "--once", cwd=tmp_path)
    assert said.returncode == 4 and "THE LOG IS ANOTHER ONE" in said.stderr


LAUNCHER = Account("AKIALAUNCHER", "launchers-secret", reads=frozenset({"runs"}), writes=frozenset({"runs"}))
WITNESS = Account("AKIAWITNESS", "witnesss-secret", frozenset({"runs", "witnessed"}), frozenset({"witnessed"}))
URL, PLACE = "s3://runs/a", "s3://witnessed/a"


def test_a_witness_of_another_account_reads_the_runs_bucket_and_keeps_what_the_launcher_cannot_change(
    folder: Path, tmp_path: Path
):
    """Two buckets, and two sets of credentials: the launcher's for the first alone, the witness's read that one."""
    with running_signed_s3([LAUNCHER, WITNESS]) as server:

        def diloco(account: Account, *args: str) -> CompletedProcess[str]:
            state = {"XDG_STATE_HOME": str(tmp_path / account.key)}
            return diloco_here(*args, cwd=tmp_path, environ={**server.environ(account), **state})

        def opened(account: Account, url: str) -> Store:
            return open_store(url, server.options(account), retry=RetryPolicy(total_s=0.0))

        run = opened(LAUNCHER, URL)
        for info in open_store(str(folder)).list(""):
            run.put(info.key, open_store(str(folder)).get(info.key))
        said = diloco(WITNESS, "witness", URL, "--to", PLACE, "--every", "0.1")
        assert said.returncode == 0 and "head " in said.stdout, said.stderr
        (stated,) = statements(opened(WITNESS, PLACE))
        for account, url in ((WITNESS, URL), (LAUNCHER, PLACE)):
            for change in (lambda store: store.put("x", b""), lambda store: store.delete(stated.key)):
                with pytest.raises(StoreDenied):
                    change(opened(account, url))
        with pytest.raises(StoreDenied):
            statements(opened(LAUNCHER, PLACE))
        assert diloco(WITNESS, "verify", URL, "--witness", PLACE).returncode == 0
        run.put(
            keys.commit(stated.round), run.get(keys.commit(stated.round)).replace(b'"write_id":"', b'"write_id":"x', 1)
        )
        told = diloco(WITNESS, "verify", URL, "--witness", PLACE, "--json")
        assert told.returncode == 4 and json.loads(told.stdout)["disagreement"]["key"] == keys.commit(stated.round)
        assert diloco(WITNESS, "witness", URL, "--to", PLACE, "--once").returncode == 4
