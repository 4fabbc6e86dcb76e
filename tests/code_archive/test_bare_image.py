"""A replica in an image that has Python and pip, and nothing else: what it needs arrives or is installed."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_orchestrator import LocalProcessExecutor, launch
from executors.contract import LaunchRequest, ReplicaHandle


class BareImage(LocalProcessExecutor):
    """Runs commands with an interpreter of its own and the environment that requests name, with pip's settings."""

    name = "bare"
    shares_machine = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "executor")
        self._python = folder / "image" / "bin" / "python"
        self._home = folder / "home"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "image")], check=True)

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        registry = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self._home), **registry, **request.env, **request.secrets}
        given = [f"{name}={value}" for name, value in env.items()]
        return super().launch(replace(request, command=["env", "-i", *given, str(self._python), *request.command[1:]]))


@pytest.mark.slow
def test_an_image_with_python_alone_will_do(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Needs a package registry: a minute or two, most of it torch."""
    settings = {"replicas": 1, "rounds": 2, "sync_every": 3, "timing": {"poll_s": 0.1}}
    caplog.set_level("INFO")
    run = launch("tiny_workloads:train", store=str(tmp_path / "bucket"), executor=BareImage(tmp_path), **settings)
    assert "packages: without hashes (uv" in caplog.text  # which is offline, if it is here: the launch goes on
    assert run.wait().status == "completed"
    installed = subprocess.run(
        [str(tmp_path / "image/bin/python"), "-m", "pip", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert "safetensors" in installed and "torchft" not in installed  # what replicas need, and no extra
    assert "diloco" not in installed  # ours came from the bucket
