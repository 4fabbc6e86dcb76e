"""Founds a run in an empty folder: `run.json`, then how its first leg begins.

Either record may already be there from somebody who died in between, or who founds the same run at the same time.
"""

from diloco_orchestrator.errors import RunFolderTaken
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin, Run, Stamp
from diloco_orchestrator.run_log.run_log import read_run
from diloco_orchestrator.store.base import Store


def found_run(store: Store, run: Run, by: str, stamp: Stamp) -> None:
    """Create the run. Raises `RunFolderTaken` if the folder holds one already."""
    if not store.create(keys.RUN, run.to_bytes()):
        raise RunFolderTaken(
            f"{store.url} already holds a run. Give the new run a folder of its own, or look at that one with "
            f"`diloco status {store.url}`."
        )
    _begin_first_leg(store, by, stamp)


def join_or_found(store: Store, run: Run, by: str, stamp: Stamp) -> None:
    """For replicas without a coordinator: whoever comes first founds the run, the others must mean the same one."""
    if not store.create(keys.RUN, run.to_bytes()):
        standing, _ = read_run(store)
        if standing.config != run.config:
            raise RunFolderTaken(f"{store.url} already holds a run with another configuration. Use a new folder.")
    _begin_first_leg(store, by, stamp)


def _begin_first_leg(store: Store, by: str, stamp: Stamp) -> None:
    """Create leg 1's record unless somebody did."""
    run, run_sha256 = read_run(store)
    begin = Begin(
        **stamp(),
        leg=1,
        after_round=0,
        from_round=0,
        from_outer_step=0,
        outer_steps=run.config.rounds,
        by=by,
        why="start of the run",
        previous=run_sha256,
    )
    store.create(keys.begin(1), begin.to_bytes())
