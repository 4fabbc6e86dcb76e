"""A replica of several ranks asks its provider for a GPU for each, by every executor, and pays for all of them."""

from collections.abc import Callable
from typing import Any

import pytest

from executors import (
    EKSExecutor,
    HFJobsExecutor,
    KubernetesExecutor,
    ModalExecutor,
    RayExecutor,
    SlurmExecutor,
)
from executors.contract import LaunchRequest, price_of
from executors.prices import MODAL


def request(ranks: int) -> LaunchRequest:
    return LaunchRequest("run", 0, 1, ["python", "-c", "pass"], ranks=ranks)


def _kubernetes(plan: Any) -> Any:
    (container,) = plan["job"]["spec"]["template"]["spec"]["containers"]
    return container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")


ASKED: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "modal": (lambda gpu: ModalExecutor(gpu=gpu), lambda plan: plan["gpu"]),
    "kubernetes": (lambda gpu: KubernetesExecutor(gpu=gpu, image="any"), _kubernetes),
    "slurm": (
        lambda gpu: SlurmExecutor(gpu=gpu),
        lambda plan: next((each for each in plan["command"] if each.startswith("--gres")), None),
    ),
    "ray": (
        lambda gpu: RayExecutor(address="http://127.0.0.1:1", gpu=gpu),
        lambda plan: plan["job"].get("entrypoint_num_gpus"),
    ),
    "hf": (lambda gpu: HFJobsExecutor(gpu), lambda plan: plan["flavor"]),
}


@pytest.mark.parametrize(
    ("cloud", "gpu", "ranks", "asked"),
    [
        ("modal", "H100", 8, ["H100:8"]),
        ("modal", ["H100!:8", "A100-80GB"], 8, ["H100!:8", "A100-80GB:8"]),
        ("modal", "H100", 1, ["H100"]),
        ("modal", None, 2, []),
        ("kubernetes", 1, 8, "8"),
        ("kubernetes", 8, 8, "8"),
        ("kubernetes", 0, 2, None),
        ("slurm", 1, 1, "--gres=gpu:1"),
        ("slurm", 8, 8, "--gres=gpu:8"),
        ("slurm", "a100", 4, "--gres=gpu:a100:4"),
        ("slurm", "a100:4", 4, "--gres=gpu:a100:4"),
        ("slurm", None, 2, None),
        ("ray", 1, 4, 4),
        ("hf", "a100x8", 8, "a100x8"),
        ("hf", "cpu-xl", 4, "cpu-xl"),
        ("hf", "l4x4", 1, "l4x4"),
    ],
)
def test_each_rank_gets_a_gpu(cloud: str, gpu: Any, ranks: int, asked: Any):
    make, gpus = ASKED[cloud]
    assert gpus(make(gpu).plan(request(ranks))) == asked


@pytest.mark.parametrize(
    ("cloud", "gpu", "ranks", "words"),
    [
        (
            "modal",
            "H100:8",
            1,
            r"gpu='H100:8' asks for 8 GPUs, and replica 0 has 1 rank, .*ranks_per_replica=8 \(--ranks\)",
        ),
        ("modal", "H100:4", 8, "asks for 4 GPUs, and replica 0 has 8 ranks"),
        ("kubernetes", 8, 4, "gpu=8 asks for 8 GPUs, and replica 0 has 4 ranks"),
        ("slurm", "a100:2", 3, "gpu='a100:2' asks for 2 GPUs"),
        ("ray", 2, 1, "gpu=2 asks for 2 GPUs"),
        ("hf", "a100-large", 8, "hardware='a100-large' has 1 GPU, and replica 0 has 8 ranks.*as a100x8 has 8"),
        ("hf", "h200x4", 8, "has 4 GPUs, and replica 0 has 8 ranks"),
    ],
)
def test_another_number_of_gpus_than_ranks_is_refused_with_both(cloud: str, gpu: Any, ranks: int, words: str):
    with pytest.raises(ValueError, match=words):
        ASKED[cloud][0](gpu).plan(request(ranks))


def test_a_replica_pays_for_the_gpus_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch):
    one, eight = (price_of(ModalExecutor(gpu="H100"), request(ranks)) for ranks in (1, 8))
    assert one is not None and eight is not None
    assert eight.hourly_usd - one.hourly_usd == pytest.approx(7 * MODAL.usd["H100"])
    instance = EKSExecutor("mine", region="us-east-1", image="any", gpu=1, instance_type="p5.48xlarge")
    prices = {ranks: price_of(instance, request(ranks)) for ranks in (1, 4, 8)}
    assert {ranks: price and price.hourly_usd for ranks, price in prices.items()} == {1: 6.88, 4: 27.52, 8: 55.04}
