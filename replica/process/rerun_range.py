"""`python -m diloco_orchestrator.replica.process.rerun_range`: repeats one replica's training in one round, for an
audit.

The training function runs unchanged, in a replica's normal attempt, on the bucket as it was then (`PointInTimeView`).
The attempt restores cursor, random state and optimizer from the manifest and state before the round, as a restarted one
does. It ends once its manifest is written, which is compared with the recorded one. The bucket is not changed.
"""

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco_orchestrator.clock import Background, ManualClock, SystemClock, ThreadBackground
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import ENV_STORAGE_OPTIONS, load_entrypoint
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.attempt.heartbeat import Pulse
from diloco_orchestrator.replica.process.range_record import RangeRecord
from diloco_orchestrator.replica.process.rank import RankPlace, train_as_rank
from diloco_orchestrator.replica.process.rank_children import RankProgram
from diloco_orchestrator.replica.process.rank_processes import RankProcesses
from diloco_orchestrator.replica.process.rerun_result import RerunResult
from diloco_orchestrator.replica.process.run_attempt import (
    Ending,
    LeavingNotice,
    load_training_libraries,
    process_environment,
    train,
)
from diloco_orchestrator.run_log.attempts import Authors
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.point_in_time_view import PointInTimeView
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

_WRITE_ID = "audit"


class RangePublished(BaseException):
    """Raised to end the training function of an audit once the round's training is done and its manifest written."""


@dataclass(frozen=True)
class Repetition:
    """One replica's training in one round, to be repeated on the bucket as it was then.

    `view`: the run's folder as it was, with what the repetition writes. `attempt`: the attempt that trains; it ends
    when its store raises `RangePublished`, once the manifest is written.
    """

    view: PointInTimeView
    attempt: Attempt
    record: RangeRecord

    @classmethod
    def of(
        cls,
        store: Store,
        manifest: Contribution,
        background: Background,
        launched: Launched | None = None,
        written: Store | None = None,
    ) -> "Repetition":
        """The repetition of the training from which `manifest` came.

        `launched`: digests that the configuration must have, else raises `ConfigError`; None: not checked. `written`:
        where what it writes goes, for ranks of one replica to the same place; by default into this process's memory.
        """
        replica_id, round_ = manifest.replica_id, manifest.round
        ours = keys.contribution(round_, replica_id)

        def end(key: str) -> None:
            if key == ours:
                raise RangePublished

        view = PointInTimeView(store, manifest.leg, round_, replica_id, manifest.attempt, end, written)
        run_json = view.get(keys.RUN)
        run_log = RunLog(view, run_json=run_json)
        leg = run_log.begin_of(manifest.leg)
        if launched is not None:
            launched.check_run(run_json, store.url)
            launched.check_leg(leg.record, store.url)
        _know_the_claim(run_log, RunLog(store), leg.record, round_)
        record, pulse = RangeRecord(run_log, manifest), Pulse()
        partial, steps = manifest.own_steps < run_log.configs.of(manifest.leg).round_steps, record.steps_in_round()

        def should_leave() -> bool:
            """Whether the repeated training has taken all steps of a partial contribution, which it then publishes."""
            return partial and pulse.round == round_ and pulse.inner_step >= steps

        # No time passes but where something is waited for: no replica is late, so that the record alone decides what it
        # trains, and what nobody will write, such as a payload that was damaged since, is waited for in no time.
        clock = ManualClock()
        attempt = Attempt(
            log=run_log,
            leg=leg,
            replica_id=replica_id,
            number=manifest.attempt,
            clock=clock,
            stamp=Stamp(_WRITE_ID, clock.wall_time),
            claim_sha256=manifest.claim_sha256,
            authors=Authors(view, background),
            should_leave=should_leave,
            background=background,
            pulse=pulse,
        )
        return cls(view, attempt, record)


def rerun(
    store: Store,
    manifest: Contribution,
    repetition: Repetition,
    trained: Callable[[Attempt], Ending],
    output: Path,
    earlier: Path | None = None,
) -> RerunResult:
    """Repeat the training from which `manifest` came, and compare the result with it.

    `trained`: trains as an attempt, and returns how it ended. `output`: folder for the new payload; `earlier`: that
    folder of an earlier repetition, to measure the noise between two. If the state that training begins from is gone or
    changed, or training cannot be repeated from it, the result says so and nothing is trained.
    """
    ours, record, view = keys.contribution(manifest.round, manifest.replica_id), repetition.record, repetition.view
    if why := record.why_lost():
        return RerunResult(lost=why)
    if why := record.why_not():
        return RerunResult(not_auditable=why)
    ending = trained(repetition.attempt)
    try:
        found = Contribution.from_bytes(view.written.get(ours), ours)
    except Exception:  # it published nothing
        words = (ending.error or ending.reason).strip().splitlines()[-1]
        return RerunResult(not_auditable=f"training it again ended without a contribution: {words}")
    from diloco_orchestrator.replica.process import range_comparison  # imports torch, whose threads are set now

    reader, most = ContributionReader(store, repetition.attempt.background), repetition.attempt.config.most_replicas
    if range_comparison.is_of_an_earlier_order(found, reader.in_round(manifest.round, most)):
        return RerunResult(
            not_auditable="an earlier version wrote this round, which drew the order of a trainer's data from each "
            "replica's own random numbers: audit it with that version"
        )
    return range_comparison.compare(store, view.written, manifest, found, record.delta_before(), output, earlier)


def _know_the_claim(past: RunLog, whole: RunLog, begin: Begin, round_: int) -> None:
    """Give `past`, a log that ends before round `round_`, the base digest that the round's commit in `whole` names.

    Does nothing if there is no such commit or it names no base. `begin`: the start or resume before the round.
    """
    entry = whole.as_read(round_)
    if entry is None or entry.commit.base_digest is None:
        return
    earlier = ((each, past.as_read(each)) for each in range(round_ - 1, begin.after_round, -1))
    base_round = next((each for each, entry in earlier if entry and entry.commit.applied), begin.from_round)
    past.claimed_bases[base_round] = entry.commit.base_digest


def main() -> int:
    """Repeat one replica's training in the round named on the command line, and write the comparison into a folder.

    A replica of several ranks is trained by as many further processes with this program. Returns the exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m diloco_orchestrator.replica.process.rerun_range")
    parser.add_argument("--store", required=True, help="the run's folder")
    parser.add_argument("--replica-id", type=int, required=True)
    parser.add_argument("--round", type=int, required=True)
    parser.add_argument("--sha256", help="of the manifest, as a commit names it")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the result")
    parser.add_argument("--earlier", type=Path, help="the output folder of a re-run before")
    parser.add_argument("--place", help="of a rank, in a process that this one has started")
    Launched.add_options(parser)
    options = parser.parse_args()
    environ, launched = process_environment(), Launched.of_options(options)
    store = of_run(open_store(options.store, json.loads(environ.get(ENV_STORAGE_OPTIONS) or "{}")), environ)
    manifest = ContributionReader(store).exact(options.round, options.replica_id, options.sha256)
    written_at = options.output / "written"  # by all ranks of the replica
    written = open_store(str(written_at))

    def repetition(background: Background) -> Repetition:
        return Repetition.of(store, manifest, background, launched, written)

    if options.place:

        def adopt(_: Mapping[str, str], __: LeavingNotice, background: Background) -> Attempt:
            return repetition(background).attempt

        place = RankPlace.of(options.place)
        return train_as_rank(place, options.replica_id, manifest.attempt, adopt, load_entrypoint)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def trained(attempt: Attempt) -> Ending:
        if manifest.ranks is None and not (attempt.config.in_ranks or attempt.log.run.config.in_ranks):
            return train(attempt, load_entrypoint)
        program = RankProgram(sys.argv[1:], environ, "diloco_orchestrator.replica.process.rerun_range")
        return RankProcesses(attempt, manifest.ranks or 1, program, SystemClock()).run()

    load_training_libraries(environ)
    found = rerun(store, manifest, repetition(ThreadBackground()), trained, options.output, options.earlier)
    (options.output / "result.json").write_text(found.to_json())
    shutil.rmtree(written_at, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a workload must not keep the process alive
