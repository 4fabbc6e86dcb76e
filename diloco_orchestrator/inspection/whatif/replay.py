"""Computes a base under another decision from stored payloads, next to the real base.

The arithmetic is a live round's (`snapshots.rebuild.take_step`), so the bits are those of a run with that decision.
Bases are stored and compared shard by shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diloco_orchestrator.allreduce.shards import PayloadGone
from diloco_orchestrator.allreduce.vectors import BLOCK
from diloco_orchestrator.errors import ConfigError, NoSuchRun
from diloco_orchestrator.inspection.whatif.decision import OtherDecision
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import bases, check_base
from diloco_orchestrator.protocol.records import Answer, Commit
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import LoggedStep, rebuild_base, start_of, take_step


@dataclass(frozen=True)
class Line:
    """Consecutive applied rounds of a run: the base of each is made from that of the one before."""

    before: int  # the round whose base the first one steps; 0 is the first base
    commits: tuple[Commit, ...]

    @property
    def last(self) -> Commit:
        return self.commits[-1]


@dataclass(frozen=True)
class Replayed:
    """Two bases after the same round: the real one, and the one under a hypothetical decision."""

    as_it_was: Base
    other: Base
    moved: float  # norm of the difference between the base as it was and the one before the line's first round
    averaged: tuple[Answer, ...]  # in the round that made the base under the other decision
    averaged_in: int  # that round: the last that averages a contribution; 0 for the first base
    below_quorum: tuple[int, ...]  # rounds that average fewer than their quorum, as no run would
    nobody: tuple[int, ...]  # rounds that average no contribution under the other decision, so that the base stays


# -- which rounds -----------------------------------------------------------------------------------------------------


def all_lines(run_log: RunLog) -> Line:
    """The applied rounds by which the newest base descends from the first. Raises `NoSuchRun` if there is none."""
    if run_log.start() is None:
        raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model: there is no round to redo.")
    applied = [commit for commit in run_log.each_commit() if commit.applied]
    known = set(bases(applied, run_log.begins()))
    commits = tuple(commit for commit in applied if commit.round in known)
    if not commits:
        raise NoSuchRun(f"no round of {run_log.store.url} was applied yet: there is none to redo.")
    return Line(0, commits)


def line_from(run_log: RunLog, round_: int, until: int | None) -> Line:
    """The applied rounds from `round_` to `until` (None: the newest base's).

    Raises `ConfigError`, naming the nearest possible round and the reason, if `round_` or `until` is no round by which
    the newest base descends from the first, or if `until` is before `round_`; `NoSuchRun` if there is no such round.
    """
    whole = all_lines(run_log)
    known = [commit.round for commit in whole.commits]
    until = known[-1] if until is None else until
    for each in (round_, until):
        if each not in known:
            _refuse(run_log, each, known)
    if until < round_:
        raise ConfigError(f"round {until} comes before round {round_}. Name a later round, or leave it out.")
    first = known.index(round_)
    commits = whole.commits[first : known.index(until) + 1]
    return Line(known[first - 1] if first else 0, commits)


def _refuse(run_log: RunLog, round_: int, known: Sequence[int]) -> None:
    url, entry = run_log.store.url, run_log.commit(round_) if round_ > 0 else None
    nearest = min(known, key=lambda each: (abs(each - round_), each))
    if round_ <= 0:
        raise ConfigError(f"no round made the base {round_} of {url}: rounds count from 1. The nearest is {nearest}.")
    if entry is None:
        raise ConfigError(f"round {round_} of {url} was never committed. The nearest with an outer step is {nearest}.")
    if entry.void:
        raise ConfigError(
            f"the commit of round {round_} of {url} is void, so that it averages nobody: {entry.void}. Its work is in "
            f"later rounds. The nearest with an outer step is {nearest}."
        )
    if not entry.commit.applied:
        raise ConfigError(
            f"round {round_} of {url} took no outer step ({entry.commit.reason}). The nearest that did is {nearest}."
        )
    check_base(round_, [0, *known], url)


def check_contributed(line: Line, decision: OtherDecision, changed: Sequence[int], url: str) -> None:
    """Raise `ConfigError` for a replica left out by `decision` that none of the rounds `changed` averages.

    Leaving it out would change nothing. `line`: the run's rounds. `url`: for the error.
    """
    commits = [commit for commit in line.commits if commit.round in changed]
    averaged = {answer.replica_id for commit in commits for answer in commit.answers if answer.averaged}
    for replica_id in decision.without:
        if replica_id not in averaged:
            there = {answer.replica_id: answer.kind for answer in commits[0].answers}
            found = f"its response is {there[replica_id]!r}" if replica_id in there else "it did not respond in time"
            why = f" ({found})" if len(commits) == 1 else ""
            spans = f"round {changed[0]}" if len(commits) == 1 else f"any round from {changed[0]} to {changed[-1]}"
            raise ConfigError(
                f"replica {replica_id} is not averaged in {spans} of {url}{why}. Averaged are replicas "
                f"{', '.join(map(str, sorted(averaged)))}: leave out one of these."
            )


# -- bases ------------------------------------------------------------------------------------------------------------


def replay(run_log: RunLog, line: Line, decision: OtherDecision, changed: Sequence[int]) -> Replayed:
    """The base after consecutive rounds: the real one, and the one with the rounds `changed` decided differently.

    Raises `ConfigError` naming a round with payloads if needed ones were deleted, and `PayloadCorrupt` or
    `RecordInvalid` for an object that was changed.
    """
    try:
        return _replayed(run_log, line, decision, changed)
    except PayloadGone as error:
        raise _gone(run_log, error) from None


def _replayed(run_log: RunLog, line: Line, decision: OtherDecision, changed: Sequence[int]) -> Replayed:
    other = rebuild_base(run_log, line.before).base
    as_it_was = rebuild_base(run_log, line.last.round).base
    moved = distance(other, as_it_was)
    entry = run_log.commit(line.before) if line.before else None
    averaged = tuple(answer for answer in entry.commit.answers if answer.averaged) if entry else ()
    averaged_in, below, nobody = line.before, [], []
    adapters, reader = start_of(run_log).adapters, ContributionReader(run_log.store)
    for commit in line.commits:
        used = decision if commit.round in changed else OtherDecision()
        config = used.config(run_log.configs.of(commit.leg))
        pairs = used.averaged(commit, config)
        if not pairs:
            nobody.append(commit.round)
            continue
        if len(pairs) < config.contributions_needed:
            below.append(commit.round)
        averaged, averaged_in = tuple(answer for answer, _ in pairs), commit.round
        named = [(reader.named(commit.round, answer), weight) for answer, weight in pairs]
        take_step(other, LoggedStep(commit, named, config), adapters, reader)
    return Replayed(as_it_was, other, moved, averaged, averaged_in, tuple(below), tuple(nobody))


def has_payloads(run_log: RunLog, round_: int) -> bool:
    """Whether the bucket holds any payload of a round. One LIST request."""
    return next(iter(run_log.store.list(keys.payloads(round_))), None) is not None


def _gone(run_log: RunLog, gone: PayloadGone) -> ConfigError:
    """The error about a deleted payload, with the first round that still has payloads: the oldest are deleted first."""
    payload = keys.parse_payload(gone.key)
    assert payload is not None, "a payload's key"
    rounds = [commit.round for commit in all_lines(run_log).commits if commit.round > payload.round]
    first, stop = 0, len(rounds)
    while first < stop:
        middle = (first + stop) // 2
        first, stop = (first, middle) if has_payloads(run_log, rounds[middle]) else (middle + 1, stop)
    left = f"Rounds from {rounds[first]} on have theirs" if first < len(rounds) else "No later round has any left"
    return ConfigError(
        f"payloads of round {payload.round} of {run_log.store.url}, which this needs, were deleted, as retention does. "
        f'{left}; a run with retention={{"payloads": "all"}} keeps them all.'
    )


def distance(one: Base, other: Base) -> float:
    """The L2 norm of the difference of two bases' parameters, without momenta, summed in float64 block by block."""
    squares = 0.0
    for fragment in range(len(one.fragments)):
        for ours, theirs in zip(one.shards(fragment), other.shards(fragment), strict=True):
            squares += squared_distance(ours.parameters, theirs.parameters)
    return float(squares**0.5)


def squared_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The squared L2 norm of the difference of two flat float32 tensors, in float64."""
    blocks = zip(one.split(BLOCK), other.split(BLOCK), strict=True)
    return sum(float((a.double() - b.double()).square().sum()) for a, b in blocks)
