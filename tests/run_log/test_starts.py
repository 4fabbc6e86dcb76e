"""Which records of `start/` count: those of this run's replicas, in the bytes that we write."""

from functools import cache

from protocol_fleet import start_of, tiny_model

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.start_records import Began, Follows, Start
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.starts import Starts
from diloco_orchestrator.store.memory import MemoryStore

STAMP = Stamp("test", lambda: 0.0)
RUN = "0" * 64  # sha256 of run.json
TAKE = keys.start_take("0" * 16)
OTHER_TAKE = keys.start_take("1" * 16)


@cache
def start(seed: int) -> Start:
    return start_of(tiny_model(seed))


def sha256(seed: int) -> str:
    return sha256_hex(start(seed).to_bytes())


class Bucket:
    """What replicas wrote about their starts, which differ by the seed of their values."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    def starts(self, replicas: int) -> Starts:
        return Starts(self.store, range(replicas), RUN)

    def holds(self, seed: int, key: str = keys.START) -> "Bucket":
        self.store.put(key, start(seed).to_bytes())
        return self

    def began(self, replica_id: int, seed: int, attempt: int = 1, key: str = keys.START) -> "Bucket":
        said = {"replica_id": replica_id, "attempt": attempt, "start_sha256": sha256(seed), "key": key}
        self.store.put(keys.began(replica_id, attempt), Began(**STAMP(), **said).to_bytes())
        return self

    def follows(self, replica_id: int, seed: int, take: str = keys.SHARED_TAKE, key: str = keys.START) -> "Bucket":
        said = {"replica_id": replica_id, "attempt": 1, "start_sha256": sha256(seed), "key": key, "take": take}
        self.store.put(keys.follows(replica_id), Follows(**STAMP(), **said).to_bytes())
        return self


def seeds(found: dict[int, str]) -> dict[int, int]:
    known = {sha256(seed): seed for seed in range(3)}
    return {replica_id: known[sha256] for replica_id, sha256 in found.items()}


def test_replicas_that_the_run_does_not_have_say_nothing():
    starts = Bucket().began(0, seed=0).began(2, seed=1).follows(1, seed=0).follows(5, seed=1).starts(replicas=2)
    starts.refresh()
    assert (seeds(starts.began), seeds(starts.follows)) == ({0: 0}, {1: 0})


def test_of_a_replicas_attempts_the_newest_says_what_it_would_begin_with():
    bucket = Bucket().began(0, seed=0, attempt=9).began(0, seed=1, attempt=10)
    starts = bucket.starts(replicas=2)
    starts.refresh()
    assert seeds(starts.began) == {0: 1}
    bucket.began(0, seed=2, attempt=11)
    starts.refresh()
    assert seeds(starts.began) == {0: 2}


def test_a_start_of_another_run_or_in_other_bytes_is_not_there():
    bucket = Bucket().began(0, seed=0).began(1, seed=1, key=TAKE).began(2, seed=2, key=OTHER_TAKE)
    bucket.store.put(keys.START, start(0).model_copy(update={"run_sha256": "1" * 64}).to_bytes())
    bucket.store.put(TAKE, start(1).to_bytes().replace(b":", b": ", 1))
    bucket.holds(2, OTHER_TAKE)
    starts = bucket.starts(replicas=3)
    starts.refresh()
    assert [each.sha256 for each in starts.offered] == [sha256(2)]


def test_start_json_counts_as_it_is_only_where_no_replica_says_anything():
    bucket = Bucket().holds(0)
    found = bucket.starts(replicas=2).chosen()
    assert found is not None and found.sha256 == sha256(0)
    assert bucket.began(0, seed=1).starts(replicas=2).chosen() is None


def test_what_most_follow_may_change_until_it_is_final():
    bucket = Bucket().holds(0).holds(1, TAKE).follows(2, seed=0)
    starts = bucket.starts(replicas=3)
    first = starts.chosen()
    assert first is not None and first.sha256 == sha256(0) and not starts.is_final
    bucket.follows(0, seed=1, key=TAKE).follows(1, seed=1, key=TAKE)
    then = starts.chosen()
    assert then is not None and then.sha256 == sha256(1) and starts.is_final


def test_half_of_the_replicas_outvote_nobody():
    bucket = Bucket().follows(0, seed=0).follows(1, seed=1).follows(2, seed=1)
    starts = bucket.starts(replicas=4)
    starts.adopt(Entry(start(0), sha256(0)), take=keys.SHARED_TAKE)
    assert starts.outvoted_by() is None
    bucket.follows(3, seed=1)
    assert starts.outvoted_by() == sha256(1)


def test_the_takes_of_a_start_are_those_that_its_followers_name_most_named_first():
    bucket = Bucket().holds(0).follows(0, seed=0, take="r2").follows(1, seed=0, take="r2").follows(2, seed=0)
    bucket.follows(3, seed=1, take="r3").follows(4, seed=1, take="r3")
    starts = bucket.starts(replicas=5)
    starts.refresh()
    assert starts.takes_of(sha256(0)) == ["r2", keys.SHARED_TAKE] and starts.takes_of(sha256(1)) == ["r3"]
