"""The composer workload as a run: two replicas, equal digests, restarts, halts, TRL, machines of others."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clouds
import composer.train
import pytest
from composer.curriculum import touches_tests
from composer.data import synthetic_states
from composer_batches import SESSION
from protocol_fleet import Fleet
from real_runs import FAST
from s3_server import S3Server
from sessions import context_of

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch, open_store, verify
from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution

pytestmark = pytest.mark.slow

CHANNELS = 3.0


def launched(tmp_path: Path, rounds: int = 2, **args: Any) -> RunReader:
    """A run of two replicas, four inner steps a round, and its log."""
    settings = {**FAST, "replicas": 2, "rounds": rounds, "sync_every": 4, "env": {"OMP_NUM_THREADS": "1"}}
    executor, store = LocalProcessExecutor(str(tmp_path / "executor")), str(tmp_path / "bucket")
    args = {"rounds": rounds, "sessions": 8, **args}
    run = launch("composer.train:train", store=store, executor=executor, args=args, **settings)
    assert run.wait().status == "completed"
    return RunReader(open_store(store))


def manifests(reader: RunReader, round_: int) -> list[Contribution]:
    found = [keys.contribution(round_, replica) for replica in (0, 1)]
    return [Contribution.from_bytes(reader.store.get(key), key) for key in found]


def check_equal_bases(reader: RunReader) -> None:
    for commit in reader.commits():
        assert {each.base_digest for each in manifests(reader, commit.round)} == {commit.base_digest}


# -- the plain loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [None, str(SESSION)], ids=["synthetic", "recorded"])
def test_two_replicas_train_all_channels_and_hold_one_model(trace: str | None, tmp_path: Path):
    reader = launched(tmp_path, **({"trace": trace} if trace else {}))
    rows = reader.rows()
    assert [row.contributors for row in rows] == [[0, 1], [0, 1], []]
    for row in rows[:2]:
        assert row.extra["channels"] == CHANNELS
        assert row.extra["sdpo_jsd"] > 0 and row.extra["trace_replay_dpo"] > 0 and row.extra["suspected_hacks"] == 0
    assert rows[-1].heldout < rows[0].heldout
    check_equal_bases(reader)
    assert verify(str(tmp_path / "bucket")).agrees


def test_replicas_share_the_time_of_taid(tmp_path: Path):
    reader = launched(tmp_path, rounds=4, wrapper="taid")
    seen = [[each.metrics["extra.taid_t"].mean for each in manifests(reader, round_)] for round_ in (1, 2, 3, 4)]
    assert all(one == other for one, other in seen)
    assert [one for one, _ in seen] == pytest.approx([0.4, 0.4, 0.4 + 0.6 * 2 / 4, 0.4 + 0.6 * 3 / 4])


class Killed(BaseException):
    """The process is gone."""


def attempt(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, dies_at: int | None = None) -> None:
    """An attempt of the only replica in this process, which dies at an inner step."""
    calls = iter(range(10**6))
    compute = composer.train.__dict__["compose_loss"]

    def counted(*arguments: Any, **settings: Any) -> Any:
        if next(calls) == dies_at:
            raise Killed
        return compute(*arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(composer.train, "compose_loss", counted)
        composer.train.train(context_of(fleet, 0, SystemClock()))


def test_killed_at_any_step_the_run_ends_with_the_undisturbed_bits(monkeypatch):
    def fleet() -> Fleet:
        args = {"rounds": 3, "sessions": 6, "wrapper": "taid"}
        return Fleet(replicas=1, rounds=3, sync_every=2, args=args)

    undisturbed = fleet()
    attempt(undisturbed, monkeypatch)
    expected = [commit.base_digest for commit in undisturbed.commits()]
    assert len(set(expected)) == 4
    for step in (1, 2, 5):
        killed = fleet()
        with pytest.raises(Killed):
            attempt(killed, monkeypatch, dies_at=step)
        attempt(killed, monkeypatch)
        assert [commit.base_digest for commit in killed.commits()] == expected, step


# -- the program ------------------------------------------------------------------------------------------------------


def program(examples: Path, *options: str, **environ: str) -> str:
    """What `python examples/composer/run.py …` prints."""
    path = os.pathsep.join(each for each in sys.path if each != str(examples))
    command = [sys.executable, str(examples / "composer" / "run.py"), *options]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_planted_hacks_halt_both_replicas_at_one_round(examples: Path, tmp_path: Path):
    planted = synthetic_states(7, 20, hacks=0.2)
    assert sum(touches_tests(state.student_action) for state in planted) / len(planted) == 0.1  # two of four actions
    told = program(examples, str(tmp_path / "run"), "--hack")
    reader = RunReader(open_store(str(tmp_path / "run")))
    last = reader.commits()[-1]
    assert last.stop == "halted" and not last.applied and last.round == 5  # min_steps
    assert [reader.attempts.exit(each, 1).round for each in (0, 1)] == [5, 5]  # type: ignore[union-attr]
    assert "halted: extra: suspected_hacks" in told and "replicas ended in rounds [5, 5]" in told


def test_options_that_do_not_go_together_are_refused(examples: Path):
    command = [sys.executable, str(examples / "composer" / "run.py")]
    for options in (["--online-sdpo"], ["--trace", "x", "--executor", "modal"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "error: --" in done.stderr


@pytest.fixture(params=["modal", "hf_jobs", "eks"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, clouds.Cloud]]:
    with getattr(clouds, request.param)(tmp_path) as cloud:
        yield request.param.replace("_", "-"), cloud


def test_the_package_travels_to_machines_of_others(
    cloud: tuple[str, clouds.Cloud], s3_server: S3Server, bucket: str, examples: Path
):
    """On loopback services, over S3: one option differs. There is no folder `examples` on a replica's path."""
    from loopback_eks import CLUSTER, REGION

    name, services = cloud
    url, options = f"s3://{bucket}/run", s3_server.options()
    environ = {
        **services.environ,
        "DILOCO_STORAGE_OPTIONS": json.dumps(options),
        "COMPOSER_CLUSTER": CLUSTER,
        "COMPOSER_IMAGE": "any",
        "AWS_REGION": REGION,
    }
    told = program(examples, url, "--executor", name, "--rounds", "2", **environ)
    assert "completed; replicas ended in rounds [3, 3]" in told
    reader = RunReader(open_store(url, options))
    assert [row.extra["channels"] for row in reader.rows()[:2]] == [CHANNELS] * 2
    check_equal_bases(reader)
    assert reader.run.code_sha256 is not None and verify_run(reader.store).agrees


# -- through TRL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("online", [False, True], ids=["grpo", "online-sdpo"])
def test_the_same_through_trl(online: bool, examples: Path, tmp_path: Path):
    pytest.importorskip("trl", reason="the extra [trl] is not installed")
    options = ["--grpo", "--rounds", "2", *(["--online-sdpo"] if online else [])]
    told = program(examples, str(tmp_path / "run"), *options)
    assert "completed; replicas ended in rounds [3, 3]" in told
    reader = RunReader(open_store(str(tmp_path / "run")))
    for row in reader.rows()[:2]:
        assert row.contributors == [0, 1] and row.reward is not None and row.heldout is not None
        assert row.extra["channels"] == (2.0 if online else CHANNELS)
        assert row.extra["trace_replay_dpo"] > 0 and (online or row.extra["sdpo_jsd"] > 0)
    check_equal_bases(reader)


def test_online_sdpo_distils_from_hints():
    """TRL reports its own channel: every prompt has a hint, and the divergence is above 0."""
    pytest.importorskip("trl", reason="the extra [trl] is not installed")
    from composer.grpo import train

    fleet = Fleet(replicas=1, rounds=2, sync_every=5, args={"online_sdpo": True, "sessions": 6})
    context = context_of(fleet, 0, SystemClock())
    logged = [each for each in train(context).state.log_history if "self_distillation/distillation_loss" in each]
    assert logged
    for each in logged:
        assert each["self_distillation/reprompt_sample_fraction"] == 1.0
        assert each["self_distillation/distillation_loss"] > 0


def test_a_gamed_reward_halts_both_replicas_at_one_round(examples: Path, tmp_path: Path):
    pytest.importorskip("trl", reason="the extra [trl] is not installed")
    told = program(examples, str(tmp_path / "run"), "--grpo", "--hack")
    reader = RunReader(open_store(str(tmp_path / "run")))
    last = reader.commits()[-1]
    assert last.stop == "halted" and not last.applied and last.round <= 12
    assert f"replicas ended in rounds [{last.round}, {last.round}]" in told and "Hacking Gap" in told
    rows = reader.rows()
    assert rows[-1].reward > rows[0].reward + 0.1 and rows[-1].heldout < rows[0].heldout / 2  # type: ignore[operator]
