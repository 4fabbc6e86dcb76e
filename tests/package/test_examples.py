"""Every example is executed as its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


def run_example(name: str, *args: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_tried_here_and_listed():
    tried = "".join(path.read_text() for path in [Path(__file__), *(ROOT / "tests" / "examples").glob("*.py")])
    assert all(f'"{path.name}"' in tried for path in EXAMPLES.glob("*.py"))
    listed = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__init__.py", "__pycache__"}
    assert [name for name in sorted(names) if f"({name}" not in listed] == []


@pytest.mark.slow
def test_a_plain_loop_and_what_its_bucket_tells(tmp_path):
    run_example("plain_loop.py", str(tmp_path / "run"))
    told = run_example("inspect_bucket.py", str(tmp_path / "run"))
    assert "6 commits in one unbroken chain" in told and "after round 1: 0.bias (32,)" in told


@pytest.mark.slow
def test_islands_of_sharded_ranks(tmp_path):
    assert "round 6: held-out before" in run_example("island_fsdp.py", str(tmp_path / "run"))


@pytest.mark.slow
def test_resume_after_a_kill():
    assert "attempts of replica 1: [1, 2]" in run_example("resume_after_kill.py")


@pytest.mark.slow
def test_a_custom_executor():
    code = (EXAMPLES / "custom_executor.py").read_text().split('"""', 2)[2].split("if __name__")[0]
    assert len(code.strip().splitlines()) <= 40
    lower = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert run_example("custom_executor.py") == f"completed; replicas ran at priorities [{lower}, {lower}]\n"


@pytest.mark.slow
def test_ones_own_text(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for name in ("README.md", "Makefile", "constraints.txt"):
        (text / name).write_text((ROOT / name).read_text() * 40)
    assert "parameters" in run_example("own_text.py", str(text), str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs"),
    [("accelerate_loop.py", "accelerate"), ("lightning_loop.py", "lightning"), ("nanochat_like_loop.py", "torch")],
)
def test_loops_of_others_by_the_push_form(name: str, needs: str, tmp_path):
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    assert run_example(name, str(tmp_path / "run")).startswith("completed after 6 rounds")
