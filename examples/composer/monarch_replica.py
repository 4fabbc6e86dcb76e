"""Replicas whose inner steps a mesh of Monarch actors computes: `python examples/composer/monarch_replica.py`.

Needs torchmonarch (0.7.0 was tried, on local CPU processes). The mesh is inside a replica: replicas themselves meet in
the bucket only and need none. Each actor computes the gradient of its share of a batch; the replica averages the shares
in the actors' order and takes the step, so the result depends on no timing.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # where `composer` is imported from

from composer.collate import Collator
from composer.data import HeldOut, load_data, make_collator
from composer.losses import compose_loss
from composer.model import make_model
from composer.train import HELD_OUT
from diloco_orchestrator import ReplicaContext, launch

ACTORS = 2


def train(ctx: ReplicaContext) -> None:
    """What every replica does: a mesh of its own for as long as the training lasts."""
    from monarch.actor import this_host

    from composer.gradient_actor import GradientActor

    torch.set_num_threads(1)
    model, collator = make_model(ctx.seed), make_collator()
    data = load_data(ctx.replica_id, ctx.seed, ctx.args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    processes = this_host().spawn_procs(per_host={"workers": ACTORS})
    try:
        mesh = processes.spawn("gradients", GradientActor, ctx.seed)
        heldout = HeldOut(collator, HELD_OUT).losses
        with ctx.attach(model, optimizer, heldout=heldout, heldout_items=HELD_OUT) as replica:
            for states in replica.batches([data.states[i : i + 4] for i in range(0, len(data.states) - 3, 4)]):
                replica.observe(loss=mesh_step(mesh, model, optimizer, collator, states, data.hints))
    finally:
        processes.stop().get()


def mesh_step(
    mesh: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, collator: Collator, states: Any, hints: Any
) -> float:
    """One inner step: every actor gets the parameters and its part of the states. The mean loss of the parts."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    parts = [collator(states[rank::ACTORS], hints) for rank in range(ACTORS)]
    answers = mesh.gradients.call(parameters, parts).get()
    shares = [value for _, value in sorted(answers.items(), key=lambda item: item[0]["workers"])]
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.stack([gradients[index] for gradients, _ in shares]).mean(0)
    optimizer.step()
    return float(sum(loss for _, loss in shares) / len(shares))


def gradients_here(model: torch.nn.Module, part: Any) -> tuple[list[torch.Tensor], float]:
    """Gradients of all parameters, and the cross entropy, of a batch with two channels."""
    model.zero_grad()
    loss = compose_loss(model, part, alpha_sdpo=0.5, strict=True)
    loss.total.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return gradients, float(loss.lm_ce.detach())


if __name__ == "__main__":
    store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp() + "/run"
    run = launch(
        "composer.monarch_replica:train", store=store, replicas=2, rounds=2, sync_every=3, quorum="all", seed=7
    )
    result = run.wait()
    print(f"{result.status} after {result.rounds} rounds, held-out {[f'{row.heldout:.3f}' for row in result.metrics]}")
