"""Hostile strangers as real machines: a signed run on an S3 server that checks signatures, joined by eight links."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from in_one_process import SmallRun
from joined import ROOT
from patience import PATIENCE_S
from real_runs import wait_for
from safetensors.torch import load
from signed_s3 import SignedS3, running_signed_s3
from tiny_workloads import FOR_STRANGERS, STEPS_FOR_STRANGERS, heldout_at_once, mlp, train_or_attack

from diloco_orchestrator import RunReader
from diloco_orchestrator.cli.invite_command import invite
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

pytestmark = pytest.mark.slow
URL = "s3://bucket/run"
LAUNCHED, STRANGERS, ROUNDS = 3, range(3, 11), 5
HOSTILE = 8, 9, 10
SCRIPTS = (
    ("sign flip x10", "noise", "scaled x50"),
    ("sign flip, just below the limit", "drift", "replay"),
    ("sign flip x1", "zero update", "honest and noise"),
)
SETTINGS = {"rounds": ROUNDS, "sync_every": STEPS_FOR_STRANGERS, "snapshot_every": ROUNDS, "guard": {"rule": "off"}}


def diloco(folder: Path, environ: dict[str, str], *args: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"]))
    kept |= {"XDG_STATE_HOME": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    with (folder / "output.txt").open("a") as output:  # nobody reads a pipe while the run goes on
        program = [sys.executable, "-m", "diloco_orchestrator.cli.main", *args]
        return subprocess.Popen(program, env=kept, cwd=folder, stdout=output, stderr=output, text=True)


def told(folder: Path) -> str:
    return (folder / "output.txt").read_text()


def fresh_loss(store: Store) -> float:
    """Of the run's last model, on items that nobody has scored or trained on."""
    model = mlp()
    values = load(store.get(keys.snapshot(ROUNDS, "model.safetensors")))
    model.load_state_dict(values)
    with torch.no_grad():
        losses = heldout_at_once(model, list(range(FOR_STRANGERS, 4 * FOR_STRANGERS)))
    return sum(losses) / len(losses)


def undisturbed() -> float:
    """The loss at the end of the same run in which nobody attacks, played in threads."""
    run = SmallRun(LAUNCHED + len(STRANGERS), aggregate="agreeing_mean", seed=0, **SETTINGS)
    run.train(train_or_attack)
    return fresh_loss(run.store)


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_three_hostile_machines_of_eight_that_joined_by_a_link_change_nothing(
    scripts: tuple[str, ...], tmp_path: Path, monkeypatch
):
    attackers = dict(zip(HOSTILE, scripts, strict=True))
    with running_signed_s3() as server:
        store = invited_run(server, attackers, tmp_path, monkeypatch)
        run_store = of_run(store)
        assert verify_run(run_store).agrees
        payloads, commits = ContributionReader(run_store), RunReader(store).commits()[:ROUNDS]
        loss = fresh_loss(run_store)
    for commit in commits:
        named = [payloads.checked(commit, each) for each in commit.checks or ()]
        assert {each.replica_id for each in named if each.scored} == set(range(LAUNCHED))
    out = [{each.replica_id for each in commit.quarantined} for commit in commits]
    averaged = [{each.replica_id for each in commit.answers if each.averaged} for commit in commits]
    print({name: sum(each in left for left in out) for each, name in attackers.items()}, "rounds of", ROUNDS)
    # Who turns its work around, from the first round on; others where it shows.
    climbs = {each for each, name in attackers.items() if name.startswith("sign flip")}
    assert all(climbs <= each for each in out), (out, averaged)
    assert set(range(8)) <= set.union(*averaged) and not climbs & set.union(*averaged), (out, averaged)
    clean = undisturbed()
    print("loss", loss, "undisturbed", clean)
    assert loss < 1.02 * clean, (loss, clean)


def invited_run(server: SignedS3, attackers: dict[int, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Launch the run, invite and join eight machines, and wait for its end."""
    launcher, settings = folder / "launcher", folder / "settings.toml"
    waits = f"poll_s = 0.5\nheartbeat_s = 2.0\nstartup_timeout_s = {PATIENCE_S}\nround_timeout_s = {PATIENCE_S}\n"
    settings.write_text(f"[timing]\n{waits}")
    for name, value in {**server.environ(), "XDG_STATE_HOME": str(launcher)}.items():
        monkeypatch.setenv(name, value)
    run = ["run", "tiny_workloads:train_or_attack", "--store", URL, "--replicas", str(LAUNCHED + len(STRANGERS))]
    run += ["--invited", ",".join(map(str, STRANGERS)), "--guard-rule", "off", "--rounds", str(ROUNDS), "--seed", "0"]
    run += [
        "--sync-every",
        str(STEPS_FOR_STRANGERS),
        "--quorum",
        "all",
        "--snapshot-every",
        str(ROUNDS),
        "--config",
        str(settings),
    ]
    run += ["--executor", f"local:{LAUNCHED}", "--executor", f"join:{len(STRANGERS)}"]
    processes = [diloco(launcher, server.environ(), *run)]
    store = open_store(URL, server.options())

    def is_launched() -> bool:
        return any(info.key == keys.RUN for info in store.list("")) or processes[0].poll() is not None

    try:
        wait_for(is_launched, "the launch")
        for replica_id in STRANGERS:
            args = [URL, "--replica", str(replica_id), "--own-credentials"]
            made = CliRunner().invoke(invite, args, standalone_mode=False)
            assert made.exception is None, (made.exception, told(launcher))
            hostile = {"HOSTILE": attackers[replica_id]} if replica_id in attackers else {}
            one, environ = folder / f"stranger-{replica_id}", {**server.environ(), **hostile}
            processes.append(diloco(one, environ, "join", made.stdout.strip(), "--every", "2"))
        assert processes[0].wait() == 0, told(launcher)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return store
