"""`Auditor`: repeats the training of drawn ranges (one replica's training in one round), and compares the results.

Each is trained in a process of its own, `replica.process.rerun_range`; `findings` draws the ranges.
"""

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.code_archive.entrypoint import check_importable
from diloco_orchestrator.errors import ConfigError, ObjectMissing, RecordInvalid
from diloco_orchestrator.inspection.audit.findings import (
    AuditOutcome,
    RangeFinding,
    TrainingRange,
    bound_of,
    judged,
    ranges_of,
)
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.process import ENV_RANK, ENV_STORAGE_OPTIONS, ENV_WORLD_SIZE, installed_versions
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.protocol.start_records import ParameterInfo
from diloco_orchestrator.redaction import ENV_SECRET_NAMES
from diloco_orchestrator.replica.process.rerun_result import RerunResult
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.launched_here import why_not_launched_here
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

_PROGRAM = "diloco_orchestrator.replica.process.rerun_range"
_OURS = Path(__file__).absolute().parents[3]
_PATIENCE_S, _PATIENCE = 900.0, 20.0  # s for imports, fetches and scoring; beside that, times the recorded train_s
_LAST_LINES = 3  # of a process that failed
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Auditor:
    """Repeats the training of one replica in one round (a range) of a run in another process, and compares the results.

    Args:
        store: the run's folder; nothing is written to it.
        storage_options: for the processes that train, as the store was opened with.
        trust_bucket: run the code named in the bucket although this user did not launch the run here.
        limit_s: seconds after which a repetition is ended; by default 15 minutes and 20 times the recorded time.

    Raises `ConfigError` for code that may not be run or is missing, a run that saved no states, and one without a
    commit.
    """

    def __init__(
        self,
        store: Store,
        *,
        storage_options: Mapping[str, Any] | None = None,
        trust_bucket: bool = False,
        limit_s: float | None = None,
    ) -> None:
        self._options = dict(storage_options or {})
        self._limit_s = limit_s
        self._clock = SystemClock()
        self._log = RunLog(store)
        self.store = self._log.store
        self._reader = ContributionReader(self.store)
        self._config = self._log.run.config
        if not trust_bucket:
            _check_trusted(self._log)
        _check_states(self._log)
        self._commits = list(self._log.commits())
        position = self._log.position()
        if not self._commits or position is None:
            raise ConfigError(f"{store.url} has no commit yet: there is nothing to audit. Wait for its first round.")
        self.head = Head(position.round, position.sha256)
        self.ranges = ranges_of(self._commits, self._log.void_authors)
        self._folder = tempfile.TemporaryDirectory(prefix="diloco-audit-")
        self._path = self._code_path()
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    @property
    def left_out(self) -> dict[str, int]:
        """Number of responses whose training an audit cannot draw, because no outer step averaged them, by reason."""
        ranges = {(each.round, each.replica_id) for each in self.ranges}
        counts = Counter(
            _why_left_out(commit, answer.kind)
            for commit in self._commits
            for answer in commit.answers
            if answer.kind != "scores" and (commit.round, answer.replica_id) not in ranges
        )
        return dict(sorted(counts.items()))

    def audited(self, range_: TrainingRange) -> RangeFinding:
        """The finding about one replica's training in one round, repeated in another process. Nothing is written."""
        began = self._clock.now()
        try:
            manifest = self._reader.exact(range_.round, range_.replica_id, range_.manifest_sha256)
        except ObjectMissing as error:
            return RangeFinding(range_, AuditOutcome.NOT_AUDITABLE, str(error))
        except RecordInvalid as error:
            return RangeFinding(range_, AuditOutcome.DIFFERS, str(error))
        if manifest.kind != "delta":
            words = f"its manifest is an {manifest.kind} now: it was replaced"
            return RangeFinding(range_, AuditOutcome.DIFFERS, words)
        whole = self._log.configs.of(manifest.leg).round_steps
        bound, partial, after_cut = bound_of(whole), manifest.own_steps < whole, self._follows_a_cut(manifest)
        found, again = self._rerun(range_, manifest), None
        outcome, words = judged(found, bound, partial=partial, after_cut=after_cut)
        if outcome is AuditOutcome.DIFFERS and not found.other_class:
            again = self._rerun(range_, manifest, earlier=self._output(self._count))
            outcome, words = judged(found, bound, again, partial=partial, after_cut=after_cut)
        exact = outcome is AuditOutcome.EQUAL or not (found.other_class or (again and again.payload != found.payload))
        return RangeFinding(
            range_,
            outcome,
            words,
            steps=manifest.own_steps,
            follows=found.follows,
            distance=found.distance,
            bound=None if exact else bound,
            seconds=round(self._clock.now() - began, 3),
        )

    # -- the process ---------------------------------------------------------------------------------------------

    def _rerun(self, range_: TrainingRange, manifest: Contribution, earlier: Path | None = None) -> RerunResult:
        self._count += 1
        output = self._output(self._count)
        output.mkdir()
        command = [sys.executable, "-P", "-m", _PROGRAM, "--store", self.store.url, "--output", str(output)]
        command += ["--replica-id", str(range_.replica_id), "--round", str(range_.round)]
        command += ["--sha256", range_.manifest_sha256] if range_.manifest_sha256 else []
        command += ["--earlier", str(earlier)] if earlier else []
        command += self._log.launched(self._log.begin_of(manifest.leg).record).arguments()
        limit_s = self._limit_s or _PATIENCE_S + _PATIENCE * manifest.train_s
        log_path = output / "log.txt"
        try:
            with log_path.open("wb") as sink:
                done = subprocess.run(
                    command,
                    env=self._environment(range_.replica_id, self._threads(manifest)),
                    cwd=output,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            return RerunResult(not_auditable=f"training it again took longer than {limit_s:.0f} s and was ended")
        result = output / "result.json"
        text = log_path.read_text(errors="replace")
        log.debug("%s, trained again:\n%s", range_, text)
        if not result.exists():
            last = " / ".join(text.strip().splitlines()[-_LAST_LINES:])
            return RerunResult(not_auditable=f"the process ended with exit code {done.returncode}: {last}")
        return RerunResult.from_json(result.read_text())

    def _output(self, number: int) -> Path:
        return Path(self._folder.name) / f"{number}"

    def _environment(self, replica_id: int, threads: int) -> dict[str, str]:
        """The training process's environment: this one's, the run's `env`, the replica's rank, and its CPU threads."""
        fixed = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        secret = {ENV_STORAGE_OPTIONS: json.dumps(self._options)} if self._options else {}
        names = {ENV_SECRET_NAMES: ",".join(self._log.run.secret_names)} if self._log.run.secret_names else {}
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(self._path),
            "PYTHONUNBUFFERED": "1",
            **fixed,
            **self._config.env,
            ENV_RANK: str(replica_id),
            ENV_WORLD_SIZE: str(self._config.most_replicas),
            **names,
            **secret,
        }

    def _code_path(self) -> list[str]:
        """The import path of the training process: the run's unpacked archive, or this one's own; then our package."""
        sha256 = self._log.run.code_sha256
        if sha256 is None:
            check_importable(self._config.entrypoint)
            return list(dict.fromkeys([*(str(Path(each or ".").resolve()) for each in sys.path), str(_OURS)]))
        folder = Path(self._folder.name) / "code"
        try:
            bootstrap.unpack(self.store.get(keys.code(sha256)), sha256, folder)
        except (bootstrap.Stopped, ObjectMissing) as error:
            raise ConfigError(f"the code of the run in {self.store.url} cannot be run: {error}") from None
        _check_installed(json.loads((folder / bootstrap.DETAILS).read_text()))
        here = os.environ.get("PYTHONPATH", "")
        return [str(folder / bootstrap.USERS), str(_OURS), *filter(None, [here])]

    def _threads(self, manifest: Contribution) -> int:
        """The number of CPU threads of the replica that wrote a manifest, from its attempt's claim record.

        0 if that record does not exist.
        """
        claim = AttemptRecords(self.store).claim(manifest.replica_id, manifest.attempt)
        return claim.threads if claim else 0

    # -- the record ----------------------------------------------------------------------------------------------

    def _follows_a_cut(self, manifest: Contribution) -> bool:
        """Whether the same attempt's contribution before this one was partial: fewer inner steps than a round."""
        begin = self._log.begin_of(manifest.leg).record
        for round_ in range(manifest.round - 1, begin.after_round, -1):
            before = self._reader.of(round_, manifest.replica_id)
            if before is not None and before.progress is not None:
                whole = self._log.configs.of(manifest.leg).round_steps
                return before.attempt == manifest.attempt and before.kind == "delta" and before.own_steps < whole
        return False


def state_bytes(parameters: tuple[ParameterInfo, ...], *, keeps_local: bool) -> int:
    """The bytes of one saved training state with AdamW: two moments of each parameter.

    `keeps_local`: local parameters are saved too, as in a run with fragments, sync delay or update alpha. An
    overestimate with exact adapters, whose residuals are among the parameters but in no optimizer.
    """
    sizes = [_BYTES.get(each.dtype, 4) * math.prod(each.shape) for each in parameters]
    return sum(sizes) * (3 if keeps_local else 2)


def _check_trusted(run_log: RunLog) -> None:
    """Raise `ConfigError` unless the code and arguments named in the bucket are those that this user launched here."""
    if why := why_not_launched_here(run_log):
        raise ConfigError(
            f"audit runs the training function that {run_log.store.url} names, and {why}: whoever may write to the "
            "bucket chose what it does on this machine. Pass trust_bucket=True (--trust-bucket) if you trust all who "
            "may write there, or audit on a machine that may be lost."
        )


def _check_states(run_log: RunLog) -> None:
    """Raise `ConfigError`, with what they would cost, unless the run's replicas save their state every round."""
    config, start = run_log.run.config, run_log.start()
    if config.saves_state == "round":
        return
    words = "about twice the size of the model with AdamW"
    if start is not None:
        overlaps = config.fragments > 1 or config.schedule.overlaps
        size = state_bytes(start.record.parameters, keeps_local=overlaps)
        whole = size * config.replicas * config.rounds
        words = (
            f"with AdamW {size:,} bytes a round and replica, {_short(whole)} in the {config.rounds} rounds of "
            f'{config.replicas} replicas (retention={{"payloads": "needed"}} keeps those of the last snapshots only)'
        )
    raise ConfigError(
        f"the replicas of {run_log.store.url} save their state by replica_state={config.saves_state!r}: training "
        "cannot be repeated from a round whose optimizer nobody kept. Launch with "
        f'replica_state="round" (the default with quorum="all") to be audited. It costs {words}.'
    )


def _check_installed(details: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for packages that the run's archive requires and this machine lacks."""
    wanted = [*details.get("requirements", []), *(details.get("users") or [])]
    installed = installed_versions(each["name"] for each in wanted)
    absent = [e["spec"] for e in wanted if bootstrap.applies(e) and installed[e["name"]] == "not installed"]
    if absent:
        raise ConfigError(
            f"the run's code needs {', '.join(absent)}, which this machine lacks; an audit installs nothing. Install "
            "them, in the versions of the run, and audit again."
        )


def _why_left_out(commit: Commit, kind: str) -> str:
    if kind != "delta":
        return {"abstention": "abstentions"}.get(kind, kind.replace("_", " "))
    return (
        "contributions that were never averaged" if commit.applied else "contributions to rounds without an outer step"
    )


def _short(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
