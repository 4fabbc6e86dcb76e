"""`verify_run`: recomputes a run from its bucket, and checks commits, begin records and results of its legs.

Reads and hashes every object that the commit log names, directly or through a manifest, and recomputes every base.
Objects that retention deleted are listed as unchecked. The modules beside this one check guard, bases and snapshots.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError, ObjectMissing
from diloco_orchestrator.inspection.verify.bases import BaseDeriver
from diloco_orchestrator.inspection.verify.claims import check_claims, check_said
from diloco_orchestrator.inspection.verify.findings import (
    Differs,
    Verification,
    check_canonical,
    equal,
    fetch,
    needed,
    optional,
    parse,
)
from diloco_orchestrator.inspection.verify.inventory import NamedByTheLog, take_stock
from diloco_orchestrator.inspection.verify.snapshots import SnapshotChecker, UnreadBase
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.head import Head, Noted
from diloco_orchestrator.protocol.records import Begin, Commit, Contribution, Probe
from diloco_orchestrator.protocol.rounds import Position
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.entries import CommitEntry, Entry
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.run_log.run_log import RunLog, signer_of
from diloco_orchestrator.run_log.run_store import rotations_of
from diloco_orchestrator.store.base import Store

if TYPE_CHECKING:
    from diloco_orchestrator.inspection.verify.tensors import Tensors
    from diloco_orchestrator.outer.base import Base


def verify_run(
    store: Store,
    on_round: Callable[[int], None] = lambda round_: None,
    expect: Head | None = None,
    signed_by: str | None = None,
    noted: Sequence[Noted] = (),
) -> Verification:
    """Check all objects of a run, oldest first, up to the first that disagrees. `on_round` is called with every round.

    `expect`: a head (newest commit) noted earlier: a log without that commit disagrees. `signed_by`:
    the public key that must have signed the run; None: the one that run.json names, if it names one. `noted`: more
    heads, such as those of a witness.

    A disagreement is part of the result. Raises `NoSuchRun` if the folder holds no run, `RecordTooNew` if a newer
    version wrote a record, `StoreError` if the bucket cannot be read, and `SpoolFailed` if this machine lacks room.
    """
    done = Verification(store.url)
    try:
        log = optional(keys.RUN, lambda: RunLog(store, check_canonical, on_bad_segment=_disagrees))
        _check_key(log, signed_by, done)
        if other := next((each for each in noted if each.run_sha256 not in ("", log.run_sha256)), None):
            raise Differs(keys.RUN, f"is that of another run: the head {other.head.short} {other.words}")
        verifier = _Verifier(log, done, on_round, [*([Noted(expect)] if expect else []), *noted])
    except Differs as difference:
        done.disagreement = difference.found
        return done
    try:
        verifier.run()
    except Differs as difference:
        done.disagreement = difference.found
        verifier.salvage()
    done.unsigned = log.unsigned()
    return done


def _check_key(log: RunLog, expected: str | None, done: Verification) -> None:
    """Raise `Differs` unless run.json names `expected` as the public key that signs the run; None accepts any."""
    done.signed_by = "" if log.run.signed_by is None else log.run.signed_by.key
    if expected is not None and done.signed_by != expected:
        found = done.signed_by or "no key: the run is not signed"
        raise Differs(keys.RUN, f"names {found}; {expected} was asked for")


def _disagrees(key: str, words: str) -> None:
    raise Differs(key, f"disagrees with the commits that it replaces: {words}")


@dataclass
class _Derived:
    """Position and base of a run, recomputed from all commits checked so far since a start or resume."""

    position: Position
    digest: str | None  # of the base; None while it cannot be computed because payloads were deleted
    base: "Base | UnreadBase | None"  # None while it cannot be computed because payloads were deleted
    last: Commit | None = None  # of the leg
    made_in: int = 0  # the round whose commit made the base


def _tensors(log: RunLog, done: Verification) -> "Tensors | None":
    """The part of a verification that computes with tensors; None without torch, which is then in `done.not_derived`.

    It is imported here, because all other parts work without torch.
    """
    try:
        module = import_module("diloco_orchestrator.inspection.verify.tensors")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        done.not_derived = "averages, outer steps, bases, and the tensors of snapshots: needs torch"
        return None
    found: Tensors = module.Tensors(log, done)
    return found


class _Verifier:
    def __init__(
        self, log: RunLog, done: Verification, on_round: Callable[[int], None], noted: Sequence[Noted]
    ) -> None:
        self._noted = noted
        self._farthest = max(noted, key=lambda each: each.head.round, default=None)
        self._log = log
        self._store = log.store
        self._done = done
        self._on_round = on_round
        self._tensors = _tensors(log, done)
        self._snapshots = SnapshotChecker(log, done, self._tensors)
        self._commits: Iterator[CommitEntry] = iter(())  # of all legs
        self._last: CommitEntry | None = None  # the commit that was checked last
        self._next: CommitEntry | None = None  # the commit that is checked next
        # By round, for rounds whose base has a snapshot or starts a leg:
        self._digests: dict[int, str | None] = {}
        self._outer_steps: dict[int, int] = {}
        self._guards: dict[int, Mapping[str, Any] | None] = {}
        self._made_in: dict[int, int] = {}  # the leg
        self._due: set[int] = {0}  # rounds whose snapshot a run writes
        self._underived: list[int] = []  # applied rounds whose payloads were deleted

    def run(self) -> None:
        start = optional(keys.START, self._log.start)
        if start is None:
            if self._farthest is not None:
                raise Differs(
                    keys.START,
                    f"{self._log.why_no_start()}, though the head {self._farthest.head.short} {self._farthest.words}",
                )
            if (found := next(iter(self._store.list(keys.ROUNDS)), None)) is not None:
                raise Differs(keys.START, f"{self._log.why_no_start()}, though {found.key} is there")
            self._done.unchecked.append("no replica brought a model: there is nothing to derive")
            self._check_rotations()
            take_stock(self._store, NamedByTheLog(code_sha256=self._log.run.code_sha256), self._done)
            return
        self._start = start.record
        equal(keys.START, "run_sha256", self._start.run_sha256, self._log.run_sha256, f"the digest of {keys.RUN}")
        check_probe(self._log.store, self._start)
        self._bases = BaseDeriver(self._log, self._start, self._snapshots, self._done, self._tensors)
        self._digests[0], self._outer_steps[0], self._guards[0] = self._start.base_digest, 0, None
        legs = range(1, max(1, self._log.newest_leg()) + 1)
        self._needed = {*self._snapshots.rounds, *self._bases_of(legs)}
        self._commits = self._log.after(Position.at_start(start.sha256))
        self._next_commit(1)
        last: _Derived | None = None
        for leg in legs:
            last = self._leg(leg, last)
            last.base = None  # its memory is needed for the next one
        far = self._farthest
        if far is not None and last is not None and last.position.round < far.head.round:
            raise Differs(
                keys.commit(last.position.round + 1), f"is missing, though the head {far.head.short} {far.words}"
            )
        if self._noted:
            self._done.checked["noted heads"] += len(self._noted)
        self._snapshots.check_all(self._digests, self._start, self._due)
        self._check_code()
        self._check_rotations()
        self._bases.named.legs = len(legs)
        self._bases.named.snapshot_files, self._bases.named.start = self._snapshots.named, self._start
        take_stock(self._store, self._bases.named, self._done)
        if (stray := next(filter(self._is_in_a_snapshot, self._done.foreign), None)) is not None:
            raise Differs(stray, "is no file of its snapshot: who loads the folder as it is gets it too")
        if self._underived and self._tensors is not None:
            first, final = self._underived[0], self._underived[-1]
            span = f"{first}" + (f" to {final}" if final > first else "")
            self._done.unchecked.append(
                f"the averages of {len(self._underived)} rounds ({span}): their payloads were deleted by retention; "
                "the next snapshots agree with the log"
            )

    def _is_in_a_snapshot(self, key: str) -> bool:
        """Whether a foreign object lies in the folder of a version of a snapshot.

        In a signed run only a folder with a record is one: anybody may put files elsewhere, and nobody loads them.
        """
        found = keys.parse_snapshot_file(key)
        if found is None:
            return False
        return not self._done.signed_by or keys.snapshot(found[0], "", found[1]) in self._snapshots.named

    def _check_rotations(self) -> None:
        """Raise `Differs` unless each rotation (replacement of the run's keys) names the commit that the log has before
        it.

        So a holder of replaced keys who may overwrite objects cannot rewrite the part of the log before the rotation.
        """
        for rotation in rotations_of(self._store):
            entry = self._log.commit(rotation.after_round) if rotation.after_round else None
            found = None if entry is None else entry.sha256
            source = keys.commit(rotation.after_round) if rotation.after_round else "a log without commits"
            equal(keys.rotation(rotation.epoch), "commit_sha256", rotation.commit_sha256, found, source)
            self._done.checked["rotations of keys"] += 1

    def _check_code(self) -> None:
        """Raise `Differs` unless the code archive has the digest that run.json names."""
        expected = self._log.run.code_sha256
        if expected is not None:
            key = keys.code(expected)
            try:
                data = self._store.get(key)
            except ObjectMissing:
                raise Differs(key, f"is missing, though {keys.RUN} names it") from None
            equal(key, "its digest", sha256_hex(data), expected, keys.RUN)

    def salvage(self) -> None:
        """After a disagreement, add the rounds of all intact snapshots to the result, for `diloco pull`."""
        if self._digests:  # without a start the model's parameters are unknown
            self._snapshots.salvage(self._start)

    # -- legs ----------------------------------------------------------------------------------------------------

    def _leg(self, leg: int, before: _Derived | None) -> _Derived:
        key, entry = keys.begin(leg), self._begin(leg)
        begin = entry.record
        if before is not None:
            equal(key, "previous", begin.previous, before.position.sha256, "the last commit before the leg")
            equal(key, "after_round", begin.after_round, before.position.round, "the log")
            if before.last is not None and before.position.stop == "none":
                raise Differs(key, f"begins a leg though round {before.position.round} stopped nothing")
        if begin.from_round not in self._digests:
            raise Differs(key, f"starts from round {begin.from_round}, which left no base")
        equal(key, "from_outer_step", begin.from_outer_step, self._outer_steps[begin.from_round], "the log")
        if begin.leg > 1:
            equal(key, "guard", begin.guard, self._guard_state(key, begin), "that round's commit")
        elif begin.settings or begin.override_guard:
            raise Differs(key, "changes settings in the first leg, whose settings are those of run.json")
        digest = self._digests[begin.from_round]
        if begin.base_digest is not None and digest is not None:
            equal(key, "base_digest", begin.base_digest, digest, "the log")
        derived = _Derived(
            position=self._log.leg_position(begin),
            digest=None if self._tensors is None else digest,  # claims are compared with what was computed
            base=self._snapshots.base(begin.from_round, digest, self._start),
        )
        if derived.base is None:
            record = keys.snapshot(begin.from_round, keys.SNAPSHOT_RECORD)
            raise Differs(record, f"is missing; leg {leg} starts from it")
        self._done.checked["legs"] += 1
        while self._commit(derived, begin):
            pass
        self._note_due(begin, derived)
        self._check_result(begin, derived)
        return derived

    def _note_due(self, begin: Begin, derived: _Derived) -> None:
        """Note which rounds of a leg have a snapshot: each of `snapshot_every` outer steps, and the last one.

        After a halt by the guard the best base has one, of whatever round.
        """
        every, last = self._config_of(keys.begin(begin.leg), begin.leg).snapshot_every, derived.last
        halted = last is not None and last.halted_by_guard
        made = [round_ for round_, leg in self._made_in.items() if leg == begin.leg]
        self._due |= {round_ for round_ in made if halted or self._outer_steps[round_] % every == 0}
        self._due |= {begin.from_round} | ({derived.made_in} if last is not None and last.stop != "none" else set())

    def _begin(self, leg: int) -> Entry[Begin]:
        """The begin record of a leg (start or resume to stop). Raises `Differs` if the first leg has none."""
        key = keys.begin(leg)
        if why := optional(key, partial(self._log.why_foreign, leg)):
            raise Differs(key, why)
        return needed(key, partial(self._log.begin, leg), "a run has one")

    def _guard_state(self, key: str, begin: Begin) -> Mapping[str, Any] | None:
        """The guard's state with which a leg begins: the one after the commit of the base that the leg starts from.

        None if the guard begins anew: no commit made that base, the record overrides the guard, or its settings differ.
        """
        config, made_in = self._config_of(key, begin.leg), self._made_in.get(begin.from_round)
        anew = begin.override_guard or made_in is None or self._log.configs.of(made_in).guard != config.guard
        return None if anew else self._guards[begin.from_round]

    def _config_of(self, key: str, leg: int) -> RunConfig:
        """The configuration of a leg (start or resume to stop). Raises `Differs` for `key` if it is invalid."""
        try:
            return self._log.configs.of(leg)
        except ConfigError as error:
            raise Differs(key, str(error)) from None

    def _check_result(self, begin: Begin, derived: _Derived) -> None:
        key = keys.result(begin.leg)
        result = optional(key, lambda: self._log.recorded_result(begin.leg))
        last = derived.last
        if result is None:
            if last is not None and last.stop != "none":
                self._done.missing.append(f"{key}: round {last.round} ended the leg, which that object records")
            return
        if last is None:  # no round of the leg was committed: a coordinator ended it
            equal(key, "round and commit", (result.round, result.commit_sha256), (0, ""), "a leg without commits")
            return
        if last.stop == "none":
            raise Differs(key, f"is there, though round {last.round}, the last one, stopped nothing")
        if begin.leg == 1 and result.before_any_commit and self._log.halt(1) is not None:
            # A replica that was taken for dead brought its model later, and obeyed the request to halt.
            self._done.notes.append(f"{key} says that no round was committed; round {last.round} ended the leg later")
            return
        expected = rounds.result_of(last, derived.position.sha256, {"write_id": result.write_id, "at": result.at})
        equal(key, "its content", result.to_bytes(), expected.to_bytes(), "the leg's last commit")

    # -- rounds --------------------------------------------------------------------------------------------------

    def _commit(self, derived: _Derived, begin: Begin) -> bool:
        """Check the leg's next commit and advance `derived`; False if the leg (start to stop) has no further one."""
        entry = self._next_of_leg(derived, begin)
        if entry is None:
            return False
        key = keys.commit(entry.commit.round)
        self._on_round(entry.commit.round)
        self._check_noted(entry)
        entry, manifests = self._judged(key, entry, derived)
        commit = entry.commit
        if entry.void:
            who = f" {entry.written.by} wrote it." if entry.contradicts else ""
            self._done.notes.append(f"{key} is void and averages nobody: {entry.void}{who}")
        else:
            self._check_halt(key, commit)
            check_said(key, commit, manifests, self._log.configs.of(begin.leg))
        self._check_step(key, commit, derived, manifests)
        self._move(derived, entry)
        self._done.checked["rounds"] += 1
        self._next_commit(commit.round + 1)
        return True

    def _next_of_leg(self, derived: _Derived, begin: Begin) -> CommitEntry | None:
        """The next commit if it is of the leg that `begin` begins; None if the leg has no further one.

        Raises `Differs` for one that cannot be read or is of a leg that does not follow, and where one is missing.
        """
        round_, found = derived.position.round + 1, self._next
        key = keys.commit(round_)
        if found is None:
            if derived.position.stop == "none" and self._log.newest_leg() > begin.leg:
                raise Differs(key, f"is missing, though leg {begin.leg + 1} began after it")
            self._check_nothing_after(round_)
            return None
        if found.written.leg == begin.leg + 1 and (why := self._log.why_foreign(begin.leg + 1)):
            raise Differs(keys.begin(begin.leg + 1), why)
        if found.commit.leg == begin.leg:
            return found
        if self._log.newest_leg() < found.commit.leg:
            raise Differs(key, f"says leg {found.commit.leg}, which has not begun")
        return None

    def _check_noted(self, entry: CommitEntry) -> None:
        """Raise `Differs` unless a commit is the one in noted heads and in the segment of its round."""
        round_ = entry.commit.round
        for each in self._noted:
            if each.head.round == round_ and not each.head.is_of(round_, entry.sha256):
                raise Differs(
                    keys.commit(round_),
                    f"has the digest {entry.sha256[:16]}; the head {each.head.short} {each.words}",
                )
        self._bases.segments.check_commit(round_, len(entry.written.to_bytes()))

    def _next_commit(self, round_: int) -> None:
        """Read the commit of `round_` into `_next`: None if there is none. Raises `Differs` if it is invalid."""
        self._next = optional(keys.commit(round_), lambda: next(self._commits, None))

    def _bases_of(self, legs: range) -> Iterator[int]:
        """The rounds from whose bases `legs` (start or resume to stop) begin. Raises `Differs` for an invalid one."""
        for leg in legs:
            entry = self._begin(leg)
            self._config_of(keys.begin(leg), leg)
            yield entry.record.from_round

    def _check_nothing_after(self, round_: int) -> None:
        """Raise `Differs` if there is a commit after `round_`, which has none that is of the log.

        In a signed run that rests on what several replicas have signed, of which each follows the log: one alone may
        have written whatever it likes there, and that is noted.
        """
        authors: set[object] = set()
        for info in self._store.list(keys.ROUNDS, start_after=keys.commit(round_ - 1)):
            if keys.commit.parse(info.key) and (data := read_optional(self._store, info.key)) is not None:
                who = signer_of(data).who if self._log.run.signed_rules else None
                authors.add(who and who[0])
                if len(authors) > 1 or who is None:
                    raise Differs(keys.commit(round_), f"is missing, though {info.key} is there")
                self._done.notes.append(f"{info.key} is of no round of the log: {signer_of(data)} wrote it")

    def _with_verdict(self, entry: CommitEntry, manifests: Mapping[int, Contribution | None]) -> CommitEntry:
        """`entry` as a replica reads it, with answers, guard and checks compared with `manifests`: void if they differ.

        `manifests`: those that the commit names, by replica id; None for one that cannot be read.
        """
        key, answers = keys.commit(entry.commit.round), entry.written.answers
        received = {a.manifest_sha256: m for a in answers if (m := manifests[a.replica_id]) is not None}
        checks = self._bases.checks(entry.written)
        read = partial(self._log.conclusions.read, entry, self._last, derive_verdict=True)
        return optional(key, lambda: read(received=received, checks=checks))

    def _judged(
        self, key: str, entry: CommitEntry, derived: _Derived
    ) -> tuple[CommitEntry, Mapping[int, Contribution | None]]:
        """A commit as replicas read it, and the manifests that it names, by replica id: none of one that contradicts
        the log before it.

        Raises `Differs` for such a one, unless an attempt's key has signed it in a run with rules about that
        (`Run.signed_rules`).
        """
        is_noted = self._log.run.signed_rules is not None and entry.written.by.who is not None
        try:
            _check_not_void(key, entry)
            manifests = self._bases.manifests(entry.commit)
            check_claims(key, entry.commit, manifests, derived.digest, self._log.run.config.invited, self._done)
            _check_not_void(key, self._with_verdict(entry, manifests))
        except Differs:
            read = partial(self._log.conclusions.read, entry, derive_verdict=True, previous=self._last)
            judged = entry
            with suppress(Differs, ObjectMissing):
                judged = optional(key, read) if is_noted else entry
            if not is_noted or not judged.contradicts:
                raise
            return judged, {}
        return entry, manifests

    def _check_halt(self, key: str, commit: Commit) -> None:
        """Raise `Differs` if a commit halts the run, and neither the guard nor a request or a coordinator did."""
        if commit.stop != "halted" or commit.fired:
            return
        if commit.reason.startswith("halt requested"):
            why = f"the commit of round {commit.round} obeys it"
            needed(keys.halt(commit.leg), partial(self._log.halt, commit.leg), why)
        elif not commit.by_coordinator:
            raise Differs(key, "halts the run, though neither the guard nor a request does")

    def _check_step(
        self, key: str, commit: Commit, derived: _Derived, manifests: Mapping[int, Contribution | None]
    ) -> None:
        """Recompute the base after a commit, or load it from a confirmed snapshot if payloads were deleted."""
        if not commit.applied:
            return
        named = [m for a in commit.answers if a.averaged and (m := manifests[a.replica_id]) is not None]
        derived.base = self._bases.stepped(key, commit, derived.base, named)
        if derived.base is None:
            self._underived.append(commit.round)
            with suppress(Differs):  # `check_all` raises it where a snapshot is due
                derived.base = self._snapshots.base(commit.round, None, self._start)
        else:
            self._done.bases.add(commit.round)
            self._done.checked["outer steps"] += 1
        derived.digest = derived.base.digest() if derived.base is not None else None

    def _move(self, derived: _Derived, entry: CommitEntry) -> None:
        commit = derived.last = entry.commit
        self._last, derived.position = entry, entry.position
        if commit.applied:
            derived.made_in = commit.round
        if commit.applied and commit.round in self._needed:
            self._digests[commit.round] = derived.digest
            self._outer_steps[commit.round] = commit.outer_step
            self._guards[commit.round] = commit.guard
            self._made_in[commit.round] = commit.leg


def _check_not_void(key: str, entry: CommitEntry) -> None:
    """Raise `Differs` if the commit contradicts the log before it, so that every reader takes it as void."""
    if entry.contradicts:
        raise Differs(key, f"is void: {entry.contradicts}")


def check_probe(store: Store, start: Start) -> None:
    """Raise `Differs` if `probe.json` or `probe.safetensors` was changed. A run without a `KLProbe` has neither."""
    data = read_optional(store, keys.KL_RECORD)
    if data is None:
        return
    record = parse(Probe, keys.KL_RECORD, data)
    equal(keys.KL_RECORD, "base_digest", record.base_digest, start.base_digest, keys.START)
    reference = fetch(store, keys.KL_REFERENCE, f"{keys.KL_RECORD} names it")
    equal(keys.KL_REFERENCE, "digest", bulk_digest(reference), record.digest, keys.KL_RECORD)
