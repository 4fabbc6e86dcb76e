"""One round of a finished run computed again from the objects in its bucket alone, without diloco_orchestrator.

python examples/recompute_round.py FOLDER ROUND

Needs numpy and blake3, a snapshot of the round before, and a commit of the round after, which names the digest of the
base that the replicas had. For runs that average everybody's payloads by the mean (`path="gather"`). The formats and
the formula are in docs/reference/bucket.md; every other case is what `diloco verify` does.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import blake3
import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

ELEMENTS = 128  # of a block of the codecs int8 and int4, which share a scale


def digest(data: bytes) -> str:
    return "b3:" + blake3.blake3(data).hexdigest()


def tensors(path: Path) -> dict[str, Vector]:
    """The fp32 tensors of a safetensors file, flat, by name."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {name: np.frombuffer(body[slice(*each["data_offsets"])], "<f4") for name, each in header.items()}


def decoded(data: bytes, codec: str) -> Vector:
    """The values of a payload shard: a header of 16 bytes, then the elements as the codec has them."""
    magic, version, _, count = struct.unpack("<4sHHQ", data[:16])
    assert (magic, version) == (b"DLCO", 1)
    body, values = data[16:], np.empty(count, np.float32)
    if codec == "fp32":
        return np.frombuffer(body, "<f4")
    if codec == "bf16":  # the upper half of an fp32
        return (np.frombuffer(body, "<u2").astype("<u4") << 16).view("<f4")
    if codec not in ("int8", "int4"):
        sys.exit(f"This program decodes fp32, bf16, int8 and int4; the run has codec={codec!r}: use diloco verify.")
    at = 0
    for first in range(0, count, ELEMENTS):
        n = min(ELEMENTS, count - first)
        size = n if codec == "int8" else (n + 1) // 2
        scale = np.frombuffer(body[at : at + 4], "<f4")
        packed = np.frombuffer(body[at + 4 : at + 4 + size], np.uint8)
        if codec == "int8":
            levels = packed.view(np.int8).astype(np.float32)
        else:
            levels = np.stack([packed & 15, packed >> 4], axis=1).ravel()[:n].astype(np.float32) - 8
        values[first : first + n] = levels * scale
        at += 4 + size
    return values


class Base:
    """Parameters and momenta of the outer optimizer, fp32: a flat vector for each fragment, cut into shards."""

    def __init__(self, snapshot: Path, start: Any) -> None:
        self.shapes = {each["name"]: each["shape"] for each in start["parameters"]}
        self.fragments, self.shard_numel = start["fragments"], start["shard_numel"]
        model, outer = tensors(snapshot / "model.safetensors"), {}
        if (snapshot / "outer.safetensors").exists():  # not of the first base
            outer = tensors(snapshot / "outer.safetensors")
        zero = {name: outer.get(f"momentum.{name}", np.zeros_like(model[name])) for name in self.shapes}
        self.parameters = [np.concatenate([model[name] for name in names]) for names in self.fragments]
        self.momenta = [np.concatenate([zero[name] for name in names]) for names in self.fragments]

    def step(self, fragment: int, gradient: Vector, lr: np.float32, momentum: np.float32) -> None:
        """SGD with Nesterov momentum on the averaged pseudo-gradient, in this order of operations."""
        self.momenta[fragment] = self.momenta[fragment] * momentum + gradient
        self.parameters[fragment] = self.parameters[fragment] - (self.momenta[fragment] * momentum + gradient) * lr

    def digest(self) -> str:
        fragments = [[[name, self.shapes[name]] for name in names] for names in self.fragments]
        layout = {"fragments": fragments, "shard_numel": self.shard_numel}
        lines = [digest(json.dumps(layout, separators=(",", ":"), sort_keys=True).encode())]
        for parameters, momenta in zip(self.parameters, self.momenta, strict=True):
            for at in range(0, parameters.size, self.shard_numel):
                shard = slice(at, at + self.shard_numel)
                lines.append(digest(parameters[shard].tobytes() + momenta[shard].tobytes()))
        return digest("\n".join(lines).encode())


def recompute(run: Path, round_: int) -> tuple[str, str]:
    """(base digest after `round_` as computed here, the digest that the next commit names)."""

    def read(name: str) -> bytes:
        path = run / name
        return (min(path.iterdir()) if path.is_dir() else path).read_bytes()  # of a signed run: NAME/SIGNATURE

    def record(name: str) -> Any:
        return json.loads(read(name).splitlines()[0])  # a signed record's second line is its signature

    config, start = record("run.json")["config"], record("start.json")
    commit, after = (record(f"rounds/{each:08d}/commit.json") for each in (round_, round_ + 1))
    if after["leg"] != commit["leg"]:
        sys.exit(f"Round {round_} ended a leg: the next one may begin from an earlier base.")
    if start.get("path", config.get("path")) == "scatter_reduce" or config["aggregate"] != "mean" or commit["clipped"]:
        sys.exit(f"Round {round_} is no plain mean of everybody's payloads: use diloco verify.")
    snapshots = sorted(run.glob(f"snapshots/{round_ - 1:08d}*/snapshot.json"))  # several, where replicas raced
    bases = [Base(each.parent, start) for each in snapshots]
    base = next((each for each in bases if each.digest() == commit["base_digest"]), None)
    if base is None:
        sys.exit(f"No snapshot of round {round_ - 1} holds the base {commit['base_digest']} that round {round_} names.")

    averaged = sorted((each for each in commit["answers"] if each["averaged"]), key=lambda each: each["replica_id"])
    total, weights = np.zeros_like(base.parameters[commit["fragment"]]), np.float32(0)
    for answer in averaged:
        manifest = record(f"rounds/{round_:08d}/contributions/{answer['replica_id']}.json")
        shards = []
        for number, shard in enumerate(manifest["payload"]["shards"]):
            name = f"rounds/{round_:08d}/payload/{answer['replica_id']}/{answer['attempt']}/{number}.bin"
            data = read(name)
            assert digest(data) == shard["digest"], f"{name} is not what its manifest names"
            shards.append(decoded(data, manifest["payload"]["codec"]))
        weight = np.float32(answer["weight"] / max(each["weight"] for each in averaged))
        total, weights = total + np.concatenate(shards) * weight, weights + weight
    if commit["applied"]:
        lr, momentum = np.float32(config["outer"]["lr"]), np.float32(config["outer"]["momentum"])
        base.step(commit["fragment"], total / weights, lr, momentum)
    return base.digest(), after["base_digest"]


if __name__ == "__main__":
    computed, claimed = recompute(Path(sys.argv[1]), int(sys.argv[2]))
    print(f"round {sys.argv[2]}: base {computed}, {'equal' if computed == claimed else f'DIFFERENT, not {claimed}'}")
    sys.exit(computed != claimed)
