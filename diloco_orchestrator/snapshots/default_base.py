"""The base that commands use when the user names no round, and its snapshot.

It follows from the commit log alone (`protocol.legs.DefaultBases`), restricted to what retention has kept.
"""

import logging
from collections.abc import Sequence

from diloco_orchestrator.allreduce.owners import ALONE, Owners
from diloco_orchestrator.errors import ConfigError, ObjectMissing, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import DefaultBase, DefaultBases
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots

log = logging.getLogger(__name__)


def default_bases(run_log: RunLog) -> DefaultBases:
    """The bases and held-out scores that the commits of a run give, from one reading of its log."""
    begins, folded = run_log.begins(), DefaultBases()
    for commit in run_log.each_commit():
        folded.add(commit, begins[commit.leg - 1])
    return folded


def default_base(
    run_log: RunLog, folded: DefaultBases | None = None, begins: Sequence[Begin] | None = None
) -> DefaultBase:
    """The base used where no round is named: the newest one, or after a halt by the guard the best scored one.

    After such a halt, if the run's retention deletes payloads and the best base has no confirmed snapshot, it is the
    best one that has one. `folded`: the scores of all commits; `begins`: all start and resume records; what is not
    given is read from `run_log`.
    """
    begins = run_log.begins() if begins is None else begins
    if folded is None:
        folded = default_bases(run_log)
    found = folded.default(begins)
    if not found.after_verdict or run_log.run.config.retention.payloads == "all":
        return found
    snapshots = ConfirmedSnapshots(run_log)
    if snapshots.take_of(found.round) is not None:
        return found
    return folded.default(begins, _with_snapshot(snapshots, folded.bases(begins)))


def check_not_lost(run_log: RunLog, begins: Sequence[Begin]) -> None:
    """Raise `ObjectMissing` if snapshots show that commits were deleted, so that the newest base is not known.

    `begins`: all start and resume records. One LIST request.
    """
    run_log.snapshots()
    if lost := run_log.lost(begins[-1]):
        raise ObjectMissing(
            f"{lost}, so that the newest model is not known. `diloco verify {run_log.store.url}` names what is left; "
            "--round N (round_=N) takes the model after a round before."
        )


def ensure_default_snapshot(
    run_log: RunLog, stamp: Stamp, by: int | None = None, owners: Owners = ALONE
) -> DefaultBase:
    """Write the snapshot of the default base, rebuilt from the bucket, unless a confirmed one exists.

    If it cannot be rebuilt, because payloads were deleted or damaged, the best base with a snapshot is the default.
    `by`: the replica that writes; None for a process that is no replica. `owners`: its ranks.
    """
    folded = default_bases(run_log)
    begins, snapshots = run_log.begins(), ConfirmedSnapshots(run_log)
    found = folded.default(begins)
    if snapshots.take_of(found.round) is not None:
        return found
    from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot  # torch, which is slow to import

    try:
        write_rebuilt_snapshot(run_log, found.round, stamp, by, owners)
    except (ConfigError, ObjectMissing, PayloadCorrupt, RecordInvalid) as error:
        log.warning("round %d scored best, but %s The best base with a snapshot is taken.", found.round, error)
        return folded.default(begins, _with_snapshot(snapshots, folded.bases(begins)))
    log.info("snapshot %d: rebuilt, because this base is the default after the halt", found.round)
    return found


def url_of_snapshot(run_log: RunLog, round_: int) -> str:
    """The URL of the folder with a round's snapshot; of several versions, that of the confirmed one.

    If several exist and none is confirmed yet, as after a halt by request, it is the version whose base digest equals
    that of the base rebuilt from payloads; the shared version if that fails. A reader other than `pull` reads the
    folder unchecked.
    """
    snapshots, store_url = ConfirmedSnapshots(run_log), run_log.store.url
    if len(found := snapshots.complete_takes(round_)) > 1 and not (found := snapshots.takes_of(round_)):
        from diloco_orchestrator.snapshots.rebuild import digest_of_base  # torch, which is slow to import

        try:
            found = snapshots.takes_saying(round_, digest_of_base(run_log, round_))
        except (ConfigError, ObjectMissing, PayloadCorrupt, RecordInvalid) as error:
            log.warning("which of the takes of snapshot %d is right cannot be told: %s", round_, error)
    return keys.snapshot_url(store_url, round_, found[0] if found else keys.SHARED_TAKE)


def _with_snapshot(snapshots: ConfirmedSnapshots, among: list[int]) -> list[int]:
    known = set(among)
    return [round_ for round_ in snapshots.rounds if round_ in known and snapshots.take_of(round_) is not None]
