"""The first base: replicas that start together agree on one, and one of them uploads it.

The creates of snapshot 0's files with the model's tensors decide the first base; everything else of snapshot 0 and
`start.json` is derived from their bytes. The replica whose create of a file succeeded writes the next one, and the
others wait. How a base is stored is `snapshots.layout`'s.
"""

import logging
from collections.abc import Mapping, Sequence

import torch

from diloco_orchestrator.clock import Backoff
from diloco_orchestrator.errors import ModelMismatch, Preempted
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import FileInfo, FrozenTensors, HeldoutSet, Start
from diloco_orchestrator.replica.process.attempt import Attempt
from diloco_orchestrator.run_log.run_log import Entry
from diloco_orchestrator.snapshots.file_plan import is_tensor_file
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot
from diloco_orchestrator.snapshots.layout import (
    ModelFiles,
    SnapshotFile,
    check_same_model,
    describe,
    existing_files,
    info_of,
    other_layout,
    read_tensors,
    write_snapshot,
)
from diloco_orchestrator.snapshots.naming import Naming
from diloco_orchestrator.snapshots.rebuild import FirstBase
from diloco_orchestrator.snapshots.tensor_file import views
from diloco_orchestrator.store.retrying import without_read_back

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.02
_GRACE_S = 2.0  # without a new file, beside the time that the next one takes, until a waiting replica writes it
_SLOW_LINK = 4e6  # bytes per second; a writer on a slower link may have to share the upload with another replica
_TURNS = 4  # replicas with different ids lose patience one after another


def agree_on_first_base(
    attempt: Attempt,
    parameters: Mapping[str, torch.Tensor],
    fragments: Sequence[Sequence[str]],
    files: ModelFiles,
    heldout: HeldoutSet | None = None,
) -> tuple[Entry[Start], FirstBase | None]:
    """Create snapshot 0 and `start.json` unless they exist.

    Returns the start that all replicas share, and the first base if this replica wrote it; else snapshot 0 holds it.

    Safe to race and to repeat: a process that dies at any line leaves what the next one completes. Replicas that
    start at the same time upload at most one file each in vain. Raises `ModelMismatch` if the run's first base is of
    another model, `Preempted` if a preemption notice comes while another replica writes.
    """
    writing = _FirstSnapshot(attempt, parameters, fragments, files, heldout)
    turn = _Turn(attempt)
    while (start := attempt.log.start()) is None:
        existing = writing.existing()
        if not turn.has_come(existing, writing.next_size(existing)):
            turn.wait()
        else:
            writing.write(existing)
    return start, writing.first


def check_start(
    start: Start,
    parameters: Mapping[str, torch.Tensor],
    fragments: Sequence[tuple[str, ...]],
    heldout: HeldoutSet | None,
    files: ModelFiles,
    attempt: Attempt,
) -> None:
    """Raise `ModelMismatch` unless a replica trains the run's model, in its fragments, with its adapters and on its
    frozen tensors, and scores its held-out set.
    """
    url = attempt.store.url
    check_same_model(describe(parameters), start.parameters)
    if start.fragments != tuple(fragments):
        raise ModelMismatch(
            f"this replica synchronises {len(fragments)} fragments of the model, the run in {url} "
            f"{len(start.fragments)}, or the same number split otherwise. All replicas must agree."
        )
    for mine, pair in zip(
        files.adapters, start.adapters, strict=True
    ):  # their residuals are parameters, compared above
        if mine != pair:
            raise ModelMismatch(
                f"this replica's adapter of {mine.weight!r} has the scaling {mine.scaling:g}, the run's in {url} "
                f"{pair.scaling:g}: its product would be averaged with other ones. Give all replicas the same "
                "lora_alpha and r."
            )
    if heldout != start.heldout:
        raise ModelMismatch(
            f"this replica scores {_heldout_words(heldout)}; the run in {url} is judged by "
            f"{_heldout_words(start.heldout)}. All replicas must pass the same `heldout_items`, `vault_items` and "
            "`in_loop` to attach, and score by the same function; another set or scorer needs a new run."
        )
    _check_untrained(start, files, attempt)


def _heldout_words(heldout: HeldoutSet | None) -> str:
    if heldout is None:
        return "no held-out set"
    root, scorer = heldout.root or heldout.digest, heldout.scorer or "unknown"
    vault = f" and {heldout.vault.items} vault items (sha256 {heldout.vault.digest[:12]})" if heldout.vault else ""
    return f"{heldout.items} held-out items ({heldout.metric}, root {root[:12]}, scorer {scorer[:12]}){vault}"


def _check_untrained(start: Start, files: ModelFiles, attempt: Attempt) -> None:
    """Raise `ModelMismatch` unless the frozen tensors and the adapter of a replica are the run's.

    Hashes every frozen tensor, once for each model. Where this replica's first buffers differ, those of snapshot 0 are
    taken.
    """
    untrained, naming, url = files.untrained, files.naming, attempt.store.url
    assert untrained is not None, "a replica has the live model"
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
    if untrained.buffers.digest() != start.buffers:
        log.warning("this replica's first buffers differ from those of snapshot 0; it takes those")
        rest = first_snapshot(attempt.log).model_files(start, {}).rest()
        names = naming.by_file(untrained.buffers.first)
        untrained.buffers.adopt({names[name]: rest.read(name) for name in rest.specs() if name in names})


def _frozen_words(frozen: FrozenTensors | None) -> str:
    if frozen is None:
        return "no frozen tensor"
    return f"{frozen.tensors} frozen tensors ({frozen.size / 1e6:.3g} MB, digest {frozen.digest[:15]})"


class _Turn:
    """Whether this replica writes the next file of snapshot 0, or waits for the one that wrote the last."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._seen: set[str] | None = None
        self._since = 0.0  # when the newest file was first listed
        self._pauses = Backoff(_FIRST_PAUSE_S, attempt.config.timing.poll_s).pauses()

    def has_come(self, existing: set[str], next_size: int) -> bool:
        """Whether no file exists, or none was added for as long as the next one, of `next_size` bytes, may take."""
        now = self._attempt.clock.now()
        if existing != self._seen:
            self._seen, self._since = existing, now
        rank = 1 + self._attempt.replica_id % _TURNS
        return not existing or now - self._since >= rank * (_GRACE_S + next_size / _SLOW_LINK)

    def wait(self) -> None:
        """Pause. Raises `Preempted` if this replica is to leave."""
        if self._attempt.should_leave():
            raise Preempted(
                f"replica {self._attempt.replica_id} got a preemption notice while another one was writing the first "
                "base. Nothing of this replica is lost; its next attempt goes on."
            )
        self._attempt.clock.sleep(next(self._pauses))


class _FirstSnapshot:
    """Writes what is missing of snapshot 0. `first`: the first base, once this replica has written it."""

    def __init__(
        self,
        attempt: Attempt,
        parameters: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        files: ModelFiles,
        heldout: HeldoutSet | None,
    ) -> None:
        self.first: FirstBase | None = None
        self._attempt = attempt
        self._own = Base.fresh(parameters, attempt.config.outer, fragments, attempt.config.shard_numel)
        self._described = describe(parameters)
        assert files.untrained is not None, "a replica has the live model"
        self._files = files
        self._untrained = files.untrained
        self._heldout = heldout
        self._planned = files.planned(self._own, attempt.object_limit)
        self._known: dict[str, FileInfo] = {}  # files of the model that this replica has written or read
        self._lost: set[str] = set()  # files that another replica created first

    def existing(self) -> set[str]:
        """Files of snapshot 0 that exist. One LIST request."""
        return existing_files(self._attempt.store, 0) | self._lost

    def next_size(self, existing: set[str]) -> int:
        """Bytes of the first file that is missing. Raises `ModelMismatch` if files of another model exist."""
        other = other_layout(existing, [each.name for each in self._planned])
        if other is not None:
            self._check_described(read_tensors(self._attempt.store, keys.snapshot(0, other)))
            raise ModelMismatch(
                f"the run's first base in {self._attempt.store.url} has the file {other}, which this replica's model "
                "would not have: its tensors are others. All replicas must build the same model."
            )
        return next((each.size for each in self._planned if each.name not in existing), 0)

    def write(self, existing: set[str]) -> None:
        """Write everything that is missing, until another replica turns out to have written a file of the model first.

        Raises `ModelMismatch` if an existing file is of another model.
        """
        for each in self._model_files():
            if each.name not in existing and not self._create(each):
                return
        base = self._derive()
        digest, attempt = base.digest(), self._attempt
        write_snapshot(attempt.store, 0, base, digest, self._files, attempt.stamp, attempt.object_limit, self._known)
        start = Start(
            **attempt.stamp(),
            run_sha256=attempt.log.run_sha256,
            parameters=self._described,
            fragments=base.fragments,
            shard_numel=base.shard_numel,
            base_digest=digest,
            adapters=self._files.adapters,
            heldout=self._heldout,
            frozen=self._untrained.describe_frozen(attempt.background),
            buffers=self._untrained.buffers.digest(),
            adapter=self._files.naming.adapter,
            first_files={**self._known, **{name: info_of(data) for name, data in self._files.extra.items()}},
        )
        attempt.store.create(keys.START, start.to_bytes())
        self.first = FirstBase(base, digest)

    def _model_files(self) -> list[SnapshotFile]:
        return [each for each in self._planned if is_tensor_file(self._files.naming.group, each.name)]

    def _create(self, file: SnapshotFile) -> bool:
        # Without reading back: a replica with equal values would take the file for its own and write the next one too.
        data = file.encode()
        if not without_read_back(self._attempt.store).create(keys.snapshot(0, file.name), data):
            self._lost.add(file.name)
            return False
        self._known[file.name] = info_of(data)
        return True

    def _derive(self) -> Base:
        """The first base: this replica's own values, but those in files that other replicas wrote."""
        others = [each for each in self._model_files() if each.name not in self._known]
        for each in others:
            key = keys.snapshot(0, each.name)
            data = self._attempt.store.get(key)
            self._known[each.name] = info_of(data)
            stored = views(data, f"{key} in {self._attempt.store.url}")
            in_model = self._files.naming.by_file([*self._files.dtypes, *self._untrained.names])
            tensors = {in_model.get(name, name): tensor for name, tensor in stored.items()}
            self._check_described(tensors)
            for name in (in_model.get(name, name) for name in each.tensors):
                if name in self._files.dtypes and name not in tensors:
                    raise ModelMismatch(
                        f"this replica trains {name!r}, which {each.name} of the run's first base does not have."
                    )
            self._untrained.take_first(tensors, f"{key} in {self._attempt.store.url}")
            self._own.fill({name: each for name, each in tensors.items() if name in self._files.dtypes}, {})
            log.info("another replica wrote %s of snapshot 0 first; its values are taken", each.name)
        return self._own

    def _check_described(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise `ModelMismatch` if this replica's model has one of these tensors in another shape or dtype."""
        ours = tuple(each for each in self._described if each.name in tensors)
        check_same_model(ours, describe({each.name: tensors[each.name] for each in ours}))
