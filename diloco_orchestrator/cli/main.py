"""The `diloco` command. Kept light: what a command needs is imported when it runs, so that `--help` is quick.

Exit codes: 0 completed, 1 failed, 2 usage, 3 halted (`demo --hack`: 0 when it halted as meant), 4 `verify` found a
disagreement, 130 Ctrl-C.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from diloco_orchestrator import __version__

EXIT_FAILED, EXIT_USAGE, EXIT_DISAGREES, EXIT_INTERRUPTED = 1, 2, 4, 130

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, on stdout.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def diloco() -> None:
    """DiLoCo training whose only infrastructure is a bucket."""


@diloco.command()
@click.option("--text", metavar="FOLDER", help="Train on the text files below it.  [default: Python's own source]")
@click.option("--store", metavar="URL", help="The run's folder, or s3://bucket/x.  [default: runs/demo-<time>]")
@click.option("--replicas", type=click.IntRange(min=1), default=4, show_default=True, help="Processes that train.")
@click.option("--rounds", type=click.IntRange(min=1), help="Outer steps.  [default: about two minutes on 2 cores]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights and data order.")
@click.option(
    "--quorum", metavar="N|all", help='Contributions a round needs; "all" waits for everybody.  [default: half]'
)
@click.option("--kill-one", is_flag=True, help="Kill -9 a replica in mid-run to show the recovery.")
@click.option("--hack", is_flag=True, help="Let the held-out score collapse to show the kill-switch.")
@_json_option
def demo(as_json: bool, **options: Any) -> int:
    """Train a small language model with 4 local replicas over a folder: the whole product in two minutes."""
    from diloco_orchestrator.cli.demo_command import show

    return show(as_json=as_json, **options)


class _ExecutorCommand(click.Command):
    """Has `--executor`, and the options of the executors that the command line names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from diloco_orchestrator.cli.executor_options import named

        ctx.meta["executors"] = named(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from diloco_orchestrator.cli.executor_options import executor_options

        own = super().get_params(ctx)
        taken = {flag for parameter in own for flag in parameter.opts}
        return [*own, *executor_options(ctx.meta.get("executors", ()), taken)]


class _RunCommand(_ExecutorCommand):
    """Has one option per setting of `RunConfig` too, read from there when it is needed."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from diloco_orchestrator.cli.setting_options import setting_options

        return [*super().get_params(ctx), *setting_options()]


_entrypoint = click.argument("entrypoint", metavar="PKG.MOD:FUNCTION")
_store = click.option("--store", metavar="URL", required=True, help="The run's own folder, or s3://bucket/x.")
_secret = click.option(
    "--secret", "secret_names", metavar="NAME", multiple=True,
    help="Hand this variable of your environment to replicas as a secret of their provider. Repeatable.",
)  # fmt: skip
_WHAT_RUNS = (
    click.option(
        "--arg", "args", metavar="K=V", multiple=True, help="For `ctx.args`; V as JSON, else as text. Repeatable."
    ),
    click.option("--env", metavar="K=V", multiple=True, help="Environment of replicas; no secrets. Repeatable."),
    _secret,
    click.option(
        "--code", metavar="FOLDER", help="What replicas elsewhere import.  [default: the package of FUNCTION]"
    ),
    click.option("--config", type=click.Path(path_type=Path), help="TOML file of settings; options go before it."),
)


def _what_runs(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_WHAT_RUNS):
        command = option(command)
    return command


@diloco.command("run", cls=_RunCommand)
@_entrypoint
@_store
@_what_runs
@_json_option
def run_(entrypoint: str, store: str, as_json: bool, **given: Any) -> int:
    """Launch a run of your own training function and supervise it until it ends.

    FUNCTION is called with a ReplicaContext in every replica; modules are looked up from the current folder too.
    """
    from diloco_orchestrator.cli.progress import follow
    from diloco_orchestrator.run import launch

    sys.path.insert(0, str(Path.cwd()))
    what = _given_to_launch(given)
    return follow(lambda: launch(entrypoint, store=store, **what), as_json=as_json)


@diloco.command("plan", cls=_RunCommand)
@_entrypoint
@_store
@_what_runs
@click.option("--parameters", metavar="N", help="Trainable parameters of the model, such as 124M, for the traffic.")
@click.option("--round-s", type=click.FloatRange(min=0.1), default=60.0, show_default=True, help="Expected s a round.")
@_json_option
def plan_(entrypoint: str, store: str, parameters: str | None, round_s: float, as_json: bool, **given: Any) -> None:
    """Show what `run` with the same options would launch and what it would cost. Sends nothing."""
    from diloco_orchestrator.cli.executor_options import number
    from diloco_orchestrator.launch_plan import plan_launch

    sys.path.insert(0, str(Path.cwd()))
    count = None if parameters is None else number(parameters)
    made = plan_launch(entrypoint, store, round_s=round_s, parameters=count, **_given_to_launch(given))
    click.echo(json.dumps(made.to_json()) if as_json else "\n".join(made.lines()))


def _given_to_launch(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `launch` from a command line's."""
    from diloco_orchestrator.cli.executor_options import secrets_of, take_fleet, with_count
    from diloco_orchestrator.cli.setting_options import merged, nested, read_toml

    executor, count = take_fleet(given)
    config, code = given.pop("config"), given.pop("code")
    secrets = secrets_of(given.pop("secret_names"))
    above = {"args": _pairs("--arg", given.pop("args")), "env": _texts("--env", given.pop("env"))}
    settings = merged(read_toml(config) if config else {}, {**nested(given), **above})
    return {**with_count(settings, count), "executor": executor, "code": code, "secrets": secrets}


_url = click.argument("url", metavar="URL")


@diloco.command()
@_url
@_json_option
def status(url: str, as_json: bool) -> None:
    """Show where the run in URL stands."""
    from rich.console import Console

    from diloco_orchestrator.cli.terminal import overview

    found = _reader(url).status()
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        Console().print(overview(found, rounds=20))


@diloco.command()
@_url
@_json_option
def watch(url: str, as_json: bool) -> int:
    """Follow the run in URL until it stops. Reads only: Ctrl-C leaves the run alone."""
    from diloco_orchestrator.cli.progress import watch_until_stopped

    return watch_until_stopped(_reader(url), as_json=as_json)


@diloco.command("attach", cls=_ExecutorCommand)
@_url
@_secret
@_json_option
def attach_(url: str, as_json: bool, **given: Any) -> int:
    """Supervise the run in URL, whose launcher is gone: relaunch its dead replicas until it ends."""
    from diloco_orchestrator.cli.progress import follow
    from diloco_orchestrator.run import attach

    sys.path.insert(0, str(Path.cwd()))
    means = _means(given)
    return follow(lambda: attach(url, **means), as_json=as_json)


def _means(given: dict[str, Any]) -> dict[str, Any]:
    """What `attach` needs beside the URL. Without --executor it finds local replicas by itself."""
    from diloco_orchestrator.cli.executor_options import secrets_of, take_fleet

    executor, _ = take_fleet(given, default=None)
    return {"executor": executor, "secrets": secrets_of(given.pop("secret_names"))}


@diloco.command()
@_url
@click.option("--reason", default="diloco halt", show_default=True, help="Goes into the log.")
@_json_option
def halt(url: str, reason: str, as_json: bool) -> None:
    """Ask the run in URL to stop after its open round, which is applied."""
    from diloco_orchestrator.clock import SystemClock, random_token
    from diloco_orchestrator.protocol.records import Stamp
    from diloco_orchestrator.run_log.append import request_halt

    reader = _reader(url)
    request_halt(reader.log, "diloco halt", reason, Stamp(random_token(), SystemClock().wall_time))
    _say(as_json, {"url": reader.store.url, "halt": reason}, "asked; the run stops when its open round is committed")


@diloco.command(cls=_ExecutorCommand)
@_url
@_secret
@click.option("--rounds", type=click.IntRange(min=1), help="Outer steps to take.  [default: those left]")
@click.option("--from-round", type=click.IntRange(min=0), help="Start from the base after this round.")
@click.option("--why", default="diloco resume", show_default=True, help="Goes into the log.")
@_json_option
def resume(url: str, rounds: int | None, from_round: int | None, why: str, as_json: bool, **given: Any) -> int:
    """Begin the next leg of the run in URL, which has stopped, and supervise it."""
    from diloco_orchestrator.cli.progress import follow
    from diloco_orchestrator.run import attach

    sys.path.insert(0, str(Path.cwd()))
    means = _means(given)
    return follow(lambda: attach(url, **means).resume(rounds, from_round, why), as_json=as_json)


@diloco.command()
@_url
@_json_option
def snapshots(url: str, as_json: bool) -> None:
    """List the snapshots in URL; the model after any other round is rebuilt by `pull`."""
    from diloco_orchestrator.protocol import keys

    reader = _reader(url)
    found = [
        {
            "round": round_,
            "url": keys.snapshot_url(reader.store.url, round_),
            "heldout": reader.heldout_of_base(round_),
        }
        for round_ in reader.snapshots()
    ]
    if as_json:
        click.echo(json.dumps(found))
        return
    for each in found:
        score = "" if each["heldout"] is None else f"  held-out {each['heldout']:.4f}"
        click.echo(f"round {each['round']}  {each['url']}{score}")


@diloco.command()
@_url
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--round", "round_", type=click.IntRange(min=0), help="The model after this round.  [default: the newest]"
)
@_json_option
def pull(url: str, destination: Path, round_: int | None, as_json: bool) -> None:
    """Copy the model files out of URL into the new folder DESTINATION, rebuilding the round if it has no snapshot."""
    from diloco_orchestrator.inspection.pull import pull as copy_out

    pulled = copy_out(_reader(url).log, destination, round_)
    _say(as_json, {"round": pulled, "destination": str(destination)}, f"round {pulled} is in {destination}")


@diloco.command()
@_url
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@_json_option
def report(url: str, destination: Path, as_json: bool) -> None:
    """Write one self-contained HTML page about the run in URL: curves, guard, participation, attempts."""
    from diloco_orchestrator.cli.report_page import page

    reader = _reader(url)
    destination.write_text(page(reader.status(), reader.run.config, reader.all_attempts()), encoding="utf-8")
    _say(as_json, {"url": reader.store.url, "report": str(destination)}, f"wrote {destination}")


@diloco.command()
@_url
@click.option("--replica", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--attempt", type=click.IntRange(min=1), help="[default: the newest]")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines.")
@_json_option
def logs(url: str, replica: int, attempt: int | None, tail: int | None, as_json: bool) -> None:
    """Print what a replica of the run in URL printed: kept in the bucket once it ended, until then on its host."""
    from diloco_orchestrator.inspection.logs import log_lines

    lines = list(log_lines(_reader(url), replica, attempt, tail))
    click.echo(json.dumps(lines) if as_json else "\n".join(lines))


@diloco.command()
@_url
@click.option("--keep-snapshots", type=click.IntRange(min=2), help="Newest ones to keep.  [default: the run's setting]")
@click.option("--payloads", type=click.Choice(["all", "needed"]), help="Which to keep.  [default: the run's setting]")
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
@_json_option
def gc(url: str, keep_snapshots: int | None, payloads: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove what the run in URL does not need any more: old payloads, states and snapshots, never the log."""
    from diloco_orchestrator.supervision.retention import delete, plan

    reader = _reader(url)
    given = {"snapshots": keep_snapshots, "payloads": payloads}
    retention = reader.run.config.retention.model_copy(update={k: v for k, v in given.items() if v is not None})
    made = plan(reader.log, retention)
    if not dry_run:
        delete(reader.store, made)
    verb = "would remove" if dry_run else "removed"
    told = {"removed": not dry_run, "objects": len(made.objects), "bytes": made.size, "snapshots": made.kept_snapshots}
    kept = ", ".join(f"{round_} ({why})" for round_, why in made.kept_snapshots.items())
    _say(as_json, told, f"{verb} {len(made.objects)} objects, {made.size / 1e6:.1f} MB; snapshots kept: {kept}")


@diloco.command()
@_url
@_json_option
def verify(url: str, as_json: bool) -> int:
    """Derive the run in URL again from its bucket: log, guard, averages, outer steps, snapshots. Exit 4: it differs."""
    reader = _reader(url)  # before what is slow to import
    from diloco_orchestrator.inspection.verify.chain import verify as derive

    done = derive(reader.store)
    if as_json:
        click.echo(json.dumps(done.to_json()))
    else:
        click.echo("checked:     " + ", ".join(f"{count} {name}" for name, count in done.checked.items()))
        for words in done.unchecked:
            click.echo(f"not checked: {words}")
        found = done.disagreement
        click.echo(f"models of:   {_spans(sorted(done.bases))}  (diloco pull --round)")
        click.echo("everything agrees" if found is None else f"DISAGREES:   {found.key}: {found.words}")
    return 0 if done.agrees else EXIT_DISAGREES


@diloco.command(cls=_ExecutorCommand)
@click.argument("url", metavar="[URL]", required=False)
@_json_option
def doctor(url: str | None, as_json: bool, **given: Any) -> int:
    """Check this machine, and with URL a store: its promises, latency, throughput, and where credentials are from.

    With --executor three tiny processes are launched there, for cents: one answers, one is cancelled, one fails.
    """
    from itertools import chain

    from diloco_orchestrator.cli.executor_options import take_fleet
    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.inspection.doctor import examine, examine_executor
    from diloco_orchestrator.store.open_store import absolute_url

    found, clock = [], SystemClock()
    executor, _ = take_fleet(given, default=None)
    there = () if executor is None else examine_executor(executor, clock)
    for finding in chain(examine(absolute_url(url) if url else None, clock), there):
        found.append(finding)
        if not as_json:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name}: {finding.detail}")
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in found]))
    return 0 if all(finding.ok for finding in found) else EXIT_FAILED


def _spans(rounds: list[int]) -> str:
    """[0, 1, 2, 5] as "rounds 0 to 2, 5"."""
    spans: list[list[int]] = []
    for round_ in rounds:
        if spans and round_ == spans[-1][-1] + 1:
            spans[-1].append(round_)
        else:
            spans.append([round_])
    words = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    return f"rounds {', '.join(words)}" if words else "no round"


def _reader(url: str) -> Any:
    """The run in `url`: a misspelt address is told soon, later outages are ridden out."""
    from diloco_orchestrator.inspection.status import RunReader
    from diloco_orchestrator.store.open_store import AT_START, absolute_url, open_store

    RunReader(open_store(absolute_url(url), retry=AT_START, must_exist=True))
    return RunReader(open_store(absolute_url(url), must_exist=True))


def _say(as_json: bool, body: dict[str, Any], words: str) -> None:
    click.echo(json.dumps(body) if as_json else words)


def _texts(flag: str, pairs: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{flag} {pair}: write it as K=V.")
        if name in found:
            raise click.UsageError(f"{flag} {name} is given twice.")
        found[name] = text
    return found


def _pairs(flag: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Values as JSON where they are, else as text."""
    found: dict[str, Any] = {}
    for name, text in _texts(flag, pairs).items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def main() -> None:
    """Entry point: every expected error becomes a message and an exit code."""
    from diloco_orchestrator.errors import ConfigError, DilocoError
    from diloco_orchestrator.executors.contract import ExecutorError

    try:
        code = diloco.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = EXIT_INTERRUPTED
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        code = EXIT_USAGE
    except (DilocoError, ExecutorError) as error:
        click.echo(f"Error: {error}", err=True)
        code = EXIT_FAILED
    except BrokenPipeError:
        code = EXIT_FAILED
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
