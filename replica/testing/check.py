"""`check_replica`: finds out by short local runs whether a training function is a sound replica.

It starts up to twelve processes: undisturbed, killed, with and without scoring, without a run, and as a fleet. `rows`
judges their results.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_orchestrator.code_archive.entrypoint import check_importable, entrypoint_of
from diloco_orchestrator.config import RunConfig, make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.replica.context import ReplicaContext
from diloco_orchestrator.replica.testing.jobs import Jobs, Seen, Wanted
from diloco_orchestrator.replica.testing.report import ConformanceReport
from diloco_orchestrator.replica.testing.rows import CheckResults, findings

_OUTER_OFF = {"lr": 1.0, "momentum": 0.0, "nesterov": False}  # the base becomes what a lone replica trained
_MOST_JOBS = 4


def check_replica(
    train: str | Callable[[ReplicaContext], Any],
    *,
    args: Mapping[str, Any] | None = None,
    heldout_items: Sequence[Any] = (),
    replicas: int = 2,
    ranks: int = 1,
    rounds: int = 3,
    sync_every: int = 4,
    seed: int = 0,
    limit_s: float = 120.0,
) -> ConformanceReport:
    """Train a few short runs on this machine and report whether `train` is a sound replica.

    Args:
        train: the training function or "package.module:function", as for `launch`; importable by other processes.
        args, heldout_items, seed: as for `launch`. Choose `args` such that the model is small.
        replicas: of the run that shows equal models.
        ranks: processes that train the model of a replica together, in every run (`ranks_per_replica`).
        rounds, sync_every: of every run; at least 2 rounds and 2 steps.
        limit_s: seconds after which a process is killed and counts as failed.

    Each process computes with one thread. Raises `ConfigError` for a function that cannot be imported and for settings
    that `launch` would refuse too.
    """
    if rounds < 2 or sync_every < 2:
        raise ConfigError(f"check_replica(rounds={rounds}, sync_every={sync_every}): a check needs 2 of each, or more.")
    entrypoint = train if isinstance(train, str) else entrypoint_of(train)
    common = {
        "entrypoint": entrypoint,
        "args": dict(args or {}),
        "heldout_items": list(heldout_items),
        "rounds": rounds,
        "sync_every": sync_every,
        "seed": seed,
        "quorum": "all",
        "ranks_per_replica": ranks,
        "guard": "off",  # numbers of so few steps say nothing; they are recorded all the same
        "timing": {"poll_s": 0.01, "round_timeout_s": limit_s, "startup_timeout_s": limit_s},
    }
    lone = make_config({**common, "replicas": 1, "outer": _OUTER_OFF})
    fleet = make_config({**common, "replicas": replicas})
    check_importable(entrypoint)
    most = max(replicas, min(_MOST_JOBS, (os.cpu_count() or 1) // ranks))
    with (
        tempfile.TemporaryDirectory(prefix="diloco-check-") as folder,
        Jobs(Path(folder), entrypoint, most, limit_s) as jobs,
    ):
        seen = jobs.run([Wanted("first", "first", {}, lone)])
        if seen["first"].completed:
            seen |= _others(jobs, seen["first"], lone, fleet)
    return ConformanceReport(entrypoint, findings(CheckResults(rounds, sync_every, replicas, seen)))


def _others(jobs: Jobs, first: Seen, lone: RunConfig, fleet: RunConfig) -> dict[str, Seen]:
    """Results of all processes of a check but the first, whose result shows which of them are needed."""
    steps = lone.sync_every
    places = {"inside a round": steps + steps // 2, "at a round's end": 2 * steps}
    # The fleet's replicas wait for each other, so they come first.
    wanted = [Wanted(f"fleet-{i}", "fleet", {}, fleet, replica_id=i) for i in range(fleet.replicas)]
    wanted += [
        Wanted(f"killed {place}", f"killed {place}", {"killed_after": after}, lone) for place, after in places.items()
    ]
    wanted += [
        Wanted("again", "again", {}, lone),
        Wanted("plain", "plain", {"plain": True}, lone),
        Wanted("disturbed", "disturbed", {"plain": True, "disturbed": True}, lone),
    ]
    if first.notes.scores:
        wanted.append(Wanted("unscored", "unscored", {"scored": False}, lone))
    if first.notes.last_item is not None:
        wanted.append(Wanted("planted", "planted", {"planted": first.notes.last_item}, lone))
    # At once after the killed ones, beside the others, so that no core waits for them at the end.
    wanted += [Wanted(f"resumed {p}", f"killed {p}", {}, lone, attempt=2, after=f"killed {p}") for p in places]
    return jobs.run(wanted)
