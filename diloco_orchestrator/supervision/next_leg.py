"""Legs: which rounds the newest leg's base came through, and how the next leg begins.

After a stop a leg may start from an earlier base; rounds in between stay in the log, but no base descends from them.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco_orchestrator.errors import ConfigError, NoSuchRun
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin, Commit, Halt, Stamp, sha256_hex
from diloco_orchestrator.run_log.run_log import read_begin, read_start
from diloco_orchestrator.store.base import Store

if TYPE_CHECKING:
    from diloco_orchestrator.snapshots.rebuild import Tip

log = logging.getLogger(__name__)


def begins(store: Store) -> list[Begin]:
    """All legs' beginnings, the newest last."""
    newest, _ = read_begin(store)
    return [read_begin(store, leg)[0] for leg in range(1, newest.leg)] + [newest]


def leg_of_base(found: Sequence[Begin], round_: int) -> Begin | None:
    """The leg in which the base after `round_` was made, or None if the newest base does not descend from it."""
    for begin in reversed(found):
        if round_ > begin.after_round or begin.leg == 1:
            return begin
        if round_ > begin.from_round:
            return None
    return None


def bases(commits: Sequence[Commit], found: Sequence[Begin]) -> list[int]:
    """Rounds after which there is a base that the newest one descends from, 0 for the first; oldest first."""
    return [0] + [c.round for c in commits if c.applied and leg_of_base(found, c.round) is not None]


def best_base(commits: Sequence[Commit], found: Sequence[Begin], among: Sequence[int]) -> int:
    """The base with the best held-out score: commit r carries the score of the base before it. 0 if none has one."""
    scored: list[tuple[float, int]] = []
    base, leg = 0, 1
    for commit in commits:
        if commit.leg != leg:
            leg, base = commit.leg, found[commit.leg - 1].from_round
        value = (commit.verdict or {}).get("value")
        if isinstance(value, float) and base in among:
            scored.append((value, base))
        base = commit.round if commit.applied else base
    return max(scored, key=lambda pair: (pair[0], -pair[1]), default=(0.0, 0))[1]


def check_base(round_: int, among: Sequence[int], url: str) -> None:
    """Raise `ConfigError` offering the nearest unless `round_` has a base that can be rebuilt."""
    if round_ not in among:
        nearest = min(among, key=lambda known: (abs(known - round_), known))
        raise ConfigError(
            f"round {round_} of {url} left no base: the run has {among[0]}..{among[-1]}, and rounds that were not "
            f"applied, or left behind by a resume, have none. The nearest is {nearest}."
        )


def request_halt(store: Store, reader: RunReader, by: str, reason: str, stamp: Stamp) -> None:
    """Ask the newest leg to stop after its open round; asking again changes nothing.

    Raises `ConfigError` for a leg that has ended.
    """
    leg = begins(store)[-1].leg
    if (result := reader.result(leg)) is not None:
        raise ConfigError(
            f"{store.url} has ended already ({result.status}: {result.reason}). There is nothing to halt."
        )
    store.create(keys.halt(leg), Halt(**stamp(), leg=leg, by=by, reason=reason).to_bytes())


def begin_next_leg(
    store: Store,
    reader: RunReader,
    *,
    rounds: int | None,
    from_round: int | None,
    by: str,
    why: str,
    stamp: Stamp,
) -> Begin:
    """Create the next leg's `begin`. Whoever loses a race for it gets a `ConfigError`, as for a run that goes on.

    `from_round`: the base to start from; by default the one that the run stopped on, and after a verdict the one with
    the best held-out score. `rounds`: outer steps of the leg; by default those that the run has left.
    """
    found, commits = begins(store), reader.commits()
    last = commits[-1] if commits else None
    leg = found[-1].leg
    if reader.result(leg) is None and (last is None or last.leg != leg or last.stop == "none"):
        raise ConfigError(
            f"{store.url} goes on (leg {leg}): there is nothing to resume. Halt it first, or attach to it."
        )
    if read_start(store) is None:
        raise NoSuchRun(f"no replica of {store.url} ever brought a model: start a new run instead.")
    known = bases(commits, found)
    fired = bool(last and last.verdict and last.verdict.get("fire"))
    if from_round is None:
        from_round = _best_that_can_be_had(store, reader, commits, found, known) if fired else known[-1]
    check_base(from_round, known, store.url)
    origin = next((commit for commit in commits if commit.round == from_round), None)
    taken = origin.outer_step if origin else 0
    left = reader.run.config.rounds - taken if rounds is None else rounds
    if left < 1:
        raise ConfigError(
            f"{store.url} took all its {taken} outer steps. Say how many more: resume(rounds=…) or --rounds."
        )
    _ensure_snapshot(store, reader, from_round, stamp)
    begin = Begin(
        **stamp(),
        leg=leg + 1,
        after_round=last.round if last else 0,
        from_round=from_round,
        from_outer_step=taken,
        outer_steps=left,
        guard=origin.guard if origin else None,
        by=by,
        why=why,
        previous=sha256_hex(store.get(keys.commit(last.round) if last else keys.START)),
    )
    if not store.create(keys.begin(begin.leg), begin.to_bytes()):
        raise ConfigError(f"somebody else began leg {begin.leg} of {store.url} at the same time: attach to it.")
    return begin


def _best_that_can_be_had(
    store: Store, reader: RunReader, commits: Sequence[Commit], found: Sequence[Begin], known: Sequence[int]
) -> int:
    """The base with the best held-out score; the best with a snapshot, where that one's payloads are collected."""
    best = best_base(commits, found, known)
    try:
        if best not in reader.snapshots():
            rebuilt(store, reader, best)
    except ConfigError as error:
        among = [round_ for round_ in reader.snapshots() if round_ in known]
        log.warning("%s The best of those is taken.", error)
        return best_base(commits, found, among)
    return best


def rebuilt(store: Store, reader: RunReader, round_: int) -> "Tip":
    """The base after `round_`, from the nearest snapshot and the commits after it."""
    from diloco_orchestrator.allreduce.payload import PayloadGone
    from diloco_orchestrator.snapshots.rebuild import rebuild

    begin, start = leg_of_base(begins(store), round_), read_start(store)
    assert begin is not None and start is not None
    try:
        return rebuild(store, begin, *start, reader.run.config.outer, until=round_)
    except PayloadGone:
        kept = reader.snapshots()
        nearest = min(kept, key=lambda known: (abs(known - round_), known))
        raise ConfigError(
            f"round {round_} of {store.url} cannot be rebuilt any more: payloads that it needs were collected. "
            f"Snapshots are there of rounds {', '.join(map(str, kept))}; the nearest is {nearest}."
        ) from None


def _ensure_snapshot(store: Store, reader: RunReader, round_: int, stamp: Stamp) -> None:
    """A leg starts from a snapshot, so that its replicas need nothing older."""
    if round_ in reader.snapshots():
        return
    from diloco_orchestrator.snapshots.layout import files_of_snapshot, write_snapshot

    tip, start = rebuilt(store, reader, round_), read_start(store)
    assert start is not None
    write_snapshot(store, round_, tip.base, tip.digest, files_of_snapshot(store, 0, start[0].parameters), stamp)
