"""The rank that is named when several ranks of a replica have failed: the one whose failure explains the others'."""

from typing import Any

import pytest

from diloco_orchestrator.replica.process.rank_processes import RankState, ending_of
from diloco_orchestrator.replica.process.run_attempt import Ending

_LOST = Ending(1, "RuntimeError", "Traceback\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1")
_WAITED = Ending(1, "RuntimeError", "Traceback\nRuntimeError: [gloo] Timed out waiting 10000ms for send")
_RAISED = Ending(1, "ValueError", "Traceback\nValueError: planted")
_REFUSED = Ending(78, "permanent", "Traceback\nConfigError: another model")
_DONE = Ending(0, "the run ended")


@pytest.mark.parametrize(
    ("ranks", "silent", "reason"),
    [
        ([(_LOST, 1), (None, -9)], [], "rank 1 of 2 was killed by signal 9 (SIGKILL, as the kernel does"),
        ([(None, -9), (_LOST, 1)], [], "rank 0 of 2 was killed by signal 9"),
        ([(_LOST, 1), (None, 3)], [], "rank 1 of 2 ended with exit code 3, without a word"),
        ([(_LOST, 1), (_RAISED, None)], [], "rank 1 of 2: ValueError"),
        ([(_LOST, 1), (_RAISED, 1), (_REFUSED, None)], [], "rank 2 of 3: permanent"),
        ([(_WAITED, 1), (None, None)], [1], "rank 1 of 2 gave no sign of life for 10 s"),
        ([(_WAITED, 1), (None, None)], [], "rank 1 of 2 did not come to a collective in which rank 0 waited for 10 s"),
        ([(_WAITED, 1), (_WAITED, None), (None, None), (None, None)], [], "ranks 2, 3 of 4 did not come"),
        ([(_DONE, 0), (_RAISED, 1)], [], "rank 1 of 2: ValueError"),
        ([(_LOST, 1), (_LOST, 1)], [], "rank 0 of 2: RuntimeError"),
    ],
)
def test_the_rank_is_named_whose_failure_explains_the_others(
    ranks: list[tuple[Any, Any]], silent: list[int], reason: str
):
    states = [RankState(number, ending, died) for number, (ending, died) in enumerate(ranks)]
    found = ending_of(states, [states[each] for each in silent], 10.0)
    assert found.reason.startswith(reason)


def test_a_refusal_stays_permanent_and_keeps_its_traceback():
    found = ending_of([RankState(0), RankState(1, _REFUSED, 78)], [], 10.0)
    assert (found.code, found.error) == (78, _REFUSED.error)
