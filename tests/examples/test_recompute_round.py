"""`recompute_round.py`: the base after a round, computed from the bucket by numpy alone."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from protocol_fleet import Fleet, report, together

from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.store.open_store import open_store

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / "tests" / "fixtures" / "kept_runs"


def recompute(run: Path, round_: int) -> subprocess.CompletedProcess[str]:
    program = str(ROOT / "examples" / "recompute_round.py")
    return subprocess.run([sys.executable, program, str(run), str(round_)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of earlier days: one signed, one in bf16 with two fragments, one whose first base was voted on."""
    folder = tmp_path_factory.mktemp("kept")
    for name in ("runs", "later", "scored"):
        with tarfile.open(KEPT / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(("name", "round_"), [("voted", 1), ("voted", 4), ("signed", 1), ("joined", 4)])
def test_a_round_of_a_kept_run_is_computed_with_the_bits_that_its_replicas_had(kept, name, round_):
    done = recompute(kept / name, round_)
    assert (done.returncode, done.stdout[-8:]) == (0, ", equal\n"), done.stderr


@pytest.mark.parametrize(("name", "words"), [("scored", "is no plain mean"), ("dealt", "is no plain mean")])
def test_what_it_does_not_compute_is_refused(kept, name, words):
    done = recompute(kept / name, 4)
    assert done.returncode == 1 and words in done.stderr


@pytest.fixture(params=["fp32", "bf16", "int8", "int4"])
def played(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run of two replicas of one round, of a model whose parameters are no whole blocks."""
    generator = torch.Generator().manual_seed(0)
    fleet = Fleet(replicas=2, rounds=2, store=open_store(str(tmp_path)), codec=request.param, snapshot_every=1)
    participants = [fleet.join(i, model=torch.nn.Linear(19, 21)) for i in range(2)]
    for _ in range(2):
        work = [torch.randn((420,), generator=generator) for _ in participants]

        def take_part(i: int, work: list[torch.Tensor] = work) -> None:
            values = FlatTensors([work[i][:21], work[i][21:].view(21, 19)])
            participants[i]._contributor.contribute_delta(values, report())
            participants[i].close()

        together([lambda i=i: take_part(i) for i in range(2)])  # type: ignore[misc]
    return tmp_path


def test_a_round_of_every_codec_is_computed_with_the_bits_of_the_replicas(played):
    done = recompute(played, 1)
    assert (done.returncode, done.stdout[-8:]) == (0, ", equal\n"), done.stderr + done.stdout


def test_a_commit_that_names_another_base_is_found(kept, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(kept / "voted", run)
    named = run / "rounds" / "00000005" / "commit.json"
    at = named.read_text().index('"base_digest":"b3:') + len('"base_digest":"b3:')
    text = named.read_text()
    named.write_text(text[:at] + ("1" if text[at] == "0" else "0") + text[at + 1 :])
    done = recompute(run, 4)
    assert done.returncode == 1 and "DIFFERENT, not b3:" in done.stdout
