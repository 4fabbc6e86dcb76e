"""Explains in plain words why a run stopped, or that it goes on, and what to do. Pure: input is a `RunStatus`."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any

from diloco_orchestrator.errors import error_line
from diloco_orchestrator.inspection.status import ReplicaRow, RoundRow, RunStatus
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import BY_HAND
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.protocol.verdict import Statistic, VerdictKind

_BAR = 20  # characters
_FIRED, _ASKED = "the guard fired: ", "halt requested: "

# Explanations of a verdict, by words in its reason: meaning, and what to check. The first match counts.
_CHANNELS = (
    (
        "Hacking Gap",
        "Training reports more and more success that the held-out items do not show: the model learns to please the "
        "training metric (reward hacking), or it memorises its training data.",
        "Read samples of the model from after that round, and check the reward or the data for what can be exploited.",
    ),
    (
        "held-out score fell while",
        "The held-out score falls while training reports success, which is what reward hacking looks like. The rule "
        "heldout does not measure noise, so that it cannot say how many sigmas this is.",
        "Read samples of the model, and compare with the rule sequential, which tells a fall from noise.",
    ),
    (
        "early collapse",
        "The model became worse on held-out items within the first rounds, by far more than these scores vary.",
        "Compare samples of the models before and after that round; check reward, data and learning rate.",
    ),
    (
        "new low",
        "The model became worse on held-out items than it ever was, its start included, and does not recover.",
        "Compare samples of the models before and after that round; check reward, data and learning rate.",
    ),
    (
        "step down",
        "The model became worse on held-out items at once and stays so, by more than the noise of the score explains.",
        "Look at what changed then: data, reward, learning rate.",
    ),
    (
        "largest recent change",
        "The model broke within a round or two: a loss spike, bad data, or numbers that overflowed.",
        "Look at the data and the learning rate of that round.",
    ),
    (
        "its best level",
        "The model has become worse on held-out items for good, by more than the noise of the score explains.",
        "Look at what changed then: data, reward, learning rate.",
    ),
    (
        "kl_to_init",
        "The model has drifted further from its start than was allowed (guard.kl_hard_stop).",
        "Raise the KL penalty or lower the learning rate; if the drift is meant, allow more of it.",
    ),
    (
        "nonfinite",
        "Held-out scores or training metrics were NaN or infinite for several rounds.",
        "Look for an overflow in the model or in the evaluation, and lower the learning rate.",
    ),
    (
        "found in the training data",
        "Held-out items were trained on, so that their scores prove nothing any more.",
        "Take them out of the training data, or make a new held-out set.",
    ),
    (
        "could not be judged",
        "The guard was without enough held-out scores for several rounds, so that nobody watched the run. Nothing says "
        "that the model is at fault.",
        "Look at the replicas' logs for the held-out evaluation, mend it, and resume.",
    ),
)

# By the error that ended a replica: meaning, and what to do.
_ERRORS = {
    "QuorumLost": (
        "too few replicas responded in time",
        "look why the others were gone (attempts in `diloco report`), or raise timing.round_timeout_s",
    ),
    "BaseDiverged": (
        "its machine computes other bits than the other replicas' machines",
        "compare `diloco doctor` on both machines; replace it",
    ),
    "ModelMismatch": ("it trains another model or scores another held-out set", "make all replicas alike"),
    "PayloadCorrupt": ("an object in the bucket is not what its record promises", "run `diloco verify`"),
    "ConfigError": ("an argument or setting cannot be used", "mend it as the message says"),
    "StoreDenied": ("the bucket refuses its credentials", "check them on the replica's machine"),
    "StoreFull": ("there is no room left in the bucket or on the disk", "make room, then resume"),
    "WorkloadEndedEarly": (
        "the training function returned before the end",
        "loop over `replica.batches`, or until `replica.step` returns False; no callback may stop a trainer",
    ),
}


@dataclass(frozen=True)
class Explanation:
    """The state of a run as sentences: what happened, why, and what to do."""

    # going on, nobody works on it, completed, halted by the guard, paused by the guard, halted on request, at its
    # limit, failed, records are missing, records disagree
    kind: str
    what: str  # the state and where the run is
    why: list[str]  # sentences
    todo: list[str]  # sentences, the most useful first
    statistics: list[Statistic] = field(default_factory=list)  # of the guard's last verdict

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The explanation as lines of text for a terminal."""
        shown = [f"  {words}" for words in statistic_lines(self.statistics)]
        return [
            self.what,
            "",
            *self.why,
            *(["", "The guard's statistics; one above its threshold stops the run:", *shown] if shown else []),
            "",
            *self.todo,
        ]


def statistic_lines(statistics: Sequence[Statistic]) -> list[str]:
    """A line of text for each statistic of the guard: name, bar up to the threshold, value and threshold."""
    longest = max((len(each.name) for each in statistics), default=0)
    return [
        f"{each.name:<{longest}}  {_bar_of(each.share)}  {each.value:.3g} of {each.threshold:g}" for each in statistics
    ]


def _bar_of(share: float) -> str:
    """A bar of 20 characters, filled in proportion to `share`, whole at 1."""
    full = min(round(share * _BAR), _BAR)
    return "█" * full + "·" * (_BAR - full)


def explain(status: RunStatus, best: int | None = None, now: float | None = None) -> Explanation:
    """The explanation of a run's state. `best`: the round whose base has the best held-out score, if any is scored.

    `now`: seconds since 1970 on this machine; without it, a run without running processes is not reported as such.
    """
    still = [] if now is None else why_still(status, now)
    state = "stands still" if still else status.state
    where = f"{state} at round {status.round}, after {status.outer_step} of {status.outer_steps} outer steps"
    what = f"{status.url}: {where} (leg {status.leg})"
    statistics = list(status.verdict.statistics) if status.verdict else []
    at = quote(status.url)
    resume = f"`diloco resume {at}`"
    scores = [*_scores(status.rounds, best), *_judged(status.rounds)]
    if still and status.false_end:
        todo = [
            f"`diloco verify {at}` names what was changed.",
            "Restore it, as it was (in a bucket with versions). `diloco attach` would go on where the commits that are "
            f"there end: do that only if {keys.result(status.leg)} is the false one.",
        ]
        return Explanation("records disagree", what, [*still, *scores], todo, statistics)
    if still:
        todo = [
            f"{go_on(status)}, which launches what is missing and supervises it.",
            "If its launcher still runs elsewhere and waits for machines, nothing has to be done: a wait leaves no "
            "trace in the bucket.",
        ]
        if status.is_by_hand:
            todo = [_sentence(go_on(status)), "A loop in a long round leaves no trace either until it publishes."]
        found, mended = _no_room(status)
        return Explanation(
            "nobody works on it", what, [*found, *still, *scores, *_warning(status)], [*mended, *todo], statistics
        )
    if status.lost:
        todo = [
            f"`diloco verify {at}` names what is missing; `diloco snapshots {at}` the models that are there.",
            "Restore what was deleted, as it was (in a bucket with versions), and let no lifecycle rule delete in a "
            "run's folder: `diloco gc` removes what nobody needs.",
        ]
        return Explanation("records are missing", what, [_sentence(status.lost), *scores], todo, statistics)
    if status.state in ("starting", "running"):
        waits, mended = _no_room(status)
        todo = ["Mend what the warning names."] if _warning(status) else []
        outlook = [f"The guard {_sentence(status.outlook)}"] if status.outlook else []
        chosen = [_sentence(words[:1].upper() + words[1:]) for words in status.place_words()]
        found = [*waits, _sentence(status.reason), *scores, *chosen, *_warning(status), *outlook]
        return Explanation("going on", what, found, [*mended, *todo] or ["Nothing has to be done."], statistics)
    if status.state == "completed":
        other = best is not None and best != status.model.round
        todo = [
            f"The model: `diloco pull {at} DESTINATION`.",
            *(
                [f"The one with the best held-out score: `diloco pull {at} DESTINATION --round {best}`."]
                if other
                else []
            ),
            *([] if status.is_by_hand else [f"More rounds: `diloco resume {at} --rounds N`."]),
        ]
        errors, mended = _errors(status)
        done = ["Every outer step is taken.", *_missing(status.rounds), *errors, *scores, *_warning(status)]
        return Explanation("completed", what, done, [*todo, *mended], statistics)
    if status.verdict is not None and status.verdict.fire and status.reason.startswith(_FIRED):
        return _fired(status, what, scores, statistics, best)
    if status.reason.startswith(_ASKED):
        asked = status.reason.removeprefix(_ASKED)
        limit = asked.startswith(("max_hours", "max_cost_usd"))
        why = f"The run's own limit ended it: {asked}." if limit else f"Somebody asked for it: {asked}."
        more = [f"It can go on from where it stopped: {resume}."]
        return Explanation("at its limit" if limit else "halted on request", what, [why, *scores], more, statistics)
    return _failed(status, what, scores, statistics, resume)


def _fired(
    status: RunStatus, what: str, scores: list[str], statistics: list[Statistic], best: int | None
) -> Explanation:
    verdict = status.verdict
    assert verdict is not None
    paused = verdict.kind is VerdictKind.PAUSE
    reason = verdict.reason.removeprefix("latched: ")
    found = next(((meaning, look) for words, meaning, look in _CHANNELS if words in reason), None)
    why = [f"The guard {'paused' if paused else 'halted'} all replicas at this round: {_sentence(reason)}"]
    if re.search(r"-\d", reason) and not any(row.reward is not None for row in status.rounds):
        why.append("To the guard higher is better, so that a loss stands in its sentence with a minus.")
    why += [found[0]] if found else []
    why += [*scores, "The round of the verdict was not applied."]
    todo = [found[1]] if found else []
    # The guard counts bases by rounds, and those that left none too: the last sentence names the one to go on from.
    if verdict.rollback_to in {0, *(row.round for row in status.rounds if row.applied)}:
        todo.append(f"The last model above suspicion is that of round {verdict.rollback_to}.")
    resume = f"diloco resume {quote(status.url)}"
    if paused:
        todo.append(f"Then go on: `{resume}`.")
    else:
        from_best = "" if best is None else f", the one of round {best}"
        todo.append(f"To go on from the base with the best held-out score{from_best}: `{resume}`.")
    return Explanation("paused by the guard" if paused else "halted by the guard", what, why, todo, statistics)


def _failed(status: RunStatus, what: str, scores: list[str], statistics: list[Statistic], resume: str) -> Explanation:
    why, todo = [_sentence(status.reason)], []
    if "rounds in a row named nobody" in status.reason:
        why.append("No replica had numbers that could be averaged; most often they are NaN.")
        todo.append("Look at the replicas' logs; lower the learning rate, and resume from an earlier round.")
    errors, mended = _errors(status)
    why, todo = why + errors, todo + mended
    logs = f"diloco logs {quote(status.url)}"
    whole = next((f"`{logs} --replica {r.replica_id}`" for r in status.replicas if r.exit_code), "")
    todo += [f"The whole output: {whole}."] if whole else []
    todo.append(f"Committed rounds are safe. Once the cause is mended: {resume}.")
    return Explanation(status.state, what, [*why, *scores], todo, statistics)


def _errors(status: RunStatus) -> tuple[list[str], list[str]]:
    """Two lists of sentences: the errors with which replicas ended, and what to do about each; equal ones once."""
    why, todo = [], []
    errors = {each.replica_id: _error_of(each) for each in status.replicas if each.error}
    for ids, (name, message) in grouped(errors.items()):
        meaning, advice = _ERRORS.get(name, ("its training function raised an error", "mend it as it says"))
        who = replicas(ids).capitalize()
        why.append(f"{who}: {meaning} ({name}: {message}).")
        todo.append(f"{who}: {advice}.")
    return why, todo


def _missing(rows: Sequence[RoundRow]) -> list[str]:
    """A sentence about the replicas that were not averaged in at least half of the outer steps; empty if none."""
    applied = [row for row in rows if row.applied]
    counts = Counter(replica_id for row in applied for replica_id in row.without)
    often = ((replica_id, count) for replica_id, count in sorted(counts.items()) if 2 * count >= len(applied))
    return [f"Without {replicas(ids)}: {count} of {len(applied)} outer steps." for ids, count in grouped(often)]


def _error_of(replica: ReplicaRow) -> tuple[str, str]:
    """Name and message of the error at the end of a replica's traceback, in one line; empty without traceback."""
    name, _, message = error_line(replica.error or "").partition(": ")
    return name.rpartition(".")[2], message.rstrip(".")


def _scores(rows: Sequence[RoundRow], best: int | None) -> list[str]:
    scored = [row for row in rows if row.heldout is not None]
    if not scored:
        trained = any(row.applied for row in rows)
        return ["No held-out score was ever taken: the kill-switch was off."] if trained else []
    first, last = scored[0], scored[-1]
    words = f"Held-out score: {first.heldout:.4f} before round {first.round}"
    if last is not first:
        words += f", {last.heldout:.4f} before round {last.round}"
    return [f"{words}; the best base is that of round {best}." if best is not None else f"{words}."]


def _judged(rows: Sequence[RoundRow]) -> list[str]:
    """Sentences about replicas whose contributions were weighted less or left out: how often, and why last."""
    counts = Counter(replica_id for row in rows for replica_id in row.judgements)
    last = {replica_id: (row.round, why) for row in rows for replica_id, why in row.judgements.items()}
    return [
        f"{replicas(ids).capitalize()} did not count in full in {count} of {len(rows)} rounds; in round {round_}: "
        f"{_sentence(why)}"
        for ids, (count, round_, why) in grouped((i, (counts[i], *last[i])) for i in sorted(last))
    ]


def _no_room(status: RunStatus) -> tuple[list[str], list[str]]:
    """Two lists of sentences: why the run's folder takes no objects, and what to do; both empty if it does."""
    if not status.no_room:
        return [], []
    why, _, todo = status.no_room.partition(": ")
    return [_sentence(f"Nobody can write: {why}")], [
        _sentence(f"{todo[:1].upper()}{todo[1:]}"),
        "Nothing else has to be done: replicas and coordinator wait for hours, and then go on where they were.",
    ]


def _warning(status: RunStatus) -> list[str]:
    """The warning of the newest round in which replicas trained, as a sentence; empty if that round has none."""
    trained = next((row for row in reversed(status.rounds) if row.stop != "completed"), None)
    return [f"Warning: {_sentence(trained.warning)}"] if trained is not None and trained.warning else []


def _sentence(words: str) -> str:
    words = words.strip()
    return words if words.endswith(".") else f"{words}."


# -- whether anybody works on the run ---------------------------------------------------------------------------------
# A reader has two kinds of evidence: heartbeats, which every living replica overwrites every few seconds, and the
# stamps of all records. Stamps are the writers' wall clocks, so the words say against which clock they were compared.


def still_s(status: RunStatus, now: float) -> float:
    """Seconds since the newest record or heartbeat of a run that has not ended, above `retry.hung_after_s`; else 0.

    0 too where a record was deleted, because what came after it is not known. `now`: seconds since 1970. A
    coordinator replaces a replica that has sent no heartbeat for `retry.hung_after_s`.
    """
    age_s = now - status.moved_at
    goes_on = status.state in ("starting", "running") and not status.lost
    return age_s if goes_on and age_s > status.hung_after_s else 0.0


def why_still(status: RunStatus, now: float) -> list[str]:
    """Sentences about a run on which no process works; empty for any other."""
    if not (age_s := still_s(status, now)):
        return []
    silent = (
        f"no heartbeat moved and no record came for {_duration(age_s)} (the newest stamp in it against this machine's "
        "clock)"
    )
    first = f"Nobody works on this run any more, as far as the bucket shows: {silent}"
    first = f"{first}. {_sentence(status.false_end)}" if status.false_end else f"{first}, and the leg has no result."
    said = [(each.replica_id, _of_replica(each)) for each in status.replicas]
    return [first, *(f"{replicas(ids).capitalize()}: {words}." for ids, words in grouped(said))]


def go_on(status: RunStatus) -> str:
    """Advice for a run on which no process works, in one line without a full stop."""
    if status.false_end:
        return f"To learn what was changed: `diloco verify {quote(status.url)}`"
    if status.is_by_hand:
        return "To go on: start the programs of its replicas again, each with its replica_id"
    return f"To go on: `diloco attach {quote(status.url)}`"


def _of_replica(replica: ReplicaRow) -> str:
    if replica.state == BY_HAND:
        return "started by its user, in a loop that sends no heartbeat"
    if replica.state == "launching":
        words = f"; its provider said: {replica.waits_for}" if replica.waits_for else ""
        return f"launched, and never claimed by a process{words.rstrip('.')}"
    if replica.state.startswith("ended: "):
        return f"{replica.state.rstrip('.')}, and nobody launched it again"
    return f"the heartbeat stopped ({replica.state}) without an exit record: the machine is gone or cut off"


def _duration(seconds: float) -> str:
    for unit, length_s, most in (("min", 60.0, 120), ("h", 3600.0, 48)):
        if seconds < most * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
