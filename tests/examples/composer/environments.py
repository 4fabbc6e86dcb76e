"""Python environments of other frameworks, made with venv and pip; tests that need one are skipped where pip cannot."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def make_environment(folder: Path, packages: list[str], *options: str, with_ours: bool = True) -> Path:
    """The folder of an environment's programs. `with_ours`: what is installed here can be imported there too."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if with_ours:
        found = next(folder.glob("lib/python*/site-packages"))
        (found / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # after its own packages
    command = [str(folder / "bin/pip"), "install", "--quiet", "--no-compile", *options, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {packages[0]} here: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin"
