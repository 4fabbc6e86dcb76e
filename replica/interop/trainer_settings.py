"""Checks and adapts a trainer's settings before it becomes a replica.

It knows transformers' `TrainingArguments` and TRL's additions to them, and imports neither.
"""

import logging
import math
from typing import Any

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.errors import ConfigError

log = logging.getLogger(__name__)

# Schedules that go by the trainer's evaluations: names of settings, and of classes.
_BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy", "ReduceLROnPlateau", "GreedyLR")


def check_trainer(trainer: Any, config: RunConfig, ranks: int = 1, said: int | None = None) -> None:
    """Raise `ConfigError`, naming setting, value and remedy, for a trainer that cannot be a replica.

    `ranks`: processes of the replica. `said`: the number of ranks that the run's configuration gives the replica, by
    which its batches are dealt; None if they are not dealt so.
    """
    args = trainer.args
    check_not_trained(trainer.state.global_step)
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigError(
            "the trainer has deepspeed set, which holds parameters in buffers of its own. Take "
            "TrainingArguments(deepspeed=...) out; with several ranks, fsdp=True shards the model."
        )
    _check_processes(trainer, ranks)
    if said not in (None, ranks):
        raise ConfigError(
            f"this machine joined with --ranks {ranks}, and the run's configuration says {said}, by which batches are "
            "dealt over all ranks. Join without --ranks, set ranks_per_replica, or give each replica its own data and "
            "shard=False."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"the trainer sees {args.n_gpu} GPUs (n_gpu={args.n_gpu}) and would split batches over them: a replica has "
            "one device. Set CUDA_VISIBLE_DEVICES to one GPU."
        )
    if args.fp16:
        raise ConfigError(
            "fp16=True scales losses and skips optimizer steps, which then count as trained. Set bf16=True, or neither."
        )
    if args.resume_from_checkpoint:
        raise ConfigError(
            f"resume_from_checkpoint={args.resume_from_checkpoint!r}: a replica continues from the run's bucket. Take "
            "it out; to start from a checkpoint, load the model from it."
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True begins training anew with another batch size. Set "
            "auto_find_batch_size=False and a per_device_train_batch_size that fits."
        )
    given = type(getattr(trainer, "lr_scheduler", None)).__name__  # by the user, in optimizers=
    if (schedule := _text(getattr(args, "lr_scheduler_type", ""))) in _BY_EVALUATIONS or given in _BY_EVALUATIONS:
        which = f'lr_scheduler_type="{schedule}"' if schedule in _BY_EVALUATIONS else f"a {given} as schedule"
        raise ConfigError(
            f"{which}: each replica would follow evaluations of its own model, and a "
            'restarted one has not all of them. Set another, such as "linear" or "constant".'
        )
    if getattr(args, "sync_ref_model", False):
        raise ConfigError(
            "sync_ref_model=True: a restarted replica would begin with the first reference model again, which no "
            "record holds. Set sync_ref_model=False."
        )
    if config.adapters == "exact" and _reference_is_without_adapter(trainer):
        raise ConfigError(
            f'adapters="exact" with beta={args.beta:g}: the reference model is this one without its adapter, and its '
            "weights would change with every round's residual. Pass ref_model=, set beta=0, or train with "
            'adapters="mean".'
        )
    for name in ("eval_strategy", "logging_strategy"):
        if _text(getattr(args, name)) == "epoch":
            raise ConfigError(f'{name}="epoch": a replica trains in one long epoch. Set {name}="steps".')
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", [])
    if any(kind.__name__ == "EarlyStoppingCallback" for each in callbacks for kind in type(each).__mro__):
        raise ConfigError(
            "the trainer has an EarlyStoppingCallback, by which each replica would end at a step of its own. Take it "
            "out: replicas end together, by the kill-switch on held-out scores or `diloco halt`."
        )
    _check_rollouts(trainer, config)


def _check_processes(trainer: Any, ranks: int) -> None:
    """Raise `ConfigError` unless the trainer's processes are the replica's ranks, each with a part of every batch."""
    args = trainer.args
    if args.world_size != ranks:
        raise ConfigError(
            f"the trainer runs in {args.world_size} processes (world_size={args.world_size}), this replica in {ranks}: "
            "start the training function by `launch(..., ranks_per_replica=...)`, without torchrun or "
            "accelerate launch, make TrainingArguments in it, and set use_cpu=True to train on the CPU beside GPUs."
        )
    plugin = getattr(getattr(getattr(trainer, "accelerator", None), "state", None), "fsdp_plugin", None)
    if (version := getattr(plugin, "fsdp_version", 2)) != 2:
        raise ConfigError(
            f"the trainer has fsdp set with version {version}, which hides the model's own parameters. Set "
            'TrainingArguments(fsdp=True, fsdp_config={"version": 2}), which is fully_shard.'
        )
    if getattr(trainer, "is_fsdp_enabled", False) and ranks == 1:
        raise ConfigError(
            "the trainer has fsdp set, and this replica is one process: set ranks_per_replica to the number of GPUs "
            "over which the model is sharded, or take TrainingArguments(fsdp=...) out."
        )
    parallel = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    sizes = {name: getattr(parallel, f"{name}_size", 1) for name in ("tp", "cp", "sp")}
    if (tp := getattr(trainer.model, "tp_size", None)) is not None:
        sizes["tp"] = max(sizes["tp"], tp)
    for name, size in sizes.items():
        if size > 1:
            raise ConfigError(
                f"the trainer has {name}_size={size}: its ranks share batches, which train_as_replica deals to each "
                f"rank. Set {name}_size=1, or write the loop around ctx.attach (docs/recipes/islands.md)."
            )


def _reference_is_without_adapter(trainer: Any) -> bool:
    """Whether TRL computes the reference model's outputs from the trained model with its adapter disabled."""
    beta, precomputed = (getattr(trainer.args, name, None) for name in ("beta", "precompute_ref_log_probs"))
    return bool(beta) and not precomputed and getattr(trainer, "ref_model", trainer) is None


def check_not_trained(global_step: int) -> None:
    """Raise `ConfigError` for a trainer that has trained, or that continues from a checkpoint."""
    if global_step:
        raise ConfigError(
            f"the trainer is at global_step={global_step} already: its optimizer and schedule belong to another "
            "training. Make a new trainer in the training function, and call train() without resume_from_checkpoint."
        )


def rollout_steps(trainer: Any) -> int:
    """Training batches made from one generation of completions; 1 for trainers that generate none."""
    per_generation, iterations = (
        getattr(trainer.args, "steps_per_generation", None),
        getattr(trainer, "num_iterations", 1),
    )
    return int(per_generation) * int(iterations) if per_generation else 1


def batches_in_a_row(trainer: Any) -> int:
    """Training batches that one rank takes in a row: those of a generation, or of an accumulation window.

    The latter where the sampler sorts what belongs to one window by length: dealt one by one, the batches would give
    one replica all long items and another all short ones.
    """
    args = trainer.args
    generates = getattr(args, "steps_per_generation", None)  # with a sampler of its own
    sorts = getattr(args, "train_sampling_strategy", "") == "batch_rebalance" and not generates
    return int(args.gradient_accumulation_steps) if sorts else rollout_steps(trainer)


def _check_rollouts(trainer: Any, config: RunConfig) -> None:
    """Raise `ConfigError` for rounds that end between a generation and the steps that train on it.

    Its completions would be of another model after the outer step, and a restarted attempt would not have them.
    """
    batches, accumulated = rollout_steps(trainer), trainer.args.gradient_accumulation_steps
    sizes = {config.ranks_of(replica_id) for replica_id in range(config.replicas)}
    if len(sizes) > 1 and getattr(trainer.args, "steps_per_generation", None):
        raise ConfigError(
            f"ranks_per_replica={config.ranks_per_replica}: a trainer that generates draws its prompts in an order "
            "that depends on the number of ranks, so replicas of other sizes would train the same ones. Set one number."
        )
    if config.round_steps * accumulated % batches == 0:
        return
    multiple = batches // math.gcd(batches, accumulated)
    enough = multiple * -(-config.round_steps // multiple) * config.fragments
    iterations = getattr(trainer, "num_iterations", 1)
    raise ConfigError(
        f"sync_every={config.sync_every}: a round of {config.round_steps} inner steps with "
        f"gradient_accumulation_steps={accumulated} does not end with a generation, which lasts "
        f"steps_per_generation={trainer.args.steps_per_generation} * num_iterations={iterations} batches: completions "
        f"of one model would train another. Set sync_every to a multiple of {multiple * config.fragments}, such as "
        f"{enough}."
    )


def adapt_trainer(trainer: Any, total_steps: int) -> None:
    """Change a trainer's settings as a replica needs them, and log it: no own checkpoints, steps to the run's end."""
    args = trainer.args
    if _text(args.save_strategy) != "no":
        log.info("save_strategy=%r is set to 'no': the run's snapshots are in its bucket", _text(args.save_strategy))
        args.save_strategy = type(args.save_strategy)("no")
    if args.load_best_model_at_end:
        log.info(
            "load_best_model_at_end=True is set to False: `diloco pull` names the round whose model has the best score "
            "of `heldout`, and leaves that model with --round"
        )
        args.load_best_model_at_end = False
    if args.max_steps < total_steps:
        log.info(
            "max_steps=%d is set to the run's %d inner steps; num_train_epochs is not used", args.max_steps, total_steps
        )
        args.max_steps = total_steps
    elif args.max_steps > total_steps:
        log.info(
            "max_steps=%d is more than the run's %d inner steps, which end it: learning rates follow the first part of "
            "the schedule. Leave max_steps out for a schedule as long as the run.",
            args.max_steps,
            total_steps,
        )


def _text(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
