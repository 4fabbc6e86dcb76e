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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_orchestrator.clock import Background, ManualClock, ThreadBackground
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.process import ENV_STORAGE_OPTIONS, load_entrypoint
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin, Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.attempt.heartbeat import Pulse
from diloco_orchestrator.replica.process.range_record import RangeRecord
from diloco_orchestrator.replica.process.rerun_result import RerunResult
from diloco_orchestrator.replica.process.run_attempt import load_training_libraries, process_environment, train
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


def rerun(
    store: Store,
    manifest: Contribution,
    background: Background,
    load: Callable[[str], Callable[[Any], None]],
    output: Path,
    earlier: Path | None = None,
    launched: Launched | None = None,
) -> RerunResult:
    """Repeat the training from which `manifest` came, in this process, and compare the result with it.

    `load`: returns the user's training function named "module:function". `output`: folder for the new payload;
    `earlier`: that folder of an earlier repetition, to measure the noise between two. `launched`: digests that the
    configuration must have, else raises `ConfigError`; None: not checked. If the state that training begins from is
    gone or changed, or training cannot be repeated from it, the result says so and nothing is trained.
    """
    replica_id, round_ = manifest.replica_id, manifest.round
    ours = keys.contribution(round_, replica_id)

    def end(key: str) -> None:
        if key == ours:
            raise RangePublished

    view = PointInTimeView(store, manifest.leg, round_, replica_id, manifest.attempt, end)
    run_json = view.get(keys.RUN)
    run_log = RunLog(view, run_json=run_json)
    leg = run_log.begin_of(manifest.leg)
    if launched is not None:
        launched.check_run(run_json, store.url)
        launched.check_leg(leg.record, store.url)
    _know_the_claim(run_log, RunLog(store), leg.record, round_)
    record = RangeRecord(run_log, manifest)
    if why := record.why_lost():
        return RerunResult(lost=why)
    if why := record.why_not():
        return RerunResult(not_auditable=why)
    steps, whole = record.steps_in_round(), run_log.configs.of(manifest.leg).round_steps
    pulse, partial = Pulse(), manifest.own_steps < whole

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
    ending = train(attempt, load)
    try:
        found = Contribution.from_bytes(view.written.get(ours), ours)
    except Exception:  # it published nothing
        words = (ending.error or ending.reason).strip().splitlines()[-1]
        return RerunResult(not_auditable=f"training it again ended without a contribution: {words}")
    from diloco_orchestrator.replica.process import range_comparison  # imports torch, whose threads are set now

    round_mates = ContributionReader(store, background).in_round(round_, attempt.config.most_replicas)
    if range_comparison.is_of_an_earlier_order(found, round_mates):
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


def main() -> None:
    """Repeat one replica's training in the round named on the command line; write the comparison into a folder."""
    parser = argparse.ArgumentParser(prog="python -m diloco_orchestrator.replica.process.rerun_range")
    parser.add_argument("--store", required=True, help="the run's folder")
    parser.add_argument("--replica-id", type=int, required=True)
    parser.add_argument("--round", type=int, required=True)
    parser.add_argument("--sha256", help="of the manifest, as a commit names it")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the result")
    parser.add_argument("--earlier", type=Path, help="the output folder of a re-run before")
    Launched.add_options(parser)
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    environ = process_environment()
    store = of_run(open_store(options.store, json.loads(environ.get(ENV_STORAGE_OPTIONS) or "{}")), environ)
    manifest = ContributionReader(store).exact(options.round, options.replica_id, options.sha256)
    load_training_libraries(environ)
    found = rerun(
        store,
        manifest,
        ThreadBackground(),
        load_entrypoint,
        options.output,
        options.earlier,
        Launched.of_options(options),
    )
    (options.output / "result.json").write_text(found.to_json())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of a workload must not keep the process alive
