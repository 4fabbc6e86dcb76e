"""The processes that benchmarks start and measure: our replicas, their peers, and the bare transfer.

A process joins, prints a line of JSON, and then answers every line of its input with one of its output. Its seconds are
those of the call alone: wall clock, and CPU of all its threads by `getrusage`. Only public names of the checkout in
PYTHONPATH are used, so that older checkouts run too.
"""

import json
import logging
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

LAYERS = 24
SHARD_BYTES = 64 << 20
_FOREVER = 1_000_000_000  # rounds, so that no run ends and no snapshot is due

Reply = dict[str, Any]
Handler = Callable[[Mapping[str, Any]], Reply]


def timed(call: Callable[[], object]) -> Reply:
    """Seconds of a call on the wall clock, of this process's CPU, and of that in the kernel."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    system_s = after.ru_stime - before.ru_stime
    return {"wall_s": wall_s, "cpu_s": after.ru_utime - before.ru_utime + system_s, "system_s": system_s}


# -- a model ----------------------------------------------------------------------------------------------------------


def model_of(parameters: int) -> Any:
    """A stack of square layers with about so many parameters, with the same values in every process."""
    import torch

    torch.set_num_threads(1)
    width = max(1, round(math.sqrt(parameters / LAYERS)))
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(width))
    return model


def numel_of(parameters: int) -> int:
    """The exact number of parameters of `model_of(parameters)`."""
    return LAYERS * max(1, round(math.sqrt(parameters / LAYERS))) ** 2


def train_a_little(model: Any, rank: int) -> None:
    """What stands for an inner step: the values change, differently on each replica."""
    import torch

    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(1e-4 * (rank + 1) * (1 if index % 2 else -1))


def train_randomly(model: Any, rank: int) -> None:
    """The same with random numbers, as codecs of few bits are made for: of equal ones they would keep the first."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-4)


def _first_value(model: Any) -> float:
    """For the benchmark to see that a sync happened: replicas agree afterwards."""
    return float(next(iter(model.parameters())).detach().view(-1)[0])


# -- programs ---------------------------------------------------------------------------------------------------------


def ours(given: Mapping[str, Any]) -> dict[str, Handler]:
    """A replica in the library form: one inner step a round, so a step of the optimizer is a whole synchronisation."""
    import torch

    from diloco_orchestrator import ObjectStoreManager, make_diloco_outer_loop

    model = model_of(given["parameters"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without gradients its step changes nothing
    manager = ObjectStoreManager.join(
        given["url"],
        given["rank"],
        given["replicas"],
        rounds=_FOREVER,
        codec=given.get("codec", "fp32"),
        snapshot_every=_FOREVER,
        **({"path": given["path"]} if given.get("path", "gather") != "gather" else {}),  # older checkouts have none
    )
    make_diloco_outer_loop(model, optimizer, manager, 1).__enter__()

    def prepare(_: Mapping[str, Any]) -> Reply:
        train_randomly(model, given["rank"])
        return {}

    def sync(_: Mapping[str, Any]) -> Reply:
        return {**timed(optimizer.step), "value": _first_value(model), "step": manager.current_step()}

    return {"prepare": prepare, "sync": sync}


def paced(given: Mapping[str, Any]) -> dict[str, Handler]:
    """A replica that trains fragments with a delay. Its inner steps sleep, as a CPU does beside a GPU that computes.

    With `busy` a step takes `step_s` of CPU time in the training thread instead, so that a replica has one core or less
    for its steps and the synchronisation together.
    """
    import torch

    from diloco_orchestrator import ObjectStoreManager, make_diloco_outer_loop

    model, step_s, steps, said = model_of(given["parameters"]), given["step_s"], given["round_steps"], _LastWait()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger().addHandler(said)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codec, busy = given.get("codec", "fp32"), given.get("busy", False)
    manager = ObjectStoreManager.join(
        given["url"], given["rank"], given["replicas"], rounds=_FOREVER, codec=codec, snapshot_every=_FOREVER
    )
    train, factor = train_a_little if codec == "fp32" else train_randomly, torch.randn(256, 256)
    fragments, delay = given["fragments"], given["delay"]
    make_diloco_outer_loop(
        model, optimizer, manager, steps * fragments, fragments=fragments, fragment_sync_delay=delay
    ).__enter__()

    def inner_step() -> float:
        """The CPU seconds of one step."""
        began = time.thread_time()
        if not busy:
            time.sleep(step_s)
        while busy and time.thread_time() - began < step_s:
            torch.mm(factor, factor)
        return time.thread_time() - began

    def alone(_: Mapping[str, Any]) -> Reply:
        """The utilisation of a round's steps without us: what other work leaves of a core."""
        began = time.perf_counter()
        for _step in range(steps):
            inner_step()
        return {"utilisation": steps * step_s / (time.perf_counter() - began)}

    def train_round(_: Mapping[str, Any]) -> Reply:
        blocked, stepping_s = [], 0.0
        for step in range(steps):
            if step == 0:  # what stands for the round's training is neither a step's time nor a synchronisation's
                train(model, given["rank"])
                began, used = time.perf_counter(), time.process_time()
            step_began = time.perf_counter()
            stepping_s += inner_step()
            optimizer.step()  # the loop's hook publishes and synchronises in here
            blocked.append(time.perf_counter() - step_began - step_s)
        wall_s = time.perf_counter() - began
        return {
            "blocked_s": max(blocked),
            "utilisation": steps * step_s / wall_s,
            "wall_s": wall_s,
            "beside_s": time.process_time() - used - stepping_s,  # CPU time of everything but the steps
            "transfer_s": said.whole_s,
            "value": _first_value(model),
            "step": manager.current_step(),
        }

    return {"round": train_round, "alone": alone}


class _LastWait(logging.Handler):
    """Remembers how long the last round's transfer took, from the line in which the loop says so."""

    whole_s: float | None = None  # older checkouts do not say it

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"waited [\d.]+ s of ([\d.]+) s", record.getMessage()):
            self.whole_s = float(found[1])


def gloo(given: Mapping[str, Any]) -> dict[str, Handler]:
    """One all-reduce of all parameters as one flat vector, over loopback: the transfer and the sum, nothing else."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = given.get("interface", "lo")
    address = f"tcp://{given.get('address', '127.0.0.1')}:{given['port']}"
    dist.init_process_group("gloo", init_method=address, rank=given["rank"], world_size=given["replicas"])
    torch.set_num_threads(1)
    flat = torch.full((numel_of(given["parameters"]),), 1.0)

    def prepare(_: Mapping[str, Any]) -> Reply:
        flat.fill_(1.0 + given["rank"])
        return {}

    def sync(_: Mapping[str, Any]) -> Reply:
        def average() -> None:
            dist.all_reduce(flat)
            flat.div_(given["replicas"])

        return {**timed(average), "value": float(flat[0])}

    return {"prepare": prepare, "sync": sync}


def torchft(given: Mapping[str, Any]) -> dict[str, Handler]:
    """torchft's own DiLoCo with its own manager, lighthouse and gloo process group: the same outer step as ours."""
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    model = model_of(given["parameters"])
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(minutes=10)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=given["replicas"],
        use_async_quorum=False,
        init_sync=False,
        timeout=patience,
        quorum_timeout=patience,
        connect_timeout=patience,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=given["lighthouse"],
        replica_id=f"replica-{given['rank']}",
        hostname="127.0.0.1",
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    DiLoCo(manager, [model], inner, outer, 1).__enter__()

    def prepare(_: Mapping[str, Any]) -> Reply:
        train_a_little(model, given["rank"])
        return {}

    def sync(_: Mapping[str, Any]) -> Reply:
        return {**timed(inner.step), "value": _first_value(model), "step": manager.current_step(), "store": store.port}

    return {"prepare": prepare, "sync": sync}


def lighthouse(given: Mapping[str, Any]) -> dict[str, Handler]:
    """torchft's lighthouse, which waits for all replicas."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=given["replicas"], join_timeout_ms=100)
    return {"address": lambda _: {"address": server.address()}}


def raw(given: Mapping[str, Any]) -> dict[str, Handler]:
    """The transfer of a round through bare obstore, four requests at a time: put one's bytes, get everybody else's."""
    import obstore
    from obstore.store import LocalStore, S3Store

    url, rank, left = given["url"], given["rank"], 4 * numel_of(given["parameters"])
    store: Any
    if url.startswith("s3://"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        options = {"timeout": "15min", "allow_http": True}
        store = S3Store(bucket, prefix=prefix, endpoint=endpoint, unsigned_payload=True, client_options=options)  # type: ignore[arg-type]
    else:
        store = LocalStore(url, mkdir=True)
    shards = [os.urandom(1) * min(SHARD_BYTES, left - start) for start in range(0, left, SHARD_BYTES)]
    pool = ThreadPoolExecutor(4)
    others = [each for each in range(given["replicas"]) if each != rank]

    def key(whose: int, shard: int, repetition: int) -> str:
        return f"rounds/{repetition}/payload/{whose}/{shard}.bin"

    def put(asked: Mapping[str, Any]) -> Reply:
        def call(shard: int) -> None:
            obstore.put(store, key(rank, shard, asked["repetition"]), shards[shard], use_multipart=False)

        return timed(lambda: list(pool.map(call, range(len(shards)))))

    def get(asked: Mapping[str, Any]) -> Reply:
        names = [key(whose, shard, asked["repetition"]) for whose in others for shard in range(len(shards))]

        def call(name: str) -> int:
            return len(bytes(obstore.get(store, name).bytes()))

        return timed(lambda: list(pool.map(call, names)))

    return {"put": put, "get": get}


def memory(given: Mapping[str, Any]) -> dict[str, Handler]:
    """`ours` with gradients and Adam, and what it holds: MiB of anonymous memory, before it joins and around a sync."""
    import torch

    from diloco_orchestrator import ObjectStoreManager, make_diloco_outer_loop

    model = model_of(given["parameters"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    before = anonymous_mib()
    manager = ObjectStoreManager.join(
        given["url"],
        given["rank"],
        given["replicas"],
        rounds=_FOREVER,
        snapshot_every=1 if given.get("snapshots") else _FOREVER,
    )
    make_diloco_outer_loop(model, optimizer, manager, 1).__enter__()
    after = anonymous_mib()

    def prepare(_: Mapping[str, Any]) -> Reply:
        train_a_little(model, given["rank"])
        return {}

    def sync(_: Mapping[str, Any]) -> Reply:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        took = timed(optimizer.step)
        if given.get("snapshots"):
            manager.participant.write_snapshot_if_due()  # as a launched replica's session does
            opened = getattr(manager.participant, "open", manager.participant)  # 0.1 has no `open`
            _await_snapshot(Path(given["url"]), opened.round - 1)
        peak = peak_mib()
        requests = getattr(manager.participant, "_requests", None)  # 0.2 and earlier have none
        if requests is not None:
            requests.payloads.wait()  # the last round's bytes go to a file beside training
        return {
            **took,
            "before_mib": before,
            "joined_mib": after - before,
            "peak_mib": peak - before,
            "held_mib": anonymous_mib() - before,
            "value": _first_value(model),
        }

    return {"prepare": prepare, "sync": sync}


def shards(given: Mapping[str, Any]) -> dict[str, Handler]:
    """What one replica computes in a round of two contributions, with its bytes in memory and no log."""
    from functools import partial
    from types import SimpleNamespace

    import torch

    from diloco_orchestrator.allreduce.payload import publish
    from diloco_orchestrator.allreduce.payload_cache import PayloadCache
    from diloco_orchestrator.allreduce.vectors import SHARD_NUMEL, FlatTensors
    from diloco_orchestrator.clock import ThreadBackground
    from diloco_orchestrator.config import OuterConfig
    from diloco_orchestrator.outer.base import Base
    from diloco_orchestrator.outer.outer_step import average_and_step

    values = torch.randn(given["parameters"], generator=torch.Generator().manual_seed(0))
    base, local, threads = Base.fresh({"w": values}, OuterConfig()), {"w": values.clone()}, ThreadBackground()
    nowhere: Any = SimpleNamespace(url="memory", create=lambda key, data: True)

    def form() -> tuple[Any, PayloadCache]:
        cache = PayloadCache(2**40)
        return publish(nowhere, str, FlatTensors([values]), "fp32", SHARD_NUMEL, cache, threads), cache

    payload, cache = form()
    data = [bytes(cache.get((str(index), shard.digest)) or b"") for index, shard in enumerate(payload.shards)]
    named: Any = [(SimpleNamespace(payload=payload, replica_id=each, round=1), 1.0) for each in range(2)]

    def step() -> None:
        average_and_step(base, 0, named, lambda manifest, index: data[index], OuterConfig())

    def all_passes(_: Mapping[str, Any]) -> Reply:
        calls = {"form": form, "step": step, "install": partial(base.copy_into, local)}
        took = {name: timed(call) for name, call in {**calls, "digest": partial(base.digest, threads)}.items()}
        found: Reply = {f"{name}_s": each["wall_s"] for name, each in took.items()}
        return {**found, **{each: sum(one[each] for one in took.values()) for each in ("wall_s", "cpu_s")}}

    return {"pass": all_passes}


def _await_snapshot(folder: Path, round_: int) -> None:
    """Block until the snapshot of a round, which is written beside training, is complete."""
    until = time.monotonic() + 200
    while not any(folder.glob(f"snapshots/{round_:08d}*/snapshot.json")):
        if time.monotonic() > until:
            raise RuntimeError(f"no snapshot of round {round_} after 200 s: {list(folder.glob('snapshots/*/*'))}")
        time.sleep(0.05)


def _status_mib() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[-1] == "kB"}


def anonymous_mib() -> float:
    """Resident memory, without pages of files."""
    return _status_mib()["RssAnon"]


def peak_mib() -> float:
    """The greatest resident memory since the peak was cleared, without the pages of files that are mapped now."""
    found = _status_mib()
    return found["VmHWM"] - found["RssFile"] - found["RssShmem"]


PROGRAMS = {
    "ours": ours,
    "paced": paced,
    "gloo": gloo,
    "torchft": torchft,
    "lighthouse": lighthouse,
    "raw": raw,
    "memory": memory,
    "shards": shards,
}


def main() -> None:
    # Libraries may print; the pipe to the benchmark is for replies alone.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    handlers = PROGRAMS[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"joined": True}), file=replies)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(handlers[asked["command"]](asked)), file=replies)
    os._exit(0)  # the benchmark is gone; peers need no farewell


if __name__ == "__main__":
    main()
