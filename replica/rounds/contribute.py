"""`Contributor`: publishes this replica's contribution to the open round, and keeps its work if no commit averages it.

Writes payload, saved state and manifest, in this order. `close_round` ends the round.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from diloco_orchestrator.allreduce.owners import Owners
from diloco_orchestrator.allreduce.payload import publish
from diloco_orchestrator.allreduce.payload_cache import KeepsPayloads
from diloco_orchestrator.allreduce.shards import NotFinite
from diloco_orchestrator.allreduce.vectors import BLOCK, Vector
from diloco_orchestrator.codecs.fine import fine_ranges
from diloco_orchestrator.errors import ConfigError, RoundError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.legs import rounds_led_to
from diloco_orchestrator.protocol.record_format import MOST_NORM
from diloco_orchestrator.protocol.records import Commit, Contribution, Origin, Shard
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.base_claims import BaseClaims
from diloco_orchestrator.replica.rounds.contribution_history import ContributionHistory
from diloco_orchestrator.replica.rounds.debt import Debt, WithDebt
from diloco_orchestrator.replica.rounds.interface import ContributionFields
from diloco_orchestrator.replica.rounds.timing import RoundTiming
from diloco_orchestrator.replica.rounds.tip import HeldTip
from diloco_orchestrator.snapshots.buffers import not_a_number, write_buffers

log = logging.getLogger(__name__)

_NAMED = 3  # parameters that are not finite which an abstention names


class Contributor:
    """Makes the contributions of one replica. `cache`: keeps published payload bytes, which averaging then reads."""

    def __init__(
        self, attempt: Attempt, tip: HeldTip, claims: BaseClaims, timing: RoundTiming, cache: KeepsPayloads
    ) -> None:
        self.history = ContributionHistory(attempt, tip, claims)
        self.own: Contribution | None = None  # this replica's manifest of the open round, once it was created here
        self.created: bytes | None = None  # its bytes, if this attempt created it
        self._attempt = attempt
        self._tip = tip
        self._claims = claims
        self._timing = timing
        self._cache = cache
        self._debt = Debt(attempt, [tip.base.numel(names) for names in tip.fragments])

    # -- contributing --------------------------------------------------------------------------------------------

    def contribute_delta(self, pseudo_gradient: Vector, fields: ContributionFields) -> Contribution:
        """Publish a pseudo-gradient and return this replica's manifest of the open round.

        If the pseudo-gradient is not finite or a buffer holds NaN, the manifest is an abstention. `pseudo_gradient`:
        base - local of the open round's fragment, flat in name order; it is read once, and work of that fragment that
        no commit averaged is added. If another attempt of this replica has created the manifest first, that one is
        returned. Raises `RoundError` if all outer steps of the run are taken.
        """
        attempt, opened = self._attempt, self._tip.open
        if opened.stopped or opened.final_evaluation:
            raise RoundError(
                f"the {attempt.outer_steps} outer steps of the run in {attempt.store.url} are taken. End "
                "the training loop there, or join with more rounds in a new folder."
            )
        if name := not_a_number(fields.buffers):
            return self._create("abstention", fields, reason=f"buffer {name} holds NaN")
        vector = self._debt.added_to(pseudo_gradient, opened.fragment, opened.round)
        base, owners, fragment = self._tip.base, attempt.owners, opened.fragment
        residual = self._debt.room(vector.numel, fragment, base.shard_numel)
        shapes = base.shapes(opened.names)
        who = (attempt.replica_id, opened.round, attempt.number)
        saving: dict[str, Future[Shard]] = {}  # while the payload is published
        if (state := fields.state) is not None:
            saving["state"] = attempt.background.start(partial(state.write, attempt.store, *who, attempt.background))
        if fields.buffers:
            write = partial(write_buffers, attempt.store, *who, fields.buffers)
            saving["buffers"] = attempt.background.start(write)
        try:
            payload = publish(
                attempt.store,
                partial(keys.payload, opened.round, attempt.replica_id, attempt.number),
                vector,
                attempt.config.codec,
                base.shard_numel,
                self._cache,
                attempt.background,
                MOST_NORM,
                fine_ranges(shapes),
                residual,
                owners,
                fragment,
            )
            save = fields.state is not None
            said = self._debt.describe_residual(residual, payload, vector.missing, opened.round, fragment, save=save)
        except NotFinite as error:
            found = set().union(*owners.each(_not_finite, owners, vector, shapes, fragment, base.shard_numel))
            where = _not_finite_words(found, shapes) + _losses_not_finite(fields)
            for each in saving.values():  # what they read changes once training goes on
                each.exception()
            return self._create("abstention", fields, reason=f"pseudo-gradient not finite: {error}{where}")
        finally:
            owners.each(WithDebt.close, vector)
        saved = {name: each.result() for name, each in saving.items()}
        origins = (*vector.carried, Origin(round=opened.round, steps=fields.steps))
        named = {"payload": payload, "origins": origins, "dropped": vector.dropped, "residual": said}
        manifest = self._create("delta", fields, **named, **saved)
        self._debt.keep(manifest, residual)
        return manifest

    def abstain(self, fields: ContributionFields, reason: str) -> Contribution:
        """Respond to the open round without a contribution: the inner steps since the last round are dropped."""
        return self._create("abstention", fields, reason=reason)

    def contribute_scores(self, fields: ContributionFields) -> Contribution:
        """Publish this replica's scores in the final evaluation round, in which nobody trains. Returns its manifest."""
        return self._create("scores", fields)

    def announce(self) -> None:
        """Make the next round wait for this replica (put it on the roster), by an abstention in the last closed round.

        Does nothing if this replica has a manifest in that round, or if the open round waits for it anyway.
        """
        attempt, last, opened = self._attempt, self._tip.last, self._tip.open
        expected = opened.stopped or attempt.replica_id in opened.roster
        if last is None or not self._timing.elastic or expected:
            return
        manifest = self._manifest("abstention", ContributionFields(), reason="back, after this round").model_copy(
            update={"round": last.round, "fragment": last.fragment, "base_digest": ""}  # it claims no base
        )
        attempt.writer.create(manifest)

    def _create(self, kind: str, fields: ContributionFields, **contents: Any) -> Contribution:
        """Create this replica's manifest of the open round; returns the existing one if any attempt of it has created
        one.

        If an object that no attempt of this replica wrote has its key, returns the manifest that could not be created.
        """
        attempt, round_ = self._attempt, self._tip.open.round
        manifest = self._manifest(kind, fields, **contents)
        if attempt.writer.create(manifest) is not None:
            self.created = manifest.to_bytes()
        else:
            existing = self.history.of_open_round()
            if existing is None:
                log.error("round %d: a manifest of this replica that none of its attempts wrote came first", round_)
                self.own = manifest  # its work is carried
                return manifest
            if existing.write_id != manifest.write_id:
                log.warning(
                    "round %d: attempt %d of this replica contributed first; attempt %d drops its own %d inner steps",
                    round_,
                    existing.attempt,
                    attempt.number,
                    fields.steps,
                )
            manifest = existing
        self.own = manifest
        return manifest

    def _manifest(self, kind: str, fields: ContributionFields, **contents: Any) -> Contribution:
        """A manifest of the open round. `contents`: its fields that name objects or earlier work, and its reason."""
        attempt, opened = self._attempt, self._tip.open
        if kind == "delta" and fields.steps and attempt.config.weights == "tokens" and fields.tokens < 1:
            raise ConfigError(
                'weights="tokens", the default where replicas have different numbers of ranks, but '
                'observe(tokens=...) reported no token in this round. Report them, or use "uniform".'
            )
        return Contribution(
            **attempt.stamp(),
            round=opened.round,
            leg=attempt.begin.leg,
            replica_id=attempt.replica_id,
            attempt=attempt.number,
            claim_sha256=attempt.claim_sha256,
            kind=kind,  # type: ignore[arg-type]
            base_digest=self._claims.hash(),
            snapshot_round=self._tip.value.snapshot_round,
            rebuilt_after=self._claims.rebuilt_after,
            fragment=opened.fragment,
            tokens=fields.tokens if kind == "delta" else 0,
            in_loop=fields.in_loop,
            scores=fields.scores,
            local_scores=fields.local_scores if kind == "delta" else (),
            vault=fields.vault,
            metrics=dict(fields.metrics),
            disagreeing=self._tip.disagreeing,
            consumed=fields.consumed,
            progress=fields.progress,
            train_s=self._timing.train_s,
            ranks=ranks if (ranks := attempt.owners.ranks) > 1 else None,
            **contents,
        )

    # -- after a round -------------------------------------------------------------------------------------------

    def settle(self, commit: Commit) -> None:
        """Decide after `commit` whether this replica's contribution to its round counts, is kept for a later payload,
        or dropped.

        Does nothing without a contribution.
        """
        manifest = self.own or self.history.of(commit.round)
        if manifest is not None:
            self._debt.settle(manifest, commit, self._claims.is_right)

    def open_round(self) -> None:
        """Forget the contribution of the closed round. After the run's stop, drop unaveraged work."""
        self.own = self.created = None
        if self._tip.open.stopped:
            self._debt.drop_all()

    def recover(self) -> None:
        """Restore unaveraged work and the train times of the last rounds from the bucket."""
        self.recover_carry()
        self._timing.recover()
        if self._attempt.begin.leg > 1 and not self._tip.closed_rounds:
            self._warn_of_dropped_work()

    def recover_carry(self) -> None:
        """Find this replica's unaveraged work in the bucket again. What was trained from a wrong base is dropped.

        For a base that got other bits by a rebuild, which changes what is right.
        """
        self._debt.recover(
            self._tip.closed_rounds,
            self.history.of,
            self._tip.commit_of,
            self._claims.is_right,
            self._before_this_leg(),
        )

    def _before_this_leg(self) -> Iterator[tuple[Contribution, bool]]:
        """(manifest of this replica, whether it was averaged) of the rounds before the last resume, newest first.

        Only rounds that led to the base that was resumed from, of as many legs as there are fragments.
        """
        begin, begins = self._attempt.begin, self._attempt.log.begins()
        for round_ in rounds_led_to(begin, begins, len(self._tip.fragments)):
            if (manifest := self.history.of(round_)) is not None:
                yield manifest, _is_averaged(manifest, self._tip.commit_of(round_))

    def _warn_of_dropped_work(self) -> None:
        """Warn if this replica's last contribution, from before the last resume, was not averaged: it never will be."""
        newest = self.history.newest()
        if newest is None or newest.kind != "delta" or newest.leg == self._attempt.begin.leg:
            return
        if not _is_averaged(newest, self._tip.commit_of(newest.round)):
            steps = sum(origin.steps for origin in newest.origins)
            log.warning("%d inner steps of round %d are dropped: their leg has ended", steps, newest.round)


def _is_averaged(manifest: Contribution, commit: Commit) -> bool:
    """Whether the commit of a manifest's round averages its contribution."""
    return any(answer.averaged and answer.replica_id == manifest.replica_id for answer in commit.answers)


def _not_finite(
    owners: Owners, vector: Vector, shapes: Mapping[str, torch.Size], fragment: int, shard_numel: int
) -> set[str]:
    """The parameters that hold NaN or infinity in this process's shards of a vector.

    `vector`: the values of the parameters in `shapes`, flat in this order, of this fragment.
    """
    own = owners.shards(fragment, vector.numel, shard_numel)
    found, start = set[str](), 0
    for name, shape in shapes.items():
        stop = start + shape.numel()
        ranges = [(max(low, start), min(high, stop)) for _, low, high in own if low < stop and start < high]
        blocks = (vector.read(at, min(at + BLOCK, last)) for first, last in ranges for at in range(first, last, BLOCK))
        if not all(bool(torch.isfinite(block).all()) for block in blocks):
            found.add(name)
        start = stop
    return found


def _not_finite_words(found: Collection[str], shapes: Mapping[str, torch.Size]) -> str:
    """A sentence naming the first parameters that are not finite (`found`); empty if only their encoding is not."""
    named = [name for name in shapes if name in found]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f" They are in {', '.join(named[:_NAMED])}{more}." if named else ""


def _losses_not_finite(fields: ContributionFields) -> str:
    """A sentence naming the observed metrics of the round that are not finite; empty if all are finite."""
    found = [name for name, metric in sorted(fields.metrics.items()) if metric.sum is None and metric.count]
    return f" Not finite either: {', '.join(found)}." if found else ""
