"""Launches the composer workload as a run of two replicas: `python examples/composer/run.py [--hack] [--grpo] …`.

One line says where replicas run (`executor_of`); the rest is the same for all.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # `composer` is imported, and packed, from there

from diloco_orchestrator import CodeBundle, CollapseStopError, RunReader, launch, open_store
from diloco_orchestrator.executors import EKSExecutor, HFJobsExecutor, LocalProcessExecutor, ModalExecutor


def executor_of(name: str) -> Any:
    """Where replicas run: the only line that differs."""
    makers: dict[str, Callable[[], Any]] = {
        "local": LocalProcessExecutor,
        "modal": lambda: ModalExecutor("composer"),
        "hf-jobs": HFJobsExecutor,
        "eks": lambda: EKSExecutor(
            os.environ["COMPOSER_CLUSTER"], region=os.environ["AWS_REGION"], image=os.environ["COMPOSER_IMAGE"]
        ),
    }
    return makers[name]()


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What `launch` gets besides entrypoint, store and executor."""
    rounds = options.rounds or (24 if not options.grpo or options.hack else 6)
    guard: dict[str, Any] = {}
    if options.hack:
        # The planted share of gamed sessions, or the reward that completions win without the held-out actions.
        guard = {"min_steps": 5, "max_extra": {"suspected_hacks": 0.05}}
        if options.grpo:
            guard = {"rule": "heldout", "min_steps": 5, "max_proxy_real_gap": 0.1}
    args: dict[str, Any] = {"rounds": rounds, "hacks": 0.2 if options.hack and not options.grpo else 0.0}
    if options.grpo:
        args |= {"online_sdpo": options.online_sdpo, "gameable": options.hack, "anchor": 0.0 if options.hack else 1.0}
    args |= {name: value for name in ("trace", "wrapper", "lr") if (value := getattr(options, name)) is not None}
    return {
        "replicas": 2,
        "rounds": rounds,
        "sync_every": 5,
        "seed": options.seed,
        "quorum": "all",
        "args": args,
        "guard": guard,
        "env": {"OMP_NUM_THREADS": "1"},
        "timing": {"poll_s": 0.05},
    }


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", nargs="?", help="folder or bucket of the run; by default a new temporary folder")
    parser.add_argument("--executor", choices=["local", "modal", "hf-jobs", "eks"], default="local")
    parser.add_argument("--grpo", action="store_true", help="TRL's GRPOTrainer in place of the plain loop")
    parser.add_argument("--online-sdpo", action="store_true", help="with --grpo: TRL's experimental SDPOTrainer")
    parser.add_argument("--hack", action="store_true", help="plant hacks, which halt both replicas")
    parser.add_argument("--wrapper", choices=["none", "taid", "entropy_opd"], help="around the second channel")
    parser.add_argument("--trace", help="a session of your own, on this machine")
    parser.add_argument("--lr", type=float, help="of the inner optimizer")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(given)
    if options.trace and options.executor != "local":
        parser.error("--trace is a path of this machine: put the file into examples/composer, and it travels along.")
    if options.online_sdpo and not options.grpo:
        parser.error("--online-sdpo is a form of --grpo: pass both.")
    store = options.store or tempfile.mkdtemp() + "/run"
    entrypoint = "composer.grpo:train" if options.grpo else "composer.train:train"
    executor = executor_of(options.executor)
    # Credentials of the bucket, where its SDK does not find them by itself. They reach replicas as a secret.
    bucket = json.loads(os.environ.get("DILOCO_STORAGE_OPTIONS", "{}"))
    needs = ["trl>=1.16,<2", "datasets>=5"] if options.grpo else []
    code = CodeBundle([Path(__file__).parent], requirements=needs)
    run = launch(entrypoint, store=store, executor=executor, storage_options=bucket, code=code, **settings_of(options))
    try:
        run.wait()
        halted = None
    except CollapseStopError as stopped:
        halted = stopped
    report(RunReader(open_store(store, bucket)))
    if halted is not None:
        print(f"halted: {halted}")
    return 0 if (halted is not None) == options.hack else 1


def report(reader: RunReader) -> None:
    """What the bucket says of each round."""
    shown = ("channels", "sdpo_jsd", "trace_replay_dpo", "suspected_hacks", "taid_t")
    for row in reader.rows():
        figures = [f"held-out {row.heldout:.3f}"] if row.heldout is not None else []
        figures += [f"loss {row.loss:.3f}"] if row.loss is not None else []
        figures += [f"reward {row.reward:.3f}"] if row.reward is not None else []
        figures += [f"{name} {row.extra[name]:.4g}" for name in shown if name in row.extra]
        print(f"round {row.round}: replicas {list(row.contributors)}, {', '.join(figures)}")
    ended = [reader.attempts.exit(each, 1) for each in range(reader.run.config.replicas)]
    rounds = [each.round for each in ended if each]
    print(f"{reader.store.url}: {reader.commits()[-1].stop}; replicas ended in rounds {rounds}")


if __name__ == "__main__":
    sys.exit(main())
