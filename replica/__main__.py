"""`python -m diloco_orchestrator.replica --store … --replica-id … --attempt … --run-sha256 …`: an attempt's process."""

import argparse
import faulthandler
import os
import sys
from contextlib import suppress

import psutil

from diloco_orchestrator.clock import SystemClock, ThreadBackground
from diloco_orchestrator.errors import Preempted
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import (
    ENV_LEAVE_AFTER,
    EXIT_ERROR,
    EXIT_PREEMPTED,
    load_entrypoint,
    print_exit_line,
    unpacked_code,
)
from diloco_orchestrator.replica.process.machines import Link, MachinePlace, other_machines, serve_machine_0
from diloco_orchestrator.replica.process.rank_children import RankProgram
from diloco_orchestrator.replica.process.rank_processes import RankProcesses
from diloco_orchestrator.replica.process.run_attempt import (
    Ending,
    LeavingNotice,
    configure_logging,
    load_training_libraries,
    process_environment,
    run_attempt,
)


def main() -> int:
    """Run the attempt that the command line names, print the exit line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m diloco_orchestrator.replica")
    parser.add_argument("--store", required=True, help="the run's folder")
    parser.add_argument("--replica-id", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--ranks", type=int, help="processes that train the replica's model together; else the run's")
    Launched.add_options(parser)
    options = parser.parse_args()
    clock, environ = SystemClock(), process_environment()
    leave_after = environ.get(ENV_LEAVE_AFTER)
    notice = LeavingNotice(clock, float(leave_after) if leave_after else None)
    notice.install()
    arguments = ["--store", options.store, "--replica-id", str(options.replica_id)]
    arguments += ["--attempt", str(options.attempt), *Launched.of_options(options).arguments()]
    program = RankProgram(arguments, environ)
    others: list[Link] = []
    if (place := MachinePlace.of(environ)) is not None:
        configure_logging(options.replica_id, options.attempt)
        if place.number:
            return serve_machine_0(place, program, clock, notice)
        try:
            others = other_machines(place, clock, notice)
        except (Preempted, OSError) as error:  # nothing is claimed, so that no record can hold it
            code = EXIT_PREEMPTED if isinstance(error, Preempted) else EXIT_ERROR
            print(error, file=sys.stderr)
            print_exit_line(code, error=f"machine 0 of {place.count}: {error}")
            return code
    ending = run_attempt(
        options.store,
        options.replica_id,
        options.attempt,
        Launched.of_options(options),
        clock=clock,
        background=ThreadBackground(),
        environ=environ,
        # The process above ranks trains nothing, and needs no torch.
        load_libraries=lambda: None if options.ranks else load_training_libraries(environ),
        load_entrypoint=load_entrypoint,
        notice=notice,
        ranks=options.ranks,
        train_in_ranks=lambda attempt, ranks: RankProcesses(attempt, ranks, program, clock, others).run(),
        # By a thread of C, which runs also where a library holds the lock of the interpreter and never comes back.
        dump_stacks_after=lambda seconds: faulthandler.dump_traceback_later(seconds, file=2),
        end_process=_end,
    )
    return _printed(ending)


def _printed(ending: Ending) -> int:
    """The exit code of `ending`, after its exit line was printed.

    It is read by providers that report no exit code, and for local processes whose parent has died; by the coordinator
    for the error of an attempt that wrote no record.
    """
    print_exit_line(ending.code, **({"error": ending.unrecorded} if ending.unrecorded else {}))
    return ending.code


def _end(ending: Ending) -> None:
    for child in psutil.Process().children(recursive=True):  # a data loader's worker that hangs would live on
        with suppress(psutil.Error):  # it has ended, or is another user's
            # Python's own, which ends after this process, once it has deleted the shared memory that it left behind.
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
    _leave(_printed(ending))


def _leave(code: int) -> None:
    """End the process without its other threads: those of a workload must not keep a finished replica alive."""
    with suppress(OSError):  # of a full disk below the output
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    with unpacked_code():
        code = main()
    _leave(code)
