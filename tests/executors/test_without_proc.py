"""Processes of a machine without /proc: the tests of LocalProcessExecutor where psutil has to answer, as on macOS."""

import subprocess
import sys
from pathlib import Path

import no_proc
import pytest
from cli_support import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not no_proc.available(), reason="this process may make no mount namespace: run it as root")
def test_the_local_executor_does_all_it_promises_without_proc(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "tests/executors/test_local_process.py",
    ]
    done = subprocess.run(
        [sys.executable, no_proc.__file__, str(tmp_path / "without"), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]


@pytest.mark.skipif(not no_proc.available(), reason="this process may make no mount namespace: run it as root")
def test_a_process_is_known_by_its_start_and_found_by_its_environment_without_proc(tmp_path: Path):
    code = """
import os, subprocess, sys
from pathlib import Path
from executors.processes import ProcessId, commands_by_environment, find_by_environment, launcher_of

assert not Path("/proc/self/stat").exists()
mark = f"MARK_{os.getpid()}"  # another run of this test may be under way
waits, marked = [sys.executable, "-c", "input()"], {**os.environ, mark: "=x y"}
child = subprocess.Popen(waits, stdin=subprocess.PIPE, env=marked, start_new_session=True)
found = ProcessId.of(child.pid)
assert found == ProcessId.of(child.pid) and found.is_alive() and found.boot_id == ""
assert find_by_environment(mark, "=x y") == child.pid and find_by_environment(mark, "=x") is None
assert list(commands_by_environment(mark)) == [(child.pid, waits)] and launcher_of(child.pid) is None
grandchild = [sys.executable, "-c", "from executors.processes import *; print(launcher_of(int(input())))"]
assert int(subprocess.run(grandchild, input=str(child.pid), capture_output=True, text=True).stdout) == os.getpid()
assert not ProcessId(found.host, "", child.pid, found.start_ticks - 1).is_alive()
child.kill(), os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
assert ProcessId.of(child.pid) == found and not found.is_alive() and find_by_environment(mark, "=x y") is None
child.wait()
assert ProcessId.of(child.pid) is None
"""
    done = subprocess.run(
        [sys.executable, no_proc.__file__, str(tmp_path / "without"), sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
