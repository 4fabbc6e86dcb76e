"""The run's training function: traces, three channels, curriculum and hack monitor in a plain loop."""

import copy
import math
from typing import Any

import torch

from composer.curriculum import Curriculum, Draws, suspected_hacks
from composer.data import HeldOut, load_data, make_collator
from composer.losses import TAIDScheduler, compose_loss
from composer.model import make_model
from diloco_orchestrator import ReplicaContext

HELD_OUT = list(range(32))


def train(ctx: ReplicaContext) -> None:
    """What every replica does. `ctx.args`: see `run.py`."""
    args: dict[str, Any] = ctx.args
    torch.set_num_threads(int(args.get("threads", 1)))
    model = make_model(ctx.seed)
    reference = copy.deepcopy(model).eval().requires_grad_(False)  # the run's start, in every attempt
    data = load_data(ctx.replica_id, ctx.seed, args)
    collator = make_collator(reference)
    preferences = [collator.preferences([pair]) for pair in data.pairs]  # the reference is asked once
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(args.get("lr", 3e-3)))
    curriculum = Curriculum()
    draws = Draws(data.states, curriculum, size=4, seed=ctx.seed + ctx.replica_id)
    wrapper, taid = str(args.get("wrapper", "none")), TAIDScheduler(ctx.total_steps)
    with ctx.attach(
        model,
        optimizer,
        heldout=HeldOut(collator, HELD_OUT).losses,
        heldout_items=HELD_OUT,
        in_loop="loss",
        stateful={"curriculum": curriculum, "taid": taid},
    ) as replica:
        steps = ctx.total_steps // int(args["rounds"])

        def follow_loss(view: Any) -> None:
            if view.in_loop is not None:  # the mean over replicas: a replica's own loss would part their t
                taid.update_t(view.in_loop, view.round * steps)

        replica.on_round(curriculum.follow)
        replica.on_round(follow_loss)
        for level, states in replica.batches(draws):
            batch = collator(states, data.hints) | preferences[replica.step_count % len(preferences)]
            loss = compose_loss(
                model,
                batch,
                alpha_sdpo=float(args.get("alpha_sdpo", 0.5)),
                beta_replay=float(args.get("beta_replay", 0.2)),
                sdpo_wrapper=wrapper,  # type: ignore[arg-type]
                taid_t=taid.t if wrapper == "taid" else None,
                strict=True,
            )
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
            ce = float(loss.lm_ce.detach())
            replica.observe(
                loss=ce,
                tokens=int((batch["labels"] >= 0).sum()),
                extra={
                    f"solved_{level}": math.exp(-ce),
                    "suspected_hacks": suspected_hacks(states),
                    "sdpo_jsd": float(loss.sdpo_jsd.detach()),
                    "trace_replay_dpo": float(loss.trace_replay_dpo.detach()),
                    "channels": float(len(loss.active)),
                    "taid_t": taid.t,
                },
            )
