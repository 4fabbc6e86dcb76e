"""Functions that tests run through the low-level form of executors. Light: nothing of torch is imported here."""

import os
import signal
import sys
import threading
from typing import Any

NOT_A_FUNCTION = 3


def add(a: float, b: float) -> dict[str, Any]:
    """Returns what it was given and where it ran."""
    return {
        "sum": a + b,
        "rank": int(os.environ["REPLICA_RANK"]),
        "world_size": int(os.environ["REPLICA_WORLD_SIZE"]),
        "threads": os.environ["OMP_NUM_THREADS"],
    }


def of_length(length: int) -> str:
    return "x" * length


def fail(words: str) -> None:
    raise LookupError(words)


def exit_with(code: int) -> None:
    sys.exit(code)


def hard_exit(code: int) -> None:
    os._exit(code)


def print_and_wait(stubborn: bool = False) -> None:
    """Prints, then runs until a signal ends it; a stubborn one ignores SIGTERM."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    threading.Event().wait()


def return_unjsonable() -> object:
    return object()


def chatter(lines: int) -> None:
    for line in range(lines):
        print(f"line {line}")


def variable(name: str) -> str | None:
    """An environment variable as the process has it."""
    return os.environ.get(name)
