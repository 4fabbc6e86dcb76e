"""Constants of a replica's process: environment variables, exit codes, exit line; and its installed versions.

Constants that executors need too come from `executors.process_contract`, so that `replica` imports no executor.
"""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from diloco_orchestrator.executors.process_contract import ENV_LEAVE_AFTER as ENV_LEAVE_AFTER
from diloco_orchestrator.executors.process_contract import ENV_MACHINE as ENV_MACHINE
from diloco_orchestrator.executors.process_contract import ENV_MACHINES as ENV_MACHINES
from diloco_orchestrator.executors.process_contract import ENV_MEETING as ENV_MEETING
from diloco_orchestrator.executors.process_contract import ENV_MEETING_KEY as ENV_MEETING_KEY
from diloco_orchestrator.executors.process_contract import ENV_MEMORY as ENV_MEMORY
from diloco_orchestrator.executors.process_contract import ENV_RANK as ENV_RANK
from diloco_orchestrator.executors.process_contract import ENV_WORLD_SIZE as ENV_WORLD_SIZE
from diloco_orchestrator.executors.process_contract import EXIT_DONE as EXIT_DONE
from diloco_orchestrator.executors.process_contract import EXIT_ERROR as EXIT_ERROR
from diloco_orchestrator.executors.process_contract import EXIT_PERMANENT as EXIT_PERMANENT
from diloco_orchestrator.executors.process_contract import EXIT_PREEMPTED as EXIT_PREEMPTED
from diloco_orchestrator.executors.process_contract import EXIT_SUPERSEDED as EXIT_SUPERSEDED
from diloco_orchestrator.executors.process_contract import KEY_VARIABLES as KEY_VARIABLES
from diloco_orchestrator.executors.process_contract import load_entrypoint as load_entrypoint
from diloco_orchestrator.executors.process_contract import print_exit_line as print_exit_line
from diloco_orchestrator.executors.process_contract import unpacked_code as unpacked_code

ENV_STORAGE_OPTIONS = "DILOCO_STORAGE_OPTIONS"  # JSON; a secret


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package by name; "not installed" if it is absent."""
    return {package: _installed_version(package) for package in packages}


@cache  # a search takes milliseconds for each package, and what is imported does not change any more
def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
