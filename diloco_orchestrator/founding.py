"""Founds a run in an empty folder: `run.json`, then how its first leg begins.

Either record may already be there from somebody who died in between, or who founds the same run at the same time.
"""

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import RunFolderTaken
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin, Run, Stamp
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.commit_log import read_run


def found_run(store: Store, config: RunConfig, run_id: str, by: str, version: str, stamp: Stamp) -> Run:
    """Create the run. Raises `RunFolderTaken` if the folder holds one already."""
    run = Run(**stamp(), run_id=run_id, config=config, package_version=version)
    if not store.create(keys.RUN, run.to_bytes()):
        raise RunFolderTaken(
            f"{store.url} already holds a run. Give the new run a folder of its own, or look at that one with "
            f"`diloco status {store.url}`."
        )
    begin_first_leg(store, config, by, stamp)
    return run


def begin_first_leg(store: Store, config: RunConfig, by: str, stamp: Stamp) -> None:
    """Create leg 1's record unless somebody did."""
    _, run_sha256 = read_run(store)
    begin = Begin(
        **stamp(), leg=1, from_round=0, outer_steps=config.rounds, by=by, why="start of the run", previous=run_sha256
    )
    store.create(keys.begin(1), begin.to_bytes())


def join_or_found(store: Store, config: RunConfig, run_id: str, by: str, version: str, stamp: Stamp) -> None:
    """For replicas without a coordinator: whoever comes first founds the run, the others must mean the same one."""
    run = Run(**stamp(), run_id=run_id, config=config, package_version=version)
    if not store.create(keys.RUN, run.to_bytes()):
        standing, _ = read_run(store)
        if standing.config != config:
            raise RunFolderTaken(f"{store.url} already holds a run with another configuration. Use a new folder.")
    begin_first_leg(store, config, by, stamp)
