"""The rows of a conformance report as pure functions, each the result of one check of a training function.

The input is results of a check's processes. Later rows depend on earlier ones: if training does not end, or is not
repeatable, the rows that compare bits are "not applicable", so that one fault is one failed row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from diloco_orchestrator.replica.testing.jobs import Seen
from diloco_orchestrator.replica.testing.report import Finding, Outcome

_CLOSE = 1e-6  # absolute, in parameters, of plain training and a run of one replica
_LOST = 0.01  # share of a disturbance below which a parameter counts as not disturbed
_NAMED = 4  # parameters that a row names
_NOT_REPEATABLE = "training is not repeatable"


@dataclass(frozen=True)
class CheckResults:
    """Results of a check's processes by name, without those that were not needed."""

    rounds: int
    sync_every: int
    replicas: int
    seen: Mapping[str, Seen]

    @property
    def first(self) -> Seen:
        """The result of an undisturbed run of one replica."""
        return self.seen["first"]

    @property
    def repeatable(self) -> bool:
        return "again" in self.seen and self.first.digests == self.seen["again"].digests


class RowResult(NamedTuple):
    """The result of one row of the report: `Finding` without the row's name, which is that of its function."""

    outcome: Outcome
    detail: str
    remedy: str = ""


def passed(detail: str) -> RowResult:
    return RowResult("passed", detail)


def failed(detail: str, remedy: str) -> RowResult:
    return RowResult("failed", detail, remedy)


def absent(detail: str, remedy: str = "") -> RowResult:
    return RowResult("not applicable", detail, remedy)


# -- one run ----------------------------------------------------------------------------------------------------------


def steps(checked: CheckResults) -> RowResult:
    """Report row: the training function steps the attached optimizer, which changes the attached model."""
    first = checked.first
    if "NeverStepped" in first.error:
        return failed(
            first.error.partition(": ")[2],
            "attach the optimizer whose step() the loop calls; if a library wraps it, the object inside.",
        )
    if not first.completed:
        return absent("training did not end")
    if len(first.notes.unmoved) == first.notes.trainable:
        return failed(
            f"{first.notes.steps} steps of the optimizer changed none of the model's {first.notes.trainable} trainable "
            "parameters",
            "attach the model that is trained, and an optimizer over its parameters: not a copy of either.",
        )
    still = f"; unchanged: {_names(first.notes.unmoved)}" if first.notes.unmoved else ""
    moved = first.notes.trainable - len(first.notes.unmoved)
    return passed(f"{first.notes.steps} inner steps changed {moved} of {first.notes.trainable} parameters{still}")


def completes(checked: CheckResults) -> RowResult:
    """Report row: the training function, as a run of one replica, takes all rounds and ends."""
    first = checked.first
    if "NeverStepped" in first.error:
        return absent("no step was taken")
    if not first.completed:
        loop = "call ctx.attach once, and loop over replica.batches(data), or until replica.step(…) is False. "
        return failed(
            f"a run of one replica ended early: {first.words()}",
            ("" if first.error and "WorkloadEndedEarly" not in first.error else loop)
            + "`diloco run` with the same function prints the traceback.",
        )
    return passed(f"a run of one replica took {checked.rounds} rounds of {checked.sync_every} steps and ended")


def observed(checked: CheckResults) -> RowResult:
    """Report row: every round has the training metric that the training function named when it called `attach`."""
    metric = checked.first.notes.metric
    missing = [str(manifest.round) for manifest in checked.first.rounds if manifest.in_loop is None]
    if missing:
        seen = sorted({each for manifest in checked.first.rounds for each in manifest.metrics} - {"tokens"})
        return failed(
            f"no {metric} was observed in rounds {', '.join(missing)}" + (f", only {', '.join(seen)}" if seen else ""),
            f"call replica.observe({metric}=…) or replica.step({metric}=…) after each step, or attach with the in_loop "
            "that is observed: without it the kill-switch cannot compare training with the held-out score.",
        )
    return passed(f"every round has a {metric}")


def frozen(checked: CheckResults) -> RowResult:
    """Report row: parameters without `requires_grad` keep their bits."""
    notes = checked.first.notes
    if not notes.frozen:
        return absent("every parameter is trainable")
    if notes.frozen_moved:
        return failed(
            f"{len(notes.frozen_moved)} of {notes.frozen} frozen parameters changed: {_names(notes.frozen_moved)}",
            "frozen parameters are neither averaged nor saved, so each replica would have its own. Keep them as they "
            "are, make them trainable, or hold them in an object that is passed in stateful.",
        )
    return passed(f"{notes.frozen} frozen parameters are unchanged")


# -- comparisons ------------------------------------------------------------------------------------------------------


def repeatable(checked: CheckResults) -> RowResult:
    """Report row "repeatable": two runs of the training function with one seed have equal bits after every round."""
    again = checked.seen["again"]
    if checked.repeatable:
        return passed(f"two runs with one seed have equal bits after each of {checked.rounds} rounds")
    return failed(
        f"two runs with one seed differ: {_difference(checked.first, again)}",
        "draw random numbers from torch, random or numpy after attach (they are seeded then) or from a generator with "
        "a fixed seed, and use torch.use_deterministic_algorithms(True). A killed replica can then resume exactly.",
    )


def plain(checked: CheckResults) -> RowResult:
    """Report row: one replica with outer rate 1 and no momentum ends with the parameters of training without a run."""
    run, alone = checked.seen.get("unscored", checked.first), checked.seen["plain"]
    if not checked.repeatable:
        return absent(_NOT_REPEATABLE)
    if not alone.completed or alone.model is None:
        return failed(
            f"the same training without a run ended early: {alone.words()}",
            "use of the session only what is documented: batches, step, observe, declare, on_round, step_count, round.",
        )
    assert run.base is not None
    if set(run.base) != set(alone.model):
        lost = sorted(set(run.base) ^ set(alone.model))
        return failed(
            f"trainable parameters change during training: {_names(lost)}",
            "freeze, unfreeze, add and replace parameters before ctx.attach.",
        )
    gaps = {each: _gap(run.base[each], alone.model[each]) for each in run.base}
    worst = max(gaps, key=lambda each: gaps[each])
    if gaps[worst] <= _CLOSE:
        exact = "bit for bit" if gaps[worst] == 0 else f"within {gaps[worst]:.1e}"
        return passed(f"one replica with outer rate 1 trains as without a run, {exact}")
    if checked.first.notes.hooked:
        return absent("training differs from that without a run, which a function given to on_round may do")
    return failed(
        f"one replica with outer rate 1 ends {gaps[worst]:.1e} away from the same training without a run, in {worst}",
        "something depends on rounds or replaces parameters after attach: an optimizer reset or a rate by "
        "replica.round (use replica.step_count), model.to(…) or a new nn.Parameter after ctx.attach.",
    )


def kept(checked: CheckResults) -> RowResult:
    """Report row: the next inner step starts from the parameters written into the model at the end of a round."""
    straight, disturbed = checked.seen["plain"], checked.seen["disturbed"]
    if not checked.repeatable:
        return absent(_NOT_REPEATABLE)
    if straight.next is None or disturbed.next is None or disturbed.moved is None:
        return absent("training without a run did not go past the first round")
    able = {each for each, size in disturbed.moved.items() if size > 0 and each in straight.next}
    able &= set(disturbed.next)
    if not able:
        return absent("no parameter moved in the last step of the first round")
    lost = [
        each
        for each in sorted(able)
        if _gap(straight.next[each], disturbed.next[each]) < _LOST * float(disturbed.moved[each])
    ]
    if lost:
        return failed(
            f"values written into parameters between two steps are gone after the next one: {_names(lost)}",
            "an optimizer or wrapper steps copies of its own, such as fp32 master weights, and overwrites what an "
            "outer step sets. Let it step the attached parameters, or refresh its copies when replica.round changes.",
        )
    return passed(f"the next step starts from what a round's end writes, in {len(able)} parameters")


def digests(checked: CheckResults) -> RowResult:
    """Report row: all replicas have equal models at every round's first step."""
    fleet = [checked.seen[f"fleet-{i}"] for i in range(checked.replicas)]
    for index, seen in enumerate(fleet):
        if not seen.completed:
            return failed(
                f"in a run of {checked.replicas} replica {index} ended early: {seen.words()}",
                "build the same model on every replica: shapes, names and requires_grad must not depend on replica_id.",
            )
    for round_, models in enumerate(zip(*(seen.notes.at_round for seen in fleet), strict=False), start=1):
        if len(set(models)) > 1:
            return failed(
                f"in round {round_} the replicas begin with different models, although the bucket has one base",
                "nothing but the optimizer may change parameters: between a round's end and the next step they are the "
                "base, on every replica the same.",
            )
    claims = {tuple(manifest.base_digest for manifest in seen.rounds) for seen in fleet}
    if len(claims) > 1:
        return failed("replicas published other digests of the same base", "run `diloco doctor` on this machine.")
    return passed(f"{checked.replicas} replicas begin each of {checked.rounds} rounds with equal models")


def saved(checked: CheckResults) -> RowResult:
    """Report row: the optimizers' state, saved and loaded again, has the same dtypes and bits."""
    notes = checked.first.notes
    if notes.state_lost:
        return failed(
            f"saved and loaded again, {len(notes.state_lost)} parts of the optimizer's state are others: "
            f"{_names(notes.state_lost)}",
            "a restarted replica, and an audit, would train otherwise from there. Let load_state_dict set exactly what "
            "state_dict returned, in the same dtypes.",
        )
    if not notes.state_tensors:
        return absent(
            "the optimizer has no state",
            "true of SGD without momentum; another optimizer must keep its moments in optimizer.state, or in a "
            "state_dict of its own.",
        )
    return passed(f"the optimizer's state of {notes.state_tensors} tensors is the same once saved and loaded")


def resumed(checked: CheckResults) -> RowResult:
    """Report row: a replica that was killed and restarted ends with the bits of the undisturbed run."""
    if not checked.repeatable:
        return absent(_NOT_REPEATABLE)
    if checked.first.notes.state_lost:
        return absent("the optimizer's state is lost")
    for place in ("inside a round", "at a round's end"):
        killed, after = checked.seen[f"killed {place}"], checked.seen[f"resumed {place}"]
        if not killed.was_killed:
            return failed(f"killed {place}, it went on: {killed.words()}", "take steps in this process only.")
        if not after.completed:
            return failed(
                f"killed {place}, the next attempt ended early: {after.words()}",
                "a training function is called again after a kill: it must find files and folders as it left them.",
            )
        if after.digests != checked.first.digests:
            return failed(
                f"killed {place} and started again, the run ends elsewhere: {_difference(checked.first, after)}",
                "pass all that changes during training in attach(stateful=…): data source, schedule, further "
                "optimizers, averages. Iterate the data through replica.batches, or give the source a state_dict.",
            )
    return passed("killed inside a round and at its end, the run ends with the undisturbed bits")


def evaluation(checked: CheckResults) -> RowResult:
    """Report row: scoring the held-out set does not affect training."""
    if not checked.first.notes.scores:
        return absent("nothing is scored", "attach(heldout=…) is what the kill-switch needs.")
    if not checked.repeatable:
        return absent(_NOT_REPEATABLE)
    without = checked.seen["unscored"]
    if not without.completed:
        return failed(
            f"without the held-out function training ended early: {without.words()}", "train without its results."
        )
    if without.digests != checked.first.digests:
        return failed(
            f"training with and without scoring differs: {_difference(without, checked.first)}",
            "the held-out function may only read the model: it must not draw from the training data's source, write "
            "parameters, or keep state that training reads.",
        )
    return passed("training is bit for bit the same with and without scoring")


def planted(checked: CheckResults) -> RowResult:
    """Report row: a held-out item among the training items ends the run before it is trained on."""
    notes = checked.first.notes
    if not notes.compares:
        return absent(
            "training items are not compared with the held-out set",
            "attach(heldout_manifest=…) or items_of=… has every item compared before its step.",
        )
    empty = [str(m.round) for m in checked.first.rounds if m.consumed is None or not m.consumed.items]
    if empty or "planted" not in checked.seen:
        return failed(
            f"no training item was declared in rounds {', '.join(empty)}, so nothing was compared",
            "loop over replica.batches, or call replica.checked(batch) or declare(items) before each step.",
        )
    seen = checked.seen["planted"]
    if "held-out item" in seen.reason:
        return passed("a training item that counts as held out ended the run")
    return failed(
        f"a training item that counts as held out did not end the run: {seen.words()}",
        "let HeldoutItemInTraining leave the training function.",
    )


def _difference(one: Seen, other: Seen) -> str:
    """A phrase naming the first round after which the bases of two runs differ."""
    for index, (ours, theirs) in enumerate(zip(one.digests, other.digests, strict=False)):
        if ours != theirs:
            return "their first models differ" if index == 0 else f"the model after round {index} is another"
    return f"{len(one.digests)} and {len(other.digests)} commits"


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; infinite for other shapes and for NaN."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    gap = float((one.float() - other.float()).abs().max())
    return gap if gap == gap else float("inf")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


Row = Callable[[CheckResults], RowResult]
ALONE: tuple[Row, ...] = (steps, completes)  # what one run shows, even one that failed
ROWS: tuple[Row, ...] = (
    *ALONE,
    observed,
    repeatable,
    plain,
    kept,
    digests,
    saved,
    resumed,
    evaluation,
    planted,
    frozen,
)
NAMES = tuple(row.__name__ for row in ROWS)


def findings(checked: CheckResults) -> tuple[Finding, ...]:
    """All rows of the report, in order. If the first run did not end, the later ones are not applicable."""
    applicable = ROWS if checked.first.completed else ALONE
    return tuple(
        Finding(row.__name__, *(row(checked) if row in applicable else absent("training did not end"))) for row in ROWS
    )
