"""The model files of a hypothetical base, and its score on the run's held-out set."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from diloco_orchestrator.errors import ConfigError, NoSuchRun
from diloco_orchestrator.inspection.pull import write_folder
from diloco_orchestrator.inspection.verify.loading import CannotLoad, ModelScorer, OwnCode, load_model, logged_scores
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.records import Answer
from diloco_orchestrator.protocol.round_metrics import sign_of
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.buffers import buffers_of
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.first_snapshot import files_of_run
from diloco_orchestrator.snapshots.reader_folder import Files, files_of


class ModelWriter:
    """Makes model files for bases of one run; tensors that are not trained are those of the run's first snapshot.

    Raises `NoSuchRun` if no replica has brought a model yet.
    """

    def __init__(self, run_log: RunLog) -> None:
        start = run_log.start()
        if start is None:
            raise NoSuchRun(f"no replica of {run_log.store.url} has brought a model: there is none to write.")
        self._log = run_log
        self.start = start.record
        self._first = files_of_run(run_log)

    def files(self, base: Base, round_: int, averaged: Sequence[Answer]) -> Files:
        """Name and bytes of each model file of a base; the bytes come in pieces, made one at a time.

        `round_` and `averaged`, a round and its averaged responses, determine the buffers. Raises `PayloadCorrupt` or
        `RecordInvalid` if the buffers cannot be read.
        """
        has_some = self.start.buffers is not None and round_ > 0
        invited = self._log.run.config.invited
        buffers = buffers_of(self._log.store, round_, averaged, invited) if has_some else {}
        return files_of(base, self._first.with_buffers(buffers))


def logged_mean(run_log: RunLog, round_: int, digest: str) -> float | None:
    """The mean held-out score that replicas logged for the base with `digest` after a round, in the metric's sign.

    None if the run has no held-out items, some were not scored, or a score is not finite.
    """
    start = run_log.start()
    if start is None or start.record.heldout is None:
        return None
    logged = logged_scores(run_log, ConfirmedSnapshots(run_log), round_, digest).values()
    sums = [score.sum for score in logged if score.sum is not None]  # None: not a finite number
    if len(sums) < len(logged) or sum(score.count for score in logged) != start.record.heldout.items:
        return None
    return sign_of(start.record.heldout) * sum(sums) / start.record.heldout.items


class BaseScorer:
    """Scores bases on the run's held-out set. The model is loaded from files as its users do.

    `code` has a scorer. Raises `ConfigError` if the run scored no base, or other items.
    """

    def __init__(self, run_log: RunLog, writer: ModelWriter, code: OwnCode) -> None:
        self._writer = writer
        self._build = code.build
        self._scorer = ModelScorer(run_log, writer.start, code)
        self.items = self._scorer.items

    def mean(self, base: Base, round_: int, averaged: Sequence[Answer]) -> float:
        """The mean score of a base over all held-out items, with the metric's own sign.

        `round_` and `averaged`, a round and its averaged responses, determine the buffers. Raises `ConfigError` if the
        model cannot be loaded here.
        """
        with tempfile.TemporaryDirectory(prefix="diloco-whatif-") as folder:
            write_folder(Path(folder) / "model", self._writer.files(base, round_, averaged))
            try:
                model = load_model(Path(folder) / "model", self._build)
            except CannotLoad as error:
                raise ConfigError(f"the model cannot be loaded to score it: {error}.") from None
        return self._scorer.mean(model)
