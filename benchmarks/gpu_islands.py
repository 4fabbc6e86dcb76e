"""On a GPU: a model sharded by `fully_shard` over a world of one, in NCCL, as a replica and without us.

    python3 benchmarks/gpu_islands.py                  # both models: about three minutes and 40 GiB of an H100
    python3 benchmarks/gpu_islands.py --model lora     # one of them
    python3 benchmarks/gpu_islands.py --tiny           # some seconds on the CPU, over gloo: whether the script works

"full" is a Llama of 1.1 billion parameters, all of them trained, in fp32 with compute in bf16. "lora" has the shape of
Llama 7 B, is frozen in bf16, and trains adapters of rank 16. Both have random weights, drawn on the device. Each is one
replica of a run in a folder in memory. In one process the same loop goes on four times: plain before `ctx.attach`, two
rounds as a replica, and plain again after the run's end; the device is synchronised at the end of each step. Printed
are the median step of each with the clock of the GPU's multiprocessors, the ratio of the replica's to the plain ones
(the bar is 1.03), what a synchronisation took, and the most memory of device and host. Exit code 1 above the bar.
"""

import argparse
import json
import math
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

BAR = 1.03
GIB = 2**30
_WARM_UP_S = 20.0  # of steps before the first that are timed: a GPU's clock falls while it warms up
_SHAPES = {  # vocabulary, hidden size, layers, intermediate size, heads, heads of keys, rows and tokens of a batch
    "full": (32_000, 2048, 16, 8192, 32, 8, 8, 1024),
    "lora": (32_000, 4096, 32, 11008, 32, 32, 2, 1024),
    "tiny": (512, 64, 2, 128, 4, 2, 2, 16),
}


def train(ctx: Any) -> None:
    """Times the steps of one model; writes `args["output"]`."""
    import torch
    import torch.distributed as dist

    device, is_gpu = ctx.device, ctx.device.type == "cuda"
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo", store=store, rank=0, world_size=1)
    began = time.perf_counter()
    model, batch = _model(ctx.args["model"], ctx.args["shape"], device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    found: dict[str, Any] = {"parameters": _count(model), "trained": _count(model, trained=True)}
    found["built_s"] = time.perf_counter() - began

    def finish() -> float:
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def steps(count: int, replica: Any = None) -> list[float]:
        """The seconds of so many steps."""
        seconds = []
        for _ in range(count):
            began = finish()
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            if replica is None:
                loss.item()
            else:
                replica.step(loss=loss.item(), tokens=batch.numel())
            seconds.append(finish() - began)
        return seconds

    def clock() -> float:
        """The clock of the GPU's multiprocessors, in MHz, behind the last step."""
        return float(torch.cuda.clock_rate()) if is_gpu else math.nan

    def peak() -> float:
        """The most memory of the device since the last call, in GiB; of this process on the CPU."""
        if not is_gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        most = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return most

    count = ctx.args["steps"]
    while finish() - began < found["built_s"] + ctx.args["warm_up_s"]:
        steps(1)
    peak()
    found["before"], found["clock before"], found["peak_gib_plain"] = steps(count), clock(), peak()
    began = finish()
    with ctx.attach(model, optimizer) as replica:
        found["attach_s"] = finish() - began
        for name in ("first round", "second round"):
            *inner, last = steps(count + 1, replica)  # the last one ends the round
            found[name], found[f"clock {name}"] = inner, clock()
            found[f"{name}'s end_s"] = last - median(inner)
            found[f"peak_gib {name}"] = peak()
    assert replica.stopped, "the run has two rounds"
    found["after"], found["clock after"] = steps(count), clock()
    found["host_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found["device"] = torch.cuda.get_device_name() if is_gpu else "cpu"
    found["torch"] = torch.__version__
    Path(ctx.args["output"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def _model(name: str, shape: str, device: Any) -> tuple[Any, Any]:
    """A sharded model with random weights, and a batch of tokens."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, hidden, layers, between, heads, keys, rows, length = _SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=between,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    dtype = torch.float32 if name == "full" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    blocks = list(model.model.layers)
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.train(), torch.randint(vocabulary, (rows, length), device=device)


def _count(model: Any, trained: bool = False) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad or not trained)


def measure(name: str, given: argparse.Namespace) -> float:
    """Time one model, print what was found, and return the ratio of a replica's median step to that of a plain one."""
    from diloco_orchestrator import LocalProcessExecutor, launch

    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="gpu-islands-", dir=given.folder or (memory if memory.is_dir() else None)))
    try:
        output, began = folder / "found.json", time.perf_counter()
        args = {"model": name, "shape": "tiny" if given.tiny else name, "steps": given.steps, "output": str(output)}
        args["warm_up_s"] = 0.1 if given.tiny else _WARM_UP_S
        run = launch(
            "gpu_islands:train",
            store=str(folder / "run"),
            executor=LocalProcessExecutor(folder / "executor"),
            args=args,
            replicas=1,
            rounds=2,
            sync_every=given.steps + 1,
            codec=given.codec,
            guard="off",
            replica_state="none",
            snapshot_every=100,
        )
        run.wait()
        found = json.loads(output.read_text())
        stored = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file())
        whole_s = time.perf_counter() - began
    finally:
        shutil.rmtree(folder)
    plain, ours = (
        {each: median(found[each]) for each in names}
        for names in (("before", "after"), ("first round", "second round"))
    )
    both = [
        median([*found[one], *found[other]]) for one, other in (("first round", "second round"), ("before", "after"))
    ]
    where = f"{found['device']}, torch {found['torch']}"
    print(f"{name}: {found['parameters']:,} parameters, {found['trained']:,} trained; {where}")
    print(
        "  ms a step, median:",
        ", ".join(f"{each} {1000 * s:.1f} ({found[f'clock {each}']:.0f} MHz)" for each, s in {**plain, **ours}.items()),
    )
    print(f"  as a replica / plain: {both[0] / both[1]:.4f} (bar {BAR}), of {given.steps} steps each")
    ends = {each: found[f"{each}'s end_s"] for each in ours}
    print(
        f"  seconds: built {found['built_s']:.1f}, attach {found['attach_s']:.1f}, the first round's synchronisation "
        f"{ends['first round']:.1f}, the run's end with its snapshot {ends['second round']:.1f}, all {whole_s:.0f}"
    )
    print(f"  one synchronisation is 3 % of {ends['first round'] / both[1] / (BAR - 1):,.0f} inner steps")
    most = max(found[f"peak_gib {each}"] for each in ours)
    words = f"device plain {found['peak_gib_plain']:.2f}, as a replica {most:.2f}; host {found['host_gib']:.1f}"
    print(f"  GiB at the most: {words}; bucket {stored / GIB:.1f}", flush=True)
    return both[0] / both[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("full", "lora", "both"), default="both")
    parser.add_argument("--steps", type=int, default=25, help="timed steps of each of the four parts")
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--folder", type=Path, help="for the bucket; default: /dev/shm")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    given = parser.parse_args()
    names = ("full", "lora") if given.model == "both" else (given.model,)
    return int(max([measure(name, given) for name in names]) > BAR and not given.tiny)


if __name__ == "__main__":
    sys.exit(main())
