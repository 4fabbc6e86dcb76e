"""Commands that compute a run again from its bucket: verify, audit, whatif."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diloco_orchestrator.cli.shared import (
    EXIT_DISAGREES,
    EXIT_FAILED,
    code_options,
    echo,
    json_option,
    named_object,
    own_code,
    reader_of,
    store_of,
    url_argument,
)

if TYPE_CHECKING:
    from diloco_orchestrator.inspection.audit.findings import Audit, RangeFinding
    from diloco_orchestrator.inspection.verify.findings import Verification


@click.command()
@url_argument
@click.option("--load", is_flag=True, help="Load every snapshot with transformers or PEFT, too.")
@code_options
@click.option("--tolerance", type=float, help="By which a score may differ; more for bf16.  [default: 0.0001]")
@click.option("--expect", metavar="HEAD", help="The log must reach it.  [default: the newest that you saw here]")
@click.option("--signed-by", metavar="KEY", help="The public key that must have signed the run, ed25519:….")
@click.option("--witness", metavar="PLACE", help="The log must have all heads that a witness has stated there.")
@click.option("--witnessed-by", metavar="KEY", help="The public key of that witness.  [default: any]")
@json_option
def verify(
    url: str,
    load: bool,
    build: str | None,
    score: str | None,
    items: str | None,
    tolerance: float | None,
    expect: str | None,
    signed_by: str | None,
    witness: str | None,
    witnessed_by: str | None,
    as_json: bool,
) -> int:
    """Derive the run in URL again from its bucket: log, guard, averages, outer steps, snapshots. Exit 4: it differs.

    Without torch the log, the guard and all digests are checked, averages and bases are not: exit 1 if nothing differs.
    """
    if witnessed_by and not witness:
        raise click.UsageError("--witnessed-by goes with --witness PLACE.")
    if (items or tolerance is not None) and not score:
        raise click.UsageError("--items and --tolerance go with --score.")
    store = store_of(url)  # before what is slow to import
    from diloco_orchestrator.inspection.verify import verify as verified
    from diloco_orchestrator.inspection.verify.findings import TOLERANCE
    from diloco_orchestrator.protocol import keys
    from diloco_orchestrator.protocol.head import Head
    from diloco_orchestrator.run_log.launched_here import head_seen_here, why_not_launched_here
    from diloco_orchestrator.run_log.run_log import RunLog

    noted = "" if expect else head_seen_here(store)
    expect = expect or noted
    done = verified(
        url,
        load=load,
        build=named_object("build", build),
        score=named_object("score", score),
        heldout_items=named_object("items", items),
        tolerance=TOLERANCE if tolerance is None else tolerance,
        expect=expect or None,
        signed_by=signed_by,
        witness=witness,
        witnessed_by=witnessed_by,
    )
    readable = done.disagreement is not None and done.disagreement.key != keys.RUN
    if noted and readable and (why := why_not_launched_here(RunLog(store))):
        done.notes.append(f"the head {Head.parse(noted).short} is of a run that you launched here, and {why}")
    if as_json:
        echo(json.dumps(done.to_json()))
    else:
        for title, words in _findings(done, is_asked_for=signed_by is not None):
            echo(f"{title + ':':<13}{words}")
        found = done.disagreement
        if found is not None:
            echo(f"DISAGREES:   {found.key}: {found.words}")
        elif done.not_derived:
            echo("NOT VERIFIED: what was checked agrees; pip install torch, and verify again")
        else:
            echo("everything agrees")
    if done.disagreement is not None:
        return EXIT_DISAGREES
    return 0 if done.agrees else EXIT_FAILED


def _findings(done: "Verification", is_asked_for: bool) -> Iterator[tuple[str, str]]:
    """(title, text) of each line about a run but the last. `is_asked_for`: whether the user named the run's key."""
    from diloco_orchestrator.inspection.verify.inventory import shortened

    yield "checked", _counts(done.checked)
    if done.not_derived:
        yield "not derived", done.not_derived
    yield from (("not checked", words) for words in done.unchecked)
    yield from (("note", words) for words in done.notes)
    if done.disagreement is None:
        yield "pinned", _counts(done.pinned)
        yield "not pinned", f"{_counts(done.unpinned)}  (by nothing in the log; --json says why)"
    lists = {"missing": done.missing, "foreign": done.foreign, "unreadable": done.unreadable, "unsigned": done.unsigned}
    for title, found in {**lists, "no exit": done.without_exit}.items():
        yield from ((title, words) for words in shortened(found))
    if done.signed_by:
        yield "signed by", f"{done.signed_by}{'' if is_asked_for else '  (as run.json says: compare, or --signed-by)'}"
    if not done.not_derived:
        yield "models of", f"{_spans(done.bases)}  (diloco pull --round)"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "nothing"


def _spans(rounds: Iterable[int]) -> str:
    from diloco_orchestrator.protocol.replica_names import spans

    words = [str(low) if low == high else f"{low} to {high}" for low, high in spans(rounds)]
    return f"rounds {', '.join(words)}" if words else "no round"


@click.command()
@url_argument
@click.option(
    "--draw", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds of replicas to train again."
)
@click.option("--seed", type=click.IntRange(min=0), help="Of the draw; choose it now.  [default: random, printed]")
@click.option("--limit-s", type=click.FloatRange(min=1), help="s after which one is ended.  [default: by its record]")
@click.option(
    "--trust-bucket", is_flag=True,
    help="Run the training function that the bucket names although you did not launch the run here.",
)  # fmt: skip
@json_option
def audit(url: str, draw: int, seed: int | None, limit_s: float | None, trust_bucket: bool, as_json: bool) -> int:
    """Train some rounds of replicas again, drawn at random, and compare their payloads. Exit 4: one differs.

    For runs with replica_state="round". Runs the run's own code here, as far as you launched it or trust the bucket.
    """
    from diloco_orchestrator.inspection.audit import audit as audited

    sys.path.insert(0, str(Path.cwd()))
    table: dict[str, Any] = {"on_draw": _print_head, "on_range": lambda found: echo(_row_of(found))}
    done = audited(url, draw, seed, trust_bucket=trust_bucket, limit_s=limit_s, **({} if as_json else table))
    if as_json:
        echo(json.dumps(done.to_json()))
    else:
        echo(done.words())
    if not done.agrees:
        return EXIT_DISAGREES
    return 0 if done.audited else EXIT_FAILED


_COLUMNS = (("round", 7), ("replica", 9), ("steps", 7), ("state of", 10), ("s", 8))
_TITLE = "payload"


def _print_head(drawn: "Audit") -> None:
    """Print the last commit audited, the seed of the draw, and the number of rounds drawn."""
    echo(f"log up to {drawn.head}, {drawn.ranges} ranges; the draw: --seed {drawn.seed}")
    echo("".join(f"{name:<{width}}" for name, width in _COLUMNS) + _TITLE)


def _row_of(found: "RangeFinding") -> str:
    follows = f"round {found.follows}" if found.follows else "start"
    cells = (found.range_.round, found.range_.replica_id, found.steps, follows, f"{found.seconds:.1f}")
    line = "".join(f"{cell!s:<{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    bound = f" (bound {found.bound:.2g})" if found.bound is not None else ""
    away = f", distance {found.distance:.2g}{bound}" if found.distance else ""
    return f"{line}{found.outcome}{away}{f': {found.words}' if found.words else ''}"


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
@code_options
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
    if (items and not score) or (build and not score):
        raise click.UsageError("--build and --items go with --score.")
    run_log = reader_of(url).log  # before what is slow to import
    from diloco_orchestrator.inspection.whatif import whatif_of

    outer = {name: given.pop(f"outer_{name}") for name in ("lr", "momentum", "nesterov")}
    found = whatif_of(
        run_log,
        round_,
        {**given, "outer": {name: value for name, value in outer.items() if value is not None}},
        own_code(build, score, items),
        onward=onward,
        until=until,
        save=save,
    )
    echo(json.dumps(found.to_json()) if as_json else "\n".join(found.lines()))
