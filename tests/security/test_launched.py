"""Attacks on what runs on a launcher's machine, by somebody who may write to the bucket after the launch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from protocol_fleet import Fleet, play

from diloco_orchestrator.cli.join_command import only_own_offers
from diloco_orchestrator.clock import SystemClock, ThreadBackground
from diloco_orchestrator.errors import ConfigError, RunFolderTaken
from diloco_orchestrator.executors.local_process import LocalProcessExecutor
from diloco_orchestrator.inspection.logs import executor_of_run
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.launching.prepare import prepare_launch
from diloco_orchestrator.launching.run import launch
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Intent, Offer
from diloco_orchestrator.protocol.launched import settings_sha256
from diloco_orchestrator.protocol.process import EXIT_PERMANENT
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.launched_here import remember, remember_leg, why_not_launched_here
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from diloco_orchestrator.supervision.next_leg import begin_next_leg
from replica.process.run_attempt import Ending, run_attempt

STAMP = Stamp("test", lambda: 0.0)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A run that this user launched here, with one intended attempt."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    given = {"args": {"who": "the launcher"}, "code_sha256": "a" * 64}
    found = Fleet(replicas=1, rounds=1, store=open_store(str(tmp_path / "bucket")), **given)
    intent = Intent(**STAMP(), replica_id=0, attempt=1, leg=1, executor="test", why="test")
    found.store.create(keys.intent(0, 1), intent.to_bytes())
    remember(RunLog(found.store))
    return found


@pytest.fixture
def run_log(fleet: Fleet) -> RunLog:
    return RunLog(fleet.store)


def change_run(fleet: Fleet) -> None:
    """Let run.json name another entrypoint and other arguments."""
    body = json.loads(fleet.store.get(keys.RUN))
    body["config"] |= {"entrypoint": "evil:train", "args": {"who": "the bucket"}}
    fleet.store.put(keys.RUN, json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n")


def begin_leg(fleet: Fleet) -> Begin:
    """Let the run end, and begin leg 2 with other arguments."""
    participant = fleet.join(0, attempt=1)
    for _ in range(2):  # the last one closes the leg
        play([participant], [1.0])
    participant.finish_leg()
    named = {"from_round": None, "by": "somebody", "why": "test", "stamp": STAMP}
    return begin_next_leg(RunLog(fleet.store), rounds=1, change={"args.who": "the bucket"}, **named)


def loaded(name: str) -> Callable[[object], None]:
    raise AssertionError(f"{name} is what the bucket chose")


def attempt(run_log: RunLog) -> Ending:
    """The end of the attempt, as the launcher pinned it, on the bucket as it is now."""
    return run_attempt(
        run_log.store.url,
        0,
        1,
        run_log.launched(run_log.begin_of(1).record),
        clock=SystemClock(),
        background=ThreadBackground(),
        environ={},
        load_libraries=lambda: None,
        load_entrypoint=loaded,
    )


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (change_run, r"run\.json in .* it was changed after the launch"),
        (lambda log: log.store.put(keys.RUN, b"[" * 1000), r"run\.json in .* it was changed after the launch"),
        (begin_leg, r"legs/2/begin\.json in .* changes args\.who, with other values"),
    ],
    ids=["run.json", "junk", "a leg"],
)
def test_a_process_refuses_a_configuration_that_its_launcher_did_not_pin(attack, words, fleet, run_log):
    attack(fleet)
    ended = attempt(run_log)
    assert ended.code == EXIT_PERMANENT, ended
    with pytest.raises(ConfigError, match=words):
        raise ConfigError(ended.unrecorded)


def test_a_relaunch_names_the_run_json_of_the_launch_in_its_command(fleet, run_log, tmp_path):
    requests = LaunchRequests(run_log.run, run_log.launched(run_log.begin_of(1).record), run_log.store.url)
    change_run(fleet)
    _, *command = requests.request(0, 1, shares_machine=True).command
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_PERMANENT
    assert "it was changed after the launch" in done.stderr and "evil" not in done.stderr


def offer_of(run_log: RunLog, settings: str = "") -> Offer:
    pinned = run_log.launched(run_log.begin_of(1).record)
    pinned = type(pinned)(pinned.run_sha256, settings)
    command, env = LaunchRequests(run_log.run, pinned, run_log.store.url).program(0, 1, shares_machine=False)
    given = {"run_id": "run-1", "replica_id": 0, "attempt": 1, "code": keys.code("a" * 64)}
    return Offer(**STAMP(), **given, command=tuple(command), env=env)


def test_a_machine_that_joined_runs_the_legs_that_its_user_has_begun_and_no_others(fleet, run_log):
    begin = begin_leg(fleet)
    offered = offer_of(run_log, settings_sha256(begin.settings))
    run_log.store.delete(keys.begin(2))
    why_not = only_own_offers(run_log.store)
    assert not why_not(offer_of(run_log))
    assert "not that of the run which you launched" in why_not(offered)
    remember_leg(run_log, begin)
    assert not why_not(offered)


def test_the_executor_of_a_run_is_not_made_for_a_leg_that_somebody_else_has_begun(fleet, run_log):
    begin = begin_leg(fleet)
    with pytest.raises(ConfigError, match=r"leg 2 changes args\.who, and was not begun by you on this machine"):
        executor_of_run(RunReader(run_log.store), "attach", trust_bucket=False)
    remember_leg(run_log, begin)
    assert not why_not_launched_here(run_log)


def test_other_bytes_under_the_key_of_the_code_to_send_are_told_before_the_run_exists(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tiny_workloads.py").write_text("def train(ctx): ...\n")
    given = {"code": tmp_path / "code", "executor": LocalProcessExecutor(tmp_path / "executor")}
    store, stamp = str(tmp_path / "bucket"), {"write_id": "w", "at": 0.0}
    prepared = prepare_launch("tiny_workloads:train", store, given, run_id="r", stamp=stamp, dry=True)
    key = keys.code(prepared.archive.sha256)
    open_store(store).create(key, b"other bytes")
    with pytest.raises(RunFolderTaken, match=key):
        launch("tiny_workloads:train", store=store, **given)
    assert [info.key for info in open_store(store).list("")] == [key]
