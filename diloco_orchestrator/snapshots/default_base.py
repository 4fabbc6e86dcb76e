"""The base that a run gives to whoever names none, and its snapshot.

Which base that is follows from the commit log alone (`protocol.legs.DefaultBases`); here it meets what retention left.
"""

import logging
from collections.abc import Sequence

from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, RecordInvalid
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import DefaultBase, DefaultBases
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots

log = logging.getLogger(__name__)


def default_base(
    run_log: RunLog, folded: DefaultBases | None = None, begins: Sequence[Begin] | None = None
) -> DefaultBase:
    """The default base now: the newest one, and after a halt by the guard the best by held-out score.

    Where retention deletes payloads, the best of those with a snapshot. `folded`: all commits; `begins`: of all legs;
    by default they are read here.
    """
    begins = run_log.begins() if begins is None else begins
    if folded is None:
        folded = _folded(run_log)
    found = folded.default(begins)
    if not found.after_verdict or run_log.run.config.retention.payloads == "all":
        return found
    snapshots = ConfirmedSnapshots(run_log)
    if snapshots.take_of(found.round) is not None:
        return found
    return folded.default(begins, _with_snapshot(snapshots, folded.bases(begins)))


def ensure_default_snapshot(run_log: RunLog, stamp: Stamp, by: int | None = None) -> DefaultBase:
    """Write the snapshot of the default base, rebuilt from the bucket, unless a confirmed one exists.

    If it cannot be rebuilt, because payloads were deleted or damaged, the best base with a snapshot is the default.
    `by`: the replica that writes; None for who is none.
    """
    folded = _folded(run_log)
    begins, snapshots = run_log.begins(), ConfirmedSnapshots(run_log)
    found = folded.default(begins)
    if snapshots.take_of(found.round) is not None:
        return found
    from diloco_orchestrator.snapshots.rebuild import write_rebuilt_snapshot  # torch, which is slow to import

    try:
        write_rebuilt_snapshot(run_log, found.round, stamp, by)
    except (ConfigError, PayloadCorrupt, RecordInvalid) as error:
        log.warning("round %d scored best, but %s The best base with a snapshot is taken.", found.round, error)
        return folded.default(begins, _with_snapshot(snapshots, folded.bases(begins)))
    log.info("snapshot %d: rebuilt, because this base is the default after the halt", found.round)
    return found


def url_of_snapshot(run_log: RunLog, round_: int) -> str:
    """The address of a round's snapshot: of the take that the log claims, if there are several.

    Where the log claims none yet, as after a halt by request, and the takes differ, it is the one whose base is that of
    the payloads. Who reads that folder by other means than `pull` reads what is there by then, unchecked.
    """
    snapshots, store_url = ConfirmedSnapshots(run_log), run_log.store.url
    if len(found := snapshots.complete_takes(round_)) > 1 and not (found := snapshots.takes_of(round_)):
        from diloco_orchestrator.snapshots.rebuild import digest_of_base  # torch, which is slow to import

        try:
            found = snapshots.takes_saying(round_, digest_of_base(run_log, round_))
        except (ConfigError, PayloadCorrupt, RecordInvalid) as error:
            log.warning("which of the takes of snapshot %d is right cannot be told: %s", round_, error)
    return keys.snapshot_url(store_url, round_, found[0] if found else keys.SHARED_TAKE)


def _folded(run_log: RunLog) -> DefaultBases:
    begins, folded = run_log.begins(), DefaultBases()
    for commit in run_log.each_commit():
        folded.add(commit, begins[commit.leg - 1])
    return folded


def _with_snapshot(snapshots: ConfirmedSnapshots, among: list[int]) -> list[int]:
    known = set(among)
    return [round_ for round_ in snapshots.rounds if round_ in known and snapshots.take_of(round_) is not None]
