"""What somebody who watches a run is told: prefixes and colours of merged output, and why an attempt ended."""

from dataclasses import fields, replace
from io import StringIO
from types import SimpleNamespace

import click
import pytest
from scripted import STAMP, Scene

from diloco_orchestrator.cli import progress
from diloco_orchestrator.cli.console import Console
from diloco_orchestrator.cli.read_commands import _prefix
from diloco_orchestrator.cli.terminal import PlainLines, overview
from diloco_orchestrator.inspection.follow_logs import LogLine
from diloco_orchestrator.inspection.status import RoundRow, RunStatus
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Exit
from executors.contract import ReplicaState

ROW = {
    "round": 1,
    "outer_step": 0,
    "bytes_up": 0,
    "bytes_down": 0,
    "train_s": 1.0,
    "stop": "halted",
    "applied": False,
    "reason": "the guard fired",
    "statistics": (),
    "without": (),
    "judgements": {},
    "extra": {},
    "late_steps": 0,
}
TRACE = 'Traceback (most recent call last):\n  File "x"\n    f()\nRuntimeError: CUDA out of memory\n'


def test_each_replica_has_a_colour_that_it_keeps_from_attempt_to_attempt():
    prefixes = [_prefix(LogLine(*who, "words")) for who in ((0, 1), (0, 2), (1, 1))]
    assert [click.unstyle(each) for each in prefixes] == ["0.1 |", "0.2 |", "1.1 |"]
    first, again, other = (each.partition("m")[0] for each in prefixes)
    assert first == again != other and first.startswith("\x1b[")


@pytest.fixture
def failed() -> tuple[RunStatus, RunStatus]:
    """A run in which replica 0 has just failed, and the same once it was launched again."""
    scene = Scene(retry={"backoff_s": 1.0})
    coordinator = scene.coordinator()
    coordinator.step()
    record = Exit(**STAMP(), replica_id=0, attempt=1, code=1, reason="RuntimeError", round=0, error=TRACE)
    scene.fleet.store.create(keys.exit_record(0, 1), record.to_bytes())
    before = coordinator.reader.status()
    scene.ends(0, 1, ReplicaState.FAILED, "exit", 1)
    scene.steps(coordinator, 5.0)
    return before, coordinator.reader.status()


def test_the_line_of_an_end_and_that_of_the_next_attempt_name_the_cause(failed: tuple[RunStatus, RunStatus]):
    out = StringIO()
    with PlainLines(Console(file=out)) as display:
        for status in failed:
            display.update(status)
    lines = out.getvalue().splitlines()
    cause = "RuntimeError: CUDA out of memory"
    assert lines == [
        f"replica 0, attempt 1 ended: {cause}",
        f"replica 0: attempt 2, after attempt 1 (error): {cause} (exit code 1)",
    ]


def test_the_live_panel_shows_it_too(failed: tuple[RunStatus, RunStatus]):
    out = StringIO()
    Console(file=out, width=200).print(overview(failed[0], 10))
    assert "ended: RuntimeError: CUDA out of memory" in out.getvalue()


def test_the_tables_name_the_training_metric_and_give_a_reason_once(failed: tuple[RunStatus, RunStatus]):
    row = RoundRow(**{**dict.fromkeys(f.name for f in fields(RoundRow)), **ROW})
    for metric in ("loss", "reward"):
        rows = [replace(row, **{metric: 0.25})]
        out = StringIO()
        Console(file=out, width=200).print(overview(replace(failed[0], rounds=rows, reason="the guard fired"), 10))
        shown = out.getvalue()
        heads = [line.split() for line in shown.splitlines() if line.startswith(("round ", "replica "))]
        assert all(metric in words for words in heads) and len(heads) == 2
        assert shown.count("the guard fired") == 1 and "halted" in shown


def test_who_halts_a_run_by_ctrl_c_is_told_how_to_go_on(monkeypatch, capsys):
    class Interrupted:
        url = "runs/mine"

        def wait(self, on_poll: object) -> None:
            raise KeyboardInterrupt

        def status(self) -> SimpleNamespace:
            return SimpleNamespace(state="halted")

    monkeypatch.setattr(progress, "log_to", lambda console: None)
    with pytest.raises(KeyboardInterrupt):
        progress.follow(Interrupted, as_json=False)  # type: ignore[arg-type]
    assert "halted; to go on: diloco resume runs/mine" in capsys.readouterr().out
