"""Several participants of one run in one process, without training: for tests of the rounds themselves."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from patience import PATIENCE_S

from diloco_orchestrator.allreduce.owners import ALONE
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import Background, Clock, SystemClock
from diloco_orchestrator.config import OuterConfig, make_config
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Intent
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Commit, Contribution, Metric, Progress, Run, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet, Start
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.attempts import AttemptRecords
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.layout import ModelFiles, describe
from diloco_orchestrator.snapshots.model_tensors import trainable
from diloco_orchestrator.snapshots.state_file import StateFile
from diloco_orchestrator.store.base import OBJECT_LIMIT, Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.retrying import RetryingStore
from replica.attempt.attempt import claim_attempt
from replica.rounds.interface import ContributionFields
from replica.rounds.own_model import OwnModel
from replica.rounds.participant import Participant

MODEL = "model.safetensors"  # of a snapshot of a model that is small enough for one file
FAST = {"poll_s": 0.01, "round_timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
BY_HAND = {"poll_s": 0.5, "round_timeout_s": 20.0, "startup_timeout_s": 20.0}  # for fleets on a clock moved by hand


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """12 parameters in two tensors."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def model_bytes(files: ModelFiles, base: Base) -> bytes:
    """The model file of a snapshot of `base`, of a model that is small enough for one."""
    return next(each for each in files.planned(base) if each.name == MODEL).encode()


def start_of(model: torch.nn.Module) -> Start:
    """The start of a run of a model with one fragment and shards of the default size."""
    base = Base.fresh(trainable(model), OuterConfig())
    return Start(
        **Stamp("start", lambda: 0.0)(),
        run_sha256="0" * 64,
        parameters=describe(trainable(model)),
        fragments=base.fragments,
        shard_numel=base.shard_numel,
        base_digest=base.digest(),
    )


class HurriedClock:
    """The system's clock, twenty times as fast: for tests of what a replica does after it has waited for a while."""

    _TIMES = 20.0

    def now(self) -> float:
        return time.monotonic() * self._TIMES

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds) / self._TIMES)

    def wall_time(self) -> float:
        return time.time()


class Fleet:
    """A founded run and ways to take part in it.

    `scored`: whether it has a held-out set. `scores_strangers`: whether contributions of strangers are scored.
    """

    def __init__(
        self,
        replicas: int = 2,
        rounds: int = 3,
        store: Store | None = None,
        clock: Clock | None = None,
        object_limit: int = OBJECT_LIMIT,
        scored: bool = False,
        code_sha256: str | None = None,
        scores_strangers: bool = False,
        **settings: Any,
    ) -> None:
        self.scores_strangers = scores_strangers
        self.engine = store or MemoryStore()
        self._clock = clock or SystemClock()
        self.store = RetryingStore(self.engine, self._clock, random.Random(0))
        values = {"entrypoint": "m:f", "replicas": replicas, "rounds": rounds, "timing": FAST, "quorum": "all"}
        values |= settings
        self.config = make_config(values)
        self.replicas = replicas
        self.object_limit = object_limit
        # Ten items a share, as `report` says.
        self.heldout = HeldoutSet(metric="reward", shares=(10,) * replicas, digest="0" * 64) if scored else None
        stamp = Stamp("founder", lambda: 0.0)
        run = Run(**stamp(), run_id="run-1", config=self.config, package_version="0", code_sha256=code_sha256)
        create_run(self.store, run, "test", stamp)
        self._tokens = 0

    def join(
        self,
        replica_id: int,
        attempt: int | None = None,
        model: torch.nn.Module | None = None,
        clock: Clock | None = None,
        should_leave: Callable[[], bool] = lambda: False,
        fragments: Sequence[Sequence[str]] = (),
        background: Background | None = None,
    ) -> Participant:
        """A participant that holds the newest base, as the attempt that a coordinator has launched if there is one."""
        self._tokens += 1
        clock = clock or self._clock
        chance = random.Random(self._tokens)
        stamp = Stamp(f"token{self._tokens}", clock.wall_time, lambda: f"{chance.getrandbits(64):016x}")
        model = model or tiny_model()
        parameters = trainable(model)
        records = AttemptRecords(self.store)
        attempt = attempt or max(set(records.numbers(replica_id)) - records.claims(replica_id), default=None)
        for number in range(1, (attempt or 0) + 1):
            who = {"replica_id": replica_id, "attempt": number}
            token = stamp.unforeseen()
            intent = Intent(**stamp(), **who, leg=1, executor="test", why="test", claim_token=token)
            self.store.create(keys.intent(replica_id, number), intent.to_bytes())
        claimed = claim_attempt(self.store, replica_id, attempt, clock, stamp, should_leave, background)
        claimed = replace(claimed, object_limit=self.object_limit)
        own = OwnModel(
            parameters,
            fragments or [tuple(parameters)],
            ModelFiles.of(model),
            self.heldout,
            scores_strangers=self.scores_strangers,
        )
        return Participant.join(claimed, own)

    def claim_key(self, replica_id: int, attempt: int = 1) -> str:
        """The key of the claim of an attempt that was intended."""
        key = AttemptRecords(self.store).claim_key(replica_id, attempt)
        assert key is not None
        return key

    def join_all(self) -> list[Participant]:
        return [self.join(replica_id) for replica_id in range(self.replicas)]

    def start(self) -> Start:
        found = RunLog(self.store).start()
        assert found is not None
        return found.record

    def commits(self) -> list[Commit]:
        return list(RunLog(self.store).commits())


def delta(value: float) -> FlatTensors:
    """A pseudo-gradient of the tiny model with one value everywhere."""
    return FlatTensors([torch.full((3,), value), torch.full((3, 3), value)])


def saved(data: bytes) -> StateFile:
    """A state to save of exactly these bytes."""
    return StateFile.of(ALONE, data, {}, {}, len(data))


def report(
    share: int = 0, score: float | None = None, in_loop: float = 0.0, inner_steps: int = 30, steps: int = 30
) -> ContributionFields:
    """What a replica says beside its pseudo-gradient; `score` is the mean on its share of ten items."""
    return ContributionFields(
        steps=steps,
        in_loop=Metric(sum=in_loop * 30, count=30),
        scores=() if score is None else (Score(share=share, sum=10 * score, count=10),),
        progress=Progress(cursor={}, rng={}, inner_steps=inner_steps, tokens=0),
    )


def play(
    participants: list[Participant], values: list[float], reports: list[ContributionFields] | None = None
) -> list[CommitEntry]:
    """One round with these pseudo-gradients, every participant in a thread of its own."""
    reports = reports or [report() for _ in participants]

    def take_part(index: int) -> CommitEntry:
        answer(participants[index], values[index], reports[index])
        return close(participants[index])

    return together([lambda i=i: take_part(i) for i in range(len(participants))])  # type: ignore[misc]


def answer(participant: Participant, value: float, said: ContributionFields | None = None) -> Contribution:
    if participant.open.final_evaluation:
        return participant._contributor.contribute_scores(said or report())
    return participant._contributor.contribute_delta(delta(value), said or report())


def close(participant: Participant) -> CommitEntry:
    """The commit of the open round, once `participant` has followed it."""
    round_ = participant.open.round
    participant.close()
    entry = participant._attempt.log.commit(round_)
    assert entry is not None
    return entry


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of all calls, each in a thread; the first error is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]
