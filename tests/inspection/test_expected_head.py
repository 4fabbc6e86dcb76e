"""A head that was noted outside of the bucket shows that the log was cut, which its hash chain cannot."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import diloco_here
from fast_s3 import running_fast_s3
from protocol_fleet import Fleet, play

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify, verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.run_log.launched_here import head_seen_here, note_head, remember
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    fleet = Fleet(replicas=2, rounds=9, store=open_store(str(tmp_path / "run")))
    replicas = fleet.join_all()
    for _ in range(3):
        play(replicas, [1.0, -0.5])
    return fleet


def cut(fleet: Fleet, *rounds: int) -> None:
    for round_ in rounds:
        for info in list(fleet.store.list(f"{keys.ROUNDS}{keys.round_name(round_)}/")):
            fleet.store.delete(info.key)


def test_a_log_that_reaches_the_head_agrees(fleet):
    head = RunReader(fleet.store).status().head
    assert Head.parse(head).round == 3
    assert verify(fleet.store.url, expect=head).agrees and verify(fleet.store.url, expect=Head.parse(head).short).agrees


def test_a_removed_tail_is_told(fleet):
    head = Head.parse(RunReader(fleet.store).status().head)
    cut(fleet, 3)
    assert verify_run(fleet.store).agrees  # nothing in the bucket shows it
    found = verify_run(fleet.store, expect=head).disagreement
    assert found is not None and found.key == keys.commit(3) and f"the head {head.short} was noted" in found.words


def test_a_removed_log_is_told(fleet):
    head = Head.parse(RunReader(fleet.store).status().head)
    cut(fleet, 1, 2, 3)
    found = verify_run(fleet.store, expect=head).disagreement
    assert found is not None and found.key == keys.commit(1)
    fleet.store.delete(keys.START)
    found = verify_run(fleet.store, expect=head).disagreement
    assert found is not None and found.key == keys.START


def test_another_commit_at_the_head_is_told(fleet):
    found = verify_run(fleet.store, expect=Head(2, "0" * 64)).disagreement
    assert found is not None and found.key == keys.commit(2) and "the head 2:0000000000000000 was noted" in found.words


@pytest.mark.parametrize("text", ["", "35", "35:", "35:xyz", "35:0123", "-1:01234567", "\u0663:01234567"])
def test_what_is_no_head_is_refused(text):
    with pytest.raises(ConfigError, match="is no head"):
        Head.parse(text)


def test_the_newest_head_that_was_seen_here_stays_when_the_log_is_cut(fleet, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    note_head(RunLog(fleet.store), RunReader(fleet.store).status().head)
    assert not head_seen_here(fleet.store)  # somebody else's run
    remember(RunLog(fleet.store))
    head = RunReader(fleet.store).status().head
    note_head(RunLog(fleet.store), head)
    cut(fleet, 3)
    note_head(RunLog(fleet.store), RunReader(fleet.store).status().head)
    assert head_seen_here(fleet.store) == head


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Fleet], None]:
    """Notes a fleet's run as launched here, with the newest head that its log has."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def note(fleet: Fleet) -> None:
        remember(RunLog(fleet.store))
        note_head(RunLog(fleet.store), RunReader(fleet.store).status().head)

    return note


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_two_servers_with_one_url_have_a_head_each(scheme: str, noted, tmp_path: Path):
    url = f"{scheme}://bucket/run"
    with running_fast_s3() as one, running_fast_s3() as other:
        for server, rounds in ((one, 2), (other, 1)):
            options = {"key": "anybody", "secret": "anything", "endpoint_url": f"{server.url}/"}
            fleet = Fleet(replicas=1, rounds=9, store=open_store(url, options))
            replicas = fleet.join_all()
            for _ in range(rounds):
                play(replicas, [1.0])
            noted(fleet)
        for server, head in ((one, 2), (other, 1)):
            done = diloco_here("verify", url, cwd=tmp_path, environ=server.environ())
            assert done.returncode == 0 and f"{head} rounds" in done.stdout, done.stdout + done.stderr


def test_another_run_at_the_same_url_is_told_as_another_run(fleet, noted, tmp_path):
    noted(fleet)
    for info in list(fleet.store.list("")):
        fleet.store.delete(info.key)
    play(Fleet(replicas=2, rounds=8, store=fleet.store).join_all(), [1.0, -0.5])
    done = diloco_here("verify", "run", cwd=tmp_path)
    assert done.returncode == 4 and "though the head 3:" in done.stdout
    assert "is of a run that you launched here, and run.json was changed since you launched the run" in done.stdout
