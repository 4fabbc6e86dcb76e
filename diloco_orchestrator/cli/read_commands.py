"""Commands that read a run from its bucket and change nothing, such as status, explain, watch, report and verify."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco_orchestrator.cli.shared import (
    EXIT_DISAGREES,
    build_option,
    items_option,
    json_option,
    named_object,
    reader_of,
    say,
    score_option,
    store_of,
    trust_option,
    url_argument,
)
from diloco_orchestrator.cli.shown import echo, shown

if TYPE_CHECKING:
    from diloco_orchestrator.inspection.follow_logs import LogLine
    from diloco_orchestrator.inspection.influence_rows import Influence
    from diloco_orchestrator.inspection.status import RunReader


@click.command()
@url_argument
@json_option
def status(url: str, as_json: bool) -> None:
    """Show the state of the run in URL: rounds, scores, replicas, costs."""
    from shlex import quote

    from diloco_orchestrator.cli.console import Console
    from diloco_orchestrator.cli.terminal import overview
    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.inspection.stillness import why_still
    from diloco_orchestrator.run_log.launched_here import failure_seen_here

    reader = reader_of(url)
    found = reader.status()
    if as_json:
        echo(json.dumps(found.to_json()))
        return
    still = why_still(found, SystemClock().wall_time())
    go_on = [f"To go on: diloco attach {quote(found.url)}"] if still else []
    Console().print(overview(found, rounds=20, still=[*still, *go_on]))
    if failure := failure_seen_here(reader.store.url):
        Console().print(f"supervision on this machine ended: {failure} `diloco attach {quote(url)}` goes on.")


@click.command()
@url_argument
@json_option
def explain(url: str, as_json: bool) -> None:
    """Say in plain words why the run in URL stopped, and what to do."""
    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.inspection.explain import explain as explained

    reader = reader_of(url)
    found = explained(reader.status(), reader.best_scored(), SystemClock().wall_time())
    say(as_json, found.to_json(), "\n".join(found.lines()))


@click.command()
@url_argument
@json_option
def watch(url: str, as_json: bool) -> int:
    """Follow the run in URL until it stops. Reads only: Ctrl-C leaves the run alone."""
    from diloco_orchestrator.cli.progress import watch_until_stopped

    return watch_until_stopped(reader_of(url), as_json=as_json)


@click.command()
@url_argument
@json_option
def snapshots(url: str, as_json: bool) -> None:
    """List the snapshots in URL; the model after any other round is rebuilt by `pull`."""
    from diloco_orchestrator.snapshots.offered import url_of_snapshot

    reader = reader_of(url)
    found = [
        {
            "round": round_,
            "url": url_of_snapshot(reader.log, round_),
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


@click.command()
@url_argument
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--round",
    "round_",
    type=click.IntRange(min=0),
    help="The model after this round.  [default: the newest; after a halt by the guard the best by held-out score]",
)
@json_option
def pull(url: str, destination: Path, round_: int | None, as_json: bool) -> None:
    """Copy the model files out of URL into the new folder DESTINATION, rebuilding the round if it has no snapshot."""
    from diloco_orchestrator.inspection.pull import copy_model

    reader = reader_of(url)
    if round_ is not None:
        pulled = copy_model(reader.log, destination, round_)
        say(as_json, {"round": pulled, "destination": str(destination)}, f"round {pulled} is in {destination}")
        return
    model = reader.model()
    pulled = copy_model(reader.log, destination, model.round)
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
@json_option
def push(url: str, repository: str, rounds: tuple[int, ...], public: bool, as_json: bool) -> None:
    """Send models of URL to the Hugging Face Hub with a model card, each round as a tagged commit. Private if new."""
    reader = reader_of(url)
    from diloco_orchestrator.inspection.push import push_models

    pushed = push_models(reader, repository, rounds, public=public)
    body = {"repository": repository, "pushed": [asdict(each) for each in pushed]}
    say(as_json, body, "\n".join(f"round {each.round} is {each.url} (tag {each.tag})" for each in pushed))


@click.command()
@url_argument
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--influence", is_flag=True, help="Add how far each contribution moved its round's base. Reads payloads.")
@click.option("--csv", "table", type=click.Path(path_type=Path, dir_okay=False), help="Write the influence there, too.")
@score_option
@build_option
@items_option
@json_option
def report(
    url: str, destination: Path, influence: bool, table: Path | None, as_json: bool, **given: str | None
) -> None:
    """Write one self-contained HTML page about the run in URL: curves, guard, participation, attempts."""
    from diloco_orchestrator.cli.report_page import page
    from diloco_orchestrator.clock import ThreadBackground
    from diloco_orchestrator.inspection.report import Report

    reader = reader_of(url)
    if not influence and (table or any(given.values())):
        raise click.UsageError("--csv, --score, --build and --items go with --influence.")
    found = _influence(reader, given) if influence else None
    html = page(Report.read(reader, ThreadBackground(), found))
    destination.write_text(html, encoding="utf-8")
    told: dict[str, object] = {"url": reader.store.url, "report": str(destination)}
    if found is not None:
        told["influence"] = found.to_json()
        if table is not None:
            table.write_text(found.to_csv(), encoding="utf-8")
    say(as_json, told, f"wrote {destination}" + (f" and {table}" if table else ""))


def _influence(reader: "RunReader", given: Mapping[str, str | None]) -> "Influence":
    """The influence of each contribution; with `--score` its effect on the held-out score too."""
    from diloco_orchestrator.inspection.whatif.influence import influence_of
    from diloco_orchestrator.inspection.whatif.models import BaseScorer, ModelWriter

    named = {name: named_object(name, text) for name, text in given.items()}
    if named["score"] is None:
        return influence_of(reader.log)
    return influence_of(reader.log, BaseScorer(reader.log, ModelWriter(reader.log), **named))


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

    reader = reader_of(url)
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
    from diloco_orchestrator.inspection.follow_logs import LogFollower

    replicas = range(reader.run.config.replicas) if replica is None else [replica]
    follower = LogFollower(reader, replicas, SystemClock(), ThreadBackground(), tail, trust_bucket=trust_bucket)
    for line in follower.lines():
        if as_json:
            echo(json.dumps(asdict(line)))
        else:
            click.echo(f"{_prefix(line)} {shown(line.text)}")


def _prefix(line: "LogLine") -> str:
    """Replica and attempt of a line, in the replica's colour; click leaves colours out where there is no terminal."""
    return click.style(f"{line.replica_id}.{line.attempt} |", fg=_COLOURS[line.replica_id % len(_COLOURS)])


@click.command()
@url_argument
@click.option("--load", is_flag=True, help="Load every snapshot with transformers or PEFT, too.")
@click.option("--build", metavar="PKG.MOD:FN", help="Makes the model, for --load of one that neither knows.")
@click.option("--score", metavar="PKG.MOD:FN", help="Your heldout(model, items): score what was loaded, and compare.")
@items_option
@click.option(
    "--tolerance", type=float, default=1e-4, show_default=True, help="By which a score may differ; more for bf16."
)
@click.option("--expect", metavar="HEAD", help="The log must reach it.  [default: the newest that you saw here]")
@json_option
def verify(
    url: str,
    load: bool,
    build: str | None,
    score: str | None,
    items: str | None,
    tolerance: float,
    expect: str | None,
    as_json: bool,
) -> int:
    """Derive the run in URL again from its bucket: log, guard, averages, outer steps, snapshots. Exit 4: it differs."""
    store = store_of(url)  # before what is slow to import
    from diloco_orchestrator.inspection.verify import check_loading, verify_run
    from diloco_orchestrator.inspection.verify.inventory import shortened
    from diloco_orchestrator.protocol.head import Head
    from diloco_orchestrator.run_log.launched_here import head_seen_here

    named = {name: named_object(name, text) for name, text in (("build", build), ("score", score), ("items", items))}
    expect = expect or head_seen_here(store.url)
    done = verify_run(store, expect=Head.parse(expect) if expect else None)
    if (load or build or score) and done.agrees:
        check_loading(store, done, **named, tolerance=tolerance)
    if as_json:
        echo(json.dumps(done.to_json()))
    else:
        echo(f"checked:     {_counts(done.checked)}")
        for words in done.unchecked:
            echo(f"not checked: {words}")
        for words in done.notes:
            echo(f"note:        {words}")
        if done.agrees:
            echo(f"pinned:      {_counts(done.pinned)}")
            echo(f"not pinned:  {_counts(done.unpinned)}  (by nothing in the log; --json says why)")
        for words in shortened(done.missing):
            echo(f"missing:     {words}")
        for words in shortened(done.foreign):
            echo(f"foreign:     {words}")
        for words in shortened(done.unreadable):
            echo(f"unreadable:  {words}")
        for words in shortened(done.without_exit):
            echo(f"no exit:     {words}")
        found = done.disagreement
        echo(f"models of:   {_spans(sorted(done.bases))}  (diloco pull --round)")
        echo("everything agrees" if found is None else f"DISAGREES:   {found.key}: {found.words}")
    return 0 if done.agrees else EXIT_DISAGREES


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "nothing"


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


COMMANDS = (status, explain, watch, snapshots, pull, push, report, logs, verify)
