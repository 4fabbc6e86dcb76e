"""`diloco witness`: states the newest commit of a run's log from another account, in a folder or bucket of its own."""

import sys

import click

from diloco_orchestrator.cli.shared import EXIT_DISAGREES, echo, json_option, say, stamp, store_of, url_argument


@click.command()
@url_argument
@click.option("--to", "place", required=True, metavar="PLACE", help="A folder or bucket of yours, for this run alone.")
@click.option("--every", type=click.FloatRange(min=0.1), help="Seconds between looks.  [default: 20.0, or more]")
@click.option("--once", is_flag=True, help="State the head of now, and end.")
@json_option
def witness(url: str, place: str, every: float | None, once: bool, as_json: bool) -> int:
    """Sign which commit is the last one of the run in URL, each time that there is a new one, until the run ends.

    The statements are in PLACE, a folder or bucket of yours; `diloco verify URL --witness PLACE` compares the run with
    them later. Exit 4: the run contradicts an earlier statement.
    """
    from diloco_orchestrator.clock import SystemClock
    from diloco_orchestrator.inspection.witness import Witness
    from diloco_orchestrator.run_log.run_store import identity_of_user
    from diloco_orchestrator.store.open_store import INTERACTIVE, WATCHING, absolute_url, open_store

    if once and every is not None:
        raise click.UsageError("--every goes without --once.")
    clock, identity = SystemClock(), identity_of_user()
    stated = open_store(absolute_url(place), retry=INTERACTIVE if once else WATCHING)
    watched = Witness(store_of(url, watches=not once), stated, identity, stamp())
    if not as_json:
        echo(f"witness {identity.public.key}")
    while True:
        found = watched.look()
        if (new := found.stated) is not None:
            say(as_json, {"round": new.round, "sha256": new.commit_sha256}, f"head {new.head.short}")
        if found.contradiction:
            echo(f"THE LOG IS ANOTHER ONE: {found.contradiction}. Both heads are in {place}.", err=True)
            return EXIT_DISAGREES
        if once or found.is_over:
            return 0
        sys.stdout.flush()
        clock.sleep(max(20.0, watched.apart_s) if every is None else every)
