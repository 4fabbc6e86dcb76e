"""Payloads that a commit averages and that cannot be read: whoever holds their bytes puts them again on request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from protocol_fleet import BY_HAND, Fleet, answer, together

from diloco_orchestrator.allreduce import spool
from diloco_orchestrator.allreduce.recent_payloads import RecentPayloads
from diloco_orchestrator.clock import ManualClock, NoBackground, SystemClock
from diloco_orchestrator.errors import PayloadCorrupt, Preempted, Superseded
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import ReuploadRequest
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import open_store
from replica.rounds.participant import Participant


class Meanwhile(ManualClock):
    """Whoever sleeps on it lets the others go on: `do` is called after every sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.do: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        super().sleep(max(seconds, 0.5))
        self.do()


class Careless(MemoryStore):
    """Acknowledges every write, and loses or damages those of the keys in `bad`, each as often as it says."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: dict[str, int] = {}
        self.damaged: dict[str, int] = {}

    def create(self, key: str, data: bytes) -> bool:
        for each, harm in ((self.lost, None), (self.damaged, data[:-1] + b"!")):
            if each.get(key, 0):
                each[key] -= 1
                return True if harm is None else super().create(key, harm)
        return super().create(key, data)


def damaged(fleet: Fleet, key: str) -> None:
    fleet.store.put(key, fleet.store.get(key)[:-1] + b"!")


def committed(replicas: int = 2, clock: ManualClock | None = None, **settings: Any) -> tuple[Fleet, list[Participant]]:
    """A fleet whose last replica has committed round 1; the others have answered, and received nothing yet."""
    fleet = Fleet(replicas=replicas, **{"timing": BY_HAND, **settings})
    clock = clock or ManualClock()
    participants = [fleet.join(i, clock=clock) for i in range(replicas)]
    for i, each in enumerate(participants):
        answer(each, 1.0 + i)
    participants[-1].close()
    return fleet, participants


def observes(participant: Participant) -> Callable[[], object]:
    """What a replica does again and again while it waits in the next round."""
    return lambda: participant._closer._observe(True)


@pytest.mark.parametrize("harm", [damaged, lambda fleet, key: fleet.store.delete(key)], ids=["damaged", "lost"])
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_a_payload_that_its_follower_cannot_read_is_put_again_by_its_author(place, harm, tmp_path):
    clock = Meanwhile()
    store = MemoryStore() if place == "memory" else open_store(str(tmp_path))
    fleet, (one, two) = committed(clock=clock, store=store)
    harm(fleet, keys.payload(1, 1, 1, 0))
    clock.do = observes(two)
    one.close()
    assert one._claims.hash() == two._claims.hash() and one.open.round == 2
    key = keys.want(1, 1, 1, 0, 2)
    want = ReuploadRequest.from_bytes(fleet.store.get(key), key)
    assert want.by.who == (0, 1) and "rounds/00000001/payload/1/1/0.bin" in want.reason
    done = verify_run(fleet.store)
    assert done.disagreement is None and any("payload/1/1/0.2.bin holds its bytes" in note for note in done.notes)


def test_any_replica_that_took_part_holds_the_bytes_though_their_author_is_gone():
    clock = Meanwhile()
    fleet, (one, _, three) = committed(3, clock)
    fleet.store.delete(keys.payload(1, 1, 1, 0))
    clock.do = observes(three)
    one.close()
    assert one._claims.hash() == three._claims.hash()


def test_an_attempt_that_joins_asks_too():
    clock = Meanwhile()
    fleet, (_, two) = committed(clock=clock)
    damaged(fleet, keys.payload(1, 0, 1, 0))
    clock.do = observes(two)
    again = fleet.join(0, clock=clock)
    assert again.open.round == 2 and again._claims.hash() == two._claims.hash()


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_take_that_the_store_harms_is_followed_by_another(how):
    clock, store = Meanwhile(), Careless()
    getattr(store, how)[keys.payload(1, 1, 1, 0, take=2)] = 1
    fleet, (one, two) = committed(clock=clock, store=store)
    fleet.store.delete(keys.payload(1, 1, 1, 0))
    clock.do = observes(two)
    one.close()
    assert one._claims.hash() == two._claims.hash()
    expected = 2 if how == "lost" else 3
    assert one._requests.payloads.held(keys.payload(1, 1, 1, 0)) == store.get(keys.payload(1, 1, 1, 0, expected))


def test_replicas_that_lack_each_others_payload_help_each_other_while_both_wait():
    """Both follow the commit of a third one, which has left since; each holds its own payload only."""
    fleet = Fleet(replicas=3, timing={**BY_HAND, "poll_s": 0.01, "round_timeout_s": 30.0})
    one, two, three = participants = [fleet.join(i, clock=SystemClock()) for i in range(3)]
    for i, each in enumerate(participants):
        answer(each, 1.0 + i)
    three.close()
    fleet.store.delete(keys.payload(1, 0, 1, 0)), fleet.store.delete(keys.payload(1, 1, 1, 0))
    behind = {0, 1}

    def follow(participant: Participant) -> None:
        try:
            participant.close()
        finally:
            behind.discard(participant._attempt.replica_id)
        while behind:  # as it does in the next round, once it has trained
            participant._closer._observe(True)

    together([lambda: follow(one), lambda: follow(two)])
    assert one._claims.hash() == two._claims.hash() == three._claims.hash()


def test_if_nobody_holds_the_bytes_the_error_names_them_and_comes_after_the_round_timeout():
    clock = Meanwhile()
    fleet, (one, _) = committed(clock=clock)
    damaged(fleet, keys.payload(1, 1, 1, 0))
    began = clock.now()
    with pytest.raises(PayloadCorrupt, match=r"payload/1/1/0\.bin.*within 20 s.*after round 1.*--from-round 0"):
        one.close()
    assert 20.0 <= clock.now() - began < 25.0
    with pytest.raises(PayloadCorrupt, match="No running replica has put it again"):
        fleet.join(0, clock=clock)


def test_who_waits_a_quarter_of_an_hour_for_a_payload_polls_a_few_times_a_minute():
    clock = Meanwhile()
    fleet, (one, _) = committed(clock=clock, timing={**BY_HAND, "round_timeout_s": 900.0})
    damaged(fleet, keys.payload(1, 1, 1, 0))
    polls: list[float] = []
    clock.do = lambda: polls.append(clock.now())
    with pytest.raises(PayloadCorrupt, match="within 900 s"):
        one.close()
    assert 900.0 / 5.0 <= len(polls) < 900.0 / 5.0 + 10


def test_a_snapshot_replaces_what_nobody_can_put_again():
    """Two others go on with quorum 1, and drop the bytes; replica 0 goes on from their snapshot."""
    clock = Meanwhile()
    fleet, (one, two, three) = committed(3, clock, quorum=1, snapshot_every=1, rounds=5)
    two.close(), fleet.store.delete(keys.payload(1, 2, 1, 0))
    two.write_snapshot_if_due(), three.write_snapshot_if_due()

    def go_on() -> None:
        clock.do = lambda: None
        for value in (1.0, 2.0):
            answer(two, value), answer(three, value)
            two.close(), three.close()
            two.write_snapshot_if_due(), three.write_snapshot_if_due()

    clock.do = go_on
    two._requests.payloads.end_round(NoBackground()), three._requests.payloads.end_round(NoBackground())
    closed = one.close()
    assert closed.skipped and one.open.round > 2


def test_who_waits_for_a_payload_leaves_when_it_is_asked_to_and_when_a_later_attempt_is_alive():
    clock = Meanwhile()
    fleet, (one, _) = committed(clock=clock)
    fleet.store.delete(keys.payload(1, 1, 1, 0))
    leaving = fleet.join  # a later attempt, which waits in vain as well
    clock.do = lambda: None
    with pytest.raises(Preempted, match="asked to leave while it waited"):
        leaving(0, clock=clock, should_leave=lambda: True)
    with pytest.raises(Superseded):
        one.close()


def name(key: str, data: bytes) -> tuple[str, str]:
    return key, bulk_digest(data)


def test_bytes_are_held_for_one_round_more_and_large_ones_in_a_file():
    payloads = RecentPayloads()
    data = bytes(17 * 2**20)
    payloads.put(name("a", data), data), payloads.put(name("b", b"small"), b"small")
    assert payloads.held("a") == data and payloads.get(name("a", data)) == data
    payloads.end_round(NoBackground())
    assert payloads.held("a") == data and payloads.held("b") == b"small" and payloads.get(name("a", data)) is None
    assert payloads._before.memory_bytes == 0
    payloads.put(name("c", b"new"), b"new")
    payloads.end_round(NoBackground())
    assert payloads.held("a") is None and payloads.held("c") == b"new"


def test_a_file_of_the_store_that_was_damaged_is_not_put_again(tmp_path: Path):
    payloads = RecentPayloads()
    for key in ("whole", "damaged"):
        (tmp_path / key).write_bytes(b"bytes")
        payloads.put_file(name(key, b"bytes"), (tmp_path / key).open("rb"), 5)
    (tmp_path / "damaged").write_bytes(b"bYtes")
    assert payloads.held("whole") == b"bytes" and payloads.held("damaged") is None
    payloads.end_round(NoBackground()), payloads.end_round(NoBackground())
    assert payloads.held("whole") == b"bytes"


def test_a_full_disk_costs_only_what_is_held_for_others(monkeypatch, caplog):
    payloads = RecentPayloads()
    payloads.put(("a", "1"), bytes(17 * 2**20))

    def full(*args: object, **kwargs: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.setattr(spool, "PATIENCE_S", 0.0)
    payloads.end_round(NoBackground())
    assert payloads.held("a") is None and "not kept for other replicas" in caplog.text
    payloads.put(("b", "2"), b"small")
    assert payloads.get(("b", "2")) == b"small"


@pytest.mark.parametrize("harm", ["lost", "damaged"])
def test_who_is_averaged_alone_reads_its_payload_back_and_puts_it_again(harm):
    store = Careless()
    getattr(store, harm)[keys.payload(1, 0, 1, 0)] = 1
    fleet = Fleet(replicas=1, timing=BY_HAND, store=store)
    one = fleet.join(0, clock=ManualClock())
    answer(one, 1.0)
    one.close()
    assert verify_run(fleet.store).disagreement is None
    assert fleet.join(0, clock=ManualClock())._claims.hash() == one._claims.hash()


def test_a_round_without_payloads_costs_no_bytes_that_are_held():
    payloads = RecentPayloads()
    payloads.put(name("a", b"bytes"), b"bytes")
    payloads.end_round(NoBackground()), payloads.end_round(NoBackground())
    assert payloads.held("a") == b"bytes"
