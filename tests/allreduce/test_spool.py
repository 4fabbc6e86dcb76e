"""What a process holds lies in memory within a budget, and beyond it in temporary files that end with the process."""

import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from protocol_fleet import Fleet, together
from real_runs import wait_for

from diloco_orchestrator.allreduce.owners import ALONE
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.spool import budget, budget_of, held
from diloco_orchestrator.allreduce.vectors import FlatTensors, copied
from diloco_orchestrator.clock import ThreadBackground
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.errors import BudgetTooSmall, ConfigError, SpoolFailed
from diloco_orchestrator.executors.machine import machine_memory
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.outer.outer_step import step
from diloco_orchestrator.replica.rounds.interface import ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.tensor_tree import state_file, unpack
from diloco_orchestrator.snapshots.stored_state import StoredState

MIB = 2**20
NUMEL = MIB // 4  # of a tensor of 1 MiB


@pytest.fixture
def spooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the budget of this process to a number of MiB; temporary files are in `tmp_path`."""

    def use(mib: int) -> None:
        monkeypatch.setenv("DILOCO_MEMORY_MIB", str(mib))
        budget.cache_clear()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield use
    budget.cache_clear()


def mapped(folder: Path) -> int:
    """Bytes of the files below `folder` that are mapped into this process. All of them have lost their names."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {folder}/" in line]
    assert all(line.endswith("(deleted)") for line in lines) and not list(folder.iterdir())
    ranges = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


# -- the budget -------------------------------------------------------------------------------------------------------


def test_tensors_beyond_the_budget_lie_in_files_without_names(spooling, tmp_path):
    spooling(3)
    kept = [held(NUMEL, "a shard") for _ in range(5)]
    assert mapped(tmp_path) == 2 * MIB
    for value, tensor in enumerate(kept):
        assert not tensor.any()
        tensor.fill_(value)
    assert [float(tensor.mean()) for tensor in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_is_dropped_gives_memory_and_disk_space_back(spooling, tmp_path):
    spooling(1)
    in_memory, in_file = held(NUMEL, "a shard"), held(NUMEL, "a shard")
    view = in_file.detach().view(2, -1)[1]
    del in_file
    assert mapped(tmp_path) == MIB, "a view of it lives"
    del view
    assert mapped(tmp_path) == 0
    del in_memory
    again = held(NUMEL, "a shard")
    assert mapped(tmp_path) == 0 and again.numel() == NUMEL


def test_payload_bytes_count_too(spooling, tmp_path):
    spooling(2)
    cache = PayloadCache()
    cache.put(("key", "digest"), bytes(MIB))
    tensors = [held(NUMEL, "a shard"), held(NUMEL, "a shard")]
    assert mapped(tmp_path) == MIB
    cache.put(("other", "digest"), b"x" * MIB)
    assert cache.get(("other", "digest")) == b"x" * MIB
    cache.clear()
    tensors.append(held(NUMEL, "a shard"))
    assert mapped(tmp_path) == MIB, "what the cache gave back is there for others"
    cache.close()


def test_without_a_setting_the_budget_is_half_of_the_machine():
    assert budget_of({}).limit == machine_memory() // 2 // MIB * MIB
    assert budget_of({"DILOCO_MEMORY_MIB": "300"}).limit == 300 * MIB


@pytest.mark.parametrize("given", ["", "0", "-1", "2.5", "64M"])
def test_a_budget_that_is_no_number_is_refused(given):
    with pytest.raises(ConfigError, match=f"DILOCO_MEMORY_MIB='{given}' is not a number of MiB above 0. Set one"):
        budget_of({"DILOCO_MEMORY_MIB": given})


def test_a_budget_too_small_for_one_shard_is_refused(spooling):
    spooling(1)
    with pytest.raises(BudgetTooSmall) as refused:
        Base({"w": torch.zeros(3 * NUMEL)}, {}, shard_numel=2 * NUMEL)
    assert str(refused.value) == (
        "one shard of the base's parameters is 2 MiB, more than the memory of 1 MiB that this process may use: "
        "DILOCO_MEMORY_MIB=1. Set DILOCO_MEMORY_MIB to more, or start the run with a smaller shard_mib."
    )


# -- what uses it -----------------------------------------------------------------------------------------------------


def test_a_base_has_the_same_bits_in_memory_and_in_files(spooling, tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(1200, 1000, generator=generator) for name in ("a", "b")}
    outer, digests, in_files = OuterConfig(), [], []
    for mib in (1000, 1):
        spooling(mib)
        base = step(Base.fresh(values, outer, shard_numel=NUMEL), values, outer)
        digests.append(base.digest())
        in_files.append(mapped(tmp_path) > 0)
    assert digests[0] == digests[1] and in_files == [False, True]


def test_a_state_and_a_copy_of_a_gradient_are_held(spooling, tmp_path):
    spooling(1)
    state = {"moments": torch.arange(4 * NUMEL, dtype=torch.bfloat16), "steps": 3}
    file = state_file(state)
    file.freeze()
    assert 2 * MIB <= mapped(tmp_path) < 3 * MIB
    data = file.whole()
    assert mapped(tmp_path) == 0
    stored = StoredState.of(ALONE, data)
    unpacked = unpack([data], "a state")
    assert 4 * MIB <= mapped(tmp_path) < 5 * MIB
    del stored
    assert torch.equal(unpacked["moments"], state["moments"]) and mapped(tmp_path) == 2 * MIB
    vector = copied(FlatTensors([torch.ones(3 * NUMEL)]), shard_numel=NUMEL)
    assert mapped(tmp_path) == 4 * MIB and vector.numel == 3 * NUMEL


def test_a_run_is_the_same_with_a_budget_of_one_shard(spooling, tmp_path):
    """Start, commits, snapshots, a resumed attempt and `verify`, with next to nothing in memory."""
    digests = []
    for mib in (1000, 1):
        spooling(mib)
        fleet = Fleet(replicas=2, rounds=2, shard_mib=1, snapshot_every=1)
        model = partial(torch.nn.Linear, 1000, 700)
        torch.manual_seed(0)
        first = model()
        participants = [fleet.join(i, model=first) for i in (0, 1)]
        together([partial(one_round, participant, float(i)) for i, participant in enumerate(participants)])
        participants[0].write_snapshot_if_due()
        again = fleet.join(0, attempt=2, model=first)
        digests.append((participants[1].digest, again.digest))
        assert verify_run(fleet.store).agrees
    assert len({digest for pair in digests for digest in pair}) == 1


def one_round(participant: Participant, value: float) -> None:
    fields = ContributionFields(steps=1)
    participant._contributor.contribute_delta(FlatTensors([torch.full((700_700,), value)]), fields)
    participant.close()


# -- no room ----------------------------------------------------------------------------------------------------------

FULL_DISK = """
import sys
from diloco_orchestrator.allreduce import spool
spool.PATIENCE_S = 0.1
from diloco_orchestrator import ObjectStoreManager, make_diloco_outer_loop
import torch
model = torch.nn.Linear(1000, 3000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
manager = ObjectStoreManager.join(sys.argv[1], 0, 1, rounds=1)
make_diloco_outer_loop(model, optimizer, manager, 1)
"""
FULL_CACHE = """
from diloco_orchestrator.allreduce import spool
spool.PATIENCE_S = 0.1
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.errors import SpoolFailed
cache = PayloadCache(memory_bytes=0)
try:
    for index in range(100):
        cache.put((f"rounds/00000001/payload/0/1/{index}.bin", "digest"), bytes(2**20))
except SpoolFailed:
    assert index and all(cache.get((f"rounds/00000001/payload/0/1/{i}.bin", "digest")) for i in range(index))
    cache.clear()
    cache.put(("another round", "digest"), b"x")
    raise
"""


def on_a_full_file_system(program: str, *arguments: str) -> str:
    """What a program writes to stderr whose TMPDIR is a file system of 8 MiB."""
    mount = 'mount -t tmpfs -o size=8m tmpfs "$TMPDIR" && exec "$@"'
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
        if subprocess.run([*command, "true"], env={**os.environ, "TMPDIR": folder}, check=False).returncode:
            pytest.skip("this machine lets nobody mount a file system of his own")
        return failed([*command, sys.executable, "-c", program, *arguments], folder)


def under_a_file_size_limit(program: str, *arguments: str) -> str:
    """What a program writes to stderr whose files may not grow beyond half a MiB."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (MIB // 2, MIB // 2))
    with tempfile.TemporaryDirectory() as folder:
        return failed([sys.executable, "-c", program, *arguments], folder, limit)


def failed(command: list[str], folder: str, before: Callable[[], None] | None = None) -> str:
    environ = {
        **os.environ,
        "TMPDIR": folder,
        "DILOCO_MEMORY_MIB": "12",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ran = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=False, preexec_fn=before)
    assert ran.returncode == 1, f"{ran.returncode}: not an error but a signal, or none\n{ran.stderr}"
    return ran.stderr.replace(folder, "FOLDER")


@pytest.mark.slow
def test_a_full_disk_is_an_error_of_the_replica_that_joins(tmp_path):
    said = on_a_full_file_system(FULL_DISK, str(tmp_path / "run"))
    assert re.search(
        r"SpoolFailed: cannot keep 11 MiB of the base's momenta in a temporary file in FOLDER: No space "
        r"left on device\. Free some space there, set TMPDIR to a folder with more, or raise DILOCO_MEMORY_MIB: 12 MiB "
        r"now, by DILOCO_MEMORY_MIB=12\.\n",
        said,
    ), said


def test_a_full_disk_is_an_error_of_a_cache_that_keeps_what_it_has():
    said = on_a_full_file_system(FULL_CACHE)
    shard = r"rounds/00000001/payload/0/1/\d+\.bin"
    assert re.search(rf"SpoolFailed: cannot keep 1 MiB of {shard} in .*FOLDER: No space left on device\. Free", said)


def test_a_disk_that_is_full_for_a_while_is_waited_for(spooling, small_disk: Path, monkeypatch, caplog):
    spooling(1)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))

    def somebody_makes_room() -> None:
        wait_for(lambda: "Waiting for up to 60 s: free some space there." in caplog.text, "the log")
        subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)

    helper = ThreadBackground().start(somebody_makes_room)
    assert len(held(2 * NUMEL, "a shard")) == 2 * NUMEL
    helper.result()
    assert f"no room in {small_disk} for a shard: No space left on device" in caplog.text


@pytest.mark.slow
def test_a_limit_on_files_is_an_error_that_names_what_was_to_be_kept(tmp_path):
    said = under_a_file_size_limit(
        "from diloco_orchestrator.allreduce.spool import held\n"
        "kept = [held(2**18, f'shard {index}') for index in range(13)]"
    )
    assert "SpoolFailed: cannot keep 1 MiB of shard 12 in a temporary file in FOLDER: File too large. Free" in said


def test_a_folder_that_cannot_be_written_to_is_named(spooling, tmp_path, monkeypatch):
    spooling(1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(SpoolFailed, match=f"in {tmp_path}/absent: No such file or directory. Free some space"):
        held(2 * NUMEL, "a shard")


def test_a_machine_without_room_is_no_disagreement(spooling, tmp_path, monkeypatch):
    """`verify` has found nothing wrong with the run that it could not read."""
    spooling(1000)
    fleet = Fleet(replicas=1, rounds=1, shard_mib=2)
    one_round(fleet.join(0, model=torch.nn.Linear(1000, 700)), 1.0)
    spooling(2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(SpoolFailed, match="of the base's momenta in a temporary file"):
        verify_run(fleet.store)
    spooling(1)
    with pytest.raises(BudgetTooSmall, match="one shard of the base's parameters is 2 MiB"):
        verify_run(fleet.store)
