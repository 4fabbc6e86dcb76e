"""Heartbeats: how often a replica writes them."""

from itertools import cycle, pairwise
from typing import Any

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Heartbeat
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.store.memory import MemoryStore
from replica.attempt.heartbeat import HeartbeatWriter, Pulse


def test_in_a_first_round_heartbeats_are_a_quarter_of_the_time_so_far_apart_and_never_rarer_than_in_long_rounds():
    clock, pulse, store = ManualClock(), Pulse(), MemoryStore()
    config = make_config({"entrypoint": "m:f", "timing": {"heartbeat_s": 1.0}, "retry": {"hung_after_s": 180.0}})
    writer = HeartbeatWriter(store, 0, 1, pulse, Stamp("a", clock.wall_time), config)
    written: list[float] = []
    for _ in range(1200):
        writer.beat()
        last = Heartbeat.from_bytes(store.get(keys.heartbeat(0, 1)), "").at
        written += [last] if last not in written else []
        clock.sleep(1.0)
    pauses = {early: late - early for early, late in pairwise(written)}
    assert written[:3] == [0.0, 1.0, 2.0]
    assert all(pause <= max(2.0, (early + pause) / 4 + 1) for early, pause in pauses.items())
    assert max(pauses.values()) == 72.0 == pauses[written[-2]]


def test_a_heartbeat_is_written_though_a_step_without_a_loss_comes_in_between():
    class Busy(Pulse):
        """As the heartbeat's thread sees it beside a training loop that observes a loss in every second step."""

        def __getattribute__(self, name: str) -> Any:
            return next(losses) if name == "loss" else super().__getattribute__(name)

    losses = cycle([0.5, None])
    store, config = MemoryStore(), make_config({"entrypoint": "m:f"})
    HeartbeatWriter(store, 0, 1, Busy(), Stamp("a", lambda: 0.0), config).beat()
    assert Heartbeat.from_bytes(store.get(keys.heartbeat(0, 1)), "").loss == 0.5
