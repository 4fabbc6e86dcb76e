"""The contract between a replica's process and its executor: environment, exit codes, exit line, entrypoint.

Standard library only: `program_text` pastes this module's source into programs that travel without our packages.
"""

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Environment that the launcher sets for a replica.
ENV_RANK = "REPLICA_RANK"
ENV_WORLD_SIZE = "REPLICA_WORLD_SIZE"
ENV_LEAVE_AFTER = "DILOCO_LEAVE_AFTER_S"  # seconds until the replica leaves by itself, before its provider ends it
ENV_MEMORY = "DILOCO_MEMORY_MIB"  # what the replica holds beside the workload may take so much memory, then files

# Environment of a replica whose ranks are on several machines: a process of the same command runs on each of them.
ENV_MACHINES = "DILOCO_MACHINES"  # their number
ENV_MACHINE = "DILOCO_MACHINE"  # the number of this one, from 0
ENV_MEETING = "DILOCO_MEETING"  # "host:port" of machine 0, to which the others connect
ENV_MEETING_KEY = "DILOCO_MEETING_KEY"  # a secret of the attempt, by which machine 0 knows the others

ENV_CODE_FOLDER = "DILOCO_CODE_FOLDER"  # where the first program unpacked the code; the process removes it at its end

# Private keys of a signed run: of its launcher, and of an attempt. A replica gets the latter alone, as a secret.
KEY_VARIABLES = ("DILOCO_RUN_KEY", "DILOCO_ATTEMPT_KEY")

# Exit codes of a replica. Any other code is an error that may be retried.
EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_PREEMPTED = 75
EXIT_SUPERSEDED = 76  # another process holds this attempt, or a newer attempt of this replica runs
EXIT_PERMANENT = 78  # a relaunch would end the same way

EXIT_LINE = "DILOCO_EXIT "  # begins the last line of output; JSON follows


@contextmanager
def unpacked_code() -> Iterator[None]:
    """Context that removes the folder into which the code was unpacked, if there is one, at its end.

    The variable that names the folder is removed from the environment at once, so that no child removes the folder.
    """
    folder = os.environ.pop(ENV_CODE_FOLDER, None)
    try:
        yield
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def print_exit_line(code: int, **fields: Any) -> None:
    """Print the last line of a process's output, which holds its exit code for providers that report none.

    `fields` are JSON beside the code; a `value` that JSON cannot hold becomes null. On a full disk nothing is printed.
    """
    try:
        line = json.dumps({"code": code, **fields})
    except (TypeError, ValueError):
        line = json.dumps({"code": code, **fields, "value": None})
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        print(f"\n{EXIT_LINE}{line}", flush=True)


def parse_exit_line(lines: Iterable[str]) -> dict[str, Any] | None:
    """The JSON object in the last complete exit line among `lines`, the end of a process's output; None without one.

    Truncated lines do not count.
    """
    found = None
    for line in lines:
        if line.startswith(EXIT_LINE):
            try:
                found = json.loads(line[len(EXIT_LINE) :])
            except ValueError:
                continue
    return found if isinstance(found, dict) else None


def load_entrypoint(entrypoint: str) -> Callable[..., Any]:
    """The function "package.module:function". Raises ImportError if it is missing, TypeError if not callable."""
    module_name, _, path = entrypoint.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ImportError(f"module {module_name} has no {path!r}. Check the spelling of {entrypoint!r}.")
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{entrypoint!r} is a {type(found).__name__}, which cannot be called. Name a function.")
    return found  # type: ignore[no-any-return]
