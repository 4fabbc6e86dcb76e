"""The recipe for SkyPilot: its own parser takes the file, and its own script of the `run:` section serves a run.

Needs SkyPilot in some Python, named by DILOCO_SKYPILOT_PYTHON: its requirements do not go with those of the tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fast_s3 import running_fast_s3
from real_runs import FAST, wait_for

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/skypilot/replicas.yaml"
PYTHON = os.environ.get("DILOCO_SKYPILOT_PYTHON", sys.executable)
pytestmark = pytest.mark.slow

PARSE = """
import json, sys
import sky
from sky.skylet import log_lib
task = sky.Task.from_yaml(sys.argv[1])
task.update_envs({"RUN": sys.argv[2]})
print(json.dumps({
    "name": task.name, "nodes": task.num_nodes, "envs": task.envs, "setup": task.setup,
    "resources": [[each.accelerators, each.use_spot, each.job_recovery] for each in task.resources],
    "needs": json.dumps(sky.utils.yaml_utils.read_yaml(sys.argv[1])["secrets"]),
    "script": log_lib.make_task_bash_script(task.run, task.envs),
}))
"""


def parsed(home: Path, url: str) -> dict[str, Any]:
    """The task as SkyPilot reads it, and the script that it runs on the task's machine."""
    environ = {"HOME": str(home), "PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    if subprocess.run([PYTHON, "-c", "import sky"], env=environ, capture_output=True, check=False).returncode:
        pytest.skip("SkyPilot is not installed: DILOCO_SKYPILOT_PYTHON names the Python that has it")
    done = subprocess.run(
        [PYTHON, "-c", PARSE, str(RECIPE), url], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_skypilots_own_parser_takes_the_recipe(tmp_path: Path):
    task = parsed(tmp_path, "s3://bucket/run")
    assert (task["name"], task["nodes"], task["envs"]) == ("diloco-replica", 1, {"RUN": "s3://bucket/run"})
    assert json.loads(task["needs"]) == {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
    assert len(task["resources"]) == 3
    for accelerators, use_spot, recovery in task["resources"]:
        assert list(accelerators.values()) == [1] and use_spot
        assert recovery["recover_on_exit_codes"] == [75]  # `diloco join` after SIGTERM


def test_skypilots_script_of_the_recipe_serves_a_run(tmp_path: Path):
    """One job per replica, each with its own home, and with the variables that SkyPilot documents."""
    with running_fast_s3() as s3:
        url = "s3://bucket/run"
        script = parsed(tmp_path, url)["script"]
        jobs = [job(tmp_path / f"machine-{rank}", script, s3.environ()) for rank in range(2)]
        launcher = subprocess.run(
            [sys.executable, "-c", LAUNCHER, url],
            env={**os.environ, **s3.environ(), "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"]))},
            capture_output=True,
            text=True,
            check=False,
        )
        wait_for(lambda: all(each.poll() is not None for each in jobs), "the jobs end with the run")
    assert launcher.stdout.splitlines()[-1:] == ["completed"], launcher.stderr
    assert [each.returncode for each in jobs] == [0, 0]


LAUNCHER = f"""
import sys
from diloco_orchestrator import JoinExecutor, launch
settings = {FAST!r}
run = launch("tiny_workloads:train", store=sys.argv[1], executor=JoinExecutor(), replicas=2, rounds=3, sync_every=3,
             **settings)
print(run.wait().status)
"""


def job(home: Path, script: str, secrets: dict[str, str]) -> "subprocess.Popen[bytes]":
    """The machine of a job after its setup: a home with the virtual environment that `setup:` makes."""
    programs = home / "diloco/bin"
    programs.mkdir(parents=True)
    (home / "sky_workdir").mkdir()
    program = programs / "diloco"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m diloco_orchestrator.cli.main "$@"\n')
    program.chmod(0o755)
    (home / "task.sh").write_text(script)
    environ = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_TASK_ID": f"sky-managed-2026-01-01-00-00-00-000000_{home.name}_1-0",
        **secrets,
    }
    return subprocess.Popen(["/bin/bash", str(home / "task.sh")], env=environ)
