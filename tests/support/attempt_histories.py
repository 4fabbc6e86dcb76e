"""Seeded histories of attempts: what coordinators, providers and processes may do, in any order, and crashes between.

Everything is real but the providers and the clock. What has to hold after each step is the caller's business.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from scripted import STAMP, ScriptedExecutor

from diloco_orchestrator.clock import ManualClock, NoBackground
from diloco_orchestrator.config import make_config
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, Heartbeat
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from executors.contract import (
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    NoCapacity,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
)

UNKNOWN = ReplicaStatus(ReplicaState.UNKNOWN)
ENDS = [
    ReplicaStatus(ReplicaState.FAILED, "oom", 137),
    ReplicaStatus(ReplicaState.PREEMPTED, "lost"),
    ReplicaStatus(ReplicaState.TIMED_OUT, "deadline"),
    ReplicaStatus(ReplicaState.FAILED, "no_capacity"),
    ReplicaStatus(ReplicaState.SUCCEEDED, "exit", 0),
    ReplicaStatus(ReplicaState.FAILED, "superseded", 76),  # without an exit record: it lost its claim
]
EXITS = [(0, 0), (1, 0), (1, 1), (75, 1), (76, 5), (78, 0)]  # code of the exit record, which of ENDS the provider says


class Crash(BaseException):
    """The coordinator's process is killed."""


class Provider(ScriptedExecutor):
    """What runs somewhere, whoever asks: launches what it is asked for, or refuses in its mood."""

    def __init__(self, name: str, chance: random.Random) -> None:
        super().__init__()
        self.name = name
        self._chance = chance
        self.blind: set[tuple[int, int]] = set()
        self.was_blind: set[tuple[int, int]] = set()
        self.mood: Sequence[Exception | None] = (None,)
        self.searchable = True

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        if (request.replica_id, request.attempt) not in self.launched:
            error = self._chance.choice(self.mood)
            if error is not None:
                raise error
        return super().launch(request)

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return UNKNOWN if (handle.replica_id, handle.attempt) in self.blind else super().poll(handle)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        if not self.searchable:
            raise ExecutorError("the provider is away")
        return super().find(run_id)

    def running(self) -> list[tuple[int, int]]:
        return [who for who in self.launched if who not in self.states]


class Spectator(ScriptedExecutor):
    """A provider as the coordinator sees it that is only compared: it can be asked, and nothing changes it."""

    def __init__(self, provider: Provider) -> None:
        super().__init__()
        self.name = provider.name
        self._provider = provider

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return self._provider.poll_many(handles)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Accepted."""


class Watched(MemoryStore):
    """One coordinator's way to the bucket: knows what it has read, can be cut off at a write."""

    def __init__(self, bucket: MemoryStore, writes: bool = True) -> None:
        super().__init__(bucket.url)
        self._bucket = bucket
        self._writes = writes
        self.seen: set[str] = set()
        self.crash_at: tuple[int, bool] | None = None  # writes left, and whether the last one still happens

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = self._bucket.get(key, start, end)
        self.seen.add(key)
        return data

    def list(self, prefix: str, start_after: str = "") -> Iterator[Any]:
        return self._bucket.list(prefix, start_after)

    def create(self, key: str, data: bytes) -> bool:
        assert self._writes, f"{key}: a coordinator wrote while it recovered"
        if self.crash_at is not None:
            left, happens = self.crash_at
            self.crash_at = (left - 1, happens)
            if left == 0 and not happens:
                raise Crash
        made = self._bucket.create(key, data)
        if made:
            self.seen.add(key)
        if self.crash_at is not None and self.crash_at[0] < 0:
            raise Crash
        return made


class Later(NoBackground):
    """Launch calls that the provider answers when the history says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, call))
        return future

    def answer_one(self) -> None:
        if self.waiting:
            future, call = self.waiting.pop(0)
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


TRACEBACKS = [f'Traceback:\n  File "/a/train.py", line {line}, in f\nValueError: message' for line in (7, 8)]


@dataclass
class Post:
    """A coordinator's post: one that dies is followed by another with the same provider."""

    provider: Provider
    background: NoBackground
    store: Watched
    coordinator: Coordinator | None = None


_SETTINGS: list[Mapping[str, Any]] = [
    {"retry": {"max_errors": 100, "backoff_s": 0.0, "hung_after_s": 100.0}},
    {"retry": {"max_errors": 1, "max_no_capacity": 2, "max_preemptions": 2, "hung_after_s": 100.0}, "quorum": 1},
]
_templates: dict[int, dict[str, bytes]] = {}


def new_bucket(kind: int) -> MemoryStore:
    """A run of two replicas before its first attempt."""
    if kind not in _templates:
        store = MemoryStore()
        values = {"entrypoint": "m:f", "replicas": 2, "timing": {"heartbeat_s": 5.0, "startup_timeout_s": 60.0}}
        config = make_config({**values, **_SETTINGS[kind]})
        create_run(store, Run(**STAMP(), run_id="run-1", config=config, package_version="0"), "test", STAMP)
        _templates[kind] = {info.key: store.get(info.key) for info in store.list("")}
    bucket = MemoryStore()
    for key, data in _templates[kind].items():
        bucket.put(key, data)
    return bucket


@dataclass
class History:
    """One seeded course of events, played against live coordinators."""

    seed: int
    after_step: "Callable[[History, Post], None]"

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.clock = ManualClock()
        self.bucket = new_bucket(self.seed % len(_SETTINGS))
        providers = [Provider(name, self.chance) for name in ("scripted", "another")[: self.chance.choice([1, 1, 2])]]
        coordinators = self.chance.choice([1, 1, 2])
        late = self.chance.random() < 0.4
        self.posts = [
            Post(providers[min(index, len(providers) - 1)], Later() if late else NoBackground(), Watched(self.bucket))
            for index in range(coordinators)
        ]
        self.providers = providers

    def play(self, count: int) -> None:
        operations = [self.step] * 8 + [self.end, self.exit, self.cancel, self.restart, self.crash, self.answer]
        operations += [self.beat, self.beat, self.blind, self.mood, self.refuse, self.work, self.stop]
        for _ in range(count):
            self.chance.choice(operations)()

    # -- what may happen -----------------------------------------------------------------------------------------

    def step(self, crashing: bool = False) -> None:
        post = self.chance.choice(self.posts)
        self.clock.advance(self.chance.choice([0.1, 1.0, 6.0, 6.0, 31.0, 70.0, 130.0, 700.0]))
        try:
            if crashing:
                post.store.crash_at = (self.chance.randrange(4), self.chance.random() < 0.5)
            if post.coordinator is None:
                self.start(post)
            assert post.coordinator is not None
            post.coordinator.step()
            post.coordinator._observe()  # what the step itself did: the other one can see it too
        except (Crash, ExecutorDenied):
            self.start(post)
        post.store.crash_at = None
        self.after_step(self, post)

    def crash(self) -> None:
        self.step(crashing=True)

    def start(self, post: Post) -> None:
        post.store, post.coordinator = Watched(self.bucket), None
        post.background = type(post.background)()
        denied, post.provider.denied = post.provider.denied, None
        post.coordinator = Coordinator(
            RunReader(post.store),
            Means(post.provider, self.clock, STAMP),
            post.background,  # type: ignore[arg-type]
        )
        post.provider.denied = denied

    def restart(self) -> None:
        post = self.chance.choice(self.posts)
        if self.chance.random() < 0.5:
            self.work()  # the call that its predecessor made reaches the provider, and nobody hears the answer
        self.start(post)

    def end(self) -> None:
        """A process vanishes without an exit record."""
        if (found := self.some_process()) is not None:
            provider, who = found
            provider.states[who] = self.chance.choice(ENDS)

    def exit(self) -> None:
        """A process ends with an exit record."""
        if (found := self.some_process()) is not None:
            provider, who = found
            code, end = self.chance.choice(EXITS)
            if code == 76 and max(number for replica_id, number in provider.launched if replica_id == who[0]) == who[1]:
                return  # a process that has claimed its attempt leaves only for a later one
            provider.states[who] = ENDS[end]
            error = self.chance.choice([None, *TRACEBACKS]) if code == 1 else None
            record = Exit(**STAMP(), replica_id=who[0], attempt=who[1], code=code, reason="told", round=1, error=error)
            self.bucket.create(keys.exit_record(*who), record.to_bytes())

    def beat(self) -> None:
        for provider in self.providers:
            for who in provider.running():
                if self.chance.random() < 0.7:
                    record = Heartbeat(
                        **STAMP(),
                        replica_id=who[0],
                        attempt=who[1],
                        counter=int(self.clock.now() * 10),
                        phase="training",
                        round=1,
                        inner_step=0,
                    )
                    self.bucket.put(keys.heartbeat(*who), record.to_bytes())

    def blind(self) -> None:
        """A provider loses sight of an attempt, or of none."""
        provider = self.chance.choice(self.providers)
        provider.blind = {who for who in provider.launched if self.chance.random() < 0.3}
        provider.was_blind |= provider.blind

    def answer(self) -> None:
        """A provider rejects credentials in polls and searches, or no longer."""
        provider = self.chance.choice(self.providers)
        provider.denied = self.chance.choice([None, ExecutorDenied("expired")])
        if provider.denied is not None:
            provider.was_blind |= {(replica_id, attempt) for replica_id in (0, 1) for attempt in range(99)}
        provider.searchable = self.chance.random() < 0.7

    def mood(self) -> None:
        """How a provider answers launches from now on."""
        errors = [NoCapacity("none today"), ExecutorDenied("expired"), ExecutorError("away"), ValueError("no such GPU")]
        self.chance.choice(self.providers).mood = self.chance.choice([(None,), (None, *errors), errors[:2]])

    def refuse(self) -> None:
        """A provider takes no cancels for a while."""
        self.chance.choice(self.providers).refuse_cancel = self.chance.choice([0, 2, 10**6])

    def work(self) -> None:
        for post in self.posts:
            if isinstance(post.background, Later):
                post.background.answer_one()

    def cancel(self) -> None:
        post = self.chance.choice(self.posts)
        if post.coordinator is not None:
            post.coordinator.cancel_all("the user wants it")

    def stop(self) -> None:
        post = self.chance.choice(self.posts)
        if post.coordinator is not None and self.chance.random() < 0.2:
            post.coordinator.stop("halted", "enough")

    def some_process(self) -> tuple[Provider, tuple[int, int]] | None:
        provider = self.chance.choice(self.providers)
        running = provider.running()
        return (provider, self.chance.choice(running)) if running else None
