"""The API of the user's training function: its argument `ReplicaContext`, and what `attach` returns, `ReplicaSession`.

Training itself is in `replica.training.session`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch

from diloco_orchestrator.errors import ConfigError, unknown_name
from diloco_orchestrator.guard.registry import rule_of
from diloco_orchestrator.guard.strangers import why_never_scored
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.rounds.own_model import OwnModel
from diloco_orchestrator.replica.rounds.participant import Participant
from diloco_orchestrator.replica.training.attached_model import AttachedModel
from diloco_orchestrator.replica.training.consumed_items import ConsumedItems, ItemsOf
from diloco_orchestrator.replica.training.drift_meter import DriftMeter
from diloco_orchestrator.replica.training.exchange import is_sharded
from diloco_orchestrator.replica.training.follower import Follower, signal_state
from diloco_orchestrator.replica.training.guard_evidence import GuardEvidence
from diloco_orchestrator.replica.training.heldout_scorer import SIGN, HeldoutFn, HeldOutScorer
from diloco_orchestrator.replica.training.inner_optimizers import InnerOptimizers
from diloco_orchestrator.replica.training.island import Island, IslandModel, IslandView, RankedOptimizers
from diloco_orchestrator.replica.training.kl_probe import KLProbe
from diloco_orchestrator.replica.training.observed_metrics import number_in
from diloco_orchestrator.replica.training.ranks import Ranks
from diloco_orchestrator.replica.training.round_hooks import RoundFn
from diloco_orchestrator.replica.training.session import TrainingSession
from diloco_orchestrator.replica.training.small_state import check_stateful
from diloco_orchestrator.replica.training.vault_scorer import VaultScorer
from diloco_orchestrator.split.manifest import HeldoutManifest

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class ReplicaContext:
    """The argument of the training function: which replica this is, the run's arguments, and `attach`."""

    def __init__(self, attempt: Attempt, ranks: Ranks | None = None) -> None:
        self.session: ReplicaSession | None = None  # what `attach` returned
        self._attempt = attempt
        self._ranks = ranks or Ranks.alone()

    @property
    def replica_id(self) -> int:
        """This replica's id, from 0 to `replicas` - 1."""
        return self._attempt.replica_id

    @property
    def replicas(self) -> int:
        """The number of parts into which data is dealt: replicas of the run, in one that can be scaled `max_replicas`.

        Nobody reads the part of an id that is vacant.
        """
        return self._attempt.config.most_replicas

    @property
    def rank(self) -> int:
        """This process's rank among those of the replica (`ranks_per_replica`), from 0; 0 in a replica of one process.

        The ranks of a replica train one model and share its batches: give each of them another part of the data.
        """
        return self._ranks.rank

    @property
    def ranks(self) -> int:
        """The number of ranks of this replica. From two on torch's default process group is theirs, and exists."""
        return self._ranks.ranks

    @property
    def local_rank(self) -> int:
        """This process's rank among the ranks of its replica on this machine, from 0."""
        return self._ranks.local_rank

    @property
    def seed(self) -> int:
        """The run's seed, the same on all replicas."""
        return self._attempt.config.seed

    @property
    def args(self) -> dict[str, Any]:
        """The workload's arguments, from `launch(args=...)` or `--arg k=v`. A copy."""
        return dict(self._attempt.config.args)

    @property
    def heldout_items(self) -> Sequence[Any]:
        """The held-out items given to `launch(heldout_items=...)`."""
        return self._attempt.config.heldout_items

    @property
    def total_steps(self) -> int:
        """Inner steps of the run up to its planned stop, for learning-rate schedules: rounds times their steps."""
        return self._attempt.outer_steps * self._attempt.config.round_steps

    @property
    def device(self) -> torch.device:
        """The device to train on: the first GPU that this process sees, in a replica of many ranks that of its local
        rank; without a GPU the CPU.

        Replica i of a local run sees GPU i modulo those of the machine; one of R ranks sees the next R.
        """
        for kind, is_there in (("cuda", torch.cuda.is_available), ("mps", torch.backends.mps.is_available)):
            if is_there():
                return torch.device(kind, self._ranks.local_rank)
        return torch.device("cpu")

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        heldout: HeldoutFn | None = None,
        heldout_items: Sequence[Any] | None = None,
        in_loop: Literal["loss", "reward"] = "loss",
        tokenizer: Any = None,
        stateful: Mapping[str, Any] | None = None,
        heldout_manifest: HeldoutManifest | str | Path | None = None,
        items_of: ItemsOf | None = None,
        kl_probe: KLProbe | None = None,
        vault_items: Sequence[Any] | None = None,
    ) -> "ReplicaSession":
        """Join the run with this model: loads the newest base into it.

        Args:
            model: its `requires_grad` parameters are trained together; the others must be the same in every replica.
                Buffers are this replica's own, and saved. Compiled or not. In a replica of many ranks every rank
                attaches the same model, in DistributedDataParallel or sharded by `fully_shard` (FSDP2), or a plain one
                whose gradients the loop averages.
            optimizer: the inner optimizer, or all of a loop that steps several: an inner step is then one of each.
            heldout: `heldout(model, items)` returns one number per item, mean nats per token or reward, as `in_loop`
                says. Without it the kill-switch is off; `launch(guard="off")` says that this is meant.
            heldout_items: the whole set, the same on all replicas; each scores its share. Default: `ctx.heldout_items`.
            in_loop: "loss" or "reward": the metric that `observe` reports and `heldout` measures.
            tokenizer: saved beside the model in snapshots.
            stateful: further objects to save and restore for a restarted replica, by name: each with `state_dict` and
                `load_state_dict`, such as a learning-rate scheduler. Those up to 64 KiB are saved in every round, like
                the position in the data; larger ones with the optimizer (`replica_state`).
            heldout_manifest: what `diloco split` wrote, or its path: every training item is compared with it before its
                step.
            items_of: `items_of(batch)` returns a batch's items as the held-out set has them, such as texts before
                tokenisation. Default: by the batch's form. Given alone, the held-out items themselves are the manifest.
            kl_probe: measures `kl_to_init`, the drift from the run's start, on the base of every round.
            vault_items: further held-out items, which `heldout` scores only when the guard would halt: the fall must be
                seen on them too. The same on all replicas.

        Raises:
            ConfigError: for invalid arguments, a model that has no values or is sharded by FSDP1, if `attach` was
                called before, if a rank does not call it or brings another model, or if the held-out set is too small
                for the run's `guard.notice_drop`.
            HeldoutItemInTraining: by `batches`, for a batch with a held-out item.
            ModelMismatch: the model, or its frozen tensors, are not those of the other replicas.
        """
        if self.session is not None:
            raise ConfigError("attach was called twice: one replica trains one model.")
        if in_loop not in SIGN:
            raise ConfigError(unknown_name("in_loop", in_loop, SIGN))
        if vault_items is not None and heldout is None:
            raise ConfigError(
                "vault_items were given without a heldout function: they confirm its alarms. Pass heldout and "
                "heldout_items too, or leave them out."
            )
        items = self.heldout_items if heldout_items is None else heldout_items
        manifest = heldout_manifest
        if isinstance(manifest, str | Path):
            manifest = HeldoutManifest.read(manifest)
        compared = _compared(items, vault_items or (), manifest, items_of)
        attached, saved = AttachedModel(model), check_stateful(stateful or {})
        shares = self.ranks > 1 or any(map(is_sharded, attached.parameters.values()))
        optimizers = RankedOptimizers(optimizer) if shares and not self.rank else InnerOptimizers(optimizer)
        attached.check_optimized(optimizers, saved)
        self._ranks.await_all("ctx.attach", self._attempt.config.timing.startup_timeout_s)
        replica = f"{self.seed}/replica {self.replica_id}"
        island = Island(self._ranks, attached, optimizers, saved, heldout, replica)
        if self.rank:
            follower = Follower(island, optimizers, in_loop, compared)
            follower.serve()
            self.session = ReplicaSession(self._attempt, follower, GuardEvidence(items=compared))
            return self.session
        if isinstance(optimizers, RankedOptimizers):
            optimizers.island = island
        if kl_probe is not None and self.ranks > 1:
            raise ConfigError(
                f"kl_probe with {self.ranks} ranks: a probe measures a model of one process. Leave it out, and pass "
                "what the training loop measures to observe(kl_to_init=...)."
            )
        scorer = vault = None
        if heldout is not None:
            root = manifest.root if manifest else None
            scorer, vault = self._scorers(island.scored_by_all(heldout), items, vault_items, in_loop, root)
        elif self.replica_id == 0 and self._attempt.config.guard.rule != "off":
            log.warning('no heldout function was given: the kill-switch is off (launch with guard="off" to mean it)')
        scores_strangers = scorer is not None and self._scores_strangers(len(items))
        evidence = GuardEvidence(scorer, DriftMeter(kl_probe) if kl_probe else None, compared, vault)
        view = frozen = None
        made: Callable[..., OwnModel] = OwnModel
        if shares:
            view, frozen = partial(IslandView, island), island.make("frozen")
            made = partial(IslandModel, island=island)
        parts = attached.split(self._attempt.config, tokenizer, view, frozen)
        own = made(attached.parameters, parts.names, parts.files, evidence.set, scores_strangers)
        rounds = Participant.join(self._attempt, own)
        training = TrainingSession(self._attempt, rounds, parts, optimizers, evidence, in_loop, saved, island)
        signal_state(self._ranks, True, 0, rounds.open.round, stopped=False, preempted=False)
        self.session = ReplicaSession(self._attempt, training, evidence)
        return self.session

    def _scorers(
        self,
        heldout: HeldoutFn,
        items: Sequence[Any],
        vault_items: Sequence[Any] | None,
        in_loop: Literal["loss", "reward"],
        root: str | None,
    ) -> tuple[HeldOutScorer, VaultScorer | None]:
        """Scorers of this replica's shares of the held-out set, and of the vault if there are `vault_items`.

        `root`: digest of the held-out manifest. Raises `ConfigError` if the set is too small for the guard.
        """
        config = self._attempt.config
        rule = rule_of(config.guard.rule)
        scorer = HeldOutScorer(heldout, items, self.replicas, in_loop, root, config.guard.per_replica)
        rule.check_set(config.guard, len(items))
        # `launch` says so of the items that it was given.
        if self.replica_id == 0 and not self.heldout_items and (few := config.too_few_to_fold):
            log.warning("%s", few)
        if vault_items is None:
            return scorer, None
        if not rule.asks_vault and self.replica_id == 0:
            log.warning("vault_items are never scored: the guard rule %s does not ask for them", config.guard.rule)
        return scorer, VaultScorer(heldout, vault_items, self.replicas, in_loop, items)

    def _scores_strangers(self, items: int) -> bool:
        """Whether contributions of strangers are scored in this run. `items`: number of held-out items."""
        config, why = self._attempt.config, why_never_scored(self._attempt.config)
        if not why and items < 2 * config.most_replicas:
            why = f"{items} held-out items are fewer than two for each replica"
        if why and config.invited and self.replica_id == 0:
            log.warning("strangers' contributions are averaged without being scored: %s", why)
        return not why


def _compared(
    items: Sequence[Any], vault_items: Sequence[Any], manifest: HeldoutManifest | None, items_of: ItemsOf | None
) -> ConsumedItems | None:
    """Comparison of training items with the held-out ones; None if neither `manifest` nor `items_of` is given.

    Raises `ConfigError` if `manifest` lacks a held-out item, or `items_of` is given without any.
    """
    every = [*items, *vault_items]
    if manifest is not None:
        manifest.check_holds(every)
    if manifest is None and items_of is None:
        return None
    if manifest is None and not items:
        raise ConfigError(
            "items_of was given with no held-out item to compare with: pass heldout_items or heldout_manifest."
        )
    return ConsumedItems(manifest or HeldoutManifest.of(every), items_of, items)


class ReplicaSession:
    """One attempt's training in a run, as a context manager; made by `ReplicaContext.attach`.

    Leaving the context early publishes nothing: the replica's next attempt trains the open round again.
    """

    def __init__(self, attempt: Attempt, training: TrainingSession | Follower, evidence: GuardEvidence) -> None:
        self._attempt = attempt
        self._training = training
        self._evidence = evidence
        self._entered = False
        self._iterated = False
        self._asks = False  # whether the loop has come back here, by `batches` or `step`, so that it can be ended

    def __enter__(self) -> Self:
        """Continue where an earlier attempt of this replica ended, and score the model."""
        self._entered = True
        try:
            self._training.begin()
        except BaseException:  # an interrupt too: no hook may stay in the user's model
            self._training.detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._training.detach()

    @property
    def is_unheard(self) -> bool:
        """Whether the training loop has neither stepped an optimizer nor called `batches` or `step`.

        Such a loop does not poll whether the process was asked to leave (SIGTERM, time limit).
        """
        return self._entered and not self._asks and self._training.metrics.inner_steps == 0

    @property
    def step_count(self) -> int:
        """Inner steps of the run up to now, from 0 to `ctx.total_steps`; restarts and missed rounds do not reset it.

        A round that could not be applied is not counted: the count goes back to the round's start.
        """
        return self._training.step_count

    @property
    def round(self) -> int:
        """Number of the open round."""
        return self._training.round

    @property
    def stopped(self) -> bool:
        """Whether the run has stopped for all replicas: completed, halted or failed."""
        return self._training.stopped

    @property
    def preempted(self) -> bool:
        """Whether training ended early, because this process got SIGTERM or is near its time limit."""
        return self._training.preempted

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """Batches until the run completes or halts, or this process is preempted.

        `data` is iterated again from its start when it ends. Outer steps happen between two batches, so take at most
        one optimizer step per batch (fewer is fine); with more, the one after an outer step uses gradients from before
        it. In a run with `deal="open"`, `data` is the whole data set in every replica, with a length and an index, and
        this replica gets the batches that it is dealt, one for each optimizer step.

        Raises `ConfigError` outside the `with` block and at a second call, `HeldoutItemInTraining` for a batch with a
        held-out item, and a round's errors, such as `QuorumLost`.
        """
        self._check_entered()
        if self._iterated:
            raise ConfigError("replica.batches was called twice: one loop runs through the whole training.")
        self._iterated = self._asks = True
        batches, items = self._training.batches(data), self._evidence.items
        return batches if items is None else map(items.checked, batches)

    @property
    def compares_items(self) -> bool:
        """Whether training items are compared with the held-out ones: `attach` got heldout_manifest or items_of."""
        return self._evidence.items is not None

    def checked(self, batch: Batch) -> Batch:
        """The same batch, after comparing its items with the held-out ones, as `batches` does. For loops with `step`.

        Call it before training on the batch. Raises `HeldoutItemInTraining` for a held-out item, `ConfigError` if
        `attach` got no manifest and no items_of.
        """
        return self._compared_by("checked").checked(batch)

    def declare(self, items: Iterable[Any]) -> None:
        """Compare training items that are not in the batch, such as prompts drawn by a sampler, with the held-out ones.

        Raises `HeldoutItemInTraining` for a held-out one, `ConfigError` if `attach` got no manifest and no items_of.
        """
        self._compared_by("declare").add(items)

    def _compared_by(self, method: str) -> ConsumedItems:
        if self._evidence.items is None:
            raise ConfigError(
                f"{method} was called with nothing to compare with: pass attach(heldout_manifest=...) or items_of."
            )
        return self._evidence.items

    def on_round(self, function: RoundFn) -> None:
        """Call `function(view)` after each commit that this replica applies, in order, before the next batch.

        It is also called at once with the newest commit, if there is one, so that a restarted attempt repeats that one.
        An error of the function ends the attempt. Put objects that it changes into `stateful`.
        """
        self._training.hooks.add(function)

    def step(
        self,
        loss: float | None = None,
        reward: float | None = None,
        kl_to_init: float | None = None,
        entropy: float | None = None,
        reward_std: float | None = None,
        tokens: int = 0,
        extra: Mapping[str, float] | None = None,
    ) -> bool:
        """Report an optimizer step of a loop that takes its batches elsewhere. Returns False once the loop has to end.

        Metrics are reported as by `observe`. The round is closed if it is complete, which changes the parameters; step
        learning-rate schedules before. The position in the data is saved and restored for objects in `stateful` only.
        Raises `ConfigError` outside the `with` block and in a loop over `batches`, and a round's errors, such as
        `QuorumLost`.
        """
        self._check_entered()
        if self._iterated:
            raise ConfigError(
                "replica.step was called in a loop over replica.batches, which does the same: leave it out."
            )
        if self._attempt.config.deal == "open":
            raise ConfigError(
                'replica.step in a run with deal="open", which deals batches through replica.batches(data): loop over '
                'these, or launch with deal="ids".'
            )
        self._asks = True
        self.observe(loss, reward, kl_to_init, entropy, reward_std, tokens, extra)
        return self._training.step()

    def _check_entered(self) -> None:
        if not self._entered:
            raise ConfigError("nothing is synchronised yet: write `with ctx.attach(...) as replica:` around the loop.")

    def observe(
        self,
        loss: float | None = None,
        reward: float | None = None,
        kl_to_init: float | None = None,
        entropy: float | None = None,
        reward_std: float | None = None,
        tokens: int = 0,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """Report the metrics of the inner step just taken. None means not measured.

        `loss` and `kl_to_init` are in mean nats per token, the others in units of your own; `tokens`: number of tokens
        of this step. `extra`: numbers of your own, at most 16 names of lower-case letters and underscores a round; they
        are in rows, report and trackers, and `guard={"max_extra": {name: limit}}` stops the run above a limit. Raises
        `ConfigError` for negative `tokens`, for `kl_to_init` beside a `KLProbe`, and for a name or number in `extra`
        that cannot be used.
        """
        if kl_to_init is not None and self._evidence.measures_drift:
            raise ConfigError(
                "observe(kl_to_init=...) was called in a run whose KLProbe measures it on every base: leave one out. "
                "The probe's is exact, and starts at the run's first model."
            )
        self._training.metrics.add(
            {"loss": loss, "reward": reward, "kl_to_init": kl_to_init, "entropy": entropy, "reward_std": reward_std},
            tokens,
        )
        if extra:
            self._training.metrics.add_extra(extra)
        shown = loss if loss is not None else reward
        self._attempt.pulse.loss = None if shown is None else number_in(shown)  # a tensor would keep its step's graph
