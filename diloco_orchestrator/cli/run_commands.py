"""Commands that start, supervise, stop or tidy up a run: run, plan, demo, attach, resume, halt, scale, gc."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from diloco_orchestrator.cli.shared import (
    ExecutorCommand,
    echo,
    importable,
    json_option,
    pairs,
    reader_of,
    say,
    secret_option,
    signed_by_option,
    stamp,
    texts,
    trust_option,
    url_argument,
)

if TYPE_CHECKING:
    from diloco_orchestrator.config import GuardSettings
    from diloco_orchestrator.launching.run import Run


class _RunCommand(ExecutorCommand):
    """A command with `--executor`, its executors' options, and one option per setting of `RunConfig`.

    `parts`: the parts of the settings that have options here, such as "guard"; empty for all.
    """

    parts: tuple[str, ...] = ()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from diloco_orchestrator.cli.setting_options import help_options, setting_options

        return [*super().get_params(ctx), *help_options(), *setting_options(self.parts)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from diloco_orchestrator.cli.setting_options import write_options

        write_options(self, ctx, formatter)


_entrypoint = click.argument("entrypoint", metavar="FILE.py:FUNCTION")
_store = click.option("--store", metavar="URL", required=True, help="The run's own folder, or s3://bucket/x.")
_ARG = click.option(
    "--arg", "args", metavar="K=V", multiple=True, help="For `ctx.args`; V as JSON, else as text. Repeatable."
)
_WHAT_RUNS = (
    _ARG,
    click.option("--env", metavar="K=V", multiple=True, help="Environment of replicas; no secrets. Repeatable."),
    secret_option,
    click.option(
        "--code", metavar="FOLDER", help="What replicas elsewhere import.  [default: the package of FUNCTION]"
    ),
    click.option("--requirements", metavar="FILE", help="Packages that replicas install; hashes in it are checked."),
    click.option(
        "--pin",
        type=click.Choice(["auto", "require", "given"]),
        default="auto",
        show_default=True,
        help="Hashes of packages: given, or listed by uv now if it can (auto); given alone (given); or refuse packages "
        "without one, and images by tag (require).",
    ),
    click.option(
        "--signed/--unsigned",
        default=None,
        help="Whether what others write into the run's folder counts for nothing: what the run writes is signed.  "
        "[default: signed in a bucket, unless machines join]",
    ),
    click.option("--config", type=click.Path(path_type=Path), help="TOML file of settings; options go before it."),
)


def _what_runs(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_WHAT_RUNS):
        command = option(command)
    return command


@click.command("run", cls=_RunCommand)
@_entrypoint
@_store
@_what_runs
@json_option
def run_(entrypoint: str, store: str, as_json: bool, **given: Any) -> int:
    """Launch a run of your own training function, and supervise it until it ends.

    FUNCTION is called with a ReplicaContext in every replica. It may also be PKG.MOD:FUNCTION, looked up from the
    current folder too.
    """
    from diloco_orchestrator.cli.progress import follow
    from diloco_orchestrator.launching.run import launch

    entrypoint, what = importable(entrypoint), _given_to_launch(given)
    return follow(lambda: launch(entrypoint, store=store, **what), as_json=as_json)


@click.command("plan", cls=_RunCommand)
@_entrypoint
@_store
@_what_runs
@click.option("--parameters", metavar="N", help="Trainable parameters of the model, such as 124M, for the traffic.")
@click.option("--round-s", type=click.FloatRange(min=0.1), default=60.0, show_default=True, help="Expected s a round.")
@click.option(
    "--compare",
    metavar="NAME[,OPTION=VALUE…]",
    multiple=True,
    help='Compare places for this run by dollars a round, as in "modal,gpu=H100,round_s=20"; several GPUs as "A+B". '
    "Repeatable.",
)
@json_option
def plan_(
    entrypoint: str,
    store: str,
    parameters: str | None,
    round_s: float,
    compare: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Show what `run` with these options would launch and cost. Launches nothing."""
    from diloco_orchestrator.cli.executor_options import number
    from diloco_orchestrator.launching.plan import plan_launch

    if compare and given["executors"]:
        raise click.UsageError("--compare names each place with its options: leave out --executor.")
    entrypoint = importable(entrypoint)
    count = None if parameters is None else number(parameters)
    if compare:
        from diloco_orchestrator.launching import places

        what = _given_to_launch(given)
        what.pop("executor")
        plans = places.compare(
            [places.place_of(each, round_s) for each in compare], entrypoint, store, **what, parameters=count
        )
        echo(json.dumps(places.plans_json(plans)) if as_json else "\n".join(places.table_of(plans)))
        return
    made = plan_launch(entrypoint, store, round_s=round_s, parameters=count, **_given_to_launch(given))
    echo(json.dumps(made.to_json()) if as_json else "\n".join(made.lines()))


def _given_to_launch(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `launch` from the parsed options of `run` or `plan`, which are removed from `given`."""
    from diloco_orchestrator.cli.executor_options import secrets_of, take_fleet, with_count
    from diloco_orchestrator.cli.setting_options import merged, nested, read_toml

    executor, count = take_fleet(given)
    config, code, requirements = given.pop("config"), given.pop("code"), given.pop("requirements")
    pin, secrets, signed = given.pop("pin"), secrets_of(given.pop("secret_names")), given.pop("signed")
    above = {"args": pairs("--arg", given.pop("args")), "env": texts("--env", given.pop("env"))}
    settings = merged(read_toml(config) if config else {}, {**nested(given), **above})
    what = {"executor": executor, "code": code, "requirements": requirements, "pin": pin, "secrets": secrets}
    return {**with_count(settings, count), **what, "signed": signed}


_track_option = click.option(
    "--track",
    metavar="TRACKER",
    help="Send metrics from here to tensorboard, trackio or wandb, as in tensorboard:FOLDER.  [default: to none]",
)


_AS_LAUNCHED = "that of the launch"


class _AttachCommand(ExecutorCommand):
    executor_default = _AS_LAUNCHED


@click.command("attach", cls=_AttachCommand)
@url_argument
@secret_option
@trust_option
@_track_option
@signed_by_option
@json_option
def attach_(url: str, signed_by: str | None, as_json: bool, **given: Any) -> int:
    """Supervise the run in URL, whose launcher is gone: relaunch its dead replicas until it ends.

    A signed run whose key is not on this machine is only shown until it ends.
    """
    from diloco_orchestrator.cli.progress import follow, watch_until_stopped
    from diloco_orchestrator.launching.run import attach
    from diloco_orchestrator.run_log.run_store import why_only_watching

    sys.path.insert(0, str(Path.cwd()))
    means, reader = _means(given), reader_of(url, signed_by)
    if why := why_only_watching(reader.run, reader.store):
        echo(f"watching only: {why}", err=True)
        return watch_until_stopped(reader.store, as_json=as_json)
    return follow(lambda: attach(url, **means), as_json=as_json)


def _means(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `attach` from the parsed options in `given`. The executor is None without `--executor`."""
    from diloco_orchestrator.cli.executor_options import secrets_of, take_fleet

    executor, _ = take_fleet(given, default=None)
    secrets, track = secrets_of(given.pop("secret_names")), given.pop("track")
    return {"executor": executor, "secrets": secrets, "trust_bucket": given.pop("trust_bucket"), "track": track}


class _ResumeCommand(_RunCommand):
    """A command with `--executor`, its executors' options, and one option per setting of the guard and of `outer`."""

    parts = ("guard", "outer")
    executor_default = _AS_LAUNCHED

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from diloco_orchestrator.cli.setting_options import setting_options

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(error.option_name in (*each.opts, *each.secondary_opts) for each in setting_options()):
                ctx.fail(
                    f"{error.option_name}: a resume cannot change that setting, which run.json fixes. Begin a new run "
                    "from the model that `diloco pull` copies."
                )
            raise


@click.command(cls=_ResumeCommand)
@url_argument
@secret_option
@trust_option
@_track_option
@click.option("--rounds", type=click.IntRange(min=1), help="Outer steps to take.  [default: those left]")
@click.option("--from-round", type=click.IntRange(min=0), help="Start from the base after this round.")
@click.option("--replicas", type=click.IntRange(min=1), help="Train with so many, in a run with --max-replicas.")
@click.option("--why", default="diloco resume", show_default=True, help="Goes into the log.")
@click.option(
    "--override-guard",
    metavar="WHY",
    default="",
    help="Let the guard begin anew, with a new baseline and the --guard-… given; WHY goes into the log.",
)
@_ARG
@click.option("--ranks", metavar="N", help="Ranks (processes) of a replica from now on, or of each, as in 2,1.")
@json_option
def resume(
    url: str,
    rounds: int | None,
    from_round: int | None,
    replicas: int | None,
    why: str,
    override_guard: str,
    ranks: str | None,
    args: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> int:
    """Resume the run in URL, which has stopped, by a new leg (stretch until its next stop), and supervise it."""
    from diloco_orchestrator.cli.progress import follow
    from diloco_orchestrator.cli.setting_options import take_part
    from diloco_orchestrator.launching.run import attach

    sys.path.insert(0, str(Path.cwd()))
    guard, outer = cast("GuardSettings", take_part("guard", given)), take_part("outer", given)
    means = _means(given)

    def begin() -> "Run":
        run = attach(url, **means)
        return run.resume(
            rounds,
            from_round,
            why,
            override_guard=override_guard,
            guard=guard,
            replicas=replicas,
            ranks_per_replica=cast("int | None", ranks),  # text, which the configuration reads and validates
            outer=outer,
            args=pairs("--arg", args),
        )

    return follow(begin, as_json=as_json)


@click.command()
@url_argument
@click.option("--reason", default="diloco halt", show_default=True, help="Goes into the log.")
@json_option
def halt(url: str, reason: str, as_json: bool) -> None:
    """Ask the run in URL to stop after its open round, which is applied."""
    from shlex import quote

    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.inspection.explain import why_still
    from diloco_orchestrator.run_log.append import request_halt

    reader = reader_of(url)
    still = why_still(reader.status(), SystemClock().wall_time())
    request_halt(reader.log, "diloco halt", reason, stamp())
    words = ["asked; the run stops when its open round is committed"]
    if still:  # no replica will commit it
        words = ["asked.", *still, f"Who supervises it ends it: diloco attach {quote(reader.store.url)}"]
    say(as_json, {"url": reader.store.url, "halt": reason, "still": still}, "\n".join(words))


@click.command()
@url_argument
@click.argument("replicas", type=click.IntRange(min=1))
@json_option
def scale(url: str, replicas: int, as_json: bool) -> None:
    """Train with REPLICAS replicas from now on, in a run in URL that was launched with --replicas 4..16."""
    from diloco_orchestrator.run_log.append import request_scale

    reader = reader_of(url)
    request_scale(reader.log, replicas, "diloco scale", stamp())
    text = f"asked; who supervises the run launches or ends replicas until {replicas} train"
    say(as_json, {"url": reader.store.url, "replicas": replicas}, text)


@click.command()
@url_argument
@click.option("--keep-snapshots", type=click.IntRange(min=2), help="Newest ones to keep.  [default: the run's setting]")
@click.option("--payloads", type=click.Choice(["all", "needed"]), help="Which to keep.  [default: the run's setting]")
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
@json_option
def gc(url: str, keep_snapshots: int | None, payloads: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove what the run in URL does not need any more: old payloads, states and snapshots, never the log."""
    from diloco_orchestrator.supervision.retention import collect, plan

    reader = reader_of(url)
    given = {"snapshots": keep_snapshots, "payloads": payloads}
    retention = reader.run.config.retention.model_copy(update={k: v for k, v in given.items() if v is not None})
    made = plan(reader.log, retention)
    if not dry_run:
        collect(reader.log, retention, made, "diloco gc", stamp())
    verb = "would remove" if dry_run else "removed"
    told = {"removed": not dry_run, "objects": len(made.objects), "bytes": made.size, "snapshots": made.kept_snapshots}
    kept = ", ".join(f"{round_} ({why})" for round_, why in made.kept_snapshots.items())
    say(as_json, told, f"{verb} {len(made.objects)} objects, {made.size / 1e6:.1f} MB; snapshots kept: {kept}")


@click.command()
@click.option("--text", metavar="FOLDER", help="Train on the text files below it.  [default: Python's own source]")
@click.option("--store", metavar="URL", help="The run's folder, or s3://bucket/x.  [default: runs/demo-<time>]")
@click.option("--replicas", type=click.IntRange(min=1), default=4, show_default=True, help="Processes that train.")
@click.option("--rounds", type=click.IntRange(min=1), help="Outer steps.  [default: one to two minutes on 2 cores]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights and data order.")
@click.option(
    "--quorum", metavar="N|all", help='Contributions a round needs; "all" waits for everybody.  [default: half]'
)
@click.option("--kill-one", is_flag=True, help="Kill -9 a replica in mid-run to show the recovery.")
@click.option("--hack", is_flag=True, help="Let the held-out score collapse to show the kill-switch.")
@json_option
def demo(as_json: bool, **options: Any) -> int:
    """Train a small language model with 4 local replicas over a folder: the whole product in two minutes."""
    from diloco_orchestrator.cli.demo_command import show

    return show(as_json=as_json, **options)
