"""Whether anybody still works on a run that has not ended, as far as its bucket shows. Pure: works on a `RunStatus`.

A reader has two kinds of evidence: heartbeats, which every living replica overwrites every few seconds, and the stamps
of all records. Stamps are the writers' wall clocks, so the words say against which clock they were compared.
"""

from diloco_orchestrator.inspection.status import ReplicaRow, RunStatus
from diloco_orchestrator.protocol.replica_names import grouped, replicas


def still_s(status: RunStatus, now: float) -> float:
    """Seconds since anything moved in a run that goes on; 0 while somebody may work on it, and once it has ended.

    `now`: seconds since 1970. A coordinator replaces a replica that has sent no heartbeat for `retry.hung_after_s`.
    """
    age_s = now - status.moved_at
    return age_s if status.state in ("starting", "running") and age_s > status.hung_after_s else 0.0


def why_still(status: RunStatus, now: float) -> list[str]:
    """Sentences about a run that nobody works on; empty for any other."""
    if not (age_s := still_s(status, now)):
        return []
    first = (
        f"Nobody works on this run any more, as far as the bucket shows: no heartbeat moved and no record came for "
        f"{_duration(age_s)} (the newest stamp in it against this machine's clock), and the leg has no result."
    )
    said = [(each.replica_id, _of_replica(each)) for each in status.replicas]
    return [first, *(f"{replicas(ids).capitalize()}: {words}." for ids, words in grouped(said))]


def _of_replica(replica: ReplicaRow) -> str:
    if replica.state == "launching":
        return "launched, and never claimed by a process"
    if replica.state.startswith("ended: "):
        return f"{replica.state.rstrip('.')}, and nobody launched it again"
    return f"the heartbeat stopped ({replica.state}) without an exit record: the machine is gone or cut off"


def _duration(seconds: float) -> str:
    """A duration for people: minutes below two hours, hours below two days, days from there on."""
    for unit, length_s, most in (("min", 60.0, 120), ("h", 3600.0, 48)):
        if seconds < most * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
