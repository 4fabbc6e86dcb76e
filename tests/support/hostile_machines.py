"""Attackers on machines that have joined a run: each wraps the store of its own process, which has the attempt's keys.

The process trains as its link says and follows the log. What it would contribute is withheld, and a script sends other
objects in its place: those of `hostile_replicas`, and a few that need a real machine.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import IO, Any, overload
from urllib.parse import quote, urlsplit

import torch
from hostile_replicas import ATTACKS, Attack, Writer

from diloco_orchestrator import ReplicaContext
from diloco_orchestrator.allreduce.payload import publish
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.codecs.table import Encoded
from diloco_orchestrator.errors import ObjectMissing
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution, Payload, Score
from diloco_orchestrator.protocol.signatures import Signature, signed_bytes, to_text
from diloco_orchestrator.protocol.signed_objects import is_signed
from diloco_orchestrator.protocol.weights import limit_of, norms_after
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.signing.signed_store import SignedStore, signed_store_in
from diloco_orchestrator.store.base import ObjectInfo, Store
from diloco_orchestrator.store.presigned import PresignedStore
from diloco_orchestrator.store.retrying import RetryingStore

FALLS_FROM = 4  # the first round in which a stranger says that its score falls


class HostileMachine(Store):
    """The store of an attacker's process, and what its script knows of the run (`hostile_replicas.Scene`)."""

    def __init__(self, ctx: ReplicaContext, attack: Attack) -> None:
        self._attempt = ctx._attempt
        self.beneath = ctx._attempt.log.store
        self._attack = attack
        self._withheld = b""  # the payload of the process's own contribution
        self._round = 0  # of it
        self._memory: dict[str, Any] = {"draw": torch.Generator().manual_seed(ctx.replica_id)}
        self.url = self.beneath.url
        self.store = _Forging(self.beneath)
        self.replicas = ctx.replicas

    def create(self, key: str, data: bytes) -> bool:
        payload, manifest = keys.parse_payload(key), keys.contribution.parse(key)
        if payload is not None and payload.replica_id == self._attempt.replica_id:
            self._withheld = data
            return True
        if manifest is None or manifest[1] != self._attempt.replica_id:
            return self.beneath.create(key, data)
        honest = Contribution.from_bytes(data, key)
        if honest.payload is None:
            return self.beneath.create(key, data)
        self._round = honest.round
        delta = Encoded(self._withheld, honest.payload.codec, honest.payload.numel).values().clone()
        others = _Others(self.beneath, honest.round)
        own = self._score(honest)
        self._attack(Writer(self, honest.replica_id, honest.round, delta, honest, others, own, self._memory))
        return True

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.beneath.get(key, start, end)

    def put(self, key: str, data: bytes) -> None:
        self.beneath.put(key, data)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self.beneath.list(prefix, start_after)

    def delete(self, key: str) -> None:
        self.beneath.delete(key)

    def open_file(self, key: str) -> IO[bytes] | None:
        return self.beneath.open_file(key)

    # -- what a script knows -------------------------------------------------------------------------------------

    def _score(self, honest: Contribution) -> Score:
        """What it might say of its own held-out share, which it does not score: what its training metric says."""
        start, said = self._attempt.log.start(), honest.in_loop
        assert start is not None and start.record.heldout is not None
        count, mean = start.record.heldout.shares[honest.replica_id], (said.sum or 0.0) / said.count if said else 0.0
        return Score(share=honest.replica_id, sum=mean * count, count=count)

    @property
    def allowed(self) -> float:
        """How many times the median norm a contribution to the open round may have."""
        last, config = self._attempt.log.commit(self._round - 1), self._attempt.config
        before = norms_after(last.commit, config) if last else None
        return float(limit_of([1.0] * self.replicas, 0, before, config).factor)

    def publish(self, round_: int, replica_id: int, vector: torch.Tensor) -> Payload:
        number, config = self._attempt.number, self._attempt.config
        return publish(
            self.beneath,
            lambda shard: keys.payload(round_, replica_id, number, shard),
            FlatTensors([vector]),
            config.codec,
            config.shard_numel,
            PayloadCache(),
        )


class _Others(Sequence[torch.Tensor]):
    """Pseudo-gradients of the open round by replica id, read from the bucket; waits for one that is not there yet."""

    def __init__(self, store: Store, round_: int) -> None:
        self._store = store
        self._round = round_

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> Any:
        assert isinstance(index, int)
        reader = ContributionReader(self._store)
        while True:
            try:
                manifest = reader.exact(self._round, index, None)
            except ObjectMissing:
                time.sleep(0.2)
                continue
            assert manifest.payload is not None
            return Encoded(reader.shard(manifest, 0), manifest.payload.codec, manifest.payload.numel).values().clone()


class _Forging:
    """Writes any object that the machine's rights let it write, with its attempt's signature where one belongs."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, data: bytes) -> None:
        signed = signed_store_in(self._store)
        if signed is None or not signed.is_signed:
            self._store.put(key, data)
            return
        name, sealed = self._as_stored(signed, key, data)
        engine = signed.beneath._opened.store if isinstance(signed.beneath, RetryingStore) else signed.beneath
        if isinstance(engine, PresignedStore) and name not in engine._newest().create:
            _put_without_right(engine, name, sealed)
        elif not signed.beneath.create(name, sealed):
            signed.beneath.put(name, sealed)

    def _as_stored(self, signed: SignedStore, key: str, data: bytes) -> tuple[str, bytes]:
        """Name and content of an object, by keys that may not sign it."""
        rules = signed._rules(keys.ROUNDS)
        assert rules is not None and rules.signer is not None
        name = rules.name_of(key)
        assert name is not None
        if is_signed(key):
            signature = rules.signer.key.sign(signed_bytes(rules.run_sha256, key, data))
            data += Signature(certificate=rules.signer.certificate, signature=to_text(signature)).line()
        return name, data


def _put_without_right(store: PresignedStore, name: str, data: bytes) -> None:
    """Send what another object's signed request would, to this one. Raises `AssertionError` if the store takes it."""
    other, url = next(iter(store._newest().create.items()))
    split = urlsplit(url)
    url = split._replace(path=split.path.removesuffix(quote(other)) + quote(name)).geturl()
    try:
        urllib.request.urlopen(urllib.request.Request(url, data, {"If-None-Match": "*"}, method="PUT")).close()
    except urllib.error.HTTPError as error:
        assert error.code in (401, 403), error
    else:
        raise AssertionError(f"{name} was written")


# -- scripts ----------------------------------------------------------------------------------------------------------


def _says_that_it_falls(writer: Writer) -> None:
    """Honest work. The score that it reports of its own share falls by 10 an item in each round."""
    own, fallen = writer.own, 10.0 * max(0, writer.round - FALLS_FROM + 1)
    scores = (Score(share=own.share, sum=(own.sum or 0.0) - fallen * own.count, count=own.count),)
    writer.send(writer.delta, scores=scores)


def _with_noise(writer: Writer) -> None:
    noise = torch.randn(writer.delta.shape, generator=writer.memory["draw"])
    writer.send(writer.delta + 0.5 * noise)


FALLING, MUCH_NOISE = "honest work, and words of a score that falls", "honest work and much noise"
SCRIPTS: dict[str, Attack] = {**ATTACKS, FALLING: _says_that_it_falls, MUCH_NOISE: _with_noise}


def attack(ctx: ReplicaContext, name: str) -> None:
    """Have what this process contributes from now on be sent by a script of `SCRIPTS`. Call it before `attach`."""
    attempt = ctx._attempt
    attempt.__dict__["config"] = attempt.config.model_copy(update={"late": "drop"})  # nothing is carried
    attempt.log.store = HostileMachine(ctx, SCRIPTS[name])
