"""What somebody who watches a run is told: prefixes and colours of merged output, and why an attempt ended."""

from collections.abc import Iterator
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path

import click
import pytest
from cli_support import diloco_here
from in_one_process import SmallRun
from scripted import STAMP, Scene

from diloco_orchestrator.cli.progress import watch_until_stopped
from diloco_orchestrator.cli.read_commands import _prefix
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.inspection.logs import LogLine
from diloco_orchestrator.inspection.status import RoundRow, RunReader, RunStatus
from diloco_orchestrator.inspection.terminal import Console, PlainLines, fitted, live_panel, overview, round_line
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, Heartbeat
from diloco_orchestrator.protocol.verdict import Statistic, Verdict
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
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
    display = PlainLines(Console(file=out))
    for status in failed:
        display.show(status)
    lines = out.getvalue().splitlines()
    cause = "RuntimeError: CUDA out of memory"
    assert lines == [
        f"replica 0, attempt 1 ended: {cause}",
        "replica 1: launching: no heartbeat yet; machine, packages and torch come first",
        f"replica 0: attempt 2, after attempt 1 (error): {cause} (exit code 1)",
    ]


def test_what_the_first_round_waits_for_is_said_once_for_the_last_to_get_there(failed: tuple[RunStatus, RunStatus]):
    out, (one, *_) = StringIO(), failed[0].replicas
    display = PlainLines(Console(file=out))
    for states in (
        ("launching", "launching"),
        ("starting", "launching"),
        ("training", "starting"),
        ("training",) * 2,
    ):
        fleet = [replace(one, replica_id=i, state=state, exit_code=None) for i, state in enumerate(states)]
        display.show(replace(failed[0], state="starting", replicas=fleet))
        display.show(replace(failed[0], state="starting", replicas=fleet))
    assert out.getvalue().splitlines() == [
        "replicas 0 and 1: launching: no heartbeat yet; machine, packages and torch come first",
        "replica 1: starting: importing torch and your code, building the model",
        "replicas 0 and 1: training",
    ]


def test_the_live_panel_shows_it_too(failed: tuple[RunStatus, RunStatus]):
    out = StringIO()
    Console(file=out, width=200).print(overview(failed[0], 10))
    assert "ended: RuntimeError: CUDA out of memory" in out.getvalue()


@pytest.mark.parametrize(
    ("state", "going", "stopped"),
    [
        ("training", "training", "no exit record, last seen training"),
        ("launching", "launching: no machine has joined yet", "never started"),
        ("ended: it left", "ended: it left", "ended: it left"),
    ],
)
def test_a_run_that_has_stopped_shows_nobody_as_training_or_launching(failed, state, going, stopped):
    """An attempt whose machine vanished at the end, or that no machine took, was shown so for ever."""
    waits_for = "no machine has joined yet" if state == "launching" else ""
    row = replace(failed[0].replicas[0], state=state, exit_code=None, waits_for=waits_for)
    for of_run, words in (("running", going), ("starting", going), ("completed", stopped), ("failed", stopped)):
        out = StringIO()
        Console(file=out, width=200).print(overview(replace(failed[0], state=of_run, replicas=[row]), 10))
        (line,) = [each for each in out.getvalue().splitlines() if each.split()[:2] == ["0", str(row.attempt)]]
        assert line.rstrip().endswith("  " + words)


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


def test_a_run_without_held_out_scores_says_that_the_kill_switch_is_off(failed: tuple[RunStatus, RunStatus]):
    row = RoundRow(**{**dict.fromkeys(f.name for f in fields(RoundRow)), **ROW})
    for heldout, applied, count in ((None, True, 1), (0.5, True, 0), (None, False, 0)):  # the last one failed before
        status = replace(failed[0], rounds=[replace(row, heldout=heldout, applied=applied)])
        out = StringIO()
        console = Console(file=out, width=200)
        console.print(overview(status, 10))
        assert out.getvalue().count("the kill-switch is off") == count
        lines = PlainLines(console)
        lines.show(status)
        lines.show(replace(status, rounds=status.rounds * 2))
        assert out.getvalue().count("the kill-switch is off") == 2 * count


def test_the_reason_of_a_stop_is_left_to_the_line_below_the_rounds(failed: tuple[RunStatus, RunStatus]):
    row = RoundRow(**{**dict.fromkeys(f.name for f in fields(RoundRow)), **ROW, "reason": "the guard fired"})
    for of_the_run, count in (("the guard fired", 0), ("a later leg's", 1)):
        out = StringIO()
        PlainLines(Console(file=out, width=200)).show(replace(failed[0], rounds=[row], reason=of_the_run))
        assert "outer step" in out.getvalue() and out.getvalue().count("the guard fired") == count


def test_an_attempt_that_ended_is_shown_in_the_last_round_that_it_followed():
    scene = Scene()
    scene.coordinator().step()
    beat = Heartbeat(**STAMP(), replica_id=0, attempt=1, counter=3, phase="training", round=2, inner_step=7)
    scene.fleet.store.put(keys.heartbeat(0, 1), beat.to_bytes())

    def shown() -> list[str]:
        out = StringIO()
        Console(file=out, width=200).print(overview(RunReader(scene.fleet.store).status(), 10))
        return next(words for line in out.getvalue().splitlines() if (words := line.split())[:2] == ["0", "1"])

    assert shown() == ["0", "1", "2", "7", "-", "training"]
    record = Exit(**STAMP(), replica_id=0, attempt=1, code=0, reason="the run ended", round=5)
    scene.fleet.store.create(keys.exit_record(0, 1), record.to_bytes())
    assert shown() == ["0", "1", "5", "-", "-", "ended:", "the", "run", "ended"]


def test_a_round_of_a_leg_that_was_given_up_is_not_counted_in_the_steps_of_the_newest_one():
    row = RoundRow(**{**dict.fromkeys(f.name for f in fields(RoundRow)), **ROW})
    assert "outer step 14/15  " in round_line(replace(row, outer_step=14), 15)
    assert "outer step 18  " in round_line(replace(row, outer_step=18), 15)


# -- the live panel on a small screen ----------------------------------------------------------------------------------


def running(failed: RunStatus, replicas: int, rounds: int, state: str = "running") -> RunStatus:
    """A status with that many training replicas and committed rounds, and a guard with six statistics."""
    row = RoundRow(**{**dict.fromkeys(f.name for f in fields(RoundRow)), **ROW, "stop": "none", "applied": True})
    rows = [replace(row, round=i + 1, loss=1.0, warning="") for i in range(rounds)]
    training = [replace(failed.replicas[0], replica_id=i, state="training", round=3) for i in range(replicas)]
    seen = tuple(Statistic(name=f"statistic {i}", value=float(i), threshold=10.0) for i in range(6))
    verdict = Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=rounds, statistics=seen)
    return replace(failed, replicas=training, rounds=rows, verdict=verdict, state=state, reason="4 of 4 contributions")


def lines_on(status: RunStatus, width: int, height: int, of: int) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, height=height)
    console.print(fitted(status, console, of))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("replicas", [1, 4, 10, 32])
@pytest.mark.parametrize("rounds", [0, 1, 30])
def test_all_of_it_fits_a_small_screen_replicas_first(failed: tuple[RunStatus, RunStatus], replicas, rounds):
    lines = lines_on(running(failed[0], replicas, rounds), 80, 24, 23)
    assert len(lines) <= 23
    heads = [line.split()[0] for line in lines if line.startswith(("replica ", "round ", "guard"))]
    assert heads[0] == "replica"
    if rounds and replicas < 10:
        assert heads[1] == "round" and any("statistic 5" in line for line in lines)
    if replicas <= 10:
        assert sum(line.rstrip().endswith(" training") for line in lines) == replicas
    if replicas == 32:
        more = next(line for line in lines if "more" in line)
        counted = int(more.split()[0])
        assert f"{counted} training" in more
        assert sum(line.rstrip().endswith("  training") for line in lines) == 32 - counted


def test_a_fleet_that_does_not_fit_shows_its_unusual_replicas(failed: tuple[RunStatus, RunStatus]):
    status = running(failed[0], 32, 3)
    replicas = [replace(each, state="launching") if each.replica_id == 31 else each for each in status.replicas]
    lines = lines_on(replace(status, replicas=replicas), 80, 24, 23)
    first = next(line for line in lines[lines.index("") + 2 :])
    assert first.split()[0] == "31" and "launching" in first


def test_a_replica_of_several_ranks_is_one_row_with_their_number(failed: tuple[RunStatus, RunStatus]):
    status = running(failed[0], 2, 3)
    replicas = [replace(each, ranks=8) if each.replica_id == 1 else each for each in status.replicas]
    lines = lines_on(replace(status, replicas=replicas), 120, 60, 59)
    assert [line.split("  ")[0] for line in lines if "ranks)" in line] == ["1 (8 ranks)"]


def test_a_tall_screen_has_the_whole_guard_and_ten_rounds(failed: tuple[RunStatus, RunStatus]):
    lines = lines_on(running(failed[0], 4, 30), 120, 60, 59)
    assert sum(line.lstrip().startswith("statistic ") for line in lines) == 6
    assert sum(line.lstrip()[:2].strip() in {str(n) for n in range(21, 31)} for line in lines if "1.000" in line) == 10


def test_the_overview_says_what_the_guard_can_judge_by_now_while_the_run_goes_on(failed: tuple[RunStatus, RunStatus]):
    for state, shown in (("running", True), ("halted", False)):
        out = StringIO()
        status = replace(running(failed[0], 2, 3, state=state), outlook="needs 5 more rounds to know the noise")
        Console(file=out, width=200).print(overview(status, 10))
        assert ("the guard needs 5 more rounds to know the noise" in out.getvalue()) is shown


@pytest.mark.parametrize(("below", "rounds"), [(2, True), (15, False)])
def test_what_the_panel_showed_last_stays_on_the_screen(failed: tuple[RunStatus, RunStatus], below: int, rounds: bool):
    out = StringIO()
    with live_panel(Console(file=out, force_terminal=True, width=80, height=24), below) as show:
        show(running(failed[0], 4, 3))
        show(running(failed[0], 4, 4, state="completed"))
    last = out.getvalue().rpartition("completed")[2]
    assert last.count("training") == 4 and "\x1b[1A" not in last.replace("\x1b[?25h", "")
    assert ("held-out before" in last) is rounds


def test_the_overview_of_a_run_that_nobody_works_on_does_not_call_it_running(failed: tuple[RunStatus, RunStatus]):
    out = StringIO()
    Console(file=out, width=200).print(overview(failed[0], 10, still=["Nobody works on this run any more."]))
    head = out.getvalue().splitlines()[:6]
    assert head[0].startswith("stands still") and "Nobody works on this run any more." in head
    assert "to the end" not in out.getvalue()


def test_a_halt_of_a_run_that_nobody_works_on_says_who_ends_it(tmp_path: Path):
    SmallRun(store=open_store(str(tmp_path / "run")))
    done = diloco_here("halt", "run", cwd=tmp_path)
    first, *_, last = done.stdout.splitlines()
    assert done.returncode == 0 and first == "asked." and "Nobody works on this run any more" in done.stdout
    assert last == f"Who supervises it ends it: diloco attach {tmp_path / 'run'}"


def test_after_an_outage_a_run_is_not_said_to_stand_still_before_its_processes_could_write(capsys):
    """Whoever watches reads at first what the outage, an hour of one call, kept everybody from replacing."""

    class Watched(ManualClock):
        said_at = 0.0

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if "Nobody works on this run any more" in capsys.readouterr().out:
                self.said_at = self.now()
                raise KeyboardInterrupt

    class Out(MemoryStore):
        over_at = 0.0

        def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
            if clock.now() > 60.0 and not self.over_at:
                clock.advance(3600.0)
                self.over_at = clock.now()
            return super().list(prefix, start_after)

    clock, store = Watched(), Out()
    SmallRun(store=store)
    hung_after_s = RunReader(store).run.config.retry.hung_after_s
    with pytest.raises(KeyboardInterrupt):
        watch_until_stopped(store, as_json=False, clock=clock)
    assert store.over_at > 3600.0 and store.over_at + hung_after_s <= clock.said_at <= store.over_at + hung_after_s + 10


def test_a_long_reason_of_several_rounds_is_shown_once(failed: tuple[RunStatus, RunStatus]):
    status, why = running(failed[0], replicas=1, rounds=3), "all answered, but nobody had a finite pseudo-gradient"
    rows = [replace(row, applied=row.round == 1, reason=why) for row in status.rounds]
    out = StringIO()
    Console(file=out, width=200).print(overview(replace(status, rounds=rows), 10))
    assert out.getvalue().count(why) == 1 and "as in round 2" in out.getvalue()


def test_who_resumes_a_run_gets_no_round_from_before(failed: tuple[RunStatus, RunStatus]):
    out, before = StringIO(), running(failed[0], replicas=1, rounds=12)
    display = PlainLines(Console(file=out, width=200), with_attempts=False)
    display.show(replace(before, state="starting", leg=2))
    display.show(running(failed[0], replicas=1, rounds=13))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("round")]
    assert lines[0] == "rounds 1 to 12 came before" and len(lines) == 2 and lines[1].startswith("round 13  ")


def test_who_begins_to_watch_late_gets_the_newest_rounds_only(failed: tuple[RunStatus, RunStatus]):
    out = StringIO()
    display = PlainLines(Console(file=out))
    for rounds in (29, 30):
        display.show(running(failed[0], replicas=1, rounds=rounds))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("round")]
    assert lines[0] == "rounds 1 to 19 came before"
    assert [line.split("  ")[0] for line in lines[1:]] == [f"round {number}" for number in range(20, 31)]
