"""`diloco join`: this machine runs replicas of a run, connected to the launcher by the bucket alone."""

import os
import platform
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from diloco_orchestrator.cli.shared import EXIT_INTERRUPTED, echo, url_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco_orchestrator.protocol.attempt_records import Offer
    from diloco_orchestrator.store.base import Store


@click.command("join")
@url_argument
@click.option(
    "--trust-bucket", is_flag=True,
    help="Run what the bucket says although you did not launch the run here: all who may write there may run commands "
    "on this machine.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Leave after one attempt, with its exit code.")
@click.option("--replica", type=click.IntRange(min=0), metavar="N", help="Take this replica only.")
@click.option("--gpus", metavar="IDS", help="GPUs of the replica, such as 0 or 2,3.  [default: all that are visible]")
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N",
    help="Processes that train a replica together here, each on a GPU of its own.  [default: as the run says; under "
    "torchrun its number of processes]",
)  # fmt: skip
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="Leave after so many hours.")
@click.option(
    "--every", "every_s", type=click.FloatRange(0.05, 30.0), default=5.0, show_default=True,
    help="Seconds between two requests to the bucket.",
)  # fmt: skip
def join(
    url: str,
    trust_bucket: bool,
    once: bool,
    replica: int | None,
    gpus: str | None,
    ranks: int | None,
    hours: float | None,
    every_s: float,
) -> int:
    """Offer this machine to the run in URL: it takes a replica's place, and the next one's, until the run is over.

    The run needs `--executor join`; it may begin later. Credentials for the bucket and the run's secrets come from this
    machine's environment. SIGTERM lets the replica publish what it has, and leaves with exit code 75.
    """
    from diloco_orchestrator.clock import SystemClock, random_token
    from diloco_orchestrator.join.machine import Identity, JoinSettings, Machine
    from diloco_orchestrator.protocol.record_format import Stamp
    from diloco_orchestrator.store.open_store import absolute_url, open_store
    from diloco_orchestrator.store.retrying import RetryPolicy

    ranks, joins = ranks_here(os.environ, ranks)
    if not joins:
        echo(f"process {os.environ['RANK']} of torchrun: process 0 joins, and starts the ranks", err=True)
        return 0
    clock, token = SystemClock(), random_token()
    patience = RetryPolicy(total_s=5.0, first_call_s=10.0)  # what fails is asked again every few seconds
    store = open_store(absolute_url(url), clock=clock, retry=patience)
    why_not = (lambda offer: "") if trust_bucket else only_own_offers(store)
    machine = Machine(
        store,
        JoinSettings(replica, once, hours, gpus, ranks, every_s),
        Identity(token, platform.node(), os.getpid()),
        environ=os.environ,
        clock=clock,
        stamp=Stamp(token, clock.wall_time),
        say=lambda words: echo(words, err=True),
        why_not=why_not,
    )
    interrupted = []

    def leave(number: int, _: object) -> None:
        name = signal.Signals(number).name
        interrupted.append(name)
        machine.leave(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    code = machine.run()
    return EXIT_INTERRUPTED if interrupted[:1] == ["SIGINT"] else code


def ranks_here(environ: "Mapping[str, str]", ranks: int | None) -> tuple[int | None, bool]:
    """Number of ranks of a replica on this machine, None for the run's setting, and whether this process is to join.

    `ranks`: of the command line. Under torchrun, which sets the variables in `environ`, the first process joins and
    starts ranks, by default as many as torchrun has processes; the others have nothing to do. Raises `ConfigError` if
    torchrun has processes on several machines, or another number of them than `ranks`.
    """
    from diloco_orchestrator.errors import ConfigError

    if "TORCHELASTIC_RUN_ID" not in environ:
        return ranks, True
    world, local = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
    if world != local:
        raise ConfigError(
            f"torchrun has {world} processes, of which {local} are on this machine: the ranks of a replica are "
            "processes of one machine. Call `diloco join` on each, without torchrun."
        )
    if ranks not in (None, world):
        raise ConfigError(f"--ranks {ranks} under a torchrun of {world} processes: leave one of them out.")
    return (None if world == 1 and ranks is None else world), environ["RANK"] == "0"


def only_own_offers(store: "Store") -> Callable[["Offer"], str]:
    """A function that returns why an offer (attempt for machines that join) is not what this user launched, or "".

    Raises `ConfigError` unless this user launched the run here and run.json, from which offers follow, is unchanged.
    """
    from diloco_orchestrator.errors import ConfigError, NoSuchRun
    from diloco_orchestrator.protocol import keys
    from diloco_orchestrator.protocol.launched import Launched
    from diloco_orchestrator.run_log.launched_here import settings_begun_here, why_not_launched_here
    from diloco_orchestrator.run_log.run_log import RunLog
    from diloco_orchestrator.supervision.launch_request import LaunchRequests

    try:
        run_log = RunLog(store)
        why = why_not_launched_here(run_log)
    except NoSuchRun:
        why = "there is no run in it yet"
    if why:
        raise ConfigError(
            f"this machine would run the code that {store.url} holds, and {why}: whoever may write to the bucket "
            "chooses what runs here, with this user's files and credentials. Pass --trust-bucket if you trust all who "
            "may write there."
        )
    run = run_log.run

    def launched(offer: "Offer", settings: str) -> tuple[str, list[str], dict[str, str], str]:
        """Run id, command, environment and code that this run's offer of an attempt must have with `settings`."""
        pinned, secrets = Launched(run_log.run_sha256, settings), dict.fromkeys(run.secret_names, "")
        requests = LaunchRequests(run, pinned, store.url, secrets=secrets)
        command, env = requests.program(offer.replica_id, offer.attempt, shares_machine=False)
        return run.run_id, command, env, keys.code(run.code_sha256 or "")

    def why_not(offer: "Offer") -> str:
        found = offer.run_id, list(offer.command), offer.env, offer.code
        if any(found == launched(offer, settings) for settings in ("", *sorted(settings_begun_here(run_log)))):
            return ""
        return (
            "its command, environment or code is not that of the run which you launched: somebody else may have put it "
            "there. Pass --trust-bucket if you trust all who may write to the bucket."
        )

    return why_not
