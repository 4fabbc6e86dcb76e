"""Ranks that failed: how long one may be silent, and which of several is named, whose failure explains the others'."""

import os
from pathlib import Path
from typing import Any

import pytest

from diloco_orchestrator.replica.process.rank import RankPlace
from diloco_orchestrator.replica.process.rank_children import RankChildren, RankProgram
from diloco_orchestrator.replica.process.rank_processes import RankState, ending_of
from diloco_orchestrator.replica.process.run_attempt import Ending

_LOST = Ending(1, "RuntimeError", "Traceback\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1")
_WAITED = Ending(1, "RuntimeError", "Traceback\nRuntimeError: [gloo] Timed out waiting 10000ms for send")
_RAISED = Ending(1, "ValueError", "Traceback\nValueError: planted")
_REFUSED = Ending(78, "permanent", "Traceback\nConfigError: another model")
_LEFT = Ending(75, "preempted")
_DONE = Ending(0, "the run ended")


@pytest.mark.parametrize(
    ("ranks", "silent", "reason"),
    [
        ([(_LOST, 1), (None, -9)], [], "rank 1 of 2 was killed by signal 9 (SIGKILL, as the kernel does"),
        ([(None, -9), (_LOST, 1)], [], "rank 0 of 2 was killed by signal 9"),
        ([(_LOST, 1), (None, -35)], [], "rank 1 of 2 was killed by signal 35"),
        ([(_LOST, 1), (None, 3)], [], "rank 1 of 2 ended with exit code 3, without a word"),
        ([(_LOST, 1), (_RAISED, None)], [], "rank 1 of 2: ValueError"),
        ([(_LOST, 1), (_RAISED, 1), (_REFUSED, None)], [], "rank 2 of 3: permanent"),
        ([(_WAITED, 1), (None, None, 7.0)], [1], "rank 1 of 2 gave no sign of life for 10 s"),  # heard at 7 s
        ([(None, None, 7.0), (None, None)], [1], "rank 1 of 2 was not ready within timing.startup_timeout_s"),
        ([(_WAITED, 1), (None, None)], [], "rank 1 of 2 did not come to a collective in which rank 0 waited for 10 s"),
        ([(_WAITED, 1), (_WAITED, None), (None, None), (None, None)], [], "ranks 2, 3 of 4 did not come"),
        ([(_DONE, 0), (_RAISED, 1)], [], "rank 1 of 2: ValueError"),
        ([(_LEFT, 75), (_LOST, 1)], [], "preempted"),
        ([(_LOST, 1), (_LOST, 1)], [], "rank 0 of 2: RuntimeError"),
    ],
)
def test_the_rank_is_named_whose_failure_explains_the_others(
    ranks: list[tuple[Any, Any]], silent: list[int], reason: str
):
    states = [RankState(number, *rest, is_ready=len(rest) == 3) for number, rest in enumerate(ranks)]
    found = ending_of(states, [states[each] for each in silent], 10.0)
    assert found.reason.startswith(reason)


def test_a_refusal_stays_permanent_and_keeps_its_traceback():
    found = ending_of([RankState(0), RankState(1, _REFUSED, 78)], [], 10.0)
    assert (found.code, found.error) == (78, _REFUSED.error)


@pytest.mark.parametrize(
    ("is_ready", "startup_timeout_s", "most_s"), [(True, 300.0, 10.0), (False, 300.0, 300.0), (False, 5.0, 10.0)]
)
def test_a_rank_that_still_imports_may_be_silent_for_the_startup_timeout(is_ready, startup_timeout_s, most_s):
    rank = RankState(1, heard_at=100.0, is_ready=is_ready)
    assert not rank.is_silent(100.0 + most_s, 10.0, startup_timeout_s)
    assert rank.is_silent(100.1 + most_s, 10.0, startup_timeout_s)
    rank.died = -9
    assert not rank.is_silent(1000.0, 10.0, startup_timeout_s)


def test_an_event_that_was_cut_off_by_a_kill_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cut_off.py").write_text(
        "import json, os, sys\n"
        "os.write(json.loads(sys.argv[-1])['events'], b'{\"ending\": {\"co')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said: list[Any] = []
    children = RankChildren(RankProgram([], dict(os.environ), "cut_off"), said.append)
    children.start(RankPlace(0, 1, 1, 1, "claim", 10.0, "meeting"), "lo")
    while not said:
        children.look(0.2)
    assert said == [{"rank": 0, "died": -9}]


def test_a_progress_bar_that_ends_no_line_is_passed_on_in_parts_and_not_kept(tmp_path: Path, monkeypatch):
    (tmp_path / "bar.py").write_text("import os\nfor _ in range(100): os.write(1, b'.' * 10_000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said: list[Any] = []
    children = RankChildren(RankProgram([], dict(os.environ), "bar"), said.append)
    children.start(RankPlace(0, 1, 1, 1, "claim", 10.0, "meeting"), "lo")
    while not said or "died" not in said[-1]:
        children.look(0.2)
    sizes = [len(each["output"]) for each in said[:-1]]
    assert sum(sizes) == 1_000_000 and max(sizes) < 200_000
