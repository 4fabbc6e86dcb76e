"""`diloco whatif`: the base of a run under another decision, from stored payloads alone."""

import json
from pathlib import Path
from typing import Any

import click

from diloco_orchestrator.cli.shared import (
    build_option,
    items_option,
    json_option,
    named_object,
    reader_of,
    score_option,
    url_argument,
)
from diloco_orchestrator.cli.shown import echo


@click.command()
@url_argument
@click.option("--round", "round_", type=int, required=True, help="The round that is decided otherwise.")
@click.option("--without", type=int, multiple=True, help="Leave out this replica's contribution. Repeatable.")
@click.option("--outer-lr", type=float, help="Outer learning rate.")
@click.option("--outer-momentum", type=float, help="Outer momentum; it can be switched neither on nor off.")
@click.option("--outer-nesterov/--no-outer-nesterov", default=None, help="Nesterov's look-ahead, or plain momentum.")
@click.option("--weights", help="Weights of contributions: uniform, or tokens.")
@click.option(
    "--aggregate", help="How contributions become one pseudo-gradient: mean, agreeing_mean, trimmed_mean or median."
)
@click.option("--clip", help="Of contributions with a large norm: median_norm, or off.")
@click.option("--clip-factor", type=float, help="How many times the median norm is too large.")
@click.option("--onward", is_flag=True, help="Decide so in every round from --round to --until, not in that one alone.")
@click.option(
    "--until", type=int, help="Compare the bases after this round.  [default: --round; with --onward the newest]"
)
@score_option
@build_option
@items_option
@click.option("--save", type=click.Path(path_type=Path), help="Write the model under the other decision there.")
@json_option
def whatif(
    url: str,
    round_: int,
    onward: bool,
    until: int | None,
    score: str | None,
    build: str | None,
    items: str | None,
    save: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Compute the base of URL if a round had been decided otherwise, and compare it with the base as it was.

    The contributions are the stored ones. After that round itself the base is, bit by bit, that of a run which decided
    so; after later rounds it is not, because its replicas would have trained from the other base.
    """
    run_log = reader_of(url).log  # before what is slow to import
    from diloco_orchestrator.inspection.whatif import whatif_of

    outer = {name: given.pop(f"outer_{name}") for name in ("lr", "momentum", "nesterov")}
    found = whatif_of(
        run_log,
        round_,
        {**given, "outer": {name: value for name, value in outer.items() if value is not None}},
        onward=onward,
        until=until,
        score=named_object("score", score),
        build=named_object("build", build),
        items=named_object("items", items),
        save=save,
    )
    echo(json.dumps(found.to_json()) if as_json else "\n".join(found.lines()))
