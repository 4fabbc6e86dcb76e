"""What must hold of a simulated run, whatever went wrong: the invariants, from what is in its bucket at the end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from simulation_gradients import LEARNING_RATE, RANK, gradient
from simulation_oracle import Differs, PlainBase, bases_of
from simulation_plan import Plan
from simulation_residuals import check_residuals
from simulation_store import InvariantBroken

from diloco_orchestrator.codecs.table import Encoded, get_codec
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.claims import wrong_bases
from diloco_orchestrator.protocol.process import EXIT_PERMANENT
from diloco_orchestrator.protocol.records import Commit, Contribution, Progress
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild
from diloco_orchestrator.store.base import Store

if TYPE_CHECKING:
    from simulation import Simulation


@dataclass(frozen=True)
class RightBases:
    """The base before and after every round, as plain float32 arithmetic gives them (`simulation_oracle`)."""

    before: Mapping[int, str]  # digest of the base that a round started from
    last: str  # of the base after the last round
    bases: Mapping[int, PlainBase]  # that a round started from

    @classmethod
    def of(cls, simulation: "Simulation", commits: Sequence[Commit]) -> "RightBases":
        """Raises `InvariantBroken` for a commit with other weights than those of plain arithmetic."""
        begins = RunLog(simulation.bucket).begins()
        try:
            bases = bases_of(
                simulation.bucket.sent,
                [begin.model_dump(mode="json") for begin in begins],
                {commit.round: commit.applied for commit in commits},
                first_base(simulation.plan),
                simulation.config.model_dump(mode="json"),
            )
        except Differs as differs:
            raise InvariantBroken(f"I3: {differs}") from differs
        before = {commit.round: bases[commit.round - 1] for commit in commits}
        before |= {begin.after_round + 1: bases[begin.from_round] for begin in begins if begin.from_round in bases}
        digests, last = {round_: base.digest() for round_, base in before.items()}, max(bases)
        return cls(digests, digests.get(last + 1) or bases[last].digest(), before)

    def is_right(self, manifest: Contribution) -> bool:
        """Whether a manifest of a closed round claims the base that its round started from."""
        return manifest.base_digest == self.before[manifest.round]


def first_base(plan: Plan) -> PlainBase:
    """What every replica's model holds at first, in one fragment or in two; residuals of adapters are one more."""
    shapes = {"bias": [plan.width], "weight": [plan.width, 1]}
    fragments = [["bias"], ["weight"]] if plan.settings["fragments"] == 2 else [["bias", "weight"]]
    first = {"bias": 2.0, "weight": 1.0}
    if plan.adapted:
        a, b, residual = (f"layer.lora_{name}.default" for name in ("A", "B", "residual"))
        a, b = f"{a}.weight", f"{b}.weight"
        shapes = {a: [RANK, 1], b: [plan.width, RANK], residual: [plan.width, 1]}
        fragments, first = [[a, b], [residual]], {a: 1.0, b: 0.0, residual: 0.0}
    parameters = [
        np.concatenate([np.full(math.prod(shapes[name]), first[name], np.float32) for name in names])
        for names in fragments
    ]
    has_momentum = plan.settings.get("outer", {}).get("momentum", 0.9) > 0
    return PlainBase(
        [[(name, shapes[name]) for name in names] for names in fragments],
        _shard_numel(plan, max(map(len, parameters))),
        parameters,
        [np.zeros_like(vector) for vector in parameters] if has_momentum else [],
    )


def _shard_numel(plan: Plan, numel: int) -> int:
    """Elements of a shard: four shards a replica where they are dealt, each of whole groups of every codec."""
    most = plan.settings.get("shard_mib", 64) * 2**18
    if plan.settings.get("path") != "scatter_reduce" or plan.replicas < 3:
        return most
    return min(most, max(1, math.ceil(numel / (16_384 * plan.replicas))) * 4096)


def check(
    simulation: "Simulation", undisturbed_digests: Callable[[Plan], list[str | None]] | None = None
) -> list[Commit]:
    """Raises `InvariantBroken`. Returns the commits.

    `undisturbed_digests`: the claims of the same run when nothing goes wrong; None: they are not compared.
    """
    plan, store = simulation.plan, simulation.bucket
    reader = RunReader(store)
    commits, leg = reader.commits(), simulation.leg
    result = reader.log.result(leg)
    if result is None:
        raise InvariantBroken(f"I10: leg {leg} ended without a result")
    done = verify_run(store)  # I1, I3, I6, I8, and that no work counts twice
    harmed = (*_harmed(plan), *sorted(simulation.forged_keys))
    if any(round_ > len(commits) for round_, _ in plan.no_commits):  # who sees it misses the one that never came
        harmed = (*harmed, keys.commit(len(commits) + 1))
    if plan.no_commits or simulation.forged_keys:  # records of rounds that a run without a model never had
        harmed = (*harmed, keys.START) if reader.log.start() is None else harmed
    if done.disagreement is not None and plan.outnumbers and not done.disagreement.key.startswith(harmed):
        raise InvariantBroken(f"I1/I3/I6/I8: {done.disagreement.key}: {done.disagreement.words}")
    _check_verdicts(commits)
    _check_saved_states(simulation, commits)
    _check_nothing_after_the_stop(simulation, commits)
    if plan.harms and (result.status == "failed" or _is_lost(store)):
        return commits
    right = RightBases.of(simulation, commits)
    _check_steps(simulation, commits, right)
    simulation.paid = check_residuals(simulation, commits, right.bases, right.before)
    _check_bases(simulation, commits, right)
    _check_arithmetic(simulation, commits, right)
    may_fail = plan.gives_up and result.status == "failed"
    if not plan.collapse and plan.halt_at is None and plan.outnumbers and result.status != "completed" and not may_fail:
        raise InvariantBroken(f"I10: the run ended as {result.status}: {result.reason}")
    if plan.exact and undisturbed_digests is not None:
        expected = undisturbed_digests(plan)
        if [c.base_digest for c in commits] != expected:
            raise InvariantBroken("I5: killed and faulty, the run ended with other bits than undisturbed")
    return commits


def _harmed(plan: Plan) -> tuple[str, ...]:
    """The beginnings of keys at which `verify` may disagree, because the plan has harmed what is there.

    A payload is put again if somebody needs it: two replicas may believe their own payload and jump.
    """
    payloads = {*plan.corrupt_payloads, *plan.lost_payloads, *((round_, i) for _, round_, i in plan.rots)}
    return (
        *(f"{keys.payloads(round_)}{replica_id}/" for round_, replica_id in payloads),
        *(keys.commit(round_) for round_, _ in plan.no_commits),
    )


def _is_lost(store: Store) -> bool:
    """Whether replicas have ended because a payload is damaged that nobody holds any more."""
    exits = [info.key for info in store.list(keys.REPLICAS) if info.key.endswith("exit.json")]
    return any("No running replica has put it again" in store.get(key).decode() for key in exits)


def _check_verdicts(commits: Sequence[Commit]) -> None:
    for commit in commits:
        if commit.applied and commit.fired:
            raise InvariantBroken(f"I7: round {commit.round} was applied though its verdict fired")


def _check_saved_states(simulation: "Simulation", commits: Sequence[Commit]) -> None:
    """I5: a pseudo-gradient names a state in every round, or where a snapshot or the planned end is due after it."""
    plan, reader = simulation.plan, ContributionReader(simulation.bucket)
    when = plan.settings.get("replica_state") or ("round" if plan.strict else "snapshot")
    begins = RunLog(simulation.bucket).begins()
    for commit in commits:
        step, begin = commit.outer_step - commit.applied + 1, begins[commit.leg - 1]
        beside_snapshot = step % plan.settings["snapshot_every"] == 0
        last = plan.settings["fragments"] if get_codec(simulation.config.codec).feedback else 1
        ends = step > begin.from_outer_step + begin.outer_steps - last
        due = when == "round" or (when == "snapshot" and (beside_snapshot or ends))
        for replica_id in range(plan.most_replicas):
            manifest = (
                reader.of(commit.round, replica_id) if not _is_forged(simulation, commit.round, replica_id) else None
            )
            if manifest is not None and manifest.kind == "delta" and (manifest.state is not None) != due:
                raise InvariantBroken(
                    f"I5: replica {replica_id} saved {'no' if due else 'a'} state in round {commit.round}; states are "
                    f'saved with replica_state="{when}"'
                )


def _check_bases(simulation: "Simulation", commits: Sequence[Commit], right: RightBases) -> None:
    """I2: all end with one base; a flipped bit removes nobody, and costs its own machine two rounds at most."""
    different = simulation.plan.other_arithmetic
    ends = _last_digests(simulation, commits)
    if len(set(ends.values())) > 1:
        raise InvariantBroken(f"I2: replicas end with different bases: {ends}")
    if different and not simulation.plan.outnumbers:
        return
    left = {i for (i, _), code in simulation.exit_codes.items() if code == EXIT_PERMANENT}
    if left - {*different, *simulation.plan.refused} and not simulation.plan.full:
        raise InvariantBroken(f"I2: replicas {sorted(left)} left for good")
    if different:
        return
    for manifest, (round_, held) in zip(simulation.loaded, simulation.held, strict=True):
        # A lone replica cannot know before it rebuilds its base, and drops then what it trained from the wrong one.
        unaware = simulation.plan.replicas == 1 and round_ in right.before and held != right.before[round_]
        if manifest.round <= len(commits) and not right.is_right(manifest) and not unaware:
            raise InvariantBroken(
                f"I2: replica {manifest.replica_id} goes on from a state that was trained from a wrong base in round "
                f"{manifest.round}"
            )
    for replica_id in range(simulation.plan.most_replicas):
        flips = sum(i == replica_id for _, i, _ in simulation.flipped)
        wrong = wrong_bases(commits, replica_id)
        if wrong > 2 * flips:
            raise InvariantBroken(
                f"I2: replica {replica_id} started {wrong} rounds from a wrong base, flipped {flips} times"
            )


def _last_digests(simulation: "Simulation", commits: Sequence[Commit]) -> dict[int, str]:
    """Digests of the bases that replicas ended with, by replica.

    Without those whose arithmetic differs if the last round was applied, as at a halt by request: nobody claims its
    base, so such a replica cannot know before the next leg.
    """
    unclaimed = bool(commits) and commits[-1].applied
    different = simulation.plan.other_arithmetic if unclaimed else ()
    return {i: digest for i, digest in simulation.last_digests.items() if i not in different}


def _check_nothing_after_the_stop(simulation: "Simulation", commits: Sequence[Commit]) -> None:
    for stop in [commit for commit in commits if commit.stop != "none"]:
        begun = simulation.bucket.written_at.get(keys.begin(stop.leg + 1), float("inf"))
        for info in simulation.bucket.list(keys.contributions(stop.round + 1)):
            if simulation.bucket.written_at[info.key] < begun and info.key not in simulation.forged_keys:
                raise InvariantBroken(f"I7: {info.key} was published after the stop in round {stop.round}")


def _check_arithmetic(simulation: "Simulation", commits: Sequence[Commit], right: RightBases) -> None:
    """I2, I3: what commits claim of bases, what replicas end with and what is rebuilt are those of plain float32."""
    plan, log = simulation.plan, RunLog(simulation.bucket)
    for commit in commits if not plan.flips and not plan.other_arithmetic else ():  # else it may name a wrong claim
        if commit.base_digest not in (None, right.before[commit.round]):
            words = f"begins from {commit.base_digest[:12]}; plain arithmetic gives {right.before[commit.round][:12]}"
            raise InvariantBroken(f"I3: round {commit.round} {words}")
    alone = plan.replicas == 1 and plan.flips and plan.harms  # nobody else has what a wrong base is rebuilt from
    if not plan.outnumbers or alone:
        return
    ends = {f"replica {i} ends with": digest for i, digest in _last_digests(simulation, commits).items()}
    if commits:
        try:
            ends["a rebuild gives"] = rebuild(log, log.newest_begin().record).digest
        except PayloadCorrupt:
            if not plan.harms:  # it may be damaged when nobody needs it any more
                raise
    for what, digest in ends.items():
        if digest != right.last:
            raise InvariantBroken(f"I2: {what} base {digest[:12]}; plain arithmetic gives {right.last[:12]}")


def _check_steps(simulation: "Simulation", commits: Sequence[Commit], right: RightBases) -> None:
    """I4: every batch is in one manifest of its replica; and every payload holds just the steps that it names."""
    plan, reader = simulation.plan, ContributionReader(simulation.bucket)
    averaged = {(c.round, a.replica_id) for c in commits for a in c.answers if a.averaged}
    for replica_id in range(plan.most_replicas):
        position, owed, leg = 0, None, 1
        before: list[tuple[Contribution, int, Contribution | None]] = []  # manifests not averaged, and what preceded
        unseen = False  # whether the steps of a round are in no manifest, because its key was taken
        for commit in commits:
            if _is_forged(simulation, commit.round, replica_id):
                unseen = True
                continue
            if commit.leg != leg:  # what was to be carried is dropped at a leg's stop
                owed, leg = None, commit.leg
            manifest = reader.of(commit.round, replica_id)
            if manifest is None or manifest.progress is None:
                continue
            end = _position(manifest.progress)
            if manifest.kind == "scores" and position <= end <= position + plan.settings["fragment_sync_delay"]:
                position = end  # behind what was trained beside the last round
                continue
            own = [o for o in manifest.origins if o.round == manifest.round]
            begin = end - own[0].steps if own else position
            if begin > position and unseen:
                unseen, position, owed = False, begin, None
            while begin != position and before and _is_outlived(simulation, before[-1][0], manifest):
                _, position, owed = before.pop()
            if begin != position:
                raise InvariantBroken(
                    f"I4: replica {replica_id}'s batches {begin} to {end} in round {commit.round} follow on {position}"
                )
            before = [] if (commit.round, replica_id) in averaged else [*before, (manifest, position, owed)]
            position = end
            if simulation.flipped and not right.is_right(manifest):
                continue  # its payload holds the flipped bit, and is not carried
            if manifest.kind == "delta" and plan.settings["fragments"] == 1:
                if not any(_is_forged(simulation, origin.round, replica_id) for origin in manifest.origins):
                    _check_payload(simulation, reader, manifest, begin, end, owed)
                owed = None if (commit.round, replica_id) in averaged else manifest


def _position(progress: Progress) -> int:
    """The number of the next batch; 0 for a replica that only scores, so that no attempt of it has drawn a batch."""
    state = progress.cursor.get("state", {"next": 0})
    return int(state["next"])  # type: ignore[index, call-overload, arg-type]


def _is_outlived(simulation: "Simulation", earlier: Contribution, later: Contribution) -> bool:
    """Whether a manifest is by another attempt than `later`, which lived on beside it, and was written after its claim.

    The attempt of `later`, whatever its number, has read the other manifests by then, and trains again what this one
    holds, which is not averaged.
    """
    claims = f"replicas/{later.replica_id}/attempts/{later.attempt}/claim."
    written = simulation.bucket.written_at
    claimed = min(when for key, when in written.items() if key.startswith(claims))
    return earlier.attempt != later.attempt and written[keys.contribution(earlier.round, earlier.replica_id)] > claimed


def _is_forged(simulation: "Simulation", round_: int, replica_id: int) -> bool:
    """Whether the manifest of a replica in a round is not its own."""
    return keys.contribution(round_, replica_id) in simulation.forged_keys


def _check_payload(
    simulation: "Simulation",
    reader: ContributionReader,
    manifest: Contribution,
    begin: int,
    end: int,
    owed: Contribution | None,
) -> None:
    found, plan = _value(reader, manifest), simulation.plan
    overlaps = plan.settings["fragment_sync_delay"] or plan.settings.get("fragment_update_alpha")
    if manifest.residual is not None:
        return  # its payload is compared whole
    if found is None or overlaps or any(i == manifest.replica_id for _, i in plan.nan):
        return
    expected = LEARNING_RATE * sum(gradient(manifest.replica_id, batch) for batch in range(begin, end))
    if len(manifest.origins) > 1:
        before = None if owed is None else _value(reader, owed)
        if owed is None:
            raise InvariantBroken(
                f"I4: replica {manifest.replica_id} carries in round {manifest.round} what it did not owe"
            )
        if before is None:
            return
        expected += carry_weight(max(1, manifest.round - owed.round)) * before
    digits = 2**-8 if plan.settings.get("codec") == "bf16" else 1e-5
    if abs(found - expected) > digits * (4 + abs(expected)):
        raise InvariantBroken(
            f"I4: round {manifest.round}, replica {manifest.replica_id}: the payload holds {found:.5f}, its steps make "
            f"{expected:.5f}"
        )


def _value(reader: ContributionReader, manifest: Contribution) -> float | None:
    """The number that fills a payload; None if it was collected or went bad."""
    assert manifest.payload is not None
    try:
        values = Encoded(reader.shard(manifest, 0), manifest.payload.codec, manifest.payload.numel).values()
    except PayloadCorrupt:
        return None
    return float(values[0])
