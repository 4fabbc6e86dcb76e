"""`ObjectStoreAllReduce`: the mean of one tensor over all ranks through a bucket, usable without a run.

Each rank writes its payload and then a manifest, and reads those of all others: for a payload of c bytes, c bytes up
and (N-1) c bytes down, or less by `scatter_reduce`. All ranks must take part. Rounds that go on without some replicas
are in `replica.rounds`.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from diloco_orchestrator.allreduce.dealing import (
    ASSUMED,
    EXACT,
    Link,
    average_codec_of,
    chooses_scatter,
    dealers,
    shard_numel_for,
)
from diloco_orchestrator.allreduce.link import agreed_link
from diloco_orchestrator.allreduce.mean import EncodedShards, Part, mean_into, write_blocks
from diloco_orchestrator.allreduce.payload import check_shape, publish
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.scatter_reduce import ScatterReduce
from diloco_orchestrator.allreduce.shards import NotFinite, fetch, shard_ranges
from diloco_orchestrator.allreduce.vectors import SHARD_NUMEL, FlatTensors
from diloco_orchestrator.clock import Backoff, Clock, SystemClock, ThreadBackground, random_token
from diloco_orchestrator.codecs.table import get_codec
from diloco_orchestrator.errors import AllReduceTimeout, ConfigError, PayloadCorrupt, RoundReused, unknown_name
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import AllReducePart, MeasuredLink
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Payload
from diloco_orchestrator.store.open_store import open_store

Path = Literal["gather", "scatter_reduce", "auto"]

_ATTEMPT = 1  # ranks have no attempts here; a key that holds other bytes means that the round id was used before
_POLL = Backoff(first_s=0.01, longest_s=0.5)


class ObjectStoreAllReduce:
    """The mean over `world_size` ranks through objects in the folder `uri`, which no other training may use.

    Objects stay in the folder: a call of r ranks leaves r payloads, and nothing removes them. Folders `rounds/<id>` of
    rounds that no rank calls again may be deleted. With another number of ranks go on with round ids not used yet.

    Raises `ValueError` for a rank outside 0..world_size-1 and for a timeout that is not positive, `ConfigError` for an
    unknown codec or one that needs error feedback. With `world_size=1` tensors are returned as they are, and no object
    is written.

    Args:
        timeout_s: how long `allreduce` waits for the other ranks.
        storage_options: credentials and endpoint as s3fs spells them.
        codec: the encoding in the bucket, as of a run's setting `codec`.
        path: the same for all ranks. "gather": every rank reads all payloads; "scatter_reduce": about three of them,
            and averages that others have made; "auto": the one that is predicted to take less time over the link that
            the first rank has measured. With "fp32" the mean has the same bits by each; with another codec that of
            "scatter_reduce" is encoded too.
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        timeout_s: float = 1800.0,
        *,
        storage_options: dict[str, Any] | None = None,
        codec: str = "fp32",
        path: Path = "gather",
        clock: Clock | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside 0..{world_size - 1} (world_size={world_size}).")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive.")
        if path not in get_args(Path):
            raise ConfigError(unknown_name("path", path, get_args(Path)))
        if get_codec(codec).feedback:
            raise ConfigError(
                f"codec {codec!r} needs error feedback: what it loses of one tensor must be added to the next, and "
                'allreduce keeps nothing between calls. Use "int4", which needs none.'
            )
        self._codec, self._path = codec, path
        self.rank, self.world_size, self._timeout_s = rank, world_size, timeout_s
        self._clock = clock or SystemClock()
        self._store = open_store(uri, storage_options, clock=self._clock)
        self._stamp = Stamp(random_token(), self._clock.wall_time)

    def allreduce(self, tensor: torch.Tensor, round_id: int) -> torch.Tensor:
        """The mean of all ranks' tensors as a new tensor of the same shape, dtype and device.

        The mean is computed in fp32 whatever the dtype, and every rank gets the same bits. A repeated call with the
        same tensor returns the same mean.

        Raises:
            ValueError: `round_id` is not an int >= 0, or ranks disagree on world size, shape or dtype.
            TypeError: `tensor` is no dense tensor of a real floating-point dtype that has values.
            PayloadCorrupt: the tensor holds NaN, infinity or what fp32 cannot hold, which the other ranks do not learn:
                they wait for `timeout_s`; or another rank's bytes do not match their manifest.
            RoundReused: this rank already published other numbers, or with another world size, under `round_id`.
            AllReduceTimeout: ranks were missing after `timeout_s`; `missing` names them.
        """
        _check_round_id(round_id)
        _check_tensor(tensor)
        if self.world_size == 1:
            return tensor.detach().clone()
        local = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
        if tensor.dtype == torch.float64 and (beyond := int(local.isinf().sum() - tensor.isinf().sum())):
            raise NotFinite(
                f"round {round_id}: {beyond} elements are beyond what fp32 holds (3.4e38), and the mean is computed in "
                "fp32. Scale the tensor first."
            )
        own = PayloadCache()
        mean = torch.empty_like(local)
        scatters, shard_numel = self._cut(mean.numel())
        self._publish(local, tensor, round_id, own, shard_numel)
        peers = self._wait_for_all(round_id)
        shards = [mean.view(-1)[start:stop] for start, stop in shard_ranges(mean.numel(), shard_numel)]
        parts = [self._part(peer, tensor, own, shard_numel) for peer in peers]
        if scatters:
            self._scatter_reduce(round_id, shards, parts)
        else:
            mean_into(shards, parts)
        own.close()
        return mean.to(device=tensor.device, dtype=tensor.dtype)

    def _cut(self, numel: int) -> tuple[bool, int]:
        """(whether a tensor of `numel` elements is averaged by scatter-reduce, elements per shard)."""
        if not chooses_scatter(self._path, numel, self._codec, self.world_size, SHARD_NUMEL, lambda: self._link):
            return False, SHARD_NUMEL
        link = self._link if self._path == "auto" else ASSUMED
        return True, shard_numel_for(numel, self.world_size, SHARD_NUMEL, self._codec, link)

    @functools.cached_property
    def _link(self) -> Link:
        def write(record: MeasuredLink) -> None:
            self._store.create(keys.LINK, record.to_bytes())

        return agreed_link(self._store, self._clock, ThreadBackground(), self._stamp, self.rank, write)

    def _scatter_reduce(self, round_id: int, shards: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
        """Write the mean of `parts` into `shards`. Raises `PayloadCorrupt` if two ranks agree on a wrong mean."""
        pairs = [dealers(round_id, index, self.world_size) for index in range(len(shards))]
        key = keys.reduced(round_id, self.rank)
        reducing = ScatterReduce(
            self._store,
            self._clock,
            ThreadBackground(),
            self._stamp,
            round_id,
            self.rank,
            pairs,
            write=lambda record: self._store.create(key, record.to_bytes()),
        )
        averages = EncodedShards([shard.numel() for shard in shards], average_codec_of(self._codec) or EXACT)
        reducing.average_into(averages, parts)
        for index, shard in enumerate(shards):
            write_blocks(averages.shard(index), shard)
        for (index, _), wrong in sorted(reducing.false.items()):
            if len(wrong) < 2:
                continue  # used by nobody
            raise PayloadCorrupt(
                f"round {round_id} in {self._store.url}: ranks {wrong[0]} and {wrong[1]} published the same average of "
                f"shard {index}, which the payloads do not give. Other ranks may have used it: do not use this round's "
                "means. Compare `diloco doctor` on both machines, or use path='gather'."
            )

    def _publish(
        self, local: torch.Tensor, tensor: torch.Tensor, round_id: int, own: PayloadCache, shard_numel: int
    ) -> None:
        payload = publish(
            self._store,
            lambda shard: keys.payload(round_id, self.rank, _ATTEMPT, shard),
            FlatTensors([local]),
            self._codec,
            shard_numel,
            own,
        )
        ours = AllReducePart(
            **self._stamp(),
            round_id=round_id,
            rank=self.rank,
            world_size=self.world_size,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype),
            payload=payload,
        )
        key = keys.contribution(round_id, self.rank)
        if self._store.create(key, ours.to_bytes()):
            return
        existing = AllReducePart.from_bytes(self._store.get(key), key)
        if existing.world_size != self.world_size:
            raise RoundReused(
                f"round {round_id} in {self._store.url} was one of {existing.world_size} ranks, this is rank "
                f"{self.rank} of {self.world_size}. Use a new folder, or the next round id."
            )
        if _content(existing) != _content(ours):
            raise RoundReused(
                f"rank {self.rank} already published another tensor as round {round_id} in {self._store.url}. "
                "Use a new folder, or the next round id."
            )

    def _wait_for_all(self, round_id: int) -> list[AllReducePart]:
        """The manifests of all ranks, in rank order. Raises `AllReduceTimeout` if some are late by `timeout_s`."""
        found: dict[int, AllReducePart] = {}
        deadline = self._clock.now() + self._timeout_s
        pauses = _POLL.pauses()
        while True:
            for info in self._store.list(keys.contributions(round_id)):
                parsed = keys.contribution.parse(info.key)
                if parsed and parsed[1] not in found:
                    found[parsed[1]] = AllReducePart.from_bytes(self._store.get(info.key), info.key)
            missing = [rank for rank in range(self.world_size) if rank not in found]
            if not missing:
                return [found[rank] for rank in range(self.world_size)]
            if self._clock.now() >= deadline:
                raise AllReduceTimeout(
                    f"round {round_id} in {self._store.url}: nothing from ranks {missing} after {self._timeout_s:g} s. "
                    "Start them and repeat the call (what is published stays valid), or raise timeout_s.",
                    missing,
                )
            self._clock.sleep(next(pauses))

    def _part(self, peer: AllReducePart, tensor: torch.Tensor, own: PayloadCache, shard_numel: int) -> Part:
        """A rank's contribution to the mean. `own`: cache with this rank's bytes, which are not read back."""
        theirs = (peer.world_size, peer.shape, peer.dtype)
        ours = (self.world_size, tuple(tensor.shape), str(tensor.dtype))
        if theirs != ours:
            raise ValueError(
                f"round {peer.round_id}: rank {peer.rank} published (world_size, shape, dtype) = {theirs}, "
                f"this rank has {ours}. All ranks must agree, in a folder of their own."
            )
        if peer.payload.shard_numel != shard_numel:
            raise ValueError(
                f"round {peer.round_id}: rank {peer.rank} cut its payload every {peer.payload.shard_numel} elements, "
                f"this rank every {shard_numel}. All ranks need the same path, here {self._path!r}."
            )
        check_shape(peer.payload, self._codec, tensor.numel(), shard_numel)

        def read(index: int) -> bytes | memoryview:
            key = keys.payload(peer.round_id, peer.rank, _ATTEMPT, index)
            return own.get((key, peer.payload.shards[index].digest)) or fetch(self._store, key, peer.payload, index)

        return Part(peer.rank, 1.0, peer.payload, read)


def _check_tensor(tensor: object) -> None:
    """Raise `TypeError` unless `tensor` is a dense tensor of a real floating-point dtype that has values."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"cannot average a {type(tensor).__name__}: pass a torch.Tensor.")
    if not tensor.is_floating_point():
        raise TypeError(f"cannot average a tensor of {tensor.dtype}: convert it to a floating dtype first.")
    if tensor.is_meta:
        raise TypeError("cannot average a tensor on the meta device: it has no values.")
    if tensor.layout != torch.strided:
        raise TypeError(f"cannot average a tensor of layout {tensor.layout}: call to_dense() first.")


def _check_round_id(round_id: int) -> None:
    if isinstance(round_id, bool) or not isinstance(round_id, int) or round_id < 0:
        raise ValueError(f"round_id={round_id!r} is not an int >= 0.")


def _content(part: AllReducePart) -> tuple[int, tuple[int, ...], str, Payload]:
    """The fields of a manifest that are equal when a rank publishes the same numbers again: all but id and time."""
    return part.world_size, part.shape, part.dtype, part.payload
