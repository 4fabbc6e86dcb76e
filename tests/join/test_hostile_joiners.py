"""Hostile strangers as real machines: a signed run on an S3 server that checks signatures, joined by eight links."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hostile_machines import FALLING, MUCH_NOISE
from hostile_replicas import ATTACKS
from in_one_process import SmallRun
from joined import ROOT
from patience import PATIENCE_S
from real_runs import wait_for
from safetensors.torch import load
from signed_s3 import SignedS3, running_signed_s3
from tiny_workloads import FOR_STRANGERS, STEPS_FOR_STRANGERS, heldout_at_once, mlp, train_or_attack

from diloco_orchestrator import RunReader
from diloco_orchestrator.cli.invite_command import invite
from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.protocol.signed_objects import parse_stored
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

pytestmark = pytest.mark.slow
URL = "s3://bucket/run"
LAUNCHED, STRANGERS, ROUNDS = 3, range(3, 11), 5
HOSTILE = 8, 9, 10
FLOOD, FORGED, DIGITS = "late flood", "forged names and ids", "counts of 400 digits"
# Each run takes a minute of CPU time, and two to five minutes where two cores are busy.
PLAYED = (
    ("sign flip x10", "random noise of the usual norm", "scaled x50"),
    ("sign flip, just below the limit", "drift: a constant direction added", "replay of its first payload"),
    ("sign flip x1", "zero update", MUCH_NOISE),
    ("3e38 in every seventh value", "NaN in every seventh value", "infinity in every seventh value"),
    ("x50, declared with the usual norm", "other bytes than the manifest names", "wrong layout"),
    ("huge counts of steps and tokens", "wrong base claim", "abstaining"),
    ("lying scores, high", "lying scores, low", "scores that are not finite"),
    ("copy of another's payload", DIGITS, FLOOD),
    (FALLING, FORGED, FORGED),
    (FALLING, FALLING, FALLING),
)
assert set(ATTACKS) <= {name for names in PLAYED for name in names}
# Averaged in no round: what is refused by its form, and what scores leave out from the first round on.
REFUSED = {
    "3e38 in every seventh value": "unverifiable",
    "NaN in every seventh value": "unverifiable",
    "infinity in every seventh value": "unverifiable",
    "x50, declared with the usual norm": "unverifiable",
    "wrong layout": "unverifiable",
    "wrong base claim": "wrong_base",
    "abstaining": "abstention",
}
# Who sends in time nothing that counts: a signed manifest that cannot be read, or is in another's name, is nobody's.
SILENT = {FLOOD, FORGED, DIGITS}
LEFT_OUT = {name for name in ATTACKS if name.startswith("sign flip")} | {"huge counts of steps and tokens"}
NEVER_AVERAGED = {*REFUSED, *LEFT_OUT, *SILENT}
SETTINGS = {"rounds": ROUNDS, "sync_every": STEPS_FOR_STRANGERS, "snapshot_every": ROUNDS}


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
    model, last = mlp(), max(each.round for each in RunReader(store).commits() if each.applied)
    model.load_state_dict(load(store.get(keys.snapshot(last, "model.safetensors"))))
    with torch.no_grad():
        losses = heldout_at_once(model, list(range(FOR_STRANGERS, 4 * FOR_STRANGERS)))
    return sum(losses) / len(losses)


@functools.cache
def undisturbed() -> float:
    """The loss at the end of the same run in which nobody attacks, played in threads."""
    run = SmallRun(LAUNCHED + len(STRANGERS), aggregate="agreeing_mean", seed=0, quorum=None, **SETTINGS)
    run.train(train_or_attack)
    return fresh_loss(run.store)


@pytest.mark.parametrize("scripts", PLAYED, ids=" and ".join)
def test_three_hostile_machines_of_eight_that_joined_by_a_link_change_nothing(
    scripts: tuple[str, ...], tmp_path: Path, monkeypatch
):
    """With default settings of a run with strangers, the kill-switch and half of the replicas as quorum among them."""
    attackers = dict(zip(HOSTILE, scripts, strict=True))
    # Of two that forge names one has the bucket's credentials, the other signed requests and no account.
    by_requests = {HOSTILE[-1]} if scripts.count(FORGED) > 1 else set()
    with running_signed_s3() as server:
        bucket = invited_run(server, attackers, by_requests, tmp_path, monkeypatch)
        store = of_run(bucket)
        assert verify_run(store).agrees
        payloads, log = ContributionReader(store), RunReader(store).commits()
        commits, loss = [each for each in log if each.applied], fresh_loss(store)
        checks = [[payloads.checked(commit, each) for each in commit.checks or ()] for commit in commits]
        if by_requests:
            check_forged(bucket, server.server.refused_urls)
    seen = {each: [of_round(commit, each) for commit in commits] for each in HOSTILE}
    for each, name in attackers.items():
        print(f"{each}, {name}: {seen[each]}")
    assert "ended (error)" not in told(tmp_path / "launcher"), told(tmp_path / "launcher")  # of an attacker either
    assert log[-1].stop == "completed" and len(commits) == ROUNDS, [each.reason for each in log]
    assert all({each.replica_id for each in named if each.scored} == set(range(LAUNCHED)) for named in checks)
    for each, name in attackers.items():
        assert name not in NEVER_AVERAGED or "averaged" not in seen[each], (name, seen)
        assert name not in REFUSED or REFUSED[name] in seen[each], (name, seen)
        assert name not in SILENT or set(seen[each]) == {"silent"}, (name, seen)
        assert name not in LEFT_OUT or "left out" in seen[each], (name, seen)
    # What strangers report of scores is not looked at: nobody deals them a share.
    said = {each.reason for commit in log for each in commit.discounted if each.replica_id in STRANGERS}
    assert all("it was not dealt" in each for each in said), said
    assert bool(said) is any(name == FALLING or "scores" in name for name in scripts)
    averaged = {each.replica_id for commit in commits for each in commit.answers if each.averaged}
    assert set(range(8)) <= averaged, [each.reason for each in commits]
    clean = undisturbed()
    print(f"loss {loss:.4f}, undisturbed {clean:.4f}: {loss / clean:.3f}")
    assert loss < 1.02 * clean, (loss, clean)


def of_round(commit: Commit, replica_id: int) -> str:
    """What became of a replica's answer to a round."""
    if replica_id in {each.replica_id for each in commit.quarantined}:
        return "left out"
    kinds = {each.replica_id: "averaged" if each.averaged else each.kind for each in commit.answers}
    return kinds.get(replica_id, "silent")


def check_forged(bucket: Store, refused: set[tuple[str, str]]) -> None:
    """Manifests of replicas that do not exist: nobody's where the bucket takes them, refused where it checks rights."""
    written = [key for info in bucket.list(keys.ROUNDS) if (key := _contribution(info.key)) and key[1] >= 100]
    assert {replica_id for _, replica_id in written} == set(range(100, 120))
    for key in written:
        with pytest.raises(ObjectMissing, match="was not signed"):
            of_run(bucket).get(keys.contribution(*key))
    asked = [_contribution(path.removeprefix("/bucket/run/")) for method, path in refused if method == "PUT"]
    assert {key[1] for key in asked if key} >= set(range(100, 120))


def _contribution(name: str) -> tuple[int, int] | None:
    """Round and replica of a manifest stored under `name`."""
    found = parse_stored(name)
    return None if found is None else keys.contribution.parse(found.key)  # type: ignore[return-value]


def invited_run(
    server: SignedS3,
    attackers: dict[int, str],
    by_requests: set[int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Store:
    """Launch the run, invite and join eight machines, and wait for its end.

    `by_requests`: replicas whose machines have no account, and see the bucket through signed requests.
    """
    launcher, settings = folder / "launcher", folder / "settings.toml"
    # The first round waits for so long for who is silent.
    startup_s = 90.0 if SILENT.intersection(attackers.values()) else PATIENCE_S
    waits = f"poll_s = 0.5\nheartbeat_s = 2.0\nstartup_timeout_s = {startup_s}\nround_timeout_s = {PATIENCE_S}\n"
    settings.write_text(f"[timing]\n{waits}")
    for name, value in {**server.environ(), "XDG_STATE_HOME": str(launcher)}.items():
        monkeypatch.setenv(name, value)
    run = ["run", "tiny_workloads:train_or_attack", "--store", URL, "--replicas", str(LAUNCHED + len(STRANGERS))]
    run += ["--invited", ",".join(map(str, STRANGERS)), "--rounds", str(ROUNDS), "--seed", "0"]
    run += ["--sync-every", str(STEPS_FOR_STRANGERS), "--snapshot-every", str(ROUNDS), "--config", str(settings)]
    run += ["--executor", f"local:{LAUNCHED}", "--executor", f"join:{len(STRANGERS)}"]
    processes = [diloco(launcher, server.environ(), *run)]
    store = open_store(URL, server.options())

    def is_launched() -> bool:
        return any(info.key == keys.RUN for info in store.list("")) or processes[0].poll() is not None

    try:
        wait_for(is_launched, "the launch")
        for replica_id in STRANGERS:
            without = replica_id in by_requests
            access = ["--presigned", "--credentials-last", "1h"] if without else ["--own-credentials"]
            args = [URL, "--replica", str(replica_id), *access]
            made = CliRunner().invoke(invite, args, standalone_mode=False)
            assert made.exception is None, (made.exception, told(launcher))
            hostile = {"HOSTILE": attackers[replica_id]} if replica_id in attackers else {}
            environ = {**({} if without else server.environ()), **hostile}
            processes.append(
                diloco(folder / f"stranger-{replica_id}", environ, "join", made.stdout.strip(), "--every", "2")
            )
        assert processes[0].wait() == 0, told(launcher)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return store
