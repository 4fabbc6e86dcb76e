"""A run whose folder's disk is full or read-only: screen, `status` and `explain` name the cause while it is so."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from cli_support import ROOT, diloco_here
from in_one_process import SmallRun
from protocol_fleet import Fleet, play
from scripted import STAMP, ScriptedExecutor

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection.explain import explain
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.terminal import Console, PlainLines, fitted, lasting, overview
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.local_files import why_no_room
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.coordinator import Coordinator, Means


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "others").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


@pytest.mark.parametrize(
    ("harm", "cause", "remedy"),
    [
        (fill, "0.0 MB left", "Free some space there."),
        (make_read_only, "is read-only", "See why (dmesg), and mount it for writing again."),
    ],
)
def test_screen_status_and_explain_name_a_disk_that_nobody_can_write_to(small_disk: Path, harm, cause, remedy):
    url, folder = str(small_disk / "run"), small_disk.parent
    SmallRun(replicas=2, store=open_store(url))
    reader, out = RunReader(open_store(url)), StringIO()
    lines = PlainLines(Console(file=out, width=300))
    assert explain(reader.status()).todo == ["Nothing has to be done."]
    lines.show(reader.status())
    assert out.getvalue() == ""
    harm(small_disk)
    for _ in range(2):
        lines.show(reader.status())
    assert out.getvalue().count("nobody can write: ") == 1 and cause in out.getvalue()
    for panel in (overview(reader.status(), 5), fitted(reader.status(), Console(file=StringIO(), width=300), 24)):
        shown = Console(file=(drawn := StringIO()), width=300)
        shown.print(panel)
        assert cause in drawn.getvalue()
    assert explain(reader.status()).todo[0] == remedy
    explained = diloco_here("explain", url, cwd=folder).stdout
    assert f"Nobody can write: the disk of {url}" in explained and cause in explained and remedy in explained
    assert cause in json.loads(diloco_here("status", url, "--json", cwd=folder).stdout)["no_room"]


def test_a_coordinator_says_once_that_the_disk_is_full(small_disk: Path, caplog):
    """A program that waits for a run said nothing for hours: only a screen did."""
    url, clock = str(small_disk / "run"), ManualClock()
    SmallRun(replicas=2, store=open_store(url), timing={"startup_timeout_s": 900.0})
    coordinator = Coordinator(RunReader(open_store(url)), Means(ScriptedExecutor(), clock, STAMP))
    for _ in range(2):
        clock.advance(100.0)
        coordinator.step()
    assert "nobody can write" not in caplog.text
    fill(small_disk)
    for _ in range(3):
        clock.advance(100.0)
        coordinator.step()
    assert caplog.text.count("nobody can write: the disk of") == 1 and "free some space there" in caplog.text


def unread() -> Console:
    """A console whose output nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    return Console(file=os.fdopen(writing, "w"), width=100)


def full() -> Console:
    """A console whose output goes to a disk without room."""
    return Console(file=os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"), width=100)


@pytest.mark.parametrize("made", [full, unread])
def test_a_screen_that_is_gone_or_full_is_said_once_and_ends_nothing(made: Callable[[], Console], caplog):
    draw = lasting(lambda words: made().print(words))
    for _ in range(3):
        draw("round 1")
    assert caplog.text.count("supervision goes on") == 1


@pytest.mark.slow
def test_a_run_is_supervised_to_its_end_though_nobody_reads_its_output(tmp_path: Path):
    command = ("run", "tiny_workloads:train", "--store", "bucket", "--replicas", "1", "--rounds", "5")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    program = [sys.executable, "-m", "diloco_orchestrator.cli.main", *command]
    environ = {**os.environ, "PYTHONPATH": path}
    started = subprocess.Popen(program, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert started.stdout is not None and started.stdout.readline().startswith(b"run folder:")
    started.stdout.close()
    started.wait()
    assert RunReader(open_store(str(tmp_path / "bucket"))).status().state == "completed"


def test_a_disk_with_less_room_than_a_round_needs_is_told_before_the_round(small_disk: Path):
    run = SmallRun(store=open_store(str(small_disk / "run")))
    assert RunReader(run.store).status().no_room == ""
    assert why_no_room(small_disk, 100_000) == "" and why_no_room(small_disk / "nowhere", 1) == ""
    assert "0.3 MB left, a round writes 1.0 MB" in why_no_room(small_disk, 1_000_000)


def test_gc_makes_room_on_a_disk_that_takes_not_even_the_record_of_it(small_disk: Path):
    store = open_store(str(small_disk / "run"))
    fleet = Fleet(replicas=2, rounds=50, snapshot_every=2, store=store)
    participants = fleet.join_all()
    for _ in range(7):
        play(participants, [1.0, 2.0])
        for participant in participants:
            participant.write_snapshot_if_due()
    fill(small_disk)
    done = diloco_here("gc", store.url, "--payloads", "needed", cwd=small_disk.parent)
    assert done.returncode == 0 and "removed 8 objects" in done.stdout, done.stdout + done.stderr
    assert "Waiting since" not in done.stderr
    assert store.get(keys.RETENTION) and verify_run(store).agrees
