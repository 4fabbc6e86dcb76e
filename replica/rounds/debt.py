"""`Debt`: what one replica adds to its next contribution of a fragment, so that no work and no rounding is lost.

It has two parts, each from the newest contribution of this replica to the fragment:

    carry       the payload, if no commit averaged it, times a weight that falls with its staleness
    residual    what a codec of very few bits lost of it, times the codec's feedback (error feedback, arXiv 1901.09847)

The next payload is encode(pseudo-gradient + carry + residual). It contains the debt from before it, so the newest
contribution is enough and nothing counts twice. A restarted attempt finds the carry in the bucket, and the residual if
a state was saved with the contribution. Where work is dropped, its residual is dropped too.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.allreduce.payload import publish
from diloco_orchestrator.allreduce.payload_cache import PayloadCache
from diloco_orchestrator.allreduce.shards import fetch, shard_ranges
from diloco_orchestrator.allreduce.vectors import FlatTensors, Vector, norm_of, room
from diloco_orchestrator.clock import Background, in_parallel
from diloco_orchestrator.codecs.table import Encoded, get_codec
from diloco_orchestrator.errors import PayloadCorrupt
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Commit, Contribution, Origin, Payload, Residual
from diloco_orchestrator.protocol.rounds import carry_weight
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.payload_shards import PayloadShard, all_shards
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

Origins = tuple[Origin, ...]
Missing = tuple[tuple[int, float], ...]  # round and share of residuals
Term = tuple[Vector, float]  # of a debt: a vector and its factor
_WHAT = "the residual of a contribution"
_MOST_CARRIED = 32  # origins of a carry that are still listed as carried
_SHARDS_AT_ONCE = 4  # each is in memory until it is in the cache


class Debt:
    """One replica's carry and residuals: unaveraged work of this leg, and what encoding lost of contributions.

    A leg is a run's stretch from start or resume to stop. `fragments`: the number of elements of each.
    """

    def __init__(self, attempt: Attempt, fragments: Sequence[int]) -> None:
        self._attempt = attempt
        self._background = attempt.background
        self._owners = attempt.owners
        self._codec = get_codec(attempt.config.codec)
        self._numels = fragments
        self._fragments = len(fragments)
        self._late = attempt.config.late
        self._carried: dict[int, Contribution] = {}  # by fragment: its newest contribution, if that is not averaged
        self._newest: dict[int, Contribution] = {}  # by fragment: its newest contribution, unless that was dropped
        self._residuals: dict[str, FlatTensors] = {}  # by `write_id` of the contribution
        self._dropped: dict[int, Origins] = {}  # by round: dropped work that no manifest lists as dropped yet

    def recover(
        self,
        rounds: range,
        manifest_of: Callable[[int], Contribution | None],
        commit_of: Callable[[int], Commit],
        is_right: Callable[[Contribution], bool],
        before: Iterable[tuple[Contribution, bool]] = (),
    ) -> None:
        """Find the unaveraged work of earlier attempts of this replica in the bucket.

        Args:
            rounds: closed rounds of this leg, newest first.
            manifest_of: this replica's manifest of a round.
            commit_of: the commit of a round.
            is_right: whether a manifest claims the base that its round started from, as this replica rebuilds it.
            before: this replica's manifests of the rounds that this leg goes on from, newest first, and whether each is
                averaged. Unaveraged work was dropped at their leg's stop.
        """
        self._carried.clear()
        self._newest.clear()
        self._dropped.clear()
        settled: set[int] = set()
        listed: set[int] = set()  # rounds whose work a newer manifest lists as dropped
        for round_ in rounds:
            manifest = manifest_of(round_)
            if manifest is None or manifest.kind != "delta":
                continue
            if manifest.fragment not in settled and self._settle(manifest, commit_of(round_), is_right):
                settled.add(manifest.fragment)
            listed |= {origin.round for origin in manifest.dropped}
            if len(settled) == self._fragments:
                break
        for manifest, is_averaged in before if self._codec.feedback else ():
            if len(settled) == self._fragments:
                break
            if manifest.kind == "delta" and manifest.fragment not in settled:
                settled.add(manifest.fragment)
                if is_averaged:
                    self._newest[manifest.fragment] = manifest
        self._dropped = {round_: origins for round_, origins in self._dropped.items() if round_ not in listed}
        self._free()

    def settle(self, manifest: Contribution, commit: Commit, is_right: Callable[[Contribution], bool]) -> None:
        """Update the debt of a fragment once a round with a contribution of this replica is committed.

        If the commit averages the contribution, its residual is the debt. If the guard quarantines it, its work is
        dropped and the next manifest lists it as dropped. Otherwise this replica checks the contribution against its
        own base, whatever the commit says: if right, it becomes the carry, and its residual stays with it; if wrong,
        its own steps are dropped and listed. An abstention and work from a wrong base leave the debt as it is.
        """
        self._settle(manifest, commit, is_right)
        self._free()

    def _settle(self, manifest: Contribution, commit: Commit, is_right: Callable[[Contribution], bool]) -> bool:
        """Update the debt by what a commit did with this replica's contribution, without freeing memory.

        Returns False for an abstention or work from a wrong base.
        """
        if manifest.kind != "delta":
            return False
        for origin in manifest.dropped:
            self._dropped.pop(origin.round, None)
        if any(a.averaged and a.replica_id == manifest.replica_id for a in commit.answers):
            self._carried.pop(manifest.fragment, None)
            self._newest[manifest.fragment] = manifest
        elif why := commit.quarantines(manifest.replica_id):
            log.warning("round %d: our %d inner steps are dropped: %s", commit.round, _steps(manifest), why)
            self._carried.pop(manifest.fragment, None)  # what it carried is in the suspected payload, too
            self._newest.pop(manifest.fragment, None)
            self._dropped[manifest.round] = manifest.origins
        elif is_right(manifest):
            self._carried[manifest.fragment] = self._newest[manifest.fragment] = manifest
            log.info("round %d went on without our %d inner steps: %s", commit.round, _steps(manifest), self._fate)
        else:
            log.warning("round %d: our %d inner steps, from another base, are dropped", commit.round, _steps(manifest))
            self._dropped[manifest.round] = tuple(o for o in manifest.origins if o.round == manifest.round)
            return False
        return True

    def _free(self) -> None:
        """Free the residuals of contributions that are no fragment's newest any more."""
        newest = {each.write_id for each in self._newest.values()}
        self._residuals = {name: each for name, each in self._residuals.items() if name in newest}

    def drop_all(self) -> None:
        """Discard all unaveraged work: the run has stopped and can never average it."""
        for manifest in self._carried.values():
            log.warning("%d inner steps of round %d are dropped: the run has stopped", _steps(manifest), manifest.round)
        self._carried.clear()

    # -- what the next contribution adds -------------------------------------------------------------------------

    def added_to(self, pseudo_gradient: Vector, fragment: int, round_: int) -> "WithDebt":
        """`pseudo_gradient` plus the debt of `fragment`: unaveraged work, weighted by its staleness in `round_`, and
        residual.

        `dropped` of the result lists work given up: by the setting `late`, because its payload cannot be read, because
        it started from a wrong base, or because it came late so often that less than a thousandth of it is left in the
        carry. (Else a manifest would grow with every round that its author misses.) `missing` lists the residual if
        nobody has kept it. A repeated call gives the same. The caller closes the result, in every rank.
        """
        dropped = tuple(origin for since in sorted(self._dropped) for origin in self._dropped[since])
        carried = self._carried.get(fragment)
        if carried is None:
            return self._with(pseudo_gradient, *self._residual_of_newest(fragment), (), dropped)
        if self._late == "drop":
            log.warning("%d inner steps of round %d are dropped: late is set to drop", _steps(carried), carried.round)
            return self._with(pseudo_gradient, [], (), (), (*dropped, *carried.origins))
        staleness = max(1, (round_ - carried.round) // self._fragments)
        try:
            payload = self._fetch(carried, pseudo_gradient.numel)
        except PayloadCorrupt as error:
            log.error("%d inner steps of round %d are dropped: %s", _steps(carried), carried.round, error)
            return self._with(pseudo_gradient, [], (), (), (*dropped, *carried.origins))
        residual, missing = self._residual_of_newest(fragment)
        debt = [*residual, (payload, carry_weight(staleness))]
        faded, origins = carried.origins[:-_MOST_CARRIED], carried.origins[-_MOST_CARRIED:]
        return self._with(pseudo_gradient, debt, missing, origins, (*dropped, *faded))

    def _with(
        self, pseudo_gradient: Vector, debt: Sequence[Term], missing: Missing, carried: Origins, dropped: Origins
    ) -> "WithDebt":
        return self._owners.make(WithDebt, pseudo_gradient, debt, missing, carried, dropped)

    def _fetch(self, carried: Contribution, numel: int) -> "StoredPayload":
        """An unaveraged contribution's payload. Raises `PayloadCorrupt` if a shard of it is unusable."""
        assert carried.payload is not None
        if carried.payload.numel != numel:
            raise PayloadCorrupt(f"the carry has {carried.payload.numel} elements, the pseudo-gradient {numel}.")
        return self._owners.make(_fetched, self._owners, self._attempt.store, self._background, carried)

    def _residual_of_newest(self, fragment: int) -> tuple[list[Term], Missing]:
        """Residual (what encoding lost) of the newest contribution to a fragment, and a list of it if it is missing."""
        newest = self._newest.get(fragment)
        if newest is None or newest.residual is None:
            return [], ()
        if newest.write_id not in self._residuals:
            try:
                self._residuals[newest.write_id] = self._saved(newest, self._numels[fragment])
            except PayloadCorrupt as error:
                share = newest.residual.share
                words = (
                    "round %d: the residual of our contribution, %.3g %% of its norm, is missing in the next one: %s"
                )
                log.warning(words, newest.round, 100 * share, error)
                return [], ((newest.round, share),)
        return [(self._residuals[newest.write_id], self._codec.feedback)], ()

    def _saved(self, manifest: Contribution, numel: int) -> FlatTensors:
        """The residual (what encoding lost) of a contribution. Raises `PayloadCorrupt` if the bucket lacks it."""
        assert manifest.residual is not None
        saved = manifest.residual.saved
        if saved is None:
            raise PayloadCorrupt("no state was saved with it.")
        if saved.numel != numel or saved.shard_numel < 1 or saved.codec != "fp32":
            raise PayloadCorrupt(f"{saved.numel} elements in {saved.codec} were saved; its fragment has {numel}.")
        if len(ranges := shard_ranges(numel, saved.shard_numel)) != len(saved.shards):
            raise PayloadCorrupt(f"{len(saved.shards)} shards were saved; {numel} elements have {len(ranges)}.")
        return self._owners.make(_saved_residual, self._owners, self._attempt.store, self._background, manifest)

    # -- the residual of a contribution --------------------------------------------------------------------------

    def room(self, numel: int, fragment: int, shard_numel: int) -> FlatTensors | None:
        """Zeros for the residual (what encoding will lose) of the next contribution; None without error feedback."""
        if not self._codec.feedback:
            return None
        return self._owners.make(room, numel, shard_numel, _WHAT, self._owners, fragment)

    def describe_residual(
        self,
        residual: FlatTensors | None,
        payload: Payload,
        missing: Missing,
        round_: int,
        fragment: int,
        *,
        save: bool,
    ) -> Residual | None:
        """The manifest's description of a residual (what encoding lost); None if `residual` is, without error feedback.

        `payload`: what was published of the contribution to `round_`, of this fragment. `missing`: (round, share) of
        earlier residuals that should be in the payload and are not. With `save` the residual is stored in the bucket.
        """
        if residual is None:
            return None
        owners, attempt, saved = self._owners, self._attempt, None
        norm = norm_of(residual, owners, fragment, payload.shard_numel)
        # Payload and residual are orthogonal, because the mean of a class is the projection of its elements.
        share = norm / whole if (whole := math.hypot(norm, payload.norm)) else 0.0
        if save:
            key, cache = partial(keys.residual, attempt.replica_id, round_, attempt.number), owners.make(PayloadCache)
            saved = publish(
                attempt.store,
                key,
                residual,
                "fp32",
                payload.shard_numel,
                cache,
                self._background,
                owners=owners,
                fragment=fragment,
            )
            owners.each(PayloadCache.close, cache)
        return Residual(share=float(f"{share:.3g}"), saved=saved, missing=missing)

    def keep(self, manifest: Contribution, residual: FlatTensors | None) -> None:
        """Keep the residual (what encoding lost) of a published contribution in memory until its round is committed.

        Does nothing if `residual` is None or another attempt of this replica wrote `manifest`.
        """
        if residual is not None and manifest.attempt == self._attempt.number:
            self._residuals[manifest.write_id] = residual

    @property
    def _fate(self) -> str:
        return "they are carried into the next contribution" if self._late == "carry" else "they will be dropped"


def _fetched(owners: Owners, store: Store, background: Background, carried: Contribution) -> "StoredPayload":
    """An unaveraged contribution's payload, in this process's shards. Raises `PayloadCorrupt` for an unusable one."""
    assert carried.payload is not None
    found, reader = StoredPayload(carried.payload), ContributionReader(store)

    def read(shard: PayloadShard) -> None:
        found.put(shard.index, reader.shard(shard.manifest, shard.index))

    own = [each for each in all_shards([carried]) if owners.owns(carried.fragment, each.index)]
    in_parallel(background, [partial(read, shard) for shard in own], _SHARDS_AT_ONCE)
    return found


def _saved_residual(owners: Owners, store: Store, background: Background, manifest: Contribution) -> FlatTensors:
    """The saved residual (what encoding lost) of a contribution, in this process's shards. Raises `PayloadCorrupt`."""
    assert manifest.residual is not None and manifest.residual.saved is not None and manifest.payload is not None
    saved, shard_numel = manifest.residual.saved, manifest.payload.shard_numel
    who = manifest.replica_id, manifest.round, manifest.attempt
    found = room(saved.numel, shard_numel, _WHAT, owners, manifest.fragment)

    def read(index: int, start: int, stop: int) -> None:
        data = fetch(store, keys.residual(*who, index), saved, index)
        found.write(start, Encoded(data, saved.codec, stop - start).values())

    # Earlier versions cut the residual into other shards than the payload.
    own = owners.shards(manifest.fragment, saved.numel, shard_numel)
    needed = [
        partial(read, index, start, stop)
        for index, (start, stop) in enumerate(shard_ranges(saved.numel, saved.shard_numel))
        if any(low < stop and start < high for _, low, high in own)
    ]
    in_parallel(background, needed, _SHARDS_AT_ONCE)
    return found


class StoredPayload:
    """A payload from the bucket as a vector, decoded range by range when it is read."""

    def __init__(self, payload: Payload) -> None:
        self.numel = payload.numel
        self._payload = payload
        self._shards = PayloadCache()

    def put(self, index: int, data: bytes) -> None:
        """Keep the bytes of one shard, which the caller has verified."""
        self._shards.put((str(index), ""), data)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the decoded payload, (stop - start,) float32."""
        parts = []
        for index, (low, high) in enumerate(shard_ranges(self.numel, self._payload.shard_numel)):
            if low < stop and start < high:
                data = self._shards.get((str(index), "")) or b""
                encoded = Encoded(data, self._payload.codec, high - low)
                parts.append(encoded.values(max(low, start) - low, min(high, stop) - low))
        return torch.cat(parts)

    def close(self) -> None:
        """Free the bytes of the payload's shards."""
        self._shards.close()


@runtime_checkable
class _Closes(Protocol):
    """A vector that frees what it reads from by `close`."""

    def close(self) -> None: ...


class WithDebt:
    """A pseudo-gradient plus its author's unaveraged work and residual, added range by range when it is read.

    Args:
        debt: vectors that are added, in this order, and their factors.
        missing: round and share of residuals that should be among them and are not.
        carried: origins of the unaveraged work.
        dropped: origins of work that is given up and that the manifest lists as dropped.
    """

    def __init__(
        self,
        pseudo_gradient: Vector,
        debt: Sequence[Term] = (),
        missing: Missing = (),
        carried: Origins = (),
        dropped: Origins = (),
    ) -> None:
        self.missing = missing
        self.carried = carried
        self.dropped = dropped
        self.numel = pseudo_gradient.numel
        self._pseudo_gradient = pseudo_gradient
        self._debt = debt

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of pseudo-gradient plus unaveraged work and residual, (stop - start,) float32."""
        values = self._pseudo_gradient.read(start, stop)
        for vector, weight in self._debt:
            values.add_(vector.read(start, stop) * weight)
        return values

    def close(self) -> None:
        """Free the local values of the pseudo-gradient, and the bytes of the unaveraged payload that is added."""
        for vector in (self._pseudo_gradient, *(added for added, _ in self._debt)):
            if isinstance(vector, _Closes):
                vector.close()


def _steps(manifest: Contribution) -> int:
    return sum(origin.steps for origin in manifest.origins)
