"""What follows from rounds: which states are drawn next, and which share of them looks like gamed tests.

`Curriculum.follow` goes to `replica.on_round`, so that all replicas draw by the same numbers.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer.traces import Message, TraceState
from diloco_orchestrator.replica.training.round_hooks import RoundView

LEVELS = ("easy", "medium", "hard")

_EDITS = {"Edit", "Write", "MultiEdit", "NotebookEdit"}
_TEST_FILE = re.compile(
    r"(^|[/\s'\"])(tests?/|test_[\w.-]*\.py\b|conftest\.py\b|[\w-]+_test\.\w+\b|[\w-]+\.test\.\w+\b)"
)
_WRITES = re.compile(r"(^|[\s;&|])(rm|mv|cp|truncate|tee|sed\s+-i\S*|git\s+(rm|checkout))\s|>")


class Curriculum:
    """Draws states of three levels of difficulty, the more often the closer a level's success is to one half.

    Success is a moving average in [0, 1]; a level is drawn with weight p (1 - p), and never with less than `least`.
    """

    def __init__(self, ema_alpha: float = 0.7, least: float = 0.02) -> None:
        self.ema_alpha, self.least = ema_alpha, least
        self.success = dict.fromkeys(LEVELS, 0.5)
        self._last_round = 0

    def follow(self, view: RoundView) -> None:
        """Update from the means over all replicas of what they reported as `extra={"solved_easy": …}`."""
        if view.round <= self._last_round:
            return  # a restarted attempt sees the newest round again
        self._last_round = view.round
        for level in LEVELS:
            seen = view.extra.get(f"solved_{level}")
            if seen is not None:
                self.success[level] = self.ema_alpha * self.success[level] + (1 - self.ema_alpha) * seen

    def weights(self) -> dict[str, float]:
        return {level: max(self.least, p * (1 - p)) for level, p in self.success.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"success": dict(self.success), "last_round": self._last_round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.success, self._last_round = dict(state["success"]), int(state["last_round"])


class Draws:
    """Endless draws of (level, states), from a position that can be saved: the source of `replica.batches`."""

    def __init__(self, states: Sequence[TraceState], curriculum: Curriculum, size: int, seed: int) -> None:
        ranked = sorted(states, key=lambda state: (len(state.messages), state.id))
        self.levels = {
            level: ranked[i * len(ranked) // len(LEVELS) : (i + 1) * len(ranked) // len(LEVELS)]
            for i, level in enumerate(LEVELS)
        }
        if not all(self.levels.values()):
            raise ValueError(f"{len(states)} states are too few for {len(LEVELS)} levels of difficulty.")
        self.curriculum, self.size, self.seed, self.next = curriculum, size, seed, 0

    def __iter__(self) -> Iterator[tuple[str, list[TraceState]]]:
        while True:
            numbers = random.Random(f"{self.seed}-{self.next}")
            self.next += 1
            weights = self.curriculum.weights()
            level = numbers.choices(LEVELS, [weights[each] for each in LEVELS])[0]
            yield level, numbers.choices(self.levels[level], k=self.size)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = int(state["next"])


def touches_tests(action: Message) -> bool:
    """Whether a tool call writes to a test file: by an editing tool, or by a shell command that changes files."""
    for call in action.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        path = str(arguments.get("file_path") or arguments.get("notebook_path") or "")
        if name in _EDITS and _TEST_FILE.search(path):
            return True
        command = str(arguments.get("command") or "")
        if name == "Bash" and _WRITES.search(command) and _TEST_FILE.search(command):
            return True
    return False


def suspected_hacks(states: Sequence[TraceState]) -> float:
    """Share of actions that touch tests, for `observe(extra={"suspected_hacks": …})`."""
    return sum(touches_tests(state.student_action) for state in states) / max(1, len(states))
