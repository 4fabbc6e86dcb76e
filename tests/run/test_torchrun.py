"""Replicas whose ranks somebody's own torchrun has started: `ObjectStoreManager.join` in every rank."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import blocks
from real_runs import reader_of
from safetensors.torch import load_file

from diloco_orchestrator import pull
from diloco_orchestrator.inspection.verify import verify
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution

pytestmark = pytest.mark.slow

WORKLOAD = str(Path(__file__).parent.parent / "support" / "torchrun_workload.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _start(bucket: Path, replica_id: int, ranks: int, *arguments: str) -> "subprocess.Popen[str]":
    command = TORCHRUN if ranks > 1 else [sys.executable]
    command = [*command, WORKLOAD, str(bucket), str(replica_id), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _ranks_of_contributions(bucket: Path, round_: int) -> list[int | None]:
    store = reader_of(bucket).store
    return [Contribution.from_bytes(store.get(key), key).ranks for i in (0, 1) if (key := keys.contribution(round_, i))]


def test_ranks_of_torchrun_join_as_one_replica_and_train_what_one_process_does(tmp_path: Path):
    models = []
    for name, ranks in (("alone", (1, 1)), ("ranks", (2, 1))):
        bucket = tmp_path / name
        processes = [_start(bucket, replica_id, count, "8") for replica_id, count in enumerate(ranks)]
        printed = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], printed
        pull(str(bucket), tmp_path / f"model {name}", 2)
        models.append(load_file(tmp_path / f"model {name}" / "model.safetensors"))
        assert verify(str(bucket)).agrees
        assert _ranks_of_contributions(bucket, 2) == [count if count > 1 else None for count in ranks]
    assert models[0].keys() == models[1].keys()
    gaps = [float((models[0][name] - models[1][name]).abs().max()) for name in models[0]]
    assert max(gaps) < 1e-3, gaps


def test_the_program_of_the_page_trains_with_ranks_on_two_machines(tmp_path: Path):
    """docs/recipes/islands.md. Two torchruns of one group, on loopback, are the machines of the first replica."""
    page = Path(__file__).parents[2] / "docs/recipes/islands.md"
    program, bucket = tmp_path / "own_ranks.py", tmp_path / "run"
    program.write_text(blocks(page, "python")[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    nodes = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--nproc-per-node", "1"]
    nodes = [*TORCHRUN[:3], *nodes, "--local-addr", "127.0.0.1"]
    commands = [nodes, nodes, TORCHRUN]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(program), str(bucket), str(replica_id), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        for command, replica_id in zip(commands, (0, 0, 1), strict=True)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], printed
    assert _ranks_of_contributions(bucket, 5) == [2, 2] and verify(str(bucket)).agrees


def test_a_rank_that_cannot_join_says_so_in_every_rank(tmp_path: Path):
    first = _start(tmp_path / "run", 0, 1, "4", "1")
    assert first.communicate() is not None and first.returncode == 0
    process = _start(tmp_path / "run", 0, 2, "4", "3")  # another number of replicas
    printed = process.communicate()[0]
    assert process.returncode != 0
    assert "RunFolderTaken" in printed and "rank 0 could not join: RunFolderTaken" in printed
