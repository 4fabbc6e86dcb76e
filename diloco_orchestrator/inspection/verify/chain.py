"""Derives a run again from its bucket: hash chain, guard, averages, outer steps, digests, snapshots. Writes nothing.

Trusts nothing but the arithmetic: every object that the log pins, directly or through a manifest, is read and hashed,
every base is computed again. What was collected is told apart from what was checked.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from diloco_orchestrator.allreduce.payload import PayloadGone, fetch_shard
from diloco_orchestrator.errors import DilocoError, NoSuchRun, ObjectMissing, RecordTooNew
from diloco_orchestrator.guard.round_fold import fold_round
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys, rounds
from diloco_orchestrator.protocol.records import (
    Answer,
    Begin,
    Commit,
    Contribution,
    Halt,
    Record,
    Result,
    Run,
    Shard,
    Snapshot,
    Start,
    canonical_json,
    sha256_hex,
)
from diloco_orchestrator.protocol.rounds import Action, Decision, Policy, Position
from diloco_orchestrator.run_log.run_log import leg_position, newest_leg, read_optional
from diloco_orchestrator.snapshots.layout import complete_snapshots, load_snapshot
from diloco_orchestrator.snapshots.rebuild import ManifestReader, average
from diloco_orchestrator.store.base import Store

R = TypeVar("R", bound=Record)

SAFE_SNAPSHOTS = 2  # complete ones at or after a round before its payloads may go


@dataclass(frozen=True)
class Disagreement:
    """The first place where the bucket and the arithmetic differ."""

    key: str
    words: str


@dataclass
class Verification:
    """What was checked, what could not be, and where the first disagreement is."""

    url: str
    checked: Counter[str] = field(default_factory=Counter)
    unchecked: list[str] = field(default_factory=list)
    disagreement: Disagreement | None = None
    bases: set[int] = field(default_factory=set)  # rounds whose model can be had: derived here, or in a whole snapshot

    @property
    def agrees(self) -> bool:
        return self.disagreement is None

    def to_json(self) -> dict[str, Any]:
        found = self.disagreement
        return {
            "url": self.url,
            "agrees": self.agrees,
            "checked": dict(self.checked),
            "unchecked": self.unchecked,
            "bases": sorted(self.bases),
            "disagreement": None if found is None else {"key": found.key, "words": found.words},
        }


class _Differs(Exception):
    """Ends the verification."""

    def __init__(self, key: str, words: str) -> None:
        super().__init__(words)
        self.found = Disagreement(key, words)


def verify(store: Store, on_round: Callable[[int], None] = lambda round_: None) -> Verification:
    """Check everything there is, oldest first, until something disagrees. `on_round` hears of every round.

    Raises `NoSuchRun`, `RecordTooNew`, and `StoreError` where the bucket cannot be read.
    """
    done = Verification(store.url)
    verifier = _Verifier(store, done, on_round)
    try:
        verifier.run()
    except _Differs as difference:
        done.disagreement = difference.found
        verifier.salvage()
    return done


@dataclass
class _Line:
    """Where the derivation stands."""

    position: Position
    digest: str
    base: Base | None  # None while it cannot be computed, because payloads were collected
    guard: Mapping[str, Any] | None
    last: Commit | None = None


class _Verifier:
    def __init__(self, store: Store, done: Verification, on_round: Callable[[int], None]) -> None:
        self._store = store
        self._done = done
        self._on_round = on_round
        self._reader = ManifestReader(store)
        self._snapshots = complete_snapshots(store)
        self._bases: dict[int, str] = {}  # digest after each round of this line that has a base
        self._outer_steps: dict[int, int] = {}
        self._guards: dict[int, Mapping[str, Any] | None] = {}
        self._counted: dict[tuple[int, int], int] = {}  # (replica, round of origin) -> the commit that counted it
        self._collected: list[int] = []

    def run(self) -> None:
        if read_optional(self._store, keys.RUN) is None:
            raise NoSuchRun(f"{self._store.url} holds no run ({keys.RUN} is missing). Check the address.")
        self._run, run_sha256 = self._record(Run, keys.RUN)
        self._policy = Policy.of(self._run.config)
        if read_optional(self._store, keys.START) is None:
            self._done.unchecked.append("no replica brought a model: there is nothing to derive")
            return
        self._start, self._start_sha256 = self._record(Start, keys.START)
        self._equal(keys.START, "run_sha256", self._start.run_sha256, run_sha256, f"the digest of {keys.RUN}")
        self._bases[0], self._outer_steps[0], self._guards[0] = self._start.base_digest, 0, None
        last: _Line | None = None
        for leg in range(1, max(1, newest_leg(self._store)) + 1):
            last = self._leg(leg, last)
        self._check_snapshots()
        if self._collected:
            span = f"{self._collected[0]}" + (f" to {self._collected[-1]}" if len(self._collected) > 1 else "")
            self._done.unchecked.append(
                f"the averages of {len(self._collected)} rounds ({span}): their payloads were collected; the next "
                "snapshots agree with the log"
            )

    def salvage(self) -> None:
        """After a disagreement: which snapshots are whole, whatever became of the log."""
        for round_ in self._snapshots if self._bases else ():  # without a start nobody knows the model
            with suppress(Exception):  # as broken as the rest
                load_snapshot(self._store, round_, self._start.parameters)
                self._done.bases.add(round_)

    # -- legs ----------------------------------------------------------------------------------------------------

    def _leg(self, leg: int, before: _Line | None) -> _Line:
        key = keys.begin(leg)
        begin, begin_sha256 = self._record(Begin, key)
        self._equal(key, "leg", begin.leg, leg, "its key")
        if before is None:
            run_sha256 = sha256_hex(self._store.get(keys.RUN))
            self._equal(key, "previous", begin.previous, run_sha256, f"the digest of {keys.RUN}")
        else:
            self._equal(key, "previous", begin.previous, before.position.sha256, "the last commit before the leg")
            self._equal(key, "after_round", begin.after_round, before.position.round, "the log")
            if before.last is not None and before.position.stop == "none":
                raise _Differs(key, f"begins a leg though round {before.position.round} stopped nothing")
        if begin.from_round not in self._bases:
            raise _Differs(key, f"starts from round {begin.from_round}, which left no base")
        self._equal(key, "from_outer_step", begin.from_outer_step, self._outer_steps[begin.from_round], "the log")
        if begin.leg > 1:
            self._equal(key, "guard", begin.guard, self._guards[begin.from_round], "that round's commit")
        line = _Line(
            position=leg_position(begin, self._start_sha256),
            digest=self._bases[begin.from_round],
            base=self._base_of_snapshot(begin.from_round, self._bases[begin.from_round]),
            guard=begin.guard,
        )
        if line.base is None:
            raise _Differs(
                keys.snapshot(begin.from_round, keys.SNAPSHOT_RECORD), f"is missing; leg {leg} starts from it"
            )
        self._done.checked["legs"] += 1
        while self._commit(line, begin, begin_sha256):
            pass
        self._check_result(begin, line)
        return line

    def _check_result(self, begin: Begin, line: _Line) -> None:
        key = keys.result(begin.leg)
        if read_optional(self._store, key) is None:
            return
        result, _ = self._record(Result, key)
        if line.last is None:  # no round of the leg was committed; a coordinator gave it up
            self._equal(key, "round and commit", (result.round, result.commit_sha256), (0, ""), "a leg without commits")
            return
        if line.last.stop == "none":
            raise _Differs(key, f"is there, though round {line.last.round}, the last one, stopped nothing")
        expected = rounds.result_of(line.last, line.position.sha256, {"write_id": result.write_id, "at": result.at})
        self._equal(key, "its content", result.to_bytes(), expected.to_bytes(), "the leg's last commit")

    # -- rounds --------------------------------------------------------------------------------------------------

    def _commit(self, line: _Line, begin: Begin, begin_sha256: str) -> bool:
        """Check the next commit of a leg and move the line on; False at the leg's end."""
        round_, key = line.position.round + 1, keys.commit(line.position.round + 1)
        if read_optional(self._store, key) is None:
            if line.position.stop == "none" and newest_leg(self._store) > begin.leg:
                raise _Differs(key, f"is missing, though leg {begin.leg + 1} began after it")
            self._check_nothing_after(round_)
            return False
        commit, sha256 = self._record(Commit, key)
        if commit.leg != begin.leg:
            if commit.leg != begin.leg + 1 or newest_leg(self._store) < commit.leg:
                raise _Differs(key, f"says leg {commit.leg}, in the middle of leg {begin.leg}")
            return False
        self._on_round(round_)
        self._equal(key, "round", commit.round, round_, "its key")
        self._equal(key, "previous", commit.previous, line.position.sha256, "the record before it")
        self._equal(key, "begin_sha256", commit.begin_sha256, begin_sha256, f"the digest of {keys.begin(begin.leg)}")
        if line.position.stop != "none":
            raise _Differs(key, f"follows round {round_ - 1}, which stopped the leg")
        ids = [answer.replica_id for answer in commit.answers]
        if ids != sorted(set(ids)) or any(i >= self._policy.replicas for i in ids):
            raise _Differs(key, f"lists the answers of replicas {ids}, of {self._policy.replicas} replicas")
        manifests = {answer.replica_id: self._manifest(commit, answer, line.digest) for answer in commit.answers}
        self._check_conclusion(key, commit, line, begin, manifests)
        self._check_step(key, commit, line, manifests)
        self._move(line, commit, sha256)
        self._done.checked["rounds"] += 1
        return True

    def _check_nothing_after(self, round_: int) -> None:
        later = [info.key for info in self._store.list("rounds/", start_after=keys.commit(round_))]
        for key in later:
            if key.endswith("/commit.json"):
                raise _Differs(keys.commit(round_), f"is missing, though {key} is there")

    def _manifest(self, commit: Commit, answer: Answer, digest: str) -> Contribution | None:
        """The manifest that an answer names, with everything that it names in turn. None if it never was readable."""
        key = keys.contribution(commit.round, answer.replica_id)
        data = self._get(key, f"the commit of round {commit.round} names it")
        self._equal(key, "its digest", sha256_hex(data), answer.manifest_sha256, "the commit that names it")
        if answer.attempt == 0:
            self._equal(key, "kind", "unverifiable", answer.kind, "a commit that names no attempt")
            return None
        manifest = self._parse(Contribution, key, data)
        in_place = (manifest.round, manifest.leg, manifest.replica_id) == (commit.round, commit.leg, answer.replica_id)
        if not in_place:
            if answer.kind != "unverifiable":
                raise _Differs(key, "says that it is another round's or another replica's")
            return None
        self._equal(key, "attempt", manifest.attempt, answer.attempt, "the commit that names it")
        if answer.kind == "wrong_base" and manifest.base_digest == digest:
            raise _Differs(key, f"names the base that round {commit.round} started from; the commit says it does not")
        if answer.kind not in ("wrong_base", "unverifiable"):
            self._equal(key, "kind", manifest.kind, answer.kind, "the commit that names it")
            self._equal(key, "fragment", manifest.fragment, commit.fragment, "the commit that names it")
            self._equal(key, "base_digest", manifest.base_digest, digest, "the base that the round started from")
            self._check_parts(manifest)
        self._equal(key, "weight", manifest.weight, answer.weight, "the commit that names it")
        self._equal(key, "origins", manifest.origins, answer.origins, "the commit that names it")
        self._done.checked["manifests"] += 1
        return manifest

    def _check_parts(self, manifest: Contribution) -> None:
        """Payload shards and the saved state: their digests."""
        parts: list[tuple[str, Shard]] = []
        if manifest.payload is not None:
            parts += [
                (keys.payload(manifest.round, manifest.replica_id, manifest.attempt, index), shard)
                for index, shard in enumerate(manifest.payload.shards)
            ]
        if manifest.state is not None:
            parts.append((keys.state(manifest.replica_id, manifest.round, manifest.attempt), manifest.state))
        for key, shard in parts:
            try:
                self._done.checked["bytes of payloads and states"] += len(fetch_shard(self._store, key, shard))
                self._done.checked["payloads and states"] += 1
            except PayloadGone:
                self._check_collected(key, manifest.round)
                self._done.checked["payloads and states collected"] += 1
            except DilocoError as error:
                raise _Differs(key, str(error)) from None

    def _check_collected(self, key: str, round_: int) -> None:
        """What retention removes has two snapshots after it, so that no base is lost."""
        if sum(snapshot >= round_ for snapshot in self._snapshots) < SAFE_SNAPSHOTS:
            words = f"is gone, though fewer than {SAFE_SNAPSHOTS} snapshots come after round {round_}: deleted by hand"
            raise _Differs(key, words)

    def _check_conclusion(
        self, key: str, commit: Commit, line: _Line, begin: Begin, manifests: Mapping[int, Contribution | None]
    ) -> None:
        """Guard, verdict, applied, stop: what follows from the manifests."""
        named = [a.replica_id for a in commit.answers if rounds.contributes(a)]
        if commit.by.startswith("coordinator"):
            self._check_still(key, commit, line)
            return
        fragment = line.position.outer_step % len(self._start.fragments)
        self._equal(key, "fragment", commit.fragment, fragment, "the schedule")
        missing = set(manifests) - set(commit.roster)
        if missing:
            raise _Differs(key, f"leaves replicas {sorted(missing)} off the next roster, though they answered")
        named = named if len(named) >= self._policy.quorum else []
        valid = [m for a in commit.answers if a.kind != "wrong_base" and (m := manifests[a.replica_id]) is not None]
        folded = fold_round(
            dict(line.guard) if line.guard is not None else None,
            self._run.config.guard,
            commit.round,
            valid,
            [m for replica_id in named if (m := manifests[replica_id]) is not None],
        )
        self._equal(key, "guard", commit.guard, folded.state if folded else line.guard, "the fold of the scores")
        verdict = folded.verdict.to_json() if folded else None
        self._equal(key, "verdict", commit.verdict, verdict, "the fold of the scores")
        expected = rounds.conclude(
            Decision(Action.COMMIT, "", tuple(named)),
            line.position,
            outer_steps=begin.from_outer_step + begin.outer_steps,
            fired=folded.verdict.reason if folded and folded.verdict.fire else "",
            halt=self._halt(commit),
        )
        for name in ("applied", "outer_step", "empty_rounds", "stop"):
            self._equal(key, name, getattr(commit, name), getattr(expected, name), "the rules of a round")
        averaged = [a.replica_id for a in commit.answers if a.averaged]
        self._equal(key, "who is averaged", averaged, named if expected.applied else [], "the answers and the quorum")

    def _check_still(self, key: str, commit: Commit, line: _Line) -> None:
        """A coordinator's stop names nobody and moves nothing."""
        self._equal(key, "outer_step", commit.outer_step, line.position.outer_step, "the round before")
        self._equal(key, "verdict", commit.verdict, None, "a stop by a coordinator")
        self._equal(key, "answers", len(commit.answers), 0, "a stop by a coordinator")
        self._equal(key, "applied", commit.applied, False, "a stop by a coordinator")
        self._equal(key, "guard", commit.guard, line.guard, "the round before")
        if commit.stop not in ("halted", "failed"):
            raise _Differs(key, f"a coordinator can stop a run as halted or failed, not as {commit.stop!r}")

    def _halt(self, commit: Commit) -> str:
        """The reason of the halt that a commit obeys; a request that came too late for a commit is none."""
        if commit.stop != "halted" or not commit.reason.startswith("halt requested"):
            return ""
        key = keys.halt(commit.leg)
        self._get(key, f"the commit of round {commit.round} obeys it")
        return self._record(Halt, key)[0].reason

    def _check_step(self, key: str, commit: Commit, line: _Line, manifests: Mapping[int, Contribution | None]) -> None:
        """The average and the outer step, computed again."""
        if not commit.applied:
            self._equal(
                key, "base_digest", commit.base_digest, line.digest, "the base before, because nobody is applied"
            )
            return
        self._check_origins(key, commit)
        named = [(m, a.weight) for a in commit.answers if a.averaged and (m := manifests[a.replica_id]) is not None]
        if line.base is not None:
            line.base = self._stepped(key, commit, line.base, named)
        if line.base is None:
            self._collected.append(commit.round)
            line.base = self._base_of_snapshot(commit.round, commit.base_digest)
            return
        self._equal(key, "base_digest", commit.base_digest, line.base.digest(), "the outer step, computed again")
        self._done.bases.add(commit.round)
        self._done.checked["outer steps"] += 1

    def _stepped(
        self, key: str, commit: Commit, base: Base, named: Sequence[tuple[Contribution, float]]
    ) -> Base | None:
        """The base after an outer step; None if its payloads were collected."""
        try:
            gradients = average(base, self._start.fragments[commit.fragment], named, self._reader.shard)
        except PayloadGone:
            return None
        except (DilocoError, IndexError, RuntimeError, ValueError) as error:
            raise _Differs(key, f"averages what cannot be averaged: {error}") from None
        return base.stepped(gradients, self._run.config.outer)

    def _check_origins(self, key: str, commit: Commit) -> None:
        """Every finished inner step counts once."""
        for answer in commit.answers:
            for origin in answer.origins if answer.averaged else ():
                at = (answer.replica_id, origin.round)
                if at in self._counted:
                    words = f"counts replica {at[0]}'s work of round {at[1]} again, after round {self._counted[at]}"
                    raise _Differs(key, words)
                self._counted[at] = commit.round

    def _move(self, line: _Line, commit: Commit, sha256: str) -> None:
        line.position, line.digest = Position.after(commit, sha256), commit.base_digest
        line.guard, line.last = commit.guard, commit
        if commit.applied:
            self._bases[commit.round] = commit.base_digest
            self._outer_steps[commit.round] = commit.outer_step
            self._guards[commit.round] = commit.guard

    # -- snapshots -----------------------------------------------------------------------------------------------

    def _base_of_snapshot(self, round_: int, digest: str) -> Base | None:
        """A snapshot's base, which the log knows by its digest; None if there is no such snapshot."""
        if round_ not in self._snapshots:
            return None
        key = keys.snapshot(round_, "")
        try:
            base = load_snapshot(self._store, round_, self._start.parameters)
        except DilocoError as error:
            if self._collected_meanwhile(round_):
                return None
            raise _Differs(key, str(error)) from None
        except Exception as error:  # safetensors' own words for a broken file
            raise _Differs(key, f"does not load: {error}") from None
        self._equal(key, "its base", base.digest(), digest, "the log")
        self._done.bases.add(round_)
        return base

    def _collected_meanwhile(self, round_: int) -> bool:
        """Whether a snapshot that was there at first is none any more: a run under way removes what it can."""
        gone = read_optional(self._store, keys.snapshot(round_, keys.SNAPSHOT_RECORD)) is None
        if gone:
            self._snapshots.remove(round_)
        return gone

    def _check_snapshots(self) -> None:
        for round_ in list(self._snapshots):
            key = keys.snapshot(round_, keys.SNAPSHOT_RECORD)
            if self._collected_meanwhile(round_):
                continue
            if round_ not in self._bases:
                raise _Differs(key, f"is of round {round_}, which left no base")
            record, _ = self._record(Snapshot, key)
            for name, info in sorted(record.files.items()):
                file = keys.snapshot(round_, name)
                data = self._get(file, f"{key} names it")
                self._equal(file, "its digest", sha256_hex(data), info.sha256, f"{key}, which names it")
            self._base_of_snapshot(round_, self._bases[round_])
            self._done.checked["snapshots"] += 1

    # -- reading -------------------------------------------------------------------------------------------------

    def _record(self, kind: type[R], key: str) -> tuple[R, str]:
        data = self._get(key, "a run has one")
        return self._parse(kind, key, data), sha256_hex(data)

    def _parse(self, kind: type[R], key: str, data: bytes) -> R:
        try:
            record = kind.from_bytes(data, key)
        except RecordTooNew:
            raise
        except (DilocoError, UnicodeDecodeError) as error:
            raise _Differs(key, str(error)) from None
        if canonical_json(json.loads(data)) != data:
            raise _Differs(key, "is not written as this package writes records: it was changed by hand")
        return record

    def _get(self, key: str, why: str) -> bytes:
        try:
            return self._store.get(key)
        except ObjectMissing:
            raise _Differs(key, f"is missing, though {why}") from None

    def _equal(self, key: str, what: str, found: Any, expected: Any, source: str) -> None:
        if found != expected:
            raise _Differs(key, f"{what} is {_short(found)}; {source} says {_short(expected)}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:12] if isinstance(value, str) and len(text) == 64 else text if len(text) < 200 else f"{text[:200]}…"
