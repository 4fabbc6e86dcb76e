"""A fleet in which some replicas attack: real participants on one side, scripted writers of the bucket on the other.

By default two participants decide, commit and follow as they do in a run. The manifests of all others are written here:
those of honest replicas as theirs, those of attackers as their script says. Training is real, of a small classifier.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from protocol_fleet import Fleet, report

from diloco_orchestrator.allreduce.payload import publish
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.codecs.table import encode
from diloco_orchestrator.guard.shares import deal
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.record_format import MOST_COUNTED
from diloco_orchestrator.protocol.records import Commit, Contribution, Metric, Origin, Payload, Score, Shard
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.protocol.weights import limit_of, norms_after
from diloco_orchestrator.replica.rounds.interface import ContributionFields
from diloco_orchestrator.replica.rounds.participant import Participant

INPUTS, HIDDEN, CLASSES = 8, 16, 4
STEPS, BATCH, LR = 20, 64, 1.0  # the learning rate falls to a tenth
FRESH = 8192  # items of a run that nobody has seen
HELDOUT, SHARE = 2048, 256  # items that judge a run at its end; items of each replica's share, which the guard sees
_SHAPES = {"b1": (HIDDEN,), "b2": (CLASSES,), "w1": (INPUTS, HIDDEN), "w2": (HIDDEN, CLASSES)}  # in name order

Values = dict[str, torch.Tensor]


class Classifier(torch.nn.Module):
    """An MLP of one hidden layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in _SHAPES.items():
            values = torch.randn(shape, generator=generator) / math.sqrt(shape[0])
            self.register_parameter(name, torch.nn.Parameter(values if len(shape) > 1 else torch.zeros(shape)))


def logits(model: Mapping[str, torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    """Of items (…, n, INPUTS), by one model or by one for each leading index."""
    hidden = torch.tanh(items @ model["w1"] + model["b1"].unsqueeze(-2))
    return hidden @ model["w2"] + model["b2"].unsqueeze(-2)


class Task:
    """Labels by a teacher, a tenth of them drawn at random; batches of every replica; held-out items."""

    shapes: Mapping[str, tuple[int, ...]] = _SHAPES

    def model(self, seed: int) -> torch.nn.Module:
        """The model that all replicas begin with."""
        return Classifier(seed)

    def rate(self, done: float) -> float:
        """The learning rate once this share of the rounds is over."""
        return LR * (1.0 - 0.9 * done)

    def __init__(self, seed: int) -> None:
        self._draw = torch.Generator().manual_seed(1000 + seed)
        self._teacher = {name: value.detach() * 2.0 for name, value in Classifier(seed + 77).named_parameters()}
        self.heldout = self.batch((HELDOUT,))

    def batch(self, size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        items = torch.randn((*size, INPUTS), generator=self._draw)
        labels = logits(self._teacher, items).argmax(dim=-1)
        noisy = torch.rand(size, generator=self._draw) < 0.1
        return items, torch.where(noisy, torch.randint(CLASSES, size, generator=self._draw), labels)

    def deal_other_items(self, replica_id: int) -> None:
        """Have a replica be dealt other items in the last round than those it was trained on."""
        items, labels = self.read
        items[replica_id], labels[replica_id] = self.batch((items.shape[1],))

    def losses_of_read(
        self, model: Mapping[str, torch.Tensor], replica_id: int, count: int, draw: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The cross entropy of `count` items dealt to a replica in the last round, and of as many dealt to others."""
        items, labels = self.read
        others = torch.tensor([i for i in range(len(items)) if i != replica_id])
        found = []
        for rows in (torch.tensor([replica_id]), others):
            which = rows[torch.randint(len(rows), (count,), generator=draw)]
            where = torch.randint(items.shape[1], (count,), generator=draw)
            scores = logits(model, items[which, where])
            found.append(torch.nn.functional.cross_entropy(scores, labels[which, where], reduction="none"))
        return found[0], found[1]

    def losses(self, model: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The cross entropy of each held-out item."""
        items, labels = self.heldout
        return torch.nn.functional.cross_entropy(logits(model, items), labels, reduction="none")

    def losses_at(self, model: Mapping[str, torch.Tensor], begin: int, count: int) -> list[float]:
        """The losses of some held-out items."""
        return [float(loss) for loss in self.losses(model)[begin:][:count]]

    def fresh_loss(self, model: Mapping[str, torch.Tensor], seed: int) -> float:
        """The mean loss on items that are neither held out nor trained on."""
        self._draw = torch.Generator().manual_seed(100_000 + seed)
        self.heldout = self.batch((FRESH,))
        return float(self.losses(model).mean())

    def trained(self, base: Mapping[str, torch.Tensor], replicas: int, lr: float) -> tuple[list[Values], list[float]]:
        """The pseudo-gradient of each replica after its inner steps, and its mean training loss."""
        local = {
            name: base[name].detach().expand(replicas, *_SHAPES[name]).clone().requires_grad_() for name in _SHAPES
        }
        losses, read = torch.zeros(replicas), []
        for _ in range(STEPS):
            items, labels = self.batch((replicas, BATCH))
            read.append((items, labels))
            scores = logits(local, items).flatten(0, 1)
            each = torch.nn.functional.cross_entropy(scores, labels.flatten(), reduction="none").view(replicas, BATCH)
            gradients = torch.autograd.grad(each.mean(dim=1).sum(), list(local.values()))
            with torch.no_grad():
                for value, gradient in zip(local.values(), gradients, strict=True):
                    value -= lr * gradient
            losses += each.mean(dim=1).detach() / STEPS
        self.read = tuple(torch.cat(each, dim=1) for each in zip(*read, strict=True))
        deltas = [{name: base[name] - local[name][i].detach() for name in _SHAPES} for i in range(replicas)]
        return deltas, losses.tolist()


class Scene(Protocol):
    """What a script knows of its run, and where it writes."""

    store: Any  # with `put`, which overwrites
    replicas: int

    @property
    def allowed(self) -> float: ...  # times the median norm that a contribution to the open round may have
    def publish(self, round_: int, replica_id: int, vector: torch.Tensor) -> Payload: ...


@dataclass
class Writer:
    """Where an attacker stands in a round: what it trained, and a manifest that an honest replica would publish."""

    fleet: Scene
    replica_id: int
    round: int
    delta: torch.Tensor  # its own pseudo-gradient, (parameters,) float32
    honest: Contribution  # its manifest, if it were honest, without a payload
    others: Sequence[torch.Tensor]  # pseudo-gradients of the honest replicas
    own: Score  # of its own held-out share, also where the guard does not count it
    memory: dict[str, Any] = field(default_factory=dict)  # kept from round to round

    def send(self, vector: torch.Tensor, **changes: Any) -> None:
        """Publish a vector as any replica does, and the honest manifest with these changes."""
        payload = self.fleet.publish(self.round, self.replica_id, vector)
        self.put({"payload": payload, **changes})

    def send_raw(self, vector: torch.Tensor, norm: float | None = None, **changes: Any) -> None:
        """Publish a vector whatever it holds. `norm`: what the manifest declares; by default what is true or 1."""
        data = encode(vector, "fp32")
        self.put_payload(data)
        true = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        declared = norm if norm is not None else true if math.isfinite(true) else 1.0
        shard = Shard(digest=bulk_digest(data), size=len(data))
        numel = vector.numel()
        payload = Payload(codec="fp32", numel=numel, shard_numel=16 * 2**20, shards=(shard,), norms=(declared,))
        self.put({"payload": payload, **changes})

    def put_payload(self, data: bytes) -> None:
        """Write the only shard of its payload, whatever was there."""
        self.fleet.store.put(keys.payload(self.round, self.replica_id, self.honest.attempt, 0), data)

    def put(self, changes: Mapping[str, Any], replica_id: int | None = None) -> None:
        """Write the honest manifest with these changes under the key of a replica, its own by default."""
        key = keys.contribution(self.round, self.replica_id if replica_id is None else replica_id)
        self.fleet.store.put(key, self.honest.model_copy(update=dict(changes)).to_bytes())

    def put_json(self, **changes: Any) -> None:
        """Write the honest manifest as JSON with changes that its schema may not allow."""
        body = {**json.loads(self.honest.to_bytes()), **changes}
        self.fleet.store.put(keys.contribution(self.round, self.replica_id), json.dumps(body).encode())


Attack = Callable[[Writer], None]


class HostileFleet(Fleet):
    """A run of replicas of which the last `len(attackers)` follow a script."""

    def __init__(
        self,
        replicas: int,
        rounds: int,
        seed: int,
        attackers: int,
        attack: Attack,
        task: Task | None = None,
        deciders: int = 2,
        share: int = SHARE,
        dealt: int = 0,
        untrained: bool = False,
        **settings: Any,
    ) -> None:
        """`deciders`: replicas, the first ones, that are real participants. More than one must decide alike.

        `share`: held-out items of each share. With `scores_strangers`, a setting of `Fleet`, the participants score the
        contributions of strangers (`invited`): with `dealt` also on so many items of the data dealt to their authors.
        `untrained`: attackers train on other data than they are dealt.
        """
        waits = {"poll_s": 0.5, "round_timeout_s": 60.0, "startup_timeout_s": 60.0}
        given = {"quorum": None, "timing": waits, "sync_every": STEPS, "snapshot_every": 1000, **settings}
        super().__init__(replicas=replicas, rounds=rounds, **given)
        self.heldout = HeldoutSet(metric="loss", shares=(share,) * replicas, digest="0" * 64)
        self.task = task or Task(seed)
        self._share, self._dealt, self._untrained = share, dealt, untrained
        self._attack, self._honest = attack, replicas - attackers
        self._clock = ManualClock()
        joined = [self.join(i, model=self.task.model(seed), clock=self._clock) for i in range(replicas)]
        self.deciders = joined[:deciders]
        for participant in self.deciders:
            on_dealt = partial(self._dealt_scores_of, participant) if dealt else None
            participant.score_strangers_by(partial(self._scores_of, participant), on_dealt)
        self._claims = [participant._attempt.claim_sha256 for participant in joined]
        self._memory: dict[int, dict[str, Any]] = {}
        self._seed = seed

    def play(self) -> list[Commit]:
        """Play the run to its end. Returns its commits."""
        while not self.deciders[0].open.stopped:
            self._round()
        return self.commits()

    @property
    def loss(self) -> float:
        """The held-out loss of the model that the run stopped on."""
        return float(self.task.losses(self.deciders[0].base.parameters).mean())

    @property
    def allowed(self) -> float:
        """How many times the median norm a contribution to the open round may have."""
        last = self.deciders[0]._tip.last
        before = norms_after(last, self.config) if last else None
        return float(limit_of([1.0] * self.replicas, 0, before, self.config).factor)

    def publish(self, round_: int, replica_id: int, vector: torch.Tensor) -> Payload:
        return publish(
            self.store,
            lambda shard: keys.payload(round_, replica_id, 1, shard),
            FlatTensors([vector]),
            "fp32",
            self.config.shard_numel,
            PayloadCache(),
        )

    def _round(self) -> None:
        first = self.deciders[0]
        parameters = {name: first.base.parameters[name] for name in self.task.shapes}
        scores = self.task.losses(parameters)
        round_, final_evaluation = first.open.round, first.open.final_evaluation
        done = first.open.outer_step / self.config.rounds
        deltas, losses = self.task.trained(parameters, self.replicas, self.task.rate(done))
        for i in range(self._honest, self.replicas) if self._untrained else ():
            self.task.deal_other_items(i)
        flat = [torch.cat([delta[name].reshape(-1) for name in self.task.shapes]) for delta in deltas]
        self._clock.advance(10.0)
        said = [self._fields(i, scores, losses[i]) for i in range(self.replicas)]
        for participant, vector, fields in zip(self.deciders, flat, said, strict=False):
            if final_evaluation:
                participant._contributor.contribute_scores(fields)
            else:
                participant._contributor.contribute_delta(FlatTensors([vector]), fields)
        first_of_all = Contribution.from_bytes(self.store.get(keys.contribution(round_, 0)), "its own")
        for i in range(len(self.deciders), self.replicas):
            own = {"replica_id": i, "write_id": f"w{i}", "claim_sha256": self._claims[i]}
            honest = first_of_all.model_copy(update={**own, "scores": said[i].scores, "in_loop": said[i].in_loop})
            if i < self._honest:
                payload = None if final_evaluation else self.publish(round_, i, flat[i])
                manifest = honest.model_copy(update={"payload": payload})
                self.store.create(keys.contribution(round_, i), manifest.to_bytes())
            elif not final_evaluation:
                memory = self._memory.setdefault(i, {"draw": torch.Generator().manual_seed(self._seed)})
                score = self._score(i, scores)
                self._attack(Writer(self, i, round_, flat[i], honest, flat[: self._honest], score, memory))
        for participant in self.deciders[1:] if self.scores_strangers else ():
            participant._closer._observe(waited=False)  # scores and reports, as all do before the first one commits
        for participant in self.deciders:
            participant.close()
        assert {participant.digest for participant in self.deciders} == {first.digest}

    def _scores_of(self, participant: Participant, base: Base) -> list[float]:
        """A base's score on each item that the open round deals to a participant; higher is better."""
        dealt = deal(self.replicas, participant.open.roster)[participant._attempt.replica_id]
        begins = [share * self._share % HELDOUT for share in dealt]
        return [-loss for at in begins for loss in self.task.losses_at(base.parameters, at, self._share)]

    def _dealt_scores_of(
        self, participant: Participant, base: Base, contribution: Contribution
    ) -> tuple[list[float], list[float]]:
        """A base's scores on items dealt to a contribution's author in the open round, and on others' items."""
        assert contribution.payload is not None
        seed = int(contribution.payload.digest[-8:], 16) + participant._attempt.replica_id
        draw = torch.Generator().manual_seed(seed)
        found = self.task.losses_of_read(base.parameters, contribution.replica_id, self._dealt, draw)
        own, others = ((-each).tolist() for each in found)
        return own, others

    def _fields(self, replica_id: int, losses: torch.Tensor, in_loop: float) -> ContributionFields:
        """What an honest replica says: the scores of the shares dealt to it, and its own training loss."""
        dealt = deal(self.replicas, self.deciders[0].open.scorers).get(replica_id, ())
        return ContributionFields(
            steps=STEPS,
            tokens=STEPS * BATCH,
            in_loop=Metric(sum=-in_loop * STEPS, count=STEPS),
            scores=tuple(self._score(share, losses) for share in dealt),
            progress=report().progress,
        )

    def _score(self, share: int, losses: torch.Tensor) -> Score:
        of_share = losses[share * self._share % HELDOUT :][: self._share]
        return Score(share=share, sum=-float(of_share.sum()), count=self._share)


# -- the scripts ------------------------------------------------------------------------------------------------------


def drift(writer: Writer, size: float = 1.0) -> None:
    """Honest work and one constant direction, `size` times as large."""
    memory = writer.memory
    if "way" not in memory:
        way = torch.randn(writer.delta.shape, generator=memory["draw"])
        memory["way"] = way / way.norm()
    writer.send(writer.delta + memory["way"] * (size * writer.delta.norm()))


def _noise(writer: Writer) -> None:
    noise = torch.randn(writer.delta.shape, generator=writer.memory["draw"])
    writer.send(noise * (writer.delta.norm() / noise.norm()))


def _replay(writer: Writer) -> None:
    writer.send(writer.memory.setdefault("old", writer.delta))


def _with_value(value: float) -> Attack:
    def attack(writer: Writer) -> None:
        vector = writer.delta.clone()
        vector[::7] = value
        writer.send_raw(vector)

    return attack


def _late_flood(writer: Writer) -> None:
    """Nothing in time; manifests of huge payloads in all rounds that are closed."""
    for round_ in range(max(1, writer.round - 3), writer.round):
        late = Writer(writer.fleet, writer.replica_id, round_, writer.delta, writer.honest, [], writer.own)
        late.send_raw(1000.0 * writer.delta, round=round_)


def _other_names(writer: Writer) -> None:
    """Another replica's id under its own key, and manifests of replicas that do not exist."""
    payload = writer.fleet.publish(writer.round, writer.replica_id, -10.0 * writer.delta)
    writer.put({"payload": payload, "replica_id": 0})
    for replica_id in range(100, 120):
        writer.put({"payload": payload, "replica_id": replica_id}, replica_id)


def _wrong_layout(writer: Writer) -> None:
    data = encode(writer.delta[:-3], "fp32")
    writer.put_payload(data)
    shard = Shard(digest=bulk_digest(data), size=len(data))
    numel = writer.delta.numel() - 3
    writer.put({"payload": Payload(codec="fp32", numel=numel, shard_numel=2**24, shards=(shard,), norms=(1.0,))})


def _wrong_digest(writer: Writer) -> None:
    writer.send(writer.delta)
    writer.put_payload(encode(50.0 * writer.delta, "fp32"))


def _lying(sign: float) -> Attack:
    def attack(writer: Writer) -> None:
        """All shares, each with a huge score over more items than there are, and a training metric to match."""
        scores = tuple(Score(share=i, sum=sign * 1e9, count=10**9) for i in range(writer.fleet.replicas))
        writer.send(writer.delta, scores=scores, in_loop=Metric(sum=-sign * 1e9, count=1))

    return attack


def _no_scores(writer: Writer) -> None:
    scores = (Score(share=writer.own.share, sum=None, count=writer.own.count),)
    writer.send(writer.delta, scores=scores, in_loop=Metric(sum=None, count=1))


def _just_below(writer: Writer, **changes: Any) -> None:
    """Backwards, by as much as the clip allows to who has trained as long as others."""
    writer.send(-0.97 * writer.fleet.allowed * writer.delta, **changes)


def _huge_counts(writer: Writer) -> None:
    origins = (Origin(round=writer.round, steps=MOST_COUNTED),)
    metrics = {"tokens": Metric(sum=1e300, count=10**99), "unheard of": Metric(sum=-1e300, count=1)}
    _just_below(writer, origins=origins, tokens=MOST_COUNTED, metrics=metrics)


def _too_huge_counts(writer: Writer) -> None:
    writer.put_json(tokens=10**400, origins=[{"round": writer.round, "steps": 10**400}])


ATTACKS: dict[str, Attack] = {
    "sign flip x10": lambda w: w.send(-10.0 * w.delta),
    "sign flip, just below the limit": _just_below,
    "sign flip x1": lambda w: w.send(-w.delta),
    "scaled x50": lambda w: w.send(50.0 * w.delta),
    "3e38 in every seventh value": _with_value(3e38),
    "NaN in every seventh value": _with_value(math.nan),
    "infinity in every seventh value": _with_value(math.inf),
    "drift: a constant direction added": drift,
    "random noise of the usual norm": _noise,
    "zero update": lambda w: w.send(torch.zeros_like(w.delta)),
    "replay of its first payload": _replay,
    "copy of another's payload": lambda w: w.send(w.others[0]),
    "x50, declared with the usual norm": lambda w: w.send_raw(50.0 * w.delta, norm=float(w.delta.norm())),
    "other bytes than the manifest names": _wrong_digest,
    "wrong layout": _wrong_layout,
    "wrong base claim": lambda w: w.send(-10.0 * w.delta, base_digest="b3:" + "7" * 64),
    "huge counts of steps and tokens": _huge_counts,
    "counts of 400 digits": _too_huge_counts,
    "forged names and ids": _other_names,
    "lying scores, high": _lying(1.0),
    "lying scores, low": _lying(-1.0),
    "scores that are not finite": _no_scores,
    "abstaining": lambda w: w.put({"kind": "abstention", "reason": "not today", "payload": None}),
    "late flood": _late_flood,
}
