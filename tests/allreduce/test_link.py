"""`agreed_link`: one measurement of the store for all ranks, and what `path="auto"` makes of it."""

from collections import Counter

import pytest
from record_examples import EXAMPLES, STAMP

from diloco_orchestrator.allreduce.dealing import ASSUMED, Link, chooses_scatter, predicted_s, shard_numel_for
from diloco_orchestrator.allreduce.link import agreed_link
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.clock import ManualClock, NoBackground
from diloco_orchestrator.errors import StoreDenied
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import MeasuredLink
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.memory import MemoryStore


class Far(MemoryStore):
    """A store whose requests take .1 s, and 1 s for each 10 MB written or 40 MB read."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.clock.advance(0.1)
        data = super().get(key, start, end)
        self.clock.advance(len(data) / 40e6)
        return data

    def put(self, key: str, data: bytes) -> None:
        self.clock.advance(0.1 + len(data) / 10e6)
        super().put(key, data)


def agreed(store: MemoryStore, clock: ManualClock, rank: int = 0) -> Link:
    stamp = Stamp(f"{rank:016x}", clock.wall_time)
    write = lambda record: store.create(keys.LINK, record.to_bytes())  # noqa: E731
    return agreed_link(store, clock, NoBackground(), stamp, rank, write)


def test_the_first_rank_measures_and_the_others_go_by_its_record():
    clock = ManualClock()
    store = Far(clock)
    link = agreed(store, clock)
    assert link.latency_s == pytest.approx(0.1)
    # One request after the other takes .4 s beside the transfer, of which those that are sent together explain .175 s.
    rates = [2**23 / (2**23 / rate + 0.225) for rate in (10e6, 40e6)]
    assert [link.up, link.down] == pytest.approx(rates)
    assert [info.key for info in store.list("")] == [keys.LINK]
    began = clock.now()
    assert agreed(store, clock, 1) == link and clock.now() - began < 0.2


def test_of_ranks_that_measure_at_once_the_first_record_counts():
    clock = ManualClock()
    store = Far(clock)
    slower = EXAMPLES["link"]
    stamp = Stamp("a" * 16, clock.wall_time)

    def late(record: MeasuredLink) -> None:
        assert store.create(keys.LINK, slower.to_bytes()) and not store.create(keys.LINK, record.to_bytes())

    assert agreed_link(store, clock, NoBackground(), stamp, 0, late) == Link(0.05, 62.5e6, 62.5e6)


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        EXAMPLES["link"].to_bytes().replace(b"0.05", b"0"),
        EXAMPLES["link"].to_bytes().replace(b"0.05", b"NaN"),
        EXAMPLES["link"].to_bytes().replace(b'"up":62500000.0', b'"up":1e400'),
        EXAMPLES["began"].to_bytes(),
    ],
)
def test_a_record_that_cannot_be_read_is_the_assumed_link_for_all(data, caplog):
    clock = ManualClock()
    store = Far(clock)
    store.create(keys.LINK, data)
    assert agreed(store, clock) == ASSUMED
    assert "start/link.json" in caplog.text and store.get(keys.LINK) == data


class Limited(MemoryStore):
    """A store whose objects at some keys may not be written, and none deleted."""

    def __init__(self, *denied: str) -> None:
        super().__init__()
        self._denied = denied

    def _check(self, key: str) -> None:
        if key.startswith(self._denied):
            raise StoreDenied(f"no right to write {key}")

    def put(self, key: str, data: bytes) -> None:
        self._check(key)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._check(key)
        return super().create(key, data)

    def delete(self, key: str) -> None:
        raise StoreDenied(f"no right to delete {key}")


def test_without_the_right_to_try_or_to_record_the_assumed_link_counts(caplog):
    store = Limited(keys.PROBE)
    assert agreed(store, ManualClock()) == ASSUMED
    assert MeasuredLink.from_bytes(store.get(keys.LINK), "").up == ASSUMED.up and "no right" in caplog.text
    assert agreed(Limited(keys.LINK), ManualClock()) == ASSUMED
    kept = Limited("nothing")
    assert agreed(kept, ManualClock()) != ASSUMED
    assert [info.size for info in kept.list(keys.PROBE)] == [0] * 4  # what may not be deleted takes no room


def test_a_transfer_as_short_as_a_request_is_repeated_with_more_bytes():
    """Also with a clock that stands still, which gives a link that can be recorded."""
    read = Counter[str]()

    class Counts(MemoryStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            data = super().get(key, start, end)
            read[key] += len(data)
            return data

    link = agreed(Counts(), ManualClock())
    assert sum(read.values()) - read[keys.LINK] == 17 * 2**23
    MeasuredLink(**STAMP, rank=0, latency_s=link.latency_s, up=link.up, down=link.down)


def test_auto_follows_the_link_and_the_requests_of_all_ranks():
    def takes(numel: int, codec: str, ranks: int, ms: float, mb: float) -> bool:
        link = Link(ms / 1e3, mb / 8 * 1e6, mb / 8 * 1e6)
        return chooses_scatter("auto", numel, codec, ranks, 2**24, lambda: link)

    # A thin line is worth requests, a wide or a far one is not.
    assert takes(25_000_000, "int4", 8, 5, 100) and not takes(25_000_000, "int4", 8, 100, 10_000)
    # 64 ranks send 50,000 requests in a round by scatter-reduce: at 5,500 a second no link makes up for that.
    assert not takes(25_000_000, "int8", 64, 5, 10_000) and takes(1_000_000_000, "int8", 64, 5, 1_000)
    slow, fast = (predicted_s(10**9, "fp32", 4, 2**24, Link(0.05, each, 1e9)) for each in (1e6, 1e9))
    assert slow[0] - fast[0] == pytest.approx(4e9 / 1e6, rel=0.01)


def test_large_fleets_take_fewer_shards_where_requests_cost_more_than_bytes():
    def shards(numel: int, ranks: int, mb: float, most: int = 2**24) -> int:
        link = Link(0.03, mb / 8 * 1e6, mb / 8 * 1e6)
        return len(shard_ranges(numel, shard_numel_for(numel, ranks, most, "int4", link)))

    assert shards(25_000_000, 16, 1000) == 64  # four a rank
    assert shards(25_000_000, 64, 1000) == 64 and 2 * 64 < shards(1_000_000_000, 64, 1000) <= 256
    assert 125 <= shards(1_000_000_000, 256, 1000) <= 128 and 250 <= shards(1_000_000_000, 256, 100) <= 256
    assert shards(25_000_000, 1024, 1000) == shards(1_000_000_000, 1024, 1000) == 64  # the fewest
    assert shards(2**30, 64, 1000, 2**20) == 1024  # no shard is larger than the setting
