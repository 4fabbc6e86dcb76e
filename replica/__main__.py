"""`python -m replica --store URL --replica-id I --attempt N`: the process entry of one attempt."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from diloco_orchestrator.clock import SystemClock, ThreadBackground
from replica.process.run_attempt import ENV_LEAVE_AFTER, LeavingNotice, fix_threads, process_environment, run_attempt

EXIT_LINE = "DILOCO_EXIT "  # the last line of output; tells an executor's poll how a process ended that nobody reaped


def load_entrypoint(entrypoint: str) -> Callable[[Any], None]:
    """The training function. Raises ImportError or TypeError saying what is wrong."""
    module_name, _, path = entrypoint.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ImportError(f"module {module_name} has no {path!r}. Check its spelling.")
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{entrypoint} is a {type(found).__name__}, not a function taking ctx.")
    return found  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m replica")
    parser.add_argument("--store", required=True, help="the run's folder")
    parser.add_argument("--replica-id", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    clock, environ = SystemClock(), process_environment()
    leave_after = environ.get(ENV_LEAVE_AFTER)
    notice = LeavingNotice(clock, float(leave_after) if leave_after else None)
    notice.install()
    fix_threads(environ)
    code = run_attempt(
        options.store,
        options.replica_id,
        options.attempt,
        clock=clock,
        background=ThreadBackground(),
        environ=environ,
        should_leave=notice,
        load_entrypoint=load_entrypoint,
    )
    print(f"\n{EXIT_LINE}{json.dumps({'code': code})}", flush=True)
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    # Non-daemon threads of a workload must not keep a finished replica alive.
    code = main()
    sys.stdout.flush()
    os._exit(code)
