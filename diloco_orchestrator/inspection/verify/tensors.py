"""Everything of a verification that computes with tensors: bases of snapshots, and outer steps. Needs torch.

The modules beside this one import it only where torch is installed; elsewhere `Verification.not_derived` says so.
"""

from collections.abc import Sequence

import torch

from diloco_orchestrator.allreduce.spool import budget
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.inspection.verify.findings import Differs, Verification, is_of_this_reader
from diloco_orchestrator.outer import outer_step
from diloco_orchestrator.outer.adapter_products import merged
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, Contribution, Snapshot
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.buffers import buffers_of_base
from diloco_orchestrator.snapshots.file_plan import Naming
from diloco_orchestrator.snapshots.first_snapshot import first_snapshot
from diloco_orchestrator.snapshots.model_tensors import same_bytes
from diloco_orchestrator.snapshots.stored import RestOfSnapshot, StoredSnapshot


class Tensors:
    """Loads the bases of one run's snapshots with all their files checked, and steps bases as its commits say."""

    def __init__(self, log: RunLog, done: Verification) -> None:
        budget()  # raises for a wrong setting of this machine, which is no fault of the first base
        self._log = log
        self._done = done
        self._rest: RestOfSnapshot | None = None  # once it was needed

    def step(
        self,
        base: Base,
        commit: Commit,
        named: Sequence[tuple[Contribution, float]],
        read: outer_step.ReadShard,
        start: Start,
    ) -> None:
        """Step `base` in place by the average that a commit makes. Raises what `outer_step.average_and_step` does.

        `named`: (manifest, weight) of the contributions that it averages. `read`: (manifest, shard index) -> bytes.
        """
        config = self._log.configs.of(commit.leg)
        outer_step.average_and_step(
            base,
            commit.fragment,
            named,
            read,
            config.outer,
            aggregate=config.aggregate,
            codec=commit.average_codec,
            adapters=start.adapters,
        )

    def base(self, round_: int, take: str, record: Snapshot, start: Start) -> Base:
        """The base in a version of a snapshot with this record, after checking every file.

        `take`: the version. Raises `Differs` or `RecordInvalid` for a file with another digest or other tensors, and
        what safetensors does.
        """
        snapshot = StoredSnapshot(self._log.store, round_, record, take)
        base = snapshot.check(start, but=snapshot.model_file_names(Naming.of(start)))
        self._check_model_files(snapshot, base, start)
        return base

    def check_loads(self, round_: int, take: str, start: Start) -> None:
        """Raise what `StoredSnapshot.base` does unless a version of a snapshot holds the base that its record names.

        `take`: name of the version.
        """
        StoredSnapshot(self._log.store, round_, self._log.snapshot(round_, take), take).base(start)

    def _check_model_files(self, snapshot: StoredSnapshot, base: Base, start: Start) -> None:
        """Raise `Differs` unless the model's files hold the base, its buffers, and snapshot 0's frozen tensors."""
        rest, naming = self._first_values(start), Naming.of(start)
        try:
            changed = {} if start.buffers is None else buffers_of_base(self._log, snapshot.round)
        except DilocoError as error:
            if is_of_this_reader(error):
                raise
            self._done.notes.append(f"the buffers in snapshot {snapshot.round} cannot be derived any more: {error}")
            return
        changed = {naming.in_file(name): value for name, value in changed.items()}
        residuals = {pair.residual for pair in start.adapters}
        adapted = {pair.weight: pair for pair in start.adapters}
        trained = {naming.in_file(each.name): each for each in start.parameters if each.name not in residuals}
        untrained = {*(rest.specs() if rest else ()), *(changed if not naming.is_adapter else ())}
        found: set[str] = set()
        for file in snapshot.model_file_names(naming):
            key = keys.snapshot(snapshot.round, file, snapshot.take)
            for name in snapshot.specs(file):
                found.add(name)
                if name in trained:
                    dtype: torch.dtype = getattr(torch, trained[name].dtype)
                    expected, source = base.parameters[trained[name].name].to(dtype), "the base"
                elif name in changed:
                    expected, source = changed[name], "the buffers of the replica that its round's commit says"
                elif rest and (pair := adapted.get(name)) is not None:
                    residual, source = base.parameters[pair.residual], "snapshot 0 and the base's residual"
                    expected = merged(rest.read(name), residual, pair.scaling)
                elif rest and name in untrained:
                    expected, source = rest.read(name), "snapshot 0"
                else:
                    raise Differs(key, f"holds a tensor {name!r} that the run's model does not have")
                if not same_bytes(snapshot.tensor(file, name), expected):
                    raise Differs(key, f"holds other values of {name!r} than {source}")
        for name in sorted({*trained, *untrained} - found):
            raise Differs(keys.snapshot(snapshot.round, "", snapshot.take), f"does not hold the model's {name!r}")

    def _first_values(self, start: Start) -> RestOfSnapshot | None:
        """The untrained tensors of snapshot 0; None, without a request, if the model has none."""
        if self._rest is None and (start.frozen is not None or start.buffers is not None):
            first = first_snapshot(self._log)
            self._rest = RestOfSnapshot(first, Naming.of(start), [each.name for each in start.parameters])
        return self._rest
