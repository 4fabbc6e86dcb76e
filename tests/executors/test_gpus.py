"""A local replica gets one of the machine's GPUs, which are found without torch; here nvidia-smi is a script."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from in_processes import request

from executors import LocalProcessExecutor
from executors.machine import gpus_of, listed_gpus, sharing_words, visible_gpus

TWO = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb)\n"
DIVIDED = """\
GPU 0: NVIDIA A100 (UUID: GPU-aa)
  MIG 3g.20gb     Device  0: (UUID: MIG-a1)
  MIG 3g.20gb     Device  1: (UUID: MIG-a2)
GPU 1: NVIDIA A100 (UUID: GPU-bb)
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of this name first on PATH, which prints a listing and notes each call."""

    def install(listing: str, code: int = 0) -> Path:
        program, calls = tmp_path / "bin" / "nvidia-smi", tmp_path / "calls"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho \"$@\" >> '{calls}'\ncat <<'END'\n{listing}END\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return calls

    return install


def gpus_in_plans(executor: LocalProcessExecutor, replicas: int, **env: str) -> list[str | None]:
    env |= {"REPLICA_WORLD_SIZE": str(replicas)}
    plans = [executor.plan(request("pass", replica_id=i, env=env)) for i in range(replicas)]
    return [plan["env"].get("CUDA_VISIBLE_DEVICES") for plan in plans]


@pytest.mark.parametrize(
    ("listing", "gpus"),
    [(TWO, ("GPU-aa", "GPU-bb")), (DIVIDED, ("MIG-a1", "MIG-a2", "GPU-bb")), ("No devices found.\n", ())],
)
def test_gpus_are_named_by_what_nvidia_smi_lists(listing, gpus):
    assert listed_gpus(listing) == gpus


@pytest.mark.parametrize(
    ("given", "gpus"),
    [("2,3", ("2", "3")), ("GPU-aa", ("GPU-aa",)), ("", ()), ("-1", ()), ("0,-1,1", ("0",))],
)
def test_gpus_that_the_launcher_was_given_are_all_it_hands_out(given, gpus, nvidia_smi):
    calls = nvidia_smi(TWO)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": given, "PATH": str(calls.parent / "bin")}) == gpus
    assert not calls.exists()


def test_replica_i_gets_gpu_i_modulo_their_number():
    assert [gpus_of(i, 1, ("a", "b"))["CUDA_VISIBLE_DEVICES"] for i in range(5)] == ["a", "b", "a", "b", "a"]
    assert gpus_of(0, 1, ()) == {}


def test_a_replica_of_several_ranks_gets_the_next_gpus_each_once():
    gpus = ("a", "b", "c", "d")
    assert [gpus_of(first, 2, gpus)["CUDA_VISIBLE_DEVICES"] for first in (0, 2, 3)] == ["a,b", "c,d", "d,a"]
    assert gpus_of(0, 3, ("a", "b")) == {"CUDA_VISIBLE_DEVICES": "a,b"}


def test_several_replicas_on_one_gpu_are_said_in_one_line(nvidia_smi, tmp_path, caplog):
    calls = nvidia_smi(TWO)
    executor = LocalProcessExecutor(tmp_path / "executor")
    with caplog.at_level(logging.INFO):
        assert gpus_in_plans(executor, 3) == ["GPU-aa", "GPU-bb", "GPU-aa"]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "3 replicas share 2 GPUs (GPU-aa, GPU-bb), up to 2 on one"
    ]
    assert calls.read_text() == "-L\n"  # once
    assert sharing_words(2, ("a", "b")) is None is sharing_words(2, ())


def test_the_runs_own_setting_decides_over_the_machines_gpus(nvidia_smi, tmp_path):
    calls = nvidia_smi(TWO)
    assert gpus_in_plans(LocalProcessExecutor(tmp_path), 2, CUDA_VISIBLE_DEVICES="1") == ["1", "1"]
    assert not calls.exists()


@pytest.mark.parametrize(
    ("env", "words"),
    [({}, r"3 ranks.*would see 2 here \(GPU-aa, GPU-bb\)"), ({"CUDA_VISIBLE_DEVICES": "1"}, r"see 1 here")],
)
def test_more_ranks_than_gpus_are_refused_before_anything_starts(nvidia_smi, tmp_path, env, words):
    nvidia_smi(TWO)
    executor, wanted = LocalProcessExecutor(tmp_path), request("pass", env=env, ranks=3)
    with pytest.raises(ValueError, match=words):
        executor.plan(wanted)
    on_cpu = executor.plan(replace(wanted, env={"CUDA_VISIBLE_DEVICES": ""}))
    assert on_cpu["env"]["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("code", [0, 9])
def test_without_a_gpu_nothing_is_set(nvidia_smi, tmp_path, code):
    nvidia_smi("No devices were found\n", code)
    assert gpus_in_plans(LocalProcessExecutor(tmp_path), 2) == [None, None]


def test_the_process_itself_sees_its_gpu_and_the_handle_says_so(nvidia_smi, tmp_path):
    nvidia_smi(TWO)
    executor = LocalProcessExecutor(tmp_path / "executor")
    name = "CUDA_VISIBLE_DEVICES"
    handles = executor.launch_replicas(2, "entrypoints:variable", {"name": name})
    assert [result.value for result in executor.collect(handles)] == ["GPU-aa", "GPU-bb"]
    assert [handle.native[name] for handle in handles] == ["GPU-aa", "GPU-bb"]


def test_finding_gpus_imports_no_torch():
    program = "import sys; from executors.machine import visible_gpus; visible_gpus({}); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
