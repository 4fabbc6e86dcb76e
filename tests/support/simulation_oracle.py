"""The global model of a simulated run in plain float32, by docs/reference/protocol.md: weights, average, step, digest.

Imports nothing of the product: the payloads are read as bytes, and every rule of sections 3 and 4 is written once more.
So a rule that is wrong everywhere alike, and that `verify` therefore derives alike, is noticed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from plain_codecs import decoded, passed, sent

Floats = NDArray[np.float32]
Json = Mapping[str, Any]


@dataclass
class PlainBase:
    """Parameters and outer momenta by fragment, each one flat vector of the fragment's parameters in name order."""

    names: list[list[tuple[str, list[int]]]]  # of each fragment: names and shapes
    shard_numel: int
    parameters: list[Floats]
    momenta: list[Floats]  # empty without outer momentum

    def copy(self) -> "PlainBase":
        vectors = [v.copy() for v in self.parameters], [v.copy() for v in self.momenta]
        return PlainBase(self.names, self.shard_numel, *vectors)

    def digest(self) -> str:
        layout = {"fragments": [[[n, s] for n, s in of] for of in self.names], "shard_numel": self.shard_numel}
        lines = [_b3(json.dumps(layout, sort_keys=True, separators=(",", ":")).encode())]
        for index, vector in enumerate(self.parameters):
            for start in range(0, len(vector), self.shard_numel):
                pair = [vector, *([self.momenta[index]] if self.momenta else [])]
                lines.append(_b3(b"".join(v[start : start + self.shard_numel].astype("<f4").tobytes() for v in pair)))
        return _b3("\n".join(lines).encode())

    def step(self, fragment: int, gradient: Floats, outer: Json) -> None:
        """SGD with Nesterov momentum: m' = mu m + g;  p' = p - lr (g + mu m')."""
        direction, mu = gradient, np.float32(outer["momentum"])
        if self.momenta:
            momentum = self.momenta[fragment] = self.momenta[fragment] * mu + gradient
            direction = momentum * mu + gradient if outer["nesterov"] else momentum
        self.parameters[fragment] = self.parameters[fragment] - direction * np.float32(outer["lr"])


@dataclass(frozen=True)
class Averaged:
    """A contribution that a commit averages, as its manifest describes it, and its payload's shards as they are."""

    replica_id: int
    steps: int  # of its own round
    carried: int  # of rounds before
    tokens: int
    norm: float
    norms: Sequence[float]  # of each shard
    digests: tuple[str, ...]  # of each shard: two payloads that have the same ones are equal
    shards: list[bytes] = field(repr=False)

    @classmethod
    def of(cls, manifest: Json, shards: list[bytes]) -> "Averaged":
        own = sum(o["steps"] for o in manifest["origins"] if o["round"] == manifest["round"])
        carried = sum(o["steps"] for o in manifest["origins"]) - own
        norms = manifest["payload"]["norms"]
        norm = math.sqrt(math.fsum(n * n for n in norms))
        digests = tuple(shard["digest"] for shard in manifest["payload"]["shards"])
        return cls(manifest["replica_id"], own, carried, manifest["tokens"], norm, norms, digests, shards)


class Differs(AssertionError):
    """The run's log says something else than plain arithmetic gives."""


def bases_of(
    written: Mapping[str, bytes], begins: Sequence[Json], applied: Mapping[int, bool], first: PlainBase, config: Json
) -> dict[int, PlainBase]:
    """The base after every round, by its number; 0: the first one. Raises `Differs` for other weights in a commit.

    Args:
        written: every object as its writer sent it, by key.
        begins: the records of the legs.
        applied: of each closed round, whether its commit is followed by an outer step.
        config: the run's settings, as run.json holds them.
    """
    found, usual = {0: first}, UsualNorms()
    for round_ in sorted(applied):
        begin = [each for each in begins if each["after_round"] < round_][-1]
        usual = UsualNorms() if round_ == begin["after_round"] + 1 else usual
        base = found[round_ - 1 if round_ > begin["after_round"] + 1 else begin["from_round"]].copy()
        found[round_] = base
        if not applied[round_]:
            continue
        folder = f"rounds/{round_:08}"
        commit = json.loads(written[f"{folder}/commit.json"])
        averaged = []
        for answer in [answer for answer in commit["answers"] if answer["averaged"]]:
            manifest = json.loads(written[f"{folder}/contributions/{answer['replica_id']}.json"])
            payload = f"{folder}/payload/{answer['replica_id']}/{manifest['attempt']}"
            shards = [written[f"{payload}/{index}.bin"] for index in range(len(manifest["payload"]["shards"]))]
            averaged.append(Averaged.of(manifest, shards))
        weight = weights(averaged, config, usual, commit["fragment"])
        usual.add(
            commit["fragment"], [a.norm for a in averaged if a.norm], config.get("max_replicas") or config["replicas"]
        )
        said = {answer["replica_id"]: answer["weight"] for answer in commit["answers"] if answer["averaged"]}
        if said != weight:
            raise Differs(f"round {round_} weighs {said}; plain arithmetic gives {weight}")
        outer = config["outer"] | {n[6:]: v for n, v in begin["settings"].items() if n.startswith("outer.")}
        before, mean = base.copy(), average(averaged, weight, config["aggregate"], commit.get("average_codec"))
        base.step(commit["fragment"], mean, outer)
        if config["adapters"] == "exact":
            step_residual(base, before, averaged, weight, mean, outer)
    return found


@dataclass
class UsualNorms:
    """What is known of the norms of a leg's rounds so far: docs/reference/protocol.md section 4, Clip."""

    rounds: int = 0
    spread: float = 0.0
    levels: dict[int, float] = field(default_factory=dict)  # by fragment

    def add(self, fragment: int, norms: Sequence[float], replicas: int) -> None:
        if len(norms) < min(3, max(2, replicas)):
            return
        m = _lower_median(norms)
        d = sorted(max(x / m, m / x) for x in norms)[len(norms) // 2]
        self.rounds += 1
        self.spread += (min(d, 8.0) - 1.0 - self.spread) / min(self.rounds, 16)
        level = self.levels.get(fragment, m)
        self.levels[fragment] = level + (m - level) / 4

    def limit(self, fragment: int, norms: Sequence[float]) -> tuple[float, float]:
        """How many times a norm is too large, and the norm."""
        few = len(norms) < 4
        m, factor = _lower_median(norms), 1.0 + (16.0 if few else 8.0) * self.spread
        return min(max(2.0, factor), 16.0), max(m, self.levels.get(fragment, 0.0)) if few else m


def weights(averaged: Sequence[Averaged], config: Json, usual: UsualNorms, fragment: int) -> dict[int, int]:
    """What each contribution weighs, by replica: docs/reference/protocol.md section 4, Weights and Clip."""
    whole = config["sync_every"] // config["fragments"]
    steps, weight = {}, {}
    for a in averaged:
        missing = max(0, whole - a.steps - a.carried) if a.steps else 0
        steps[a.replica_id] = weight[a.replica_id] = config["sync_every"] - missing
        if config["weights"] == "tokens":
            weight[a.replica_id] = max(1, a.tokens * (a.steps + a.carried) // a.steps) if a.steps else 1
        if config["aggregate"] in ("median", "trimmed_mean"):
            weight[a.replica_id] = 1
    if config["weights"] == "tokens" and averaged:
        each = _lower_median([Fraction(weight[i], steps[i]) for i in weight])
        capped = {i: max(1, math.floor(each * steps[i])) for i in weight if weight[i] > 4 * each * steps[i]}
        weight |= capped
    norms = {a.replica_id: Fraction(a.norm) for a in averaged if a.norm}
    if config["clip"] == "off" or not norms:
        return weight
    plain = [a.norm for a in averaged if a.norm]
    factor, level = usual.limit(fragment, plain)
    if config["clip_factor"] or config["aggregate"] == "agreeing_mean":
        factor, level = config["clip_factor"] or 1.25, _lower_median(plain)
    middle, typical = Fraction(level), _lower_median([Fraction(steps[i]) for i in norms])
    far = [i for i in norms if norms[i] > Fraction(factor) * middle * max(1, steps[i] / typical)]
    if far:
        weight = {i: w * 2**20 for i, w in weight.items()}
    for i in far:
        weight[i] = math.floor(weight[i] * middle / norms[i])
    for digests in {a.digests for a in averaged if a.norm}:
        equal = [a.replica_id for a in averaged if a.digests == digests]
        if 1 < len(equal) <= len(averaged) / 2:
            heaviest = max(equal, key=lambda i: (weight[i], -i))
            weight |= {i: 0 for i in equal if i != heaviest}
    zeros = [a.replica_id for a in averaged if not a.norm]
    return weight | (dict.fromkeys(zeros, 0) if len(zeros) < len(averaged) / 2 else {})


def average(averaged: Sequence[Averaged], weight: Mapping[int, int], how: str, codec: str | None) -> Floats:
    """The average of a round by shard, in replica_id order: docs/reference/protocol.md sections 4, Aggregate, and 5.

    `codec`: that it passes through, None for none.
    """
    parts = sorted((a for a in averaged if weight[a.replica_id]), key=lambda a: a.replica_id)
    largest = max(weight[a.replica_id] for a in parts)
    share = {a.replica_id: np.float32(weight[a.replica_id] / largest) for a in parts}
    found = []
    for shard in range(len(parts[0].shards)):
        values = {a.replica_id: decoded(a.shards[shard]) for a in parts}
        if how in ("median", "trimmed_mean"):
            count = len(parts)
            trim = 0 if count < 3 else (count - 1) // 2 if how == "median" else max(1, count // 4)
            rows = np.sort([values[i] * share[i] + np.float32(0) for i in values], axis=0)[trim : count - trim]
            total: Any = np.float32(len(rows))
        else:
            out = _disagreeing(values, {a.replica_id: a.norms[shard] for a in parts}) if how == "agreeing_mean" else ()
            kept = [i for i in values if i not in out]
            largest_kept = max(weight[i] for i in kept)
            of_kept = [np.float32(weight[i] / largest_kept) for i in kept]
            rows = [values[i] * w for i, w in zip(kept, of_kept, strict=True)]
            total = np.float32(0)
            shards = {a.replica_id: a.shards[shard] for a in parts}
            for i, w in zip(kept, of_kept, strict=True):
                total = total + (w * sent(shards[i]) if how == "contributors_mean" else w)
            total = np.where(total == 0, np.float32(1), total)
        summed = np.zeros_like(rows[0])
        for row in rows:
            summed = summed + row
        found.append(passed(summed / total, codec))
    return np.concatenate(found)


def step_residual(
    base: PlainBase,
    before: PlainBase,
    averaged: Sequence[Averaged],
    weight: Mapping[int, int],
    mean: Floats,
    outer: Json,
) -> None:
    """Outer step of the product of a LoRA pair, after its factors' own: docs/reference/protocol.md, Exact adapters."""
    ((_, (rank, columns)), (_, (rows, _))) = base.names[0]

    def factors(vector: Floats) -> tuple[Floats, Floats]:
        return vector[: rank * columns].reshape(rank, columns), vector[rank * columns :].reshape(rows, rank)

    def add_product(to: Floats, b: Floats, a: Floats) -> Floats:
        for r in range(rank):
            to = to + b[:, r : r + 1] * a[r]
        return to

    nothing = np.zeros((rows, columns), np.float32)
    (a, b), (mean_a, mean_b), (new_a, new_b) = (factors(v) for v in (before.parameters[0], mean, base.parameters[0]))
    largest, crossed, total = max(weight[each.replica_id] for each in averaged), nothing, 0.0
    for each in sorted(averaged, key=lambda each: each.replica_id):
        local_a, local_b = factors(np.concatenate([decoded(shard) for shard in each.shards]))
        share = weight[each.replica_id] / largest
        crossed, total = add_product(crossed, local_b * np.float32(share), local_a), total + share
    change = add_product(add_product(nothing, mean_b, a), b, mean_a) - crossed / np.float32(total)
    base.step(1, change.reshape(-1), outer)
    moved = add_product(add_product(nothing, b - new_b, a), new_b, a - new_a)
    base.parameters[1] = base.parameters[1] + moved.reshape(-1)


def _disagreeing(values: Mapping[int, Floats], norms: Mapping[int, float]) -> list[int]:
    """The quarter whose median cosine to the others is the lowest. Values count as whole numbers of at most 127."""
    whole = {}
    for i, vector in values.items():
        exponent = math.frexp(norms[i] / math.sqrt(len(vector)))[1]
        scale = math.ldexp(1.0, min(5 - exponent, 127)) if norms[i] else 0.0
        whole[i] = np.clip(np.rint(vector.astype(np.float64) * scale), -127, 127).astype(np.int64)
    products = {i: {j: int(whole[i] @ whole[j]) for j in whole} for i in whole}
    judged = []
    for i in whole:
        others = [j for j in whole if j != i and products[j][j]]
        if products[i][i] and others:
            cosines = [products[i][j] / math.sqrt(products[i][i] * products[j][j]) for j in others]
            judged.append((_lower_median(cosines), i))
    return [i for _, i in sorted(judged)[: len(judged) // 4]]


def _lower_median(values: Sequence[Any]) -> Any:
    return sorted(values)[(len(values) - 1) // 2]


def _b3(data: bytes) -> str:
    return "b3:" + blake3(data).hexdigest()
