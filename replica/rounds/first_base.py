"""The first base: replicas that start together agree on one start record, and one of them uploads the first base.

Each replica votes with the start record of its own model (`Began`) and records the one that it adopts for good
(`Follows`); `protocol.first_base` decides. A replica whose own start record exists adopts it without waiting. An object
at `start.json` or in snapshot 0 with other bytes than a replica writes there is ignored, and the replica writes its own
under a random name. `snapshots.layout` stores a base.
"""

import functools
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from itertools import chain

import torch

from diloco_orchestrator.allreduce.dealing import ASSUMED, Link, path_of, shard_numel_of
from diloco_orchestrator.allreduce.link import agreed_link, recorded_link
from diloco_orchestrator.clock import Backoff
from diloco_orchestrator.errors import FirstBaseOutvoted, ModelMismatch, ObjectMissing, Preempted, RecordInvalid
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.first_base import StartDecision, decide_start
from diloco_orchestrator.protocol.pace import apart_s
from diloco_orchestrator.protocol.records import FileInfo, Snapshot
from diloco_orchestrator.protocol.start_records import Began, Follows, FrozenTensors, HeldoutSet, Start
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.run_log import complete_takes
from diloco_orchestrator.snapshots.confirmation import first_take
from diloco_orchestrator.snapshots.file_plan import Naming, is_side_file, is_tensor_file
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot, side_files_of_run
from diloco_orchestrator.snapshots.layout import (
    ModelFiles,
    SnapshotFile,
    check_same_model,
    create_snapshot_record,
    describe,
    existing_files,
    in_groups,
    info_of,
    with_bytes,
)
from diloco_orchestrator.snapshots.model_tensors import digest_of
from diloco_orchestrator.snapshots.rebuild import FirstBase, stored_base
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_ADAPTER_CONFIG = "adapter_config.json"
_SCALING = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")  # of PEFT
_GRACE_S = 2.0  # without a new file, beside the time that the next one takes, until a waiting replica writes it
_SLOW_LINK = 4e6  # bytes per second; a writer on a slower link may have to share the upload with another replica
_TURNS = 4  # replicas with different ids lose patience one after another
_FOREIGN_TAKES = 16  # versions of snapshot 0 that are read after those that votes name: anybody may add some


def agree_on_first_base(attempt: Attempt, own: OwnModel) -> tuple[Entry[Start], FirstBase | None]:
    """Adopt the run's start record, which describes its first base, or create it with snapshot 0, that base.

    Returns the adopted start record, and the first base if this process has it in memory, else None.

    Safe to race and to repeat: if a process dies at any line, the next one completes its objects. Replicas that start
    at once with equal models upload at most one file each in vain. A replica whose model differs from every existing
    start record waits until more than half of the replicas agree or all have voted, at most `timing.startup_timeout_s`.
    Raises `ModelMismatch` if the run's start record is of another model or no replica has the configured `first_base`,
    `Preempted` if a preemption notice comes meanwhile.
    """
    starts = attempt.log.starts
    found = starts.chosen()
    if found is not None and starts.is_final:
        attempt.log.starts.adopt(found, first_take(attempt.log))
        return found, None
    return _Agreement(attempt, own).reach()


class _Agreement:
    """One replica's vote on the first base, until it has adopted a start record, which describes one."""

    def __init__(self, attempt: Attempt, own: OwnModel) -> None:
        self._attempt = attempt
        self._starts = attempt.log.starts
        self._writing = _FirstSnapshot(attempt, own)
        self._start = _start_of(attempt, self._writing, own)
        self._own = sha256_hex(self._start.to_bytes())
        self._key = keys.start_take(attempt.stamp.unforeseen())
        longest_s = max(attempt.config.timing.poll_s, apart_s(attempt.config, attempt.store.requests_allowed))
        self._pauses = Backoff(_FIRST_PAUSE_S, longest_s).pauses()
        self._said = ""
        self._useless: set[str] = set()  # starts whose base is nowhere, or holds what is no number

    def reach(self) -> tuple[Entry[Start], FirstBase | None]:
        """Vote on the first base, then wait, upload or adopt until a start record (which describes one) is adopted.

        Returns that record, and the first base if this process has it in memory, else None.
        """
        attempt = self._attempt
        began = Began(**attempt.stamp(), **self._who, start_sha256=self._own, key=self._key)
        attempt.writer.create(began)
        since = attempt.clock.now()
        while True:
            self._starts.refresh()
            waited = attempt.clock.now() - since >= attempt.config.timing.startup_timeout_s
            decision = self._decide(waited)
            self._say(decision)
            if decision.sha256 is None:
                self._check_first_base(waited)
                self._pause()
            elif attempt.is_invited and self._starts.entry(decision.sha256) is None:
                self._pause()  # until a replica that is no stranger's has written it
            elif decision.sha256 != self._own or attempt.is_invited:
                if (begun := self._adopt_other(decision.sha256)) is not None:
                    return begun
            elif (entry := self._starts.entry(self._own)) is not None:
                return self._adopt_own(entry)
            elif (existing := self._writing.existing_on_turn()) is None:
                self._pause()
            elif self._writing.write(existing):
                self._create_start()

    @property
    def _who(self) -> dict[str, int]:
        return {"replica_id": self._attempt.replica_id, "attempt": self._attempt.number}

    def _decide(self, waited: bool) -> StartDecision:
        starts = self._starts
        if starts.followed.keys() - {self._own}:
            begun = self._attempt.log.start_of_commits()
            if begun is not None and begun.sha256 not in self._useless:
                return StartDecision(begun.sha256, "rounds have been committed from it")
        is_wrong = self._attempt.config.first_base not in (None, self._start.base_digest)
        said = {**starts.began, self._attempt.replica_id: self._own}
        offered = [each.sha256 for each in starts.offered if each.sha256 not in self._useless]
        mine = starts.follows.get(self._attempt.replica_id)
        is_alone = self._own in offered or not offered  # then no vote is waited for
        voters = self._attempt.log.run.config.launched  # others adopt what these chose
        launched = () if is_alone else {i for i in AttemptRecords(self._attempt.store).all_numbers() if i in voters}
        return decide_start(
            None if is_wrong else self._own,
            said,
            starts.follows,
            offered,
            len(voters),
            launched,
            mine,
            waited,
        )

    def _check_first_base(self, waited: bool) -> None:
        """Raise `ModelMismatch` if this replica's base is not the configured `first_base` and the wait for one is over.

        `waited`: whether `startup_timeout_s` has passed without a start record of that base.
        """
        attempt, named = self._attempt, self._attempt.config.first_base
        if waited and named not in (None, self._start.base_digest):
            raise ModelMismatch(
                f"replica {attempt.replica_id} begins with base {self._start.base_digest}, the run's first_base names "
                f"{named}, and no replica has begun with that one. Compare model, seed, fragments and outer settings "
                "with the run that the digest is from, and the versions of torch; or launch a run without first_base."
            )

    def _say(self, decision: StartDecision) -> None:
        """Log, once, that this replica waits for a start record or adopts one other than its own model's."""
        if decision.why != self._said and self._starts.offered and decision.sha256 != self._own:
            what = "waiting" if decision.sha256 is None else f"start {decision.sha256[:12]} is followed"
            log.info("this replica's first values are not those of the run's start; %s: %s", what, decision.why)
        self._said = decision.why

    def _pause(self) -> None:
        """Sleep until the next poll of the votes. Raises `Preempted` after a preemption notice."""
        if self._attempt.should_leave():
            raise Preempted(
                f"replica {self._attempt.replica_id} got a preemption notice while another one was writing the first "
                "base. Nothing of this replica is lost; its next attempt goes on."
            )
        self._attempt.clock.sleep(next(self._pauses))

    # -- adopting --------------------------------------------------------------------------------------------------

    def _adopt_own(self, entry: Entry[Start]) -> tuple[Entry[Start], FirstBase | None]:
        """Adopt the existing start record of this replica's model; uploads its base if no snapshot 0 holds it."""
        take, base = self._writing.take, self._writing.base
        if take is None:
            found = self._stored(entry)
            while found is None and self._writing.take is None:
                self._writing.write_anew()  # the start record was written without its snapshot, or that was damaged
            take, base = found or (self._writing.take or keys.SHARED_TAKE, base)
        return self._begun(entry, take, base)

    def _adopt_other(self, sha256: str) -> tuple[Entry[Start], FirstBase | None] | None:
        """Adopt another model's start record if snapshot 0 holds its base, all finite; else None, and it is ignored."""
        entry = self._starts.entry(sha256)
        assert entry is not None, "a start record that is adopted exists"
        found = self._stored(entry)
        if found is None or not all(self._attempt.owners.each(_is_finite, found[1])):
            why = "is in no take of snapshot 0" if found is None else "holds NaN or infinity"
            log.warning("start %s is passed over: its base %s", sha256[:12], why)
            self._useless.add(sha256)
            return None
        return self._begun(entry, *found)

    def _begun(self, entry: Entry[Start], take: str, base: Base) -> tuple[Entry[Start], FirstBase]:
        attempt, key = self._attempt, self._starts.key_of(entry.sha256)
        follows = Follows(**attempt.stamp(), **self._who, start_sha256=entry.sha256, key=key, take=take)
        attempt.writer.create(follows)
        self._starts.adopt(entry, take)
        return entry, FirstBase(base, entry.record.base_digest)

    def _stored(self, entry: Entry[Start]) -> tuple[str, Base] | None:
        """The version of snapshot 0 with a start record's base and buffers, and that base.

        None if no version is complete, readable and of that base; unreadable versions are logged.
        """
        attempt, start = self._attempt, entry.record
        there = complete_takes(attempt.store).get(0, [])
        named = [take for take in self._starts.takes_of(entry.sha256) if take in there]
        for take in dict.fromkeys(chain(named, there[:_FOREIGN_TAKES])):
            try:
                record = attempt.log.snapshot(0, take)
                if record.base_digest != start.base_digest:
                    continue
                stored = StoredSnapshot(attempt.store, 0, record, take)
                base = stored_base(stored, start, attempt.owners)
                if _buffers_digest(stored, start, self._writing.buffers) == start.buffers:
                    return take, base
            except (RecordInvalid, ObjectMissing, ModelMismatch, KeyError, ValueError) as error:
                log.warning("%s is passed over: %s", keys.snapshot(0, "", take), error)
        return None

    def _create_start(self) -> None:
        """Create this model's start record as `start.json`, or, if that holds another, at a key of its own."""
        writer = self._attempt.writer
        if writer.create(self._start, keys.START) is None and self._starts.entry(self._own) is None:
            self._starts.refresh()
            if self._starts.entry(self._own) is None:
                log.warning("%s holds another start, which no replica began with: it is passed over", keys.START)
                vote = self._starts.vote(self._attempt.replica_id)  # an earlier process of this attempt may have voted
                same = vote is not None and vote.start_sha256 == self._own
                writer.create(self._start, vote.key if vote and same else self._key)
                self._starts.refresh()
                if self._starts.entry(self._own) is None:
                    raise FirstBaseOutvoted(self._not_recorded())

    def _not_recorded(self) -> str:
        """A sentence about a vote that names another key than this process's, so that nobody finds its start."""
        vote, url = keys.began(self._attempt.replica_id, self._attempt.number), self._attempt.store.url
        return (
            f"{keys.START} and {vote} in {url} are another process's, which began with another run or model. If a run "
            "in this folder was removed while its replicas were alive, end them: they go on to write here. The next "
            "attempt votes anew."
        )


def _start_of(attempt: Attempt, writing: "_FirstSnapshot", own: OwnModel) -> Start:
    """The start record: digest and shapes of this replica's model. Equal models give equal bytes, without a time."""
    base = writing.base
    return Start(
        write_id="start",
        at=0.0,
        run_sha256=attempt.log.run_sha256,
        parameters=describe(own.parameters),
        fragments=base.fragments,
        shard_numel=base.shard_numel,
        base_digest=base.digest(attempt.background),
        adapters=own.files.adapters,
        heldout=own.heldout,
        frozen=own.untrained.describe_frozen(attempt.background),
        buffers=own.untrained.buffers.digest(),
        adapter=own.files.naming.adapter,
        first_files=writing.first_files(),
        path=writing.path if attempt.config.path == "auto" else None,
        scores_strangers=2 if own.scores_strangers else None,
        heldout_by="launched" if attempt.config.invited and own.heldout else None,
    )


def _is_finite(base: Base) -> bool:
    """Whether all parameters in this process's shards of a base are finite."""
    return all(
        bool(torch.isfinite(shard.parameters).all())
        for fragment in range(len(base.fragments))
        for _, shard in base.own_shards(fragment)
    )


def _buffers_digest(stored: StoredSnapshot, start: Start, buffers: Sequence[str]) -> str | None:
    """The digest of the buffers in a stored snapshot; the one in `start` if that is None or of an adapter.

    `buffers`: names of the persistent buffers in this replica's model.
    """
    if start.buffers is None or Naming.of(start).is_adapter:
        return start.buffers  # PEFT's files hold no buffers but its own
    rest = stored.model_files(start, {}).rest()
    return digest_of({name: rest.read(name) for name in buffers if name in rest.specs()})


def patience_s(replica_id: int, next_size: int) -> float:
    """Seconds without a new file of snapshot 0 until a waiting replica uploads the next one, of `next_size` bytes."""
    return (1 + replica_id % _TURNS) * (_GRACE_S + next_size / _SLOW_LINK)


def _link_of(attempt: Attempt) -> Link:
    """The link by which all replicas of the run choose its path. A stranger's measures none: others write the start."""
    if attempt.is_invited:
        return recorded_link(attempt.store) or ASSUMED
    who = attempt.stamp, attempt.replica_id
    return agreed_link(attempt.store, attempt.clock, attempt.background, *who, attempt.writer.create)


class _FirstSnapshot:
    """Writes snapshot 0, the first base, from this replica's model. `take`: the version written, None before.

    Existing files with equal bytes are kept. If a file of the shared version has other bytes, that version is left as
    it is, and all files are written into another one.
    """

    def __init__(self, attempt: Attempt, own: OwnModel) -> None:
        numels = [sum(own.parameters[name].numel() for name in names) for names in own.fragments]
        link = functools.cache(functools.partial(_link_of, attempt))
        self.path = path_of(attempt.config, numels, link)
        shard_numel = shard_numel_of(attempt.config, self.path, numels, link)
        self.base = own.first_base(attempt.config.outer, shard_numel)
        self.take: str | None = None
        self.buffers = sorted(own.untrained.buffers.first)
        self._attempt, self._owners = attempt, attempt.owners
        self._files = own.files
        self._planned = own.files.planned(self.base, attempt.object_limit)
        self._infos: dict[str, FileInfo] = {}  # files of the shared version that this replica has written or compared
        self._lost: set[str] = set()  # files that another replica created first
        self._seen: set[str] | None = None  # files as of the last listing
        self._since = 0.0  # when the newest of them was first listed

    def first_files(self) -> dict[str, FileInfo]:
        """Entries (digest, size) of snapshot 0's files with tensors and of those without. Encodes one at a time."""
        named = [each for each in self._planned if self._is_of_model(each) or is_side_file(each.name)]
        found = dict[str, FileInfo]()
        for group in in_groups(named, self._owners):
            infos = with_bytes(self._owners, group, info_of, [()] * len(group))
            found |= zip((each.name for each in group), infos, strict=True)
        return found

    def existing_on_turn(self) -> set[str] | None:
        """The existing files of snapshot 0's shared version, if this replica is to write the next one; else None.

        None while another replica is uploading: a file was added within `patience_s`. One LIST request.
        """
        now, planned = self._attempt.clock.now(), {each.name for each in self._planned}
        existing = (existing_files(self._attempt.store, 0) | self._lost) & planned
        if existing != self._seen:
            self._seen, self._since = existing, now
        next_size = next((each.size for each in self._planned if each.name not in existing), 0)
        is_turn = not existing or now - self._since >= patience_s(self._attempt.replica_id, next_size)
        return existing if is_turn else None

    def write(self, existing: set[str]) -> bool:
        """Write all missing files of snapshot 0 and its record. False if another replica just created a model file."""
        left = [each for each in self._planned if each.name not in self._infos]
        for group in in_groups(left, self._owners):
            yields = {each.name for each in group if self._is_of_model(each)}
            for each, (info, outcome) in zip(group, self._put(keys.SHARED_TAKE, group, existing, yields), strict=True):
                if outcome is _Put.LOST:
                    self._lost.add(each.name)
                    return False
                if outcome is _Put.OTHER:
                    self.write_anew()
                    return True
                self._infos[each.name] = info
        if self._complete(keys.SHARED_TAKE, self._infos):
            self.take = keys.SHARED_TAKE
        else:
            self.write_anew()
        return True

    def write_anew(self) -> None:
        """Write all files into this replica's own version of snapshot 0; if that holds others, into a new one."""
        unforeseen = keys.unforeseen_take(self._attempt.stamp.unforeseen())
        for take in (keys.own_take(self._attempt.replica_id), unforeseen):
            log.warning("the shared take of snapshot 0 holds other bytes than this replica's: it writes take %s", take)
            if self._wrote(take):
                self.take = take
                return

    def _wrote(self, take: str) -> bool:
        """Write the missing files and record of a snapshot version; False if the version holds other bytes already."""
        infos = dict[str, FileInfo]()
        for group in in_groups(self._planned, self._owners):
            put = self._put(take, group, (), ())
            if any(outcome is _Put.OTHER for _, outcome in put):
                return False
            infos |= {each.name: info for each, (info, _) in zip(group, put, strict=True)}
        return self._complete(take, infos)

    def _is_of_model(self, file: SnapshotFile) -> bool:
        return is_tensor_file(self._files.naming.group, file.name)

    def _put(
        self, take: str, files: Sequence[SnapshotFile], existing: Collection[str], yields: Collection[str]
    ) -> list[tuple[FileInfo, "_Put"]]:
        """Create files of a snapshot version, at most one for each rank, except `existing` ones.

        Returns entry and outcome of each. `yields`: names of those that are left to another replica which creates them
        first.
        """
        store = self._attempt.store
        names = [each.name for each in files]
        args = [(store, keys.snapshot(0, name, take), name in existing, name in yields) for name in names]
        return with_bytes(self._owners, files, _put, args)

    def _complete(self, take: str, infos: Mapping[str, FileInfo]) -> bool:
        """Create `snapshot.json` of a snapshot version; False if an existing one names other files."""
        ours = Snapshot(**self._attempt.stamp(), round=0, base_digest=self.base.digest(), by=None, files=dict(infos))
        return create_snapshot_record(self._attempt.store, ours, take)


class _Put(Enum):
    """The outcome of creating a file of snapshot 0."""

    OURS = "it has our bytes"
    LOST = "another replica just created it"
    OTHER = "it has other bytes"


def _put(data: bytes, store: Store, key: str, exists: bool, yields: bool) -> tuple[FileInfo, _Put]:
    """Create a file of snapshot 0 unless it exists. Returns its entry and the outcome.

    `yields`: whether it is not even read if another replica creates it first.
    """
    # Without reading back: a replica with equal values would take the file for its own and write the next one too.
    if not exists and store.without_read_back().create(key, data):
        return info_of(data), _Put.OURS
    if not exists and yields:
        return info_of(data), _Put.LOST
    return info_of(data), _Put.OURS if store.get(key, 0, len(data) + 1) == data else _Put.OTHER


# -- whether a replica trains the model of its run --------------------------------------------------------------------


def check_start(start: Start, own: OwnModel, attempt: Attempt) -> None:
    """Raise `ModelMismatch` unless a replica's model and held-out set are those of the run's start record."""
    url = attempt.store.url
    check_same_model(describe(own.parameters), start.parameters)
    if start.fragments != tuple(map(tuple, own.fragments)):
        raise ModelMismatch(
            f"this replica synchronises {len(own.fragments)} fragments of the model, the run in {url} "
            f"{len(start.fragments)}, or the same number split otherwise. All replicas must agree."
        )
    # There are as many: their residuals are parameters, compared above.
    for mine, pair in zip(own.files.adapters, start.adapters, strict=True):
        if mine != pair:
            raise ModelMismatch(
                f"this replica's adapter of {mine.weight!r} has the scaling {mine.scaling:g}, the run's in {url} "
                f"{pair.scaling:g}: its product would be averaged with other ones. Give all replicas the same "
                "lora_alpha and r."
            )
    if own.heldout != start.heldout:
        raise ModelMismatch(
            f"this replica scores {_heldout_words(own.heldout)}; the run in {url} is judged by "
            f"{_heldout_words(start.heldout)}. All replicas must pass the same `heldout_items`, `vault_items` and "
            "`in_loop` to attach, and score by the same function; another set or scorer needs a new run."
        )
    _check_untrained(start, own, attempt)


def _heldout_words(heldout: HeldoutSet | None) -> str:
    if heldout is None:
        return "no held-out set"
    root, scorer = heldout.root or heldout.digest, heldout.scorer or "unknown"
    vault = f" and {heldout.vault.items} vault items (sha256 {heldout.vault.digest[:12]})" if heldout.vault else ""
    return f"{heldout.items} held-out items ({heldout.metric}, root {root[:12]}, scorer {scorer[:12]}){vault}"


def _check_untrained(start: Start, own: OwnModel, attempt: Attempt) -> None:
    """Raise `ModelMismatch` unless a replica's frozen tensors, names and settings of its adapter are the run's.

    Frozen tensors are hashed at the first call for a model object. Buffers that differ are no error: this function sets
    the replica's to those in snapshot 0.
    """
    untrained, naming, url = own.untrained, own.files.naming, attempt.store.url
    ours, theirs = untrained.describe_frozen(attempt.background), start.frozen
    if ours != theirs:
        raise ModelMismatch(
            f"replica {attempt.replica_id} has {_frozen_words(ours)}; the run in {url} has {_frozen_words(theirs)}. "
            "Its base model is another: what is trained on different bases cannot be averaged. Load the same model, in "
            "the same revision, dtype and quantisation, in every replica, or start a new run."
        )
    if Naming.of(start) != naming:
        raise ModelMismatch(
            f"the adapter of replica {attempt.replica_id} is stored under other names than that of the run in {url}: "
            "all replicas must build it alike, with the same version of PEFT."
        )
    _check_adapter_config(start, own.files, attempt)
    if untrained.buffers.digest() != start.buffers:
        log.warning("this replica's first buffers differ from those of snapshot 0; it takes those")
        rest = first_snapshot(attempt.log).model_files(start, {}).rest()
        names = naming.by_file(untrained.buffers.first)
        untrained.buffers.adopt({names[name]: rest.read(name) for name in rest.specs() if name in names})


def _check_adapter_config(start: Start, files: ModelFiles, attempt: Attempt) -> None:
    """Raise `ModelMismatch` unless PEFT scales the product of a replica's factors as in the run.

    Shapes do not show it: factors of one rank give other products under another `lora_alpha`. Reads the run's file only
    if its digest differs.
    """
    ours, named = files.extra.get(_ADAPTER_CONFIG), (start.first_files or {}).get(_ADAPTER_CONFIG)
    if ours is None or named is None or info_of(ours) == named:
        return
    theirs = side_files_of_run(attempt.log).get(_ADAPTER_CONFIG)
    mine, run = json.loads(ours), json.loads(theirs or ours)
    for name in _SCALING:
        if mine.get(name) != run.get(name):
            raise ModelMismatch(
                f"the adapter of replica {attempt.replica_id} has {name}={mine.get(name)!r}, that of the run in "
                f"{attempt.store.url} {run.get(name)!r}: the same factors would be another product. Give all replicas "
                "the same r, lora_alpha and patterns."
            )


def _frozen_words(frozen: FrozenTensors | None) -> str:
    if frozen is None:
        return "no frozen tensor"
    return f"{frozen.tensors} frozen tensors ({frozen.size / 1e6:.3g} MB, digest {frozen.digest[:15]})"
