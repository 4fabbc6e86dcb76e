"""Commits that somebody forges who may write to the bucket, in a run of two replicas that goes on beside."""

from collections.abc import Callable
from typing import Any

from protocol_fleet import Fleet, play, report

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.run_log.run_log import RunLog
from replica.rounds.participant import Participant

STAMP = Stamp("attacker", lambda: 0.0)
Fields = dict[str, Any]


def scores(round_: int) -> list:
    return [report(share=i, score=0.5 + 0.01 * round_, in_loop=0.5) for i in (0, 1)]


def after_two_rounds(scored: bool = False, **settings: Any) -> tuple[Fleet, list[Participant]]:
    """A run of 20 rounds, two of which are committed."""
    fleet = Fleet(replicas=2, rounds=20, scored=scored, **settings)
    participants = fleet.join_all()
    for round_ in (1, 2):
        play(participants, [1.0, 0.5], scores(round_) if scored else None)
    return fleet, participants


def forge(fleet: Fleet, change: Callable[[Commit], Fields], round_: int = 3) -> None:
    """Commit the open round as it might have ended, with some fields changed."""
    last = RunLog(fleet.store).commit(round_ - 1)
    assert last is not None
    answers, claim = [], None
    for each in last.written.answers:
        data = fleet.store.get(keys.contribution(round_, each.replica_id))
        manifest = Contribution.from_bytes(data, "")
        claim = manifest.base_digest
        named = {"manifest_sha256": sha256_hex(data), "origins": manifest.origins, "train_s": manifest.train_s}
        payload = manifest.payload
        named |= {"tokens": manifest.tokens, "norm": payload.norm if payload else 0.0}
        named |= {"payload": payload.digest if payload else ""}
        answers.append(each.model_copy(update=named))
    fields = {
        **STAMP(),
        "round": round_,
        "outer_step": round_,
        "answers": tuple(answers),
        "previous": last.sha256,
        "base_digest": claim,
    }
    honest = last.written.model_copy(update=fields)
    forged = honest.model_copy(update=change(honest))
    assert fleet.store.create(keys.commit(round_), forged.to_bytes())


def nobody(commit: Commit) -> tuple:
    return tuple(each.model_copy(update={"averaged": False}) for each in commit.answers)


def completed(commit: Commit) -> Fields:
    return {"stop": "completed", "applied": False, "answers": nobody(commit), "outer_step": commit.outer_step - 1}
