"""Begins the next leg (stretch to the next stop) of a stopped run: its base, its settings, its number of outer steps.

`auto_resume` does so by itself after a halt by the guard, if the run was launched with `on_halt`. `protocol.legs`
decides which bases exist.
"""

import logging
from collections.abc import Mapping

from pydantic import JsonValue

from diloco_orchestrator.config import GuardConfig, RunConfig, config_of_leg
from diloco_orchestrator.errors import ConfigError, NoSuchRun, ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.guard.registry import rule_of
from diloco_orchestrator.guard.strangers import why_never_scored
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.legs import bases, check_base
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Commit, Halt
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import may_commit
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots, claimed_base
from diloco_orchestrator.snapshots.default_base import check_not_lost, ensure_default_snapshot
from diloco_orchestrator.supervision.rotation import barred_after, begin_epoch, check_failure, due, is_asked_for
from diloco_orchestrator.supervision.unfounded_commits import UnfoundedCommits

log = logging.getLogger(__name__)

# `Begin.by` of the legs that begin here. Those of the first are counted by it, whichever coordinator began them.
BY_AUTO_RESUME, BY_ROTATION = "on_halt", "rotation"
BY_ITSELF = (BY_AUTO_RESUME, BY_ROTATION)  # whose legs have the budget of the one before


def begin_next_leg(
    run_log: RunLog,
    *,
    rounds: int | None,
    from_round: int | None,
    by: str,
    why: str,
    stamp: Stamp,
    change: Mapping[str, JsonValue] | None = None,
    override_guard: str = "",
    guard: Mapping[str, JsonValue] | None = None,
) -> Begin:
    """Create the record with which the next leg begins: the run from this resume to its next stop.

    Args:
        rounds: outer steps of the leg; by default those that the run has left.
        from_round: the base to start from; by default the one that the run stopped on, and after a halt by the guard
            the one with the best held-out score.
        change: settings of the leg, {"outer.lr": 0.5}, {"replicas": 8}; the others are those of the leg before.
        override_guard: why the guard begins anew, with a new baseline; empty: its state goes on.
        guard: the guard's settings in this leg, where it begins anew.

    Raises `ConfigError` for a run that goes on, for a round without a base, for settings that a leg cannot have, and if
    somebody else has begun the leg meanwhile; `NoSuchRun` if no replica ever brought a model; `ObjectMissing` if
    commits were deleted.
    """
    begins, url = run_log.begins(), run_log.store.url
    check_not_lost(run_log, begins)
    UnfoundedCommits(run_log, begins[-1], by, stamp).judge()  # nobody can once another leg has begun after them
    check_failure(run_log, begins[-1])
    commits = run_log.commits()
    last = commits[-1] if commits else None
    leg = begins[-1].leg
    if run_log.result(leg) is None and (last is None or last.leg != leg or last.stop == "none"):
        raise ConfigError(f"{url} goes on (leg {leg}): there is nothing to resume. Halt it first, or attach to it.")
    config, barred = _config(run_log, begins[-1], change or {}, override_guard, guard or {}), due(run_log, begins[-1])
    if not any(may_commit(run_log.store, each) for each in config.launched - barred):
        raise ConfigError(
            f"replicas {sorted(config.launched)} of {url} wrote void commits, and commit no more: with nobody else no "
            "round would end. Resume it with more replicas."
        )
    if barred or is_asked_for(run_log, leg):
        begin_epoch(run_log, by, why, stamp)
    start = run_log.start()
    if start is None:
        raise NoSuchRun(f"no replica of {url} ever brought a model: start a new run instead.")
    if start.record.strangers_rules and (unscored := why_never_scored(config)):
        raise ConfigError(f"strangers' contributions to {url} are scored before they are averaged, but {unscored}.")
    known = bases(commits, begins)
    if from_round is None:
        halted = last is not None and last.leg == leg and last.halted_by_guard
        from_round = ensure_default_snapshot(run_log, stamp).round if halted else known[-1]
    check_base(from_round, known, url)
    origin = run_log.commit(from_round) if from_round else None
    taken = origin.commit.outer_step if origin else 0
    left = run_log.run.config.rounds - taken if rounds is None else rounds
    if left < 1:
        raise ConfigError(f"{url} took all its {taken} outer steps. Say how many more: resume(rounds=…) or --rounds.")
    digest = _ensure_snapshot(run_log, from_round, stamp)
    position = run_log.position()
    begin = Begin(
        **stamp(),
        leg=leg + 1,
        after_round=last.round if last else 0,
        from_round=from_round,
        from_outer_step=taken,
        base_digest=digest,
        outer_steps=left,
        guard=None if override_guard else _guard_state(run_log, origin, config),
        override_guard=override_guard,
        settings=_differences(run_log.run.config, config),
        by=by,
        why=why,
        previous=position.sha256 if position else start.sha256,
    )
    if Writer(run_log.store, Role.LAUNCHER).create(begin) is None:
        raise ConfigError(_why_not_first(run_log, begin.leg))
    return begin


def _why_not_first(run_log: RunLog, leg: int) -> str:
    """Reason why the record with which `leg` begins cannot be created, because another object has its key."""
    if why := run_log.why_foreign(leg):
        return (
            f"leg {leg} of {run_log.store.url} cannot begin: {keys.begin(leg)} is there and no leg's ({why}). Delete "
            "it, and find out who may write to the bucket."
        )
    return f"somebody else began leg {leg} of {run_log.store.url} at the same time: attach to it."


def _config(
    run_log: RunLog,
    before: Begin,
    change: Mapping[str, JsonValue],
    override_guard: str,
    guard: Mapping[str, JsonValue],
) -> RunConfig:
    """Configuration of the run after a resume from the leg of `before`. Raises `ConfigError` for invalid settings."""
    config_of_leg(run_log.run.config, change)
    if guard and not override_guard:
        raise ConfigError(
            "other settings of the guard need a reason, which every reader of the run sees: "
            'resume(override_guard="why", guard={…}) or diloco resume --override-guard WHY.'
        )
    settings = {**before.settings, **change, **{f"guard.{name}": value for name, value in guard.items()}}
    if "rule" in guard:  # another rule begins with its own defaults: it would refuse settings that it does not read
        rule_of(str(guard["rule"]))
        defaults = GuardConfig().model_dump(mode="json")
        settings |= {f"guard.{name}": guard.get(name, value) for name, value in defaults.items()}
    return config_of_leg(run_log.run.config, settings, guard=True)


def _differences(before: RunConfig, after: RunConfig) -> dict[str, JsonValue]:
    """The settings of a resumed run that differ from run.json, by name, as the record of the resume stores them."""
    found: dict[str, JsonValue] = {} if before.replicas == after.replicas else {"replicas": after.replicas}
    for part in ("args", "guard", "outer"):
        old, new = before.model_dump(mode="json")[part], after.model_dump(mode="json")[part]
        found |= {f"{part}.{name}": value for name, value in new.items() if value != old[name]}
    ranks: JsonValue = after.ranks_per_replica  # type: ignore[assignment]
    return found if ranks == before.ranks_per_replica else {**found, "ranks_per_replica": ranks}


def _guard_state(run_log: RunLog, origin: CommitEntry | None, config: RunConfig) -> dict[str, JsonValue] | None:
    """The guard's state after the round resumed from; None, a new baseline, if other settings computed it."""
    judged_alike = origin is not None and run_log.configs.of(origin.commit.leg).guard == config.guard
    return origin.commit.guard if origin and judged_alike else None


def _ensure_snapshot(run_log: RunLog, round_: int, stamp: Stamp) -> str | None:
    """Write the snapshot of the base that is resumed from, unless it exists, so that replicas need no older objects.

    Returns the digest of that base. Raises `ConfigError` naming the newest snapshot if manifests or payloads that the
    base needs cannot be read any more.
    """
    snapshots = ConfirmedSnapshots(run_log)
    if snapshots.take_of(round_) is not None:
        return claimed_base(run_log, round_)
    from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot  # torch, which is slow to import

    try:
        return write_rebuilt_snapshot(run_log, round_, stamp)
    except (ConfigError, ObjectMissing, PayloadCorrupt, RecordInvalid) as error:
        newest = snapshots.newest(1, range(round_))[0]
        raise ConfigError(
            f"the base after round {round_} of {run_log.store.url} cannot be rebuilt: {error} Resume with --from-round "
            f"{newest}, the newest round before it with a snapshot."
        ) from None


def auto_resume(run_log: RunLog, stamp: Stamp) -> Begin | None:
    """Resume the run if the guard has halted its newest leg (start or resume to stop) and `on_halt` allows one more.

    Also if the leg was halted for the run's keys to be replaced, which is done first, and if it failed by void commits
    of replicas that then commit nothing more (`rotation.due`); not if anything else stopped such a leg meanwhile.

    Returns the begin record of the new leg, else None. Safe to repeat and to race: of several coordinators one begins
    the leg, and all return its record. If somebody has requested a halt of the leg, none begins.
    """
    on_halt, begins = run_log.run.config.on_halt, run_log.begins()
    leg = begins[-1].leg
    check_failure(run_log, begins[-1])
    entry, halt = run_log.newest(begins[-1]), run_log.halt(leg)
    if entry is None or entry.commit.leg != leg:
        return None
    for_keys = halt is not None and halt.new_keys is True
    if halt is not None and for_keys and _obeys(entry.commit, halt):
        return _begun(run_log, leg, BY_ROTATION, f"the run has new keys: {halt.reason}", stamp, {})
    if entry.commit.stop == "failed" and not entry.commit.by_coordinator and (halt is None or for_keys):
        barred = due(run_log, begins[-1]) | barred_after(run_log, leg)
        if barred:
            why = f"void commits made leg {leg} fail; replicas {sorted(barred)}, which wrote them, commit no more"
            return _begun(run_log, leg, BY_ROTATION, why, stamp, {})
    if on_halt is None or not entry.commit.halted_by_guard:
        return None
    if halt is not None and not for_keys:
        log.warning("leg %d was asked to halt: on_halt begins no other leg", leg)
        return None
    done = sum(begin.by == BY_AUTO_RESUME for begin in begins)
    if done >= on_halt.at_most:
        log.warning("the guard halted leg %d: on_halt has begun its %d legs", leg, done)
        return None
    change = ", ".join(f"{name}={value}" for name, value in on_halt.change.items()) or "nothing changed"
    why = f"on_halt {done + 1} of at most {on_halt.at_most} ({change}): {_reason(entry.commit)}"
    return _begun(run_log, leg, BY_AUTO_RESUME, why, stamp, on_halt.change)


def _begun(run_log: RunLog, leg: int, by: str, why: str, stamp: Stamp, change: Mapping[str, JsonValue]) -> Begin | None:
    """The record of the leg after `leg`, begun here or by another coordinator; None, with a warning, if none can."""
    try:
        begin = begin_next_leg(run_log, rounds=None, from_round=None, by=by, why=why, stamp=stamp, change=change)
    except ConfigError as error:
        newest = run_log.newest_begin().record
        if newest.leg > leg:  # another coordinator was first
            return newest
        log.warning("no leg begins after leg %d: %s", leg, error)
        return None
    log.warning("leg %d begins from round %d: %s", begin.leg, begin.from_round, why)
    return begin


def _obeys(commit: Commit, halt: Halt) -> bool:
    """Whether a commit stopped its leg for the request `halt`: neither the guard did, nor a coordinator for a limit."""
    if commit.stop != "halted" or commit.halted_by_guard:
        return False
    return not commit.by_coordinator or commit.reason in (halt.reason, f"halt requested: {halt.reason}")


def _reason(commit: Commit) -> str:
    assert commit.verdict is not None
    return commit.verdict.reason
