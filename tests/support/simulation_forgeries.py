"""Well-formed records that somebody with a key to the bucket forges in the middle of a simulated run.

What each may cost is in docs/inside/attacks.md and SECURITY.md: a replica is replaced or given up, a round goes on
without it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from simulation_plan import FORGERIES

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Cancel, Claim, Exit, Intent
from diloco_orchestrator.protocol.record_format import By, Record, Stamp
from diloco_orchestrator.protocol.records import Contribution, Out, Result, ReuploadRequest
from diloco_orchestrator.run_log.run_log import RunLog

if TYPE_CHECKING:
    from simulation import Simulation

Forged = Iterator[tuple[str, Record]]
STAMP = Stamp("attacker", lambda: 0.0)


def forge(simulation: "Simulation", what: str, replica_id: int) -> None:
    """Create the records of one forgery, as far as their keys are free. `what`: a name in `FORGERIES`."""
    for key, record in _MADE_BY[what](simulation, replica_id):
        if simulation.bucket.forge(key, record.to_bytes()):
            simulation.forged_keys.add(key)


def _newest(simulation: "Simulation", replica_id: int) -> int:
    """The newest attempt of a replica; 0 if there is none."""
    return max((attempt for i, attempt in simulation.replicas if i == replica_id), default=0)


def _legs(simulation: "Simulation", replica_id: int) -> Forged:
    """Legs that nobody began: the next one while this one goes on, and one far ahead."""
    log = RunLog(simulation.bucket)
    last, first = log.newest(log.begins()[-1]), log.begins()[0]
    if last is not None and last.commit.stop != "none":
        return  # after a stop it would be a leg, as any user begins one
    for leg in (2, 999):
        changed = {"write_id": f"forged {leg}", "leg": leg, "after_round": last.commit.round if last else 0}
        yield keys.begin(leg), first.model_copy(update=changed | ({"previous": last.sha256} if last else {}))


def _claims(simulation: "Simulation", replica_id: int) -> Forged:
    """Claims of coming attempts, under keys that can be foreseen."""
    newest = _newest(simulation, replica_id)
    for attempt in range(newest + 1, newest + 4):
        for token in ("", "0" * 16):
            of = {"replica_id": replica_id, "attempt": attempt, "host": "h", "pid": 1, "versions": {}, "threads": 1}
            yield keys.claim(replica_id, attempt, token), Claim(**STAMP(), **of)  # type: ignore[arg-type]


def _intent(simulation: "Simulation", replica_id: int) -> Forged:
    """An intent of the next attempt, as if another coordinator launched it."""
    attempt = _newest(simulation, replica_id) + 1
    of = {"replica_id": replica_id, "attempt": attempt, "leg": 1, "claim_token": "f" * 16}
    yield (
        keys.intent(replica_id, attempt),
        Intent(**STAMP(), **of, executor="simulated", why="forged"),  # type: ignore[arg-type]
    )


def _requests(simulation: "Simulation", replica_id: int) -> Forged:
    """Requests for payloads that everybody can read, and for takes that never were."""
    for round_ in range(1, len(simulation.bucket.commits) + 1):
        for take in (2, 9):
            of = {"round": round_, "replica_id": replica_id, "attempt": 1, "shard": 0, "take": take}
            yield (
                keys.want(round_, replica_id, 1, 0, take),
                ReuploadRequest(**STAMP(), **of, by=By((99, 1)), reason="forged"),  # type: ignore[arg-type]
            )


def _manifest(simulation: "Simulation", replica_id: int) -> Forged:
    """The replica's manifest of the open round, with the claim of nobody, like the last one."""
    last = len(simulation.bucket.commits)
    key = keys.contribution(last, replica_id) if last else ""
    if key in simulation.bucket.sent and key not in simulation.forged_keys:
        manifest = Contribution.from_bytes(simulation.bucket.sent[key], key)
        changed = {"write_id": "forged", "round": last + 1, "claim_sha256": "0" * 64}
        yield keys.contribution(last + 1, replica_id), manifest.model_copy(update=changed)


def _exit(code: int) -> Callable[["Simulation", int], Forged]:
    def forged(simulation: "Simulation", replica_id: int) -> Forged:
        """An exit record of an attempt that lives."""
        of = {"replica_id": replica_id, "attempt": max(1, _newest(simulation, replica_id)), "code": code, "round": 0}
        key = keys.exit_record(replica_id, of["attempt"])
        yield key, Exit(**STAMP(), **of, reason="forged")  # type: ignore[arg-type]

    return forged


def _cancel(simulation: "Simulation", replica_id: int) -> Forged:
    attempt = max(1, _newest(simulation, replica_id))
    yield (
        keys.cancel(replica_id, attempt),
        Cancel(**STAMP(), replica_id=replica_id, attempt=attempt, reason="forged"),
    )


def _out(simulation: "Simulation", replica_id: int) -> Forged:
    yield keys.out(1, replica_id), Out(**STAMP(), leg=1, replica_id=replica_id, attempt=1, by="x", reason="forged")


def _result(simulation: "Simulation", replica_id: int) -> Forged:
    """Results of a leg that goes on and of one far ahead."""
    for leg in (1, 999):
        yield keys.result(leg), Result(**STAMP(), leg=leg, status="failed", round=0, outer_steps=0, reason="forged")


_MADE_BY: dict[str, Callable[["Simulation", int], Forged]] = {
    "legs": _legs,
    "claims": _claims,
    "intent": _intent,
    "requests": _requests,
    "manifest": _manifest,
    **{f"exit {code}": _exit(code) for code in (0, 1, 75, 76, 78)},
    "cancel": _cancel,
    "result": _result,
    "out": _out,
}
assert _MADE_BY.keys() == set(FORGERIES)
