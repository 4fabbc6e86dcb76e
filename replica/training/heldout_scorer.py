"""`HeldOutScorer`: scores the global model on this replica's shares of the held-out set, without affecting training.

`guard.shares` assigns the shares; the guard's rule judges the scores.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.shares import content_hash, deal, set_digest, shares_of
from diloco_orchestrator.outer.base import Base
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.records import Score
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.tip import OpenRound
from diloco_orchestrator.replica.training import rng
from diloco_orchestrator.split.content import item_hash, merkle_root

HeldoutFn = Callable[[Any, Any], Any]  # (model, items), in the types that its user gives them

SIGN = {"loss": -1.0, "reward": 1.0}  # published numbers: higher is better


@dataclass(frozen=True)
class ShownBase:
    """A model that has the parameters of the open round's base, for measurements, which must leave it unchanged."""

    model: torch.nn.Module
    attempt: Attempt
    open: OpenRound
    holding: Callable[[Base], AbstractContextManager[None]]  # lets the model hold another base for a while


class HeldOutScorer:
    """Scores bases (global models) on this replica's shares of the held-out set. `scores`: of the last base.

    `heldout(model, items)` returns one number per item: nats per token for "loss", the reward for "reward". `root`: of
    the manifest that lists the items; by default computed from the items. `set`: the held-out set for start.json.
    Raises `ConfigError` for fewer items than replicas, and for an item given twice.
    """

    def __init__(
        self,
        heldout: HeldoutFn,
        items: Sequence[Any],
        replicas: int,
        metric: Literal["loss", "reward"],
        root: str | None = None,
        per_replica: bool = False,
    ) -> None:
        if len(items) < replicas:
            raise ConfigError(
                f"{len(items)} held-out items cannot be dealt over {replicas} replicas: give at least one for each, "
                "better a hundred."
            )
        _check_distinct(items)
        self.scores: tuple[Score, ...] = ()
        self._scored: tuple[int, tuple[int, ...]] = (-1, ())  # version of the base, and the roster
        self._heldout = heldout
        self._shares = shares_of(items, replicas)
        self._untouched = set(range(replicas))  # shares that were not scored yet
        self.set = HeldoutSet(
            metric=metric,
            shares=tuple(map(len, self._shares)),
            digest=set_digest(items),
            # Form 1, as earlier versions wrote it: a restarted replica must find the same root in start.json.
            root=root or merkle_root(item_hash(each, form=1) for each in items),
            scorer=scorer_digest(heldout),
        )
        self._sign = SIGN[metric]
        self._per_replica = per_replica

    def has_scored(self, version: int, roster: tuple[int, ...]) -> bool:
        """Whether `scores` are of base number `version`, on the held-out shares that `roster` assigns to this replica.

        `roster`: the replicas that take part in the round.
        """
        return self._scored == (version, roster)

    def score(self, model: torch.nn.Module, replica_id: int, version: int, roster: tuple[int, ...]) -> None:
        """Score `model`, which has base number `version`, on the held-out shares that `roster` assigns to this replica.

        Parameters, modes and random generators are left unchanged. Raises `ConfigError` if the function does not return
        one number per item or changes an item, and the function's errors, with a note.
        """
        dealt = deal(len(self._shares), roster).get(replica_id, [])
        with undisturbed(model):
            self.scores = tuple(self._score_share(model, share) for share in dealt)
        self._scored = version, roster

    def score_local(self, model: torch.nn.Module) -> tuple[Score, ...]:
        """Scores of `model`, with this replica's local parameters, on the same held-out shares; for the per-replica
        guard.

        Empty in a run without that guard. Leaves everything unchanged, as `score` does.
        """
        if not self._per_replica:
            return ()
        with undisturbed(model):
            return tuple(self._score_share(model, score.share) for score in self.scores)

    def values(self, model: torch.nn.Module, replica_id: int, roster: tuple[int, ...]) -> list[float]:
        """Scores of `model` on each held-out item that `roster` assigns to this replica. Higher is better.

        Leaves everything unchanged, and raises, as `score` does.
        """
        dealt = deal(len(self._shares), roster).get(replica_id, [])
        with undisturbed(model):
            values = [values_of(self._heldout, model, self._shares[share], f"share {share}") for share in dealt]
        return [self._sign * value for each in values for value in each]

    def values_of(self, model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
        """Scores of `model` on items that are not held out. Higher is better; all else is as with `values`."""
        with undisturbed(model):
            return [self._sign * value for value in values_of(self._heldout, model, items, "training data")]

    def _score_share(self, model: torch.nn.Module, share: int) -> Score:
        items = self._shares[share]
        before = [content_hash(item) for item in items] if share in self._untouched else None
        values = values_of(self._heldout, model, items, f"share {share}")
        if before is not None:
            self._untouched.discard(share)
            _check_unchanged(items, before, share)
        total = self._sign * math.fsum(values) if all(map(math.isfinite, values)) else None
        return Score(share=share, sum=total, count=len(items))


def values_of(heldout: HeldoutFn, model: torch.nn.Module, items: Sequence[Any], where: str) -> list[float]:
    """The scores that `heldout` gives for all items.

    Raises `ConfigError` for another number of scores than items, and errors of `heldout`, with a note. `where`:
    describes the items, for errors.
    """
    try:
        given = heldout(model, items)
        one = not hasattr(given, "__iter__") or getattr(given, "ndim", 1) == 0  # their mean, say, or a tensor of it
        values = [float(value) for value in ([given] if one else given)]
    except Exception as error:  # the training function runs here
        error.add_note(f"heldout(model, items) raised this, for the {len(items)} items of {where}.")
        raise
    if len(values) != len(items):
        raise ConfigError(f"heldout returned {len(values)} numbers for {len(items)} items; it must be one for each.")
    return values


def scorer_digest(heldout: HeldoutFn) -> str | None:
    """The sha256 of the scoring function's own source, without functions that it calls; None if it has none."""
    while isinstance(heldout, functools.partial):
        heldout = heldout.func
    known = inspect.isroutine(heldout)
    try:
        return sha256_hex(inspect.getsource(heldout if known else type(heldout)).encode())
    except (OSError, TypeError):
        return None


def _check_unchanged(items: Sequence[Any], before: Sequence[str], share: int) -> None:
    """Raise `ConfigError` if an item's content has changed: later rounds would score other items."""
    for index, (item, content) in enumerate(zip(items, before, strict=True)):
        if content_hash(item) != content:
            raise ConfigError(
                f"heldout has changed item {index} of share {share} in place: every later round would score other "
                "items. Let it work on a copy, such as copy.deepcopy(items)."
            )


def _check_distinct(items: Sequence[Any]) -> None:
    """Raise `ConfigError` if an item occurs twice: it would be in two shares, which must not overlap."""
    seen: dict[str, int] = {}
    for index, item in enumerate(items):
        first = seen.setdefault(content_hash(item), index)
        if first != index:
            raise ConfigError(
                f"held-out items {first} and {index} are the same, so that the shares of two replicas overlap. Give "
                "every item once, as in list({str(item): item for item in items}.values())."
            )


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Context with `model` in evaluation mode and without gradients; restores modes and random generators."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with rng.kept(), torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
