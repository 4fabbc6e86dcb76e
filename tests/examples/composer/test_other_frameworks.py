"""VeRL's policy loss and Monarch's actor mesh, each in an environment of its own (`VERL_PYTHON`, `MONARCH_PYTHON`)."""

import os
import subprocess
from pathlib import Path

import pytest
from environments import make_environment

from diloco_orchestrator import RunReader, open_store, verify

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"

# What `import verl` needs beside our own packages; its transformers and hub are older than ours.
VERL = [
    *("verl==0.9.1", "transformers==5.10.4", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "tensordict==0.10.0"),
    *("ray==2.60.0", "hydra-core==1.3.8", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3", "codetiming==1.4.0"),
    *(
        "torchdata==0.11.0",
        "peft",
        "accelerate",
        "dill",
        "orjson",
        "pyvers",
        "cloudpickle",
        "importlib_metadata",
        "zipp",
    ),
    *("pandas", "python-dateutil", "pytz", "six", "msgpack", "pylatexenc"),
]


def run(python: str, code: str, *arguments: str) -> str:
    # Our code and the example, but not what is installed here: the environment's own packages come first.
    path = os.pathsep.join(map(str, [EXAMPLES.parent, EXAMPLES]))
    environ = {**os.environ, "PYTHONPATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [python, *arguments] if not code else [python, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def program(name: str, packages: list[str], tmp_path: Path, *options: str) -> str:
    given = os.environ.get(f"{name.upper()}_PYTHON")
    return given or str(make_environment(tmp_path / name, packages, *options) / "python")


IN_VERL = """
import torch
import composer.verl_policy_loss
from composer.losses import dpo_loss
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

g = torch.Generator().manual_seed(7)
old = -torch.rand(4, 6, generator=g)
new = (old + 0.1 * torch.randn(4, 6, generator=g)).requires_grad_()
mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
worth = torch.tensor([[1.0], [-1.0], [-0.5], [0.5]]).expand(4, 6)
config = ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=4)
given = dict(old_log_prob=old, log_prob=new, advantages=worth, response_mask=mask, config=config)
ours, metrics = get_policy_loss_fn("composer")(**given)
theirs, _ = get_policy_loss_fn("vanilla")(**given)
sums, ref = (new * mask).sum(-1), (old * mask).sum(-1)
expected = theirs + 0.2 * dpo_loss(sums[[0, 3]], sums[[1, 2]], ref[[0, 3]], ref[[1, 2]], beta=0.1)
assert metrics["composer/pairs"] == 2, metrics
assert torch.equal(ours, expected), (ours, expected)
gradients = [torch.autograd.grad(each, new, retain_graph=True)[0] for each in (ours, expected, theirs)]
assert torch.allclose(gradients[0], gradients[1], rtol=0, atol=1e-7) and not torch.equal(gradients[0], gradients[2])
assert (gradients[0][mask == 0] == 0).all()
equal = {**given, "advantages": torch.ones(4, 6)}
same, metrics = get_policy_loss_fn("composer")(**equal)
assert metrics["composer/pairs"] == 0 and torch.equal(same, get_policy_loss_fn("vanilla")(**equal)[0])
three = {key: value[:3] for key, value in given.items() if key != "config"}
try:
    get_policy_loss_fn("composer")(**three, config=config)
except ValueError as error:
    assert "3 rows are no pairs" in str(error)
else:
    raise AssertionError("3 rows were taken")
print("equal", float(ours))
"""


def test_verls_policy_loss_has_the_preference_channel_of_the_losses(tmp_path: Path):
    python = program("verl", VERL, tmp_path, "--no-deps")
    assert run(python, IN_VERL).splitlines()[-1].startswith("equal")


IN_MONARCH = """
import torch
from composer.data import load_data, make_collator
from composer.gradient_actor import GradientActor
from composer.model import make_model
from composer.monarch_replica import ACTORS, gradients_here, mesh_step
from monarch.actor import this_host

if __name__ == "__main__":
    torch.set_num_threads(1)
    collator, data = make_collator(), load_data(0, 7, {"sessions": 4})
    alone, driving = make_model(7), make_model(7)
    states = data.states[:4]
    shares = [gradients_here(alone, collator(states[rank::ACTORS], data.hints)) for rank in range(ACTORS)]
    for index, parameter in enumerate(alone.parameters()):
        parameter.grad = torch.stack([gradients[index] for gradients, _ in shares]).mean(0)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    processes = this_host().spawn_procs(per_host={"workers": ACTORS})
    mesh = processes.spawn("gradients", GradientActor, 99)  # whose own start does not count
    loss = mesh_step(mesh, driving, torch.optim.SGD(driving.parameters(), lr=0.1), collator, states, data.hints)
    processes.stop().get()
    assert loss == sum(loss for _, loss in shares) / ACTORS
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), driving.parameters(), strict=True))
    print("equal", loss)
"""


def test_a_mesh_of_monarch_actors_drives_a_replicas_inner_steps(tmp_path: Path):
    python = program("monarch", ["torchmonarch==0.7.0"], tmp_path)
    (tmp_path / "in_monarch.py").write_text(IN_MONARCH)
    assert run(python, "", str(tmp_path / "in_monarch.py")).splitlines()[-1].startswith("equal")
    told = run(python, "", str(EXAMPLES / "composer" / "monarch_replica.py"), str(tmp_path / "run"))
    assert told.splitlines()[-1].startswith("completed after 3 rounds")
    reader = RunReader(open_store(str(tmp_path / "run")))
    assert [row.contributors for row in reader.rows()] == [[0, 1], [0, 1], []]
    assert reader.rows()[-1].heldout < reader.rows()[0].heldout - 1  # type: ignore[operator]
    assert verify(str(tmp_path / "run")).agrees
