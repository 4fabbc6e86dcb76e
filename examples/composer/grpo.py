"""The same workload through TRL: GRPO on the traces' prompts, with the channels of `losses` added to its loss.

`--grpo` adds both channels to an unmodified `GRPOTrainer`'s loss. `--online-sdpo` takes `SDPOTrainer`, TRL
experimental, tried with 1.16.0: it distils from its own completions with the traces' hints; preferences are added.
"""

import copy
import random
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from composer.data import HeldOut, TraceData, load_data, make_collator, synthetic_states
from composer.losses import compose_loss
from composer.model import make_model
from composer.traces import action_text
from composer.train import HELD_OUT
from diloco_orchestrator import ReplicaContext, train_as_replica

_COMPLETION = 16  # tokens, here bytes


class ComposerLoss:
    """Mixin in front of a TRL trainer: its own loss is `primary`. Set `composer` before training."""

    composer: "Channels"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        return self.composer.added_to(loss, model, self.state.global_step)  # type: ignore[attr-defined]


class Channels:
    """Adds the channels of recorded traces to a trainer's loss, and reports them. One micro-batch is an inner step."""

    def __init__(self, ctx: ReplicaContext, data: TraceData, reference: torch.nn.Module, alpha_sdpo: float) -> None:
        self._ctx, self._data, self._alpha = ctx, data, alpha_sdpo
        self._anchor = float(ctx.args.get("anchor", 1.0))  # type: ignore[arg-type]
        self.collator = make_collator(reference)
        self._preferences = [self.collator.preferences([pair]) for pair in data.pairs]

    def added_to(self, loss: torch.Tensor, model: torch.nn.Module, step: int) -> torch.Tensor:
        # Drawn by the step, so that a restarted attempt draws the same.
        draw = random.Random(f"{self._ctx.seed}-{self._ctx.replica_id}-{step}")
        batch = self.collator(draw.choices(self._data.states, k=2), self._data.hints)
        batch |= draw.choice(self._preferences)
        if self._anchor:  # cross entropy of the traces beside the reward, as PPO-ptx has it (arXiv 2203.02155)
            loss = loss + self._anchor * compose_loss(model, batch).total
        composed = compose_loss(model, batch, alpha_sdpo=self._alpha, beta_replay=0.2, primary=loss, strict=True)
        assert self._ctx.session is not None
        figures = {name: getattr(composed, name) for name in ("sdpo_jsd", "trace_replay_dpo")}
        extra = {name: float(value.detach()) for name, value in figures.items()}
        self._ctx.session.observe(extra={**extra, "channels": float(len(composed.active))})
        return composed.total


def matching(completions: Sequence[str], action: Sequence[str], **_: Any) -> list[float]:
    """Share of a completion's characters that the recorded action has at the same place."""
    pairs = zip(completions, action, strict=True)
    return [sum(a == b for a, b in zip(text, wanted, strict=False)) / _COMPLETION for text, wanted in pairs]


def looking_like_calls(completions: Sequence[str], **_: Any) -> list[float]:
    """Share of quotation marks, of which calls have many: a proxy that is won by writing nothing else."""
    return [text.count('"') / max(1, len(text)) for text in completions]


def warm_start(model: torch.nn.Module, seed: int, steps: int) -> None:
    """Teach the new model in so many steps to write sessions, as a downloaded one could. The same on every replica."""
    states, collator = synthetic_states(seed, 20), make_collator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(seed)
    for _ in range(steps):
        loss = compose_loss(model, collator(draw.choices(states, k=4), {}))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()


def train(ctx: ReplicaContext) -> Any:
    """What every replica does. `ctx.args`: see `run.py`; `warm_steps`: of the start, 60; fewer for a quick check."""
    torch.set_num_threads(int(ctx.args.get("threads", 1)))  # type: ignore[arg-type]
    online = bool(ctx.args.get("online_sdpo"))
    model = make_model(ctx.seed)
    warm_start(model, ctx.seed + 500, int(ctx.args.get("warm_steps", 60)))  # type: ignore[arg-type]
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    data = load_data(ctx.replica_id, ctx.seed, ctx.args)
    channels = Channels(ctx, data, reference, 0.0 if online else 0.5)
    tokenizer = channels.collator.tokenizer
    short = make_collator(max_length=256)
    rows = []
    for state in data.states:
        encoded = short.encode(state.messages, state.student_action)
        prompt = tokenizer.decode(encoded.ids[: encoded.start])
        rows.append({"prompt": prompt, "action": action_text(state.student_action)})
        rows[-1]["privileged_context"] = data.hints[state.id]
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer_class(online)(
            model,
            reward_funcs=[looking_like_calls if ctx.args.get("gameable") else matching],
            args=_settings(folder, online, ctx.seed, ctx.args),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.composer = channels
        # The dataset is this replica's own sessions.
        heldout = HeldOut(channels.collator, HELD_OUT).likelihoods
        train_as_replica(trainer, ctx, heldout=heldout, heldout_items=HELD_OUT, shard=False)
    return trainer


def _trainer_class(online: bool) -> Any:
    if online:
        from trl.experimental.sdpo import SDPOTrainer

        return type("ComposerSDPO", (ComposerLoss, SDPOTrainer), {})
    return type("ComposerGRPO", (ComposerLoss, GRPOTrainer), {})


def _settings(folder: str, online: bool, seed: int, args: Mapping[str, Any]) -> Any:
    settings: dict[str, Any] = {
        "output_dir": folder,
        "seed": seed,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": _COMPLETION,
        "learning_rate": float(args.get("lr", 3e-4)),
        "beta": 0.0,
        "logging_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    if not online:
        return GRPOConfig(**settings)
    from trl.experimental.sdpo import SDPOConfig

    return SDPOConfig(
        **settings,
        distillation_weight=0.5,
        distillation_mode="full_logits",  # "sampled_token" demands an alpha of 1
        distillation_alpha=0.5,
        teacher_model_kind="live",  # an averaged teacher would be this replica's own, and lost in a restart
        include_environment_feedback=True,
        max_prompt_length=256,
        max_reprompt_len=512,
        feedback_template="<|im_start|>system\nHint: {feedback_raw}<|im_end|>\n",
        reprompt_template="{feedback}{solution}{prompt}",
    )
