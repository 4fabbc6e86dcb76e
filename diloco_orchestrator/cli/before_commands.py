"""Commands before a run: doctor checks machines and stores, check a training function, lock lists packages."""

import json
import os
from pathlib import Path
from typing import Any

import click

from diloco_orchestrator.cli.shared import (
    EXIT_FAILED,
    ExecutorCommand,
    echo,
    importable,
    json_option,
    pairs,
    say,
    secret_option,
    texts,
)


class _DoctorCommand(ExecutorCommand):
    executor_default = "this machine alone is examined"


@click.command(cls=_DoctorCommand)
@click.argument("url", metavar="[URL]", required=False)
@secret_option
@click.option("--env", metavar="K=V", multiple=True, help="Environment of the process over there. Repeatable.")
@json_option
def doctor(url: str | None, as_json: bool, env: tuple[str, ...], **given: Any) -> int:
    """Check this machine, and with URL a store: its promises, latency, throughput, and where credentials are from.

    With --executor three tiny processes are launched there, for cents: one answers, one is cancelled, one fails. With
    URL too a process starts as a replica would, with the same image, machine and secrets, and checks from over there
    GPU and driver, torch, disk, memory, clock and the store. Each check says what to do.
    """
    from itertools import chain

    from diloco_orchestrator.cli.executor_options import secrets_of, take_fleet
    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.inspection.doctor import examine, examine_executor
    from diloco_orchestrator.inspection.terminal import Console, finding_lines
    from diloco_orchestrator.launching.trial_replica import examine_over_there
    from diloco_orchestrator.store.open_store import absolute_url

    console, found, clock = Console(soft_wrap=True), [], SystemClock()
    executor, _ = take_fleet(given, default=None)
    secrets, where = secrets_of(given.pop("secret_names")), absolute_url(url) if url else None
    if (secrets or env) and (executor is None or where is None):
        raise click.UsageError("--secret and --env are of the process over there: name --executor and URL too.")
    checks = [examine(where, clock)]
    if executor is not None:
        if where:
            executor.use_store(where, {})
        checks.append(examine_executor(executor, clock))
        if where:
            checks.append(examine_over_there(executor, where, clock, env=texts("--env", env), secrets=secrets))
    for finding in chain.from_iterable(checks):
        found.append(finding)
        if not as_json:  # at once: the next check may take minutes
            console.print(finding_lines(finding))
    if as_json:
        echo(json.dumps([finding.to_json() for finding in found]))
    return 0 if all(finding.ok for finding in found) else EXIT_FAILED


@click.command()
@click.argument("target", metavar="FILE.py:FUNCTION")
@click.option(
    "--arg", "args", metavar="K=V", multiple=True, help="For `ctx.args`; V as JSON, else as text. Repeatable."
)
@click.option("--replicas", type=click.IntRange(min=2), default=2, show_default=True, help="Of the run with several.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Processes of each replica.")
@click.option("--rounds", type=click.IntRange(min=2), default=3, show_default=True, help="Of every run.")
@click.option("--sync-every", type=click.IntRange(min=2), default=4, show_default=True, help="Inner steps of a round.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="As of a run.")
@click.option(
    "--limit-s", type=click.FloatRange(min=1), default=120.0, show_default=True, help="s after which a process failed."
)
@json_option
def check(target: str, as_json: bool, args: tuple[str, ...], **settings: Any) -> int:
    """Learn from short local runs whether a training function is sound. Exit 1: it is not.

    FUNCTION may also be PKG.MOD:FUNCTION, looked up from the current folder too. Give it arguments that make a small
    model.
    """
    from diloco_orchestrator.replica.testing import check_replica

    report = check_replica(importable(target), args=pairs("--arg", args), **settings)
    echo(json.dumps(report.to_json()) if as_json else str(report))
    return 0 if report.sound else EXIT_FAILED


@click.command()
@click.option("--store", metavar="URL", default="", help="Of the run, for the packages that it takes to reach it.")
@click.option("--requirements", metavar="FILE", help="Packages that your code needs, without hashes.")
@click.option(
    "--image",
    "images",
    metavar="NAME",
    multiple=True,
    help="Container image that `run` is to send by the digest that its tag has now. Repeatable.",
)
@click.option("--python", default="3.11", show_default=True, help="Oldest version that replicas have.")
@click.option("-o", "--output", default="diloco-lock.txt", show_default=True, help="File to write, beside your code.")
@click.argument("uv_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- UV_OPTION…]")
@json_option
def lock(
    store: str,
    requirements: str | None,
    images: tuple[str, ...],
    python: str,
    output: str,
    uv_options: tuple[str, ...],
    as_json: bool,
) -> None:
    """List all packages that replicas install with version and hashes, by uv, in a file that `run` finds by itself.

    With that file replicas install nothing whose hash is not listed, and every attempt gets an image named with --image
    by the digest that its registry has now (`diloco plan` names the images of a run). Further options go to `uv pip
    compile`, as in `diloco lock -- --torch-backend cpu --emit-index-url`.
    """
    from diloco_orchestrator.code_archive.image_digests import digests_of
    from diloco_orchestrator.code_archive.pinning import write_lock
    from diloco_orchestrator.supervision.launch_request import extras_for

    target = Path(output)
    found = write_lock(
        target,
        extras=extras_for(store),
        requirements=requirements,
        python=python,
        options=uv_options,
        images=digests_of(images, os.environ),
    )
    told = {"file": str(target), "packages": len(found.packages), "images": dict(found.images)}
    with_images = "".join(f"; image {name} is {digest}" for name, digest in sorted(found.images.items()))
    say(as_json, told, f"wrote {target}: {len(found.packages)} packages with hashes{with_images}")
