"""Whether an attempt has taken part in a commit, from the commit log: then its replica's budgets are full again."""

from diloco_orchestrator.run_log.run_log import RunLog

_ROUNDS = 50  # an attempt that was averaged in none of the last ones before its end has not got on


def took_part(run_log: RunLog, leg: int, replica_id: int, attempt: int) -> bool:
    """Whether one of the last 50 commits of a leg averages a contribution of an attempt.

    Costs a GET for each of these commits that was not read before, and one for the open round.
    """
    begin = run_log.begin(leg)
    newest = run_log.newest(begin.record) if begin is not None else None
    if begin is None or newest is None:
        return False
    last = newest.commit.round
    for round_ in range(last, max(begin.record.after_round, last - _ROUNDS), -1):
        entry = run_log.commit(round_)
        answers = entry.commit.answers if entry is not None else ()
        if any(a.averaged and (a.replica_id, a.attempt) == (replica_id, attempt) for a in answers):
            return True
    return False
