"""Commands that read a run from its bucket and change nothing, such as status, explain, watch, pull and report."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING

import click

from diloco_orchestrator.cli.shared import (
    code_options,
    echo,
    json_option,
    optional_url_argument,
    own_code,
    reader_of,
    say,
    signed_by_option,
    stamp,
    store_of,
    trust_option,
    url_argument,
)
from diloco_orchestrator.redaction import shown

if TYPE_CHECKING:
    from diloco_orchestrator.inspection.logs import LogLine
    from diloco_orchestrator.inspection.report import Influence
    from diloco_orchestrator.inspection.status import RunReader

_NARROWEST = 76  # columns that the tables of `status` need; a terminal with fewer wraps their lines, and cuts nothing


@click.command()
@url_argument
@json_option
def status(url: str, as_json: bool) -> None:
    """Show the state of the run in URL: rounds, scores, replicas, costs."""
    from shlex import quote

    from diloco_orchestrator.clock import SystemClock, ThreadBackground
    from diloco_orchestrator.inspection.explain import go_on, why_still
    from diloco_orchestrator.inspection.passed_over import passed_over
    from diloco_orchestrator.inspection.terminal import Console, overview
    from diloco_orchestrator.run_log.launched_here import failure_seen_here

    reader = reader_of(url)
    others = passed_over(reader.log, ThreadBackground())
    found = reader.status()
    found = replace(found, unreadable=sorted([*others, *found.unreadable]))
    if as_json:
        echo(json.dumps(found.to_json()))
        return
    still = why_still(found, SystemClock().wall_time())
    console = Console()
    if console.width < _NARROWEST:
        console.width = _NARROWEST
    console.print(overview(found, rounds=20, still=[*still, go_on(found)] if still else []))
    if failure := failure_seen_here(reader.store):
        console.print(f"supervision on this machine ended: {failure} `diloco attach {quote(url)}` goes on.")


@click.command()
@url_argument
@json_option
def explain(url: str, as_json: bool) -> None:
    """Say in plain words why the run in URL stopped, and what to do. An error's name instead: what that error means."""
    if words := about_error(url):
        say(as_json, {"error": words}, words)
        return
    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.inspection.explain import explain as explained

    reader = reader_of(url)
    found = explained(reader.status(), reader.best_scored(), SystemClock().wall_time())
    say(as_json, found.to_json(), "\n".join(found.lines()))


def about_error(name: str) -> str:
    """The words of the docs about the error type of this name, in upper or lower case; empty if there is none."""
    page = files("diloco_orchestrator.cli") / "troubleshooting.md"
    section = rf"^### ({re.escape(name)})\n+(.+?)\n*(?=^### |\Z)"
    found = re.search(section, page.read_text(encoding="utf-8"), re.IGNORECASE | re.MULTILINE | re.DOTALL)
    if found is None or Path(name).exists():  # a run's folder may have any name
        return ""

    def spelt(link: re.Match[str]) -> str:
        return f"{link[1]} ({normpath(f'docs/reference/{link[2]}')})"

    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", spelt, f"{found[1]}: {found[2]}").replace("**", "")


@click.command()
@url_argument
@json_option
def watch(url: str, as_json: bool) -> int:
    """Follow the run in URL until it stops. Reads only: Ctrl-C leaves the run alone."""
    from diloco_orchestrator.cli.progress import watch_until_stopped

    return watch_until_stopped(store_of(url, watches=True), as_json=as_json)


@click.command()
@url_argument
@json_option
def snapshots(url: str, as_json: bool) -> None:
    """List the snapshots in URL; the model after any other round is rebuilt by `pull`."""
    reader = reader_of(url)
    found = [
        {
            "round": round_,
            "url": reader.snapshot_url(round_),
            "heldout": reader.heldout_of_base(round_),
        }
        for round_ in reader.snapshots()
    ]
    if as_json:
        echo(json.dumps(found))
        return
    for each in found:
        score = "" if each["heldout"] is None else f"  held-out {each['heldout']:.4f}"
        echo(f"round {each['round']}  {each['url']}{score}")


sign_option = click.option("--sign", is_flag=True, help="Add model.sig, your signature in OpenSSF's format.")


@click.command()
@url_argument
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--round",
    "round_",
    type=click.IntRange(min=0),
    help="The model after this round.  [default: the newest; after a halt by the guard the best by held-out score]",
)
@sign_option
@signed_by_option
@json_option
def pull(url: str, destination: Path, round_: int | None, sign: bool, signed_by: str | None, as_json: bool) -> None:
    """Copy the model files out of URL into the new folder DESTINATION, rebuilding the round if it has no snapshot."""
    from diloco_orchestrator.inspection.pull import copy_model

    reader = reader_of(url, signed_by)
    if round_ is not None:
        pulled = copy_model(reader.log, destination, round_, sign=sign)
        say(as_json, {"round": pulled, "destination": str(destination)}, f"round {pulled} is in {destination}")
        return
    model = reader.model()
    pulled = copy_model(reader.log, destination, model.round, sign=sign)
    found = {"round": pulled, "destination": str(destination), "model": asdict(model)}
    say(as_json, found, f"{destination}: {model.words()}")


@click.command()
@url_argument
@click.argument("repository", metavar="USER/MODEL")
@click.option(
    "--round",
    "rounds",
    type=click.IntRange(min=0),
    multiple=True,
    help="The model after this round; repeatable.  [default: the one that pull takes]",
)
@click.option("--public", is_flag=True, help="Make the repository public, or send to one that is.")
@sign_option
@signed_by_option
@json_option
def push(
    url: str, repository: str, rounds: tuple[int, ...], public: bool, sign: bool, signed_by: str | None, as_json: bool
) -> None:
    """Send models of URL to the Hugging Face Hub with a model card, each round as a tagged commit. Private if new."""
    reader = reader_of(url, signed_by)
    from diloco_orchestrator.inspection.push import push_models

    pushed = push_models(reader, repository, rounds, public=public, sign=sign)
    body = {"repository": repository, "pushed": [asdict(each) for each in pushed]}
    say(as_json, body, "\n".join(f"round {each.round} is {each.url} (tag {each.tag})" for each in pushed))


@click.command()
@url_argument
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--influence", is_flag=True, help="Add how far each contribution moved its round's base. Reads payloads.")
@click.option("--csv", "table", type=click.Path(path_type=Path, dir_okay=False), help="Write the influence there, too.")
@code_options
@click.option("--follow", "-f", is_flag=True, help="Write the page anew after each round, until the run stops.")
@click.option("--serve", is_flag=True, help="The same, and show it to a browser of this machine until Ctrl-C.")
@click.option("--port", type=click.IntRange(0, 65535), help="With --serve.  [default: one that is free]")
@json_option
def report(
    url: str,
    destination: Path,
    influence: bool,
    table: Path | None,
    follow: bool,
    serve: bool,
    port: int | None,
    as_json: bool,
    **given: str | None,
) -> None:
    """Write one self-contained HTML page about the run in URL: curves, guard, participation, attempts."""
    if not influence and (table or any(given.values())):
        raise click.UsageError("--csv, --score, --build and --items go with --influence.")
    if given["score"] is None and any(given.values()):
        raise click.UsageError("--build and --items go with --score.")
    if port is not None and not serve:
        raise click.UsageError("--port goes with --serve.")
    if follow or serve:
        if influence:
            raise click.UsageError("--influence reads all payloads: it goes without --follow and --serve.")
        _keep_up(url, destination, (port or 0) if serve else None, as_json)
        return
    from diloco_orchestrator.cli.report_page import page
    from diloco_orchestrator.clock import ThreadBackground
    from diloco_orchestrator.inspection.report import Report

    reader = reader_of(url)
    found = _influence(reader, given) if influence else None
    html = page(Report.read(reader, ThreadBackground(), found))
    destination.write_text(html, encoding="utf-8")
    told: dict[str, object] = {"url": reader.store.url, "report": str(destination)}
    if found is not None:
        told["influence"] = found.to_json()
        if table is not None:
            table.write_text(found.to_csv(), encoding="utf-8")
    say(as_json, told, f"wrote {destination}" + (f" and {table}" if table else ""))


def _keep_up(url: str, destination: Path, port: int | None, as_json: bool) -> None:
    """Keep the page in `destination` up to date until the run stops; with a `port` serve it too, until Ctrl-C."""
    from contextlib import nullcontext, suppress

    from diloco_orchestrator.cli.live_report import PageServer, keep_up
    from diloco_orchestrator.clock import SystemClock

    store, clock = store_of(url, watches=True), SystemClock()
    try:
        server = None if port is None else PageServer(port)
    except OSError as error:
        raise click.UsageError(
            f"Port {port} of this machine: {error.strerror}. Take another one, or leave it out."
        ) from error
    with nullcontext() if server is None else server.serving():
        if server is not None:
            click.echo(f"{server.url} shows the run, to this machine only", err=True)
        status = keep_up(store, destination, server, clock)
        told = {"url": store.url, "report": str(destination), "state": status.state}
        say(as_json, told, f"wrote {destination}; {status.state}: {status.reason}")
        if server is not None:
            click.echo("Ctrl-C ends the page", err=True)
            with suppress(KeyboardInterrupt):
                while True:
                    clock.sleep(3600.0)


def _influence(reader: "RunReader", given: Mapping[str, str | None]) -> "Influence":
    from diloco_orchestrator.inspection.whatif.influence import influence_of
    from diloco_orchestrator.inspection.whatif.models import BaseScorer, ModelWriter

    code = own_code(**given)
    scorer = None if code.score is None else BaseScorer(reader.log, ModelWriter(reader.log), code)
    return influence_of(reader.log, scorer)


@click.command()
@url_argument
@click.option(
    "--to",
    required=True,
    metavar="TRACKER",
    help='"tensorboard", "trackio" or "wandb"; a folder or project may follow: "tensorboard:runs/curves", '
    '"wandb:my-project".',
)
@click.option("--follow", "-f", is_flag=True, help="Go on with rounds that are committed later, until the run stops.")
@json_option
def track(url: str, to: str, follow: bool, as_json: bool) -> None:
    """Send the rounds of the run in URL to TensorBoard, trackio or W&B: those that are not there yet."""
    import sys

    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.supervision.trackers import send_run

    stdout, sys.stdout = sys.stdout, sys.stderr  # trackers' libraries print, trackio even as the process ends
    found = send_run(reader_of(url, watches=follow), to, SystemClock() if follow else None)
    words = f"{to}: {found.sent} of {found.rounds} rounds of {found.run_id} sent"
    words += f"; {found.rounds - found.sent} were there" if found.sent < found.rounds else ""
    click.echo(json.dumps({"to": to, **asdict(found)}) if as_json else shown(words), file=stdout)


@click.command()
@url_argument
@click.option("--replica", type=click.IntRange(min=0), help="[default: 0; with --follow all]")
@click.option("--attempt", type=click.IntRange(min=1), help="[default: the newest]")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines.")
@click.option("--follow", "-f", is_flag=True, help="All replicas merged, line by line, until the run stops.")
@trust_option
@json_option
def logs(
    url: str,
    replica: int | None,
    attempt: int | None,
    tail: int | None,
    follow: bool,
    trust_bucket: bool,
    as_json: bool,
) -> None:
    """Print what a replica of the run in URL printed: kept in the bucket once it ended, until then on its host."""
    from diloco_orchestrator.inspection.logs import log_lines

    reader = reader_of(url, watches=follow)
    if follow:
        if attempt is not None:
            raise click.UsageError("--follow goes on from attempt to attempt: leave out --attempt.")
        _follow(reader, replica, tail, trust_bucket, as_json)
        return
    lines = list(log_lines(reader, replica or 0, attempt, tail, trust_bucket=trust_bucket))
    echo(json.dumps(lines) if as_json else "\n".join(lines))


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green")


def _follow(reader: "RunReader", replica: int | None, tail: int | None, trust_bucket: bool, as_json: bool) -> None:
    """Print the lines of one replica, or of all, with replica and attempt in front; as JSON one object each."""
    from diloco_orchestrator.clock import SystemClock, ThreadBackground
    from diloco_orchestrator.inspection.logs import LogFollower

    replicas = range(reader.run.config.most_replicas) if replica is None else [replica]
    follower = LogFollower(reader, replicas, SystemClock(), ThreadBackground(), tail, trust_bucket=trust_bucket)
    for line in follower.lines():
        if as_json:
            echo(json.dumps(asdict(line)))
        else:
            click.echo(f"{_prefix(line)} {shown(line.text)}")


def _prefix(line: "LogLine") -> str:
    return click.style(f"{line.replica_id}.{line.attempt} |", fg=_COLOURS[line.replica_id % len(_COLOURS)])


@click.command()
@optional_url_argument
@click.option("--export", is_flag=True, help="Print an operator's private keys, for DILOCO_RUN_KEY on another machine.")
@click.option("--me", is_flag=True, help="Print the line by which a launcher certifies you. It is no secret.")
@click.option("--models", is_flag=True, help="Print the public key that checks models which you have signed, as PEM.")
@click.option("--certify", metavar="LINE", help="Let the user with this line (`diloco key --me`) supervise the run.")
@click.option("--rotate", is_flag=True, help="Replace all keys but the run's own after the open round: one has leaked.")
@click.option("--why", help="With --rotate: goes into the log.  [default: diloco key --rotate]")
@json_option
def key(
    url: str | None,
    export: bool,
    me: bool,
    models: bool,
    certify: str | None,
    rotate: bool,
    why: str | None,
    as_json: bool,
) -> None:
    """Show which key signs the run in URL, and whether this machine has its private key; certify or rotate keys."""
    from diloco_orchestrator.run_log.run_store import identity_of_user, operator_of_run, why_only_watching

    if sum((export, me, models, certify is not None, rotate)) > 1 or (url is None) is not (me or models):
        raise click.UsageError("say --me or --models alone, or URL with one of --export, --certify, --rotate or none.")
    if why is not None and not rotate:
        raise click.UsageError("--why goes with --rotate.")
    if url is None:
        from diloco_orchestrator.inspection.sign_model import public_pem

        line = identity_of_user().public.text() if me else public_pem().strip()
        say(as_json, {"user" if me else "models": line}, line)
        return
    reader = reader_of(url)
    run, store = reader.run, reader.store
    if export:
        operator = operator_of_run(run, store, "--export")
        if operator is None:
            raise click.UsageError(f"{store.url} is not signed: it has no key.")
        say(as_json, {"private": operator.text()}, operator.text())
        return
    if certify is not None or rotate:
        _change_keys(reader, certify, why or "diloco key --rotate", as_json)
        return
    public = "" if run.signed_by is None else run.signed_by.key
    only_watches = why_only_watching(run, store)
    words = f"{public}\n{only_watches or 'Its keys are on this machine.'}" if public else "The run is not signed."
    has_keys = bool(public) and not only_watches
    say(as_json, {"url": store.url, "signed_by": public, "has_private_key": has_keys}, words)


def _change_keys(reader: "RunReader", certify: str | None, why: str, as_json: bool) -> None:
    """Certify the user with the line `certify`, or replace the run's keys."""
    from diloco_orchestrator.supervision import rotation

    if certify is not None:
        record = rotation.certify(reader.log, certify, "diloco key", stamp())
        words = f"{record.operator.key} may supervise the run until its keys are rotated."
        say(as_json, {"certified": record.operator.key}, words)
        return
    found = rotation.rotate(reader.log, "diloco key", why, stamp())
    words = (
        "The run halts after its open round; its coordinator goes on with new keys. Where none runs: `diloco resume`."
        if found is None
        else f"New keys count from leg {found.from_leg} on: `diloco resume`."
    )
    say(as_json, {"from_leg": None if found is None else found.from_leg}, words)
