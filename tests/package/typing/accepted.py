"""What users write, and type checkers accept: `test_public_face.py` runs them over this file."""

from pathlib import Path

import torch

from diloco_orchestrator import (
    CodeBundle,
    ExecutorDenied,
    GuardConfig,
    LaunchPlan,
    LocalProcessExecutor,
    ModalExecutor,
    ReplicaContext,
    RoundRow,
    Run,
    RunNotFinished,
    RunReader,
    RunResult,
    ServerlessExecutor,
    TimingConfig,
    Verdict,
    Verification,
    attach,
    launch,
    open_store,
    plan_launch,
    pull,
    verify,
)


class Network(torch.nn.Linear):
    pass


def score(model: Network, items: list[torch.Tensor]) -> list[float]:
    return [float(model(item)) for item in items]


def train(ctx: ReplicaContext) -> None:
    assert ctx.replica_id < ctx.replicas
    model = Network(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(ctx.args["lr"]))
    with ctx.attach(model, optimizer, heldout=score, heldout_items=[torch.ones(4)], in_loop="loss"):
        pass


def start(place: ServerlessExecutor) -> RunResult:
    run: Run = launch(
        train,
        store="runs/a",
        executor=place,
        replicas=4,
        rounds=3,
        args={"lr": 3e-4},
        quorum="all",
        guard={"min_steps": 3},
        timing=TimingConfig(poll_s=0.1),
        code=CodeBundle(["src"]),
        pin="require",
    )
    try:
        return run.result()
    except (RunNotFinished, ExecutorDenied):
        return run.wait(timeout=60.0)


def look(url: str) -> tuple[Verification, int, LaunchPlan]:
    rows: list[RoundRow] = RunReader(open_store(url)).rows()
    verdict: Verdict | None = attach(url).result().verdict
    assert verdict is None or rows
    plan = plan_launch("my_pkg.train:train", url, executor=ModalExecutor(gpu="A100"), guard=GuardConfig(min_steps=3))
    return verify(url), pull(url, Path("model"), 3), plan


start(LocalProcessExecutor())
