"""What launcher, supervisor and commands do with the keys of a signed run."""

import json
import stat
from pathlib import Path

import pytest
from cli_support import diloco_here
from real_runs import wait_for
from scripted import ScriptedExecutor

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError, Superseded
from diloco_orchestrator.executors.contract import LaunchRequest
from diloco_orchestrator.executors.local_process import LocalProcessExecutor
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.launching.prepare import prepare_launch
from diloco_orchestrator.launching.run import launch
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Halt, Result, Run
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.replica.attempt.attempt import claim_attempt
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import check_signed_by, keep_key, of_run
from diloco_orchestrator.signing.identity import Identity
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, ENV_RUN_KEY, keep
from diloco_orchestrator.signing.keys import RunKey
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.launch_request import LaunchRequests

STAMP = Stamp("test", lambda: 0.0)
RUN_KEY = RunKey(bytes(range(32)))


def run_of(key: RunKey | None = RUN_KEY) -> Run:
    config = make_config({"entrypoint": "m:f", "replicas": 2})
    return Run(
        **STAMP(), run_id="r", config=config, package_version="0", signed_by=None if key is None else key.signed_by
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A signed run that has begun, whose key is in this user's state folder."""
    keep_key(RUN_KEY)
    create_run(of_run(open_store(str(tmp_path / "run"))), run_of(), "launch", STAMP)
    return tmp_path / "run"


def requests(key: RunKey | None = RUN_KEY) -> LaunchRequests:
    operator = None if key is None else key.operator("a" * 64)
    return LaunchRequests(run_of(key), Launched("a" * 64), "/somewhere", operator=operator)


@pytest.mark.parametrize(
    ("url", "options", "signed"),
    [
        ("s3://bucket/run", {}, True),
        ("gs://bucket/run", {}, True),
        ("hf://buckets/me/run", {}, True),
        ("s3://bucket/run", {"signed": False}, False),
        ("s3://bucket/run", {"executor": JoinExecutor()}, False),
        ("s3://bucket/run", {"executor": JoinExecutor(machines=[Identity(bytes(32)).public.text()])}, True),
        ("/somewhere", {}, False),
        ("file:///somewhere", {}, False),
        ("/somewhere", {"signed": True}, True),
    ],
)
def test_a_run_in_a_bucket_is_signed_unless_its_launch_says_otherwise(url, options, signed):
    given = {"executor": LocalProcessExecutor(), "replicas": 2, "rounds": 2, **options}
    prepared = prepare_launch("tiny_workloads:train", url, given, run_id="r", stamp=STAMP(), dry=True)
    assert (prepared.run.signed_by is not None) is signed
    assert all((ENV_ATTEMPT_KEY in each.secrets) is signed for each in prepared.requests)
    by_itself = "://" in url and "file:" not in url and not signed and "signed" not in options
    assert ("--machines" in prepared.unsigned) is by_itself, "its user is told why, and what to do"


@pytest.mark.parametrize("signed", [True, False])
def test_a_launch_says_where_the_keys_are_without_which_nobody_goes_on(tmp_path, monkeypatch, caplog, signed):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    caplog.set_level("INFO")
    url = str(tmp_path / "run")
    launch("tiny_workloads:train", store=url, executor=ScriptedExecutor(), replicas=2, rounds=2, signed=signed)
    assert (f"for another machine: diloco key {url} --export" in caplog.text) is signed
    assert (f"They are in {tmp_path / 'state'}" in caplog.text) is signed


def test_each_attempt_gets_a_key_of_its_own_as_a_secret_and_no_attempt_gets_the_runs(tmp_path):
    executor = LocalProcessExecutor(tmp_path)
    secrets = [requests().request(*who, True).secrets for who in ((0, 1), (0, 2), (1, 1))]
    assert len({each[ENV_ATTEMPT_KEY] for each in secrets}) == 3
    assert requests().request(0, 1, True).secrets == secrets[0], "another coordinator launches it with the same key"
    assert not any(ENV_RUN_KEY in each for each in secrets)
    shown = json.dumps(executor.plan(requests().request(0, 1, True)))
    for private in (RUN_KEY.text(), secrets[0][ENV_ATTEMPT_KEY].removeprefix("diloco-keys-")):
        assert private not in shown
    assert ENV_ATTEMPT_KEY not in requests(None).request(0, 1, True).secrets


def test_a_key_is_redacted_wherever_it_is_printed():
    secret = requests().request(0, 1, True).secrets[ENV_ATTEMPT_KEY]
    assert "diloco-key" not in redact(f"keys: {secret} and {RUN_KEY.text()}", {})


def test_a_signed_run_needs_machines_that_can_get_keys():
    run, operator = run_of().model_copy(update={"code_sha256": "a" * 64}), RUN_KEY.operator("a" * 64)
    for machines in ((), (Identity(bytes(32)).public.text(),)):
        executor = JoinExecutor(machines=machines)
        executor.use_store("/somewhere", {})
        launching = LaunchRequests(run, Launched("a" * 64), "/x", dry=True, operator=operator)
        if machines:
            launching.check(executor)
            continue
        with pytest.raises(ConfigError, match="needs machines that can get an attempt's keys"):
            launching.check(executor)


def test_a_runs_key_is_this_users_alone(tmp_path):
    path = keep(RUN_KEY, {"XDG_STATE_HOME": str(tmp_path)})
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="only this user can write to"):
        keep(RUN_KEY, {"XDG_STATE_HOME": str(tmp_path)})


def test_a_replica_that_its_user_starts_signs_with_the_runs_key(folder, monkeypatch):
    claim_attempt(open_store(str(folder)), 0, None, ManualClock(), STAMP)
    assert AttemptRecords(RunLog(open_store(str(folder))).store).claims(0) == {1}
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent / "elsewhere"))
    with pytest.raises(ConfigError, match="needs keys of"):
        claim_attempt(open_store(str(folder)), 1, None, ManualClock(), STAMP)


def test_an_attempts_process_claims_its_own_attempt_only(folder):
    log = RunLog(open_store(str(folder)))
    claim_attempt(open_store(str(folder)), 0, None, ManualClock(), STAMP)
    environ = {ENV_ATTEMPT_KEY: RUN_KEY.operator(log.run_sha256).of_attempt(log.run_sha256, 0, 1).text()}
    with pytest.raises(Superseded):  # it reads the intent that the run's key signed, and the claim
        claim_attempt(of_run(open_store(str(folder)), environ), 0, 1, ManualClock(), STAMP)


@pytest.mark.parametrize("command", ["status", "verify", "key"])
def test_commands_name_the_key(command, folder):
    said = diloco_here(command, str(folder), cwd=folder.parent)
    assert said.returncode == 0 and RUN_KEY.signed_by.key in said.stdout


def test_verify_tells_a_run_by_another_key(folder):
    for key, code in ((RUN_KEY.signed_by.key, 0), (RunKey(bytes(32)).signed_by.key, 4)):
        said = diloco_here("verify", str(folder), "--signed-by", key, cwd=folder.parent)
        assert said.returncode == code, said.stdout
    unsigned = folder.parent / "unsigned"
    create_run(open_store(str(unsigned)), run_of(None), "launch", STAMP)
    said = diloco_here("verify", str(unsigned), "--signed-by", RUN_KEY.signed_by.key, cwd=folder.parent)
    assert said.returncode == 4 and "the run is not signed" in said.stdout


def test_verify_and_status_name_what_nobody_signed(folder):
    junk = folder / keys.begin(2)
    junk.parent.mkdir(parents=True)
    junk.write_bytes(b"{}")
    for command in ("status", "verify"):
        said = diloco_here(command, str(folder), cwd=folder.parent)
        assert keys.begin(2) in said.stdout, said.stderr


def test_without_the_key_nothing_is_written_and_the_key_is_named(folder):
    here = diloco_here("key", "--export", str(folder), cwd=folder.parent)
    assert here.stdout.startswith("diloco-keys-") and RUN_KEY.text() not in here.stdout
    elsewhere = {"XDG_STATE_HOME": str(folder.parent / "elsewhere")}
    before = sorted(folder.rglob("*"))
    for command in (
        ["halt", str(folder)],
        ["key", "--export", str(folder)],
        ["gc", "--payloads", "needed", str(folder)],
    ):
        said = diloco_here(*command, cwd=folder.parent, environ=elsewhere)
        assert said.returncode == 2 and RUN_KEY.signed_by.key in said.stderr, command
        assert "--export" in said.stderr
    assert sorted(folder.rglob("*")) == before
    said = diloco_here("halt", str(folder), cwd=folder.parent, environ={**elsewhere, ENV_RUN_KEY: RUN_KEY.text()})
    assert said.returncode == 0 and RunLog(open_store(str(folder))).halt(1) is not None


def test_attach_without_a_key_watches_and_names_it(folder):
    log = RunLog(open_store(str(folder)))
    fields = {"status": "halted", "round": 0, "outer_steps": 0, "reason": "the user's wish"}
    assert log.store.create(keys.halt(1), Halt(**STAMP(), leg=1, by="user", reason="enough").to_bytes())
    assert log.store.create(keys.result(1), Result(**STAMP(), leg=1, **fields).to_bytes())
    elsewhere, before = {"XDG_STATE_HOME": str(folder.parent / "elsewhere")}, sorted(folder.rglob("*"))
    said = diloco_here("attach", str(folder), cwd=folder.parent, environ=elsewhere)
    assert "watching only: " in said.stderr and RUN_KEY.signed_by.key in said.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_replaced_run_json_is_told_by_the_key_that_is_asked_for_or_held(folder, monkeypatch):
    """Whoever may overwrite objects could put an unsigned run in the place of a signed one."""
    key, log = RUN_KEY.signed_by.key, RunLog(open_store(str(folder)))
    check_signed_by(log.run, "here", key)
    monkeypatch.setenv(ENV_RUN_KEY, RUN_KEY.text())
    check_signed_by(log.run, "here", None)
    for expected in (None, key):
        with pytest.raises(ConfigError, match="somebody has replaced"):
            check_signed_by(run_of(None), "here", expected)
    with pytest.raises(ConfigError, match="is signed by"):
        check_signed_by(run_of(RunKey(bytes(32))), "here", key)
    monkeypatch.delenv(ENV_RUN_KEY)
    check_signed_by(run_of(None), "here", None)
    said = diloco_here("pull", str(folder), str(folder.parent / "model"), "--signed-by", "ed25519:x", cwd=folder.parent)
    assert said.returncode == 2 and key in said.stderr and not (folder.parent / "model").exists()


def test_replicas_of_this_machine_do_not_inherit_the_launchers_keys(tmp_path, monkeypatch):
    monkeypatch.setenv(ENV_RUN_KEY, RUN_KEY.text())
    program = "import os; print('KEYS', sorted(n for n in os.environ if n.endswith('_KEY') and 'DILOCO' in n))"
    executor = LocalProcessExecutor(tmp_path)
    request = LaunchRequest("run-1", 0, 1, ["python", "-c", program], secrets={ENV_ATTEMPT_KEY: "an attempt's"})
    handle = executor.launch(request)
    wait_for(lambda: executor.poll(handle).state.ended, "the process")
    assert f"KEYS {[ENV_ATTEMPT_KEY]}" in "\n".join(executor.logs(handle))
