"""The first base: one replica uploads it, nobody uploads or downloads it twice, whoever dies on the way."""

import random
import threading
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from patience import PATIENCE_S
from protocol_fleet import FAST, Fleet, play, tiny_model, together

from diloco_orchestrator.clock import ManualClock, SystemClock
from diloco_orchestrator.errors import ModelMismatch, Preempted
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.start_records import Began
from diloco_orchestrator.replica.attempt.attempt import claim_attempt
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.layout import ModelFiles
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.store.base import OBJECT_LIMIT, Store
from diloco_orchestrator.store.retrying import RetryingStore

LIMIT = 600  # bytes; the model below has files with one layer's weight each


def model(seed: int = 0, layers: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    built = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(layers)))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return built.to(dtype)


class Counted(Store):
    """One replica's way to the bucket, which counts the bytes of snapshot files on it, also those sent in vain."""

    def __init__(self, store: Store, start_line: threading.Barrier | None = None) -> None:
        self.url = store.url
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()
        self._store = store
        self._start_line = start_line

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = self._store.get(key, start, end)
        if key.startswith(keys.SNAPSHOTS):
            self.down[key] += len(data)
        return data

    def create(self, key: str, data: bytes) -> bool:
        if key.startswith(keys.SNAPSHOTS):
            if self._start_line is not None and not self.up:
                self._start_line.wait(PATIENCE_S)  # everybody has found an empty folder and sends its first file
            self.up[key] += len(data)
        return self._store.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def list(self, prefix: str, start_after: str = ""):
        return self._store.list(prefix, start_after)

    def delete(self, key: str) -> None:
        self._store.delete(key)


def join(fleet: Fleet, store: Store, replica_id: int, built: torch.nn.Module, clock=None, leave=lambda: False):
    clock = clock or SystemClock()
    stamp = Stamp(f"{replica_id}-{random.random()}", clock.wall_time)
    retrying = RetryingStore(store, clock, random.Random(replica_id))
    claimed = replace(claim_attempt(retrying, replica_id, None, clock, stamp, leave), object_limit=fleet.object_limit)
    parameters = trainable(built)
    return Participant.join(claimed, OwnModel(parameters, [tuple(parameters)], ModelFiles.of(built)))


@pytest.mark.parametrize("limit", [LIMIT, OBJECT_LIMIT])
@pytest.mark.parametrize("seeds", [(0, 0, 0, 0), (0, 1, 2, 3)], ids=["equal values", "other values"])
def test_four_starters_upload_one_model_and_download_it_at_most_once_each(seeds, limit):
    fleet = Fleet(replicas=4, object_limit=limit)
    ways = [Counted(fleet.engine, start_line) for start_line in [threading.Barrier(4)] for _ in seeds]
    joined = together([partial(join, fleet, ways[i], i, model(seeds[i])) for i in range(4)])
    assert len({one.digest for one in joined}) == 1
    sizes = {info.key: info.size for info in fleet.engine.list(keys.SNAPSHOTS)}
    once, largest = sum(sizes.values()), max(size for key, size in sizes.items() if "model" in key)
    assert sum(sum(way.up.values()) for way in ways) <= once + 3 * largest
    assert all(count <= sizes[key] for way in ways for key, count in way.down.items()), "some file twice"
    assert all(sum(way.down.values()) <= once for way in ways)
    writers = [way for way in ways if len(way.up) > 1]
    assert len(writers) == 1 and not [key for key in writers[0].down if "safetensors" in key]


def test_a_late_replica_uploads_nothing():
    fleet = Fleet(replicas=2, object_limit=LIMIT)
    join(fleet, fleet.engine, 0, model())
    way = Counted(fleet.engine)
    join(fleet, way, 1, model(seed=5))
    assert not way.up


def test_once_a_round_is_committed_its_base_is_that_of_who_votes_later_with_other_values():
    fleet = Fleet(replicas=1, max_replicas=2, quorum=1, timing={**FAST, "startup_timeout_s": 1.0})
    begun = fleet.join(1)
    play([begun], [0.5])
    assert fleet.join(0, model=tiny_model(seed=5)).digest == begun.digest
    begun._attempt.check_superseded()
    assert [commit.applied for commit in fleet.commits()] == [True]


def test_a_run_is_read_while_who_votes_comes_after_a_replica_that_has_trained_alone():
    fleet = Fleet(replicas=1, max_replicas=2, quorum=1, timing={**FAST, "startup_timeout_s": 1.0})
    play([fleet.join(1)], [0.5])
    start = RunLog(fleet.store).start()
    vote = {"replica_id": 0, "attempt": 1, "start_sha256": "0" * 64, "key": keys.start_take("0" * 16)}
    fleet.store.create(keys.began(0, 1), Began(**Stamp("late", lambda: 0.0)(), **vote).to_bytes())
    assert RunLog(fleet.store).start() == start and [commit.applied for commit in fleet.commits()] == [True]


class Dying(Counted):
    """Dies at the given create of a snapshot's file or of start.json, before it is done or after."""

    def __init__(self, store: Store, at: int, after: bool) -> None:
        super().__init__(store)
        self._left = at
        self._after = after

    def create(self, key: str, data: bytes) -> bool:
        counts = key.startswith(keys.SNAPSHOTS) or key == keys.START
        self._left -= counts
        if counts and self._left < 0 and not self._after:
            raise KeyboardInterrupt
        made = super().create(key, data)
        if counts and self._left < 0:
            raise KeyboardInterrupt
        return made


def creates_of_a_first_base() -> int:
    fleet = Fleet(replicas=1, object_limit=LIMIT)
    way = Counted(fleet.engine)
    join(fleet, way, 0, model())
    return len(way.up) + 1


@pytest.mark.parametrize("after", [False, True])
def test_a_writer_that_dies_anywhere_is_completed_by_the_next_with_equal_values(after):
    for at in range(creates_of_a_first_base()):
        fleet = Fleet(replicas=3, object_limit=LIMIT)
        with pytest.raises(KeyboardInterrupt):
            join(fleet, Dying(fleet.engine, at, after), 0, model(seed=0))
        left = {info.key: fleet.engine.get(info.key) for info in fleet.engine.list(keys.SNAPSHOTS)}
        ways = [Counted(fleet.engine) for _ in range(2)]
        joined = [join(fleet, ways[i], 1 + i, model(seed=0), ManualClock()) for i in range(2)]
        assert {one.digest for one in joined} == {fleet.start().base_digest}
        assert all(fleet.engine.get(key) == data for key, data in left.items())
        again = set(ways[0].up) & set(left) - {keys.snapshot(0, keys.SNAPSHOT_RECORD)}
        assert not again and not ways[1].up


@pytest.mark.parametrize("after", [False, True])
def test_a_writer_that_dies_before_its_start_leaves_no_base_to_who_has_other_values(after):
    """Nobody follows values of which only some may be there: the next replica begins with its own, in another take."""
    for at in range(creates_of_a_first_base() - 1):
        fleet = Fleet(replicas=3, object_limit=LIMIT)
        with pytest.raises(KeyboardInterrupt):
            join(fleet, Dying(fleet.engine, at, after), 0, model(seed=0))
        joined = [join(fleet, fleet.engine, 1 + i, model(seed=1 + i), ManualClock()) for i in range(2)]
        own = Base.fresh(trainable(model(seed=1)), fleet.config.outer)
        assert {one.digest for one in joined} == {fleet.start().base_digest} == {own.digest()}


def test_a_waiting_replica_writes_only_once_nothing_has_moved_for_a_while():
    """Replica 0 has written one file and is still alive: it adds another one while replica 1 waits."""
    fleet = Fleet(replicas=2, object_limit=LIMIT)
    with pytest.raises(KeyboardInterrupt):
        join(fleet, Dying(fleet.engine, 1, after=False), 0, model())
    clock = ManualClock()
    began = clock.now()
    moved: list[float] = []

    class Slow(Counted):
        """Replica 1's view, in which replica 0's second file appears after 3 s."""

        def list(self, prefix: str, start_after: str = ""):
            if prefix == keys.snapshot(0, "") and clock.now() - began > 3.0 and not moved:
                second = ModelFiles.of(model()).planned(Base.fresh(trainable(model()), fleet.config.outer), LIMIT)[1]
                fleet.engine.create(keys.snapshot(0, second.name), second.encode())
                moved.append(clock.now())
            return super().list(prefix, start_after)

    way = Slow(fleet.engine)
    join(fleet, way, 1, model(), clock)
    assert moved and clock.now() - moved[0] >= 4.0  # replica 1's patience, from the second file on
    sent = {key.rpartition("/")[2] for key in way.up}
    assert {"model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"} <= sent
    assert not {"model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"} & sent


def test_a_waiting_replica_leaves_when_it_is_asked_to():
    fleet = Fleet(replicas=2, object_limit=LIMIT)
    with pytest.raises(KeyboardInterrupt):
        join(fleet, Dying(fleet.engine, 1, after=False), 0, model())
    way = Counted(fleet.engine)
    with pytest.raises(Preempted, match="another one was writing the first base"):
        join(fleet, way, 1, model(), ManualClock(), leave=lambda: True)
    assert not way.up


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (partial(model, dtype=torch.float32), r"'0.weight': here float32\[10, 10\], in the run bfloat16\[10, 10\]"),
        (partial(model, layers=5), r"at parameter '4.weight': here bfloat16\[10, 10\], in the run absent"),
    ],
    ids=["other dtype", "more layers"],
)
def test_another_model_is_refused_once_all_have_said_what_they_begin_with(other, words):
    fleet = Fleet(replicas=2, object_limit=LIMIT)
    join(fleet, fleet.engine, 0, model())
    with pytest.raises(ModelMismatch, match=words):
        join(fleet, fleet.engine, 1, other(), ManualClock())
