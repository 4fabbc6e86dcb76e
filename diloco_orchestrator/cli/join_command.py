"""`diloco join`: this machine runs replicas of a run, connected to the launcher by the bucket alone."""

import math
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from diloco_orchestrator.cli.shared import EXIT_INTERRUPTED, echo

if TYPE_CHECKING:
    from diloco_orchestrator.clock import Clock
    from diloco_orchestrator.join.grants import Lent
    from diloco_orchestrator.join.link import Link
    from diloco_orchestrator.join.machine import JoinSettings
    from diloco_orchestrator.protocol.attempt_records import Offer
    from diloco_orchestrator.run_log.run_log import RunLog
    from diloco_orchestrator.store.base import Store
    from diloco_orchestrator.store.retrying import RetryPolicy


@click.command("join")
@click.argument("url", metavar="URL|LINK")
@click.option(
    "--trust-bucket", is_flag=True,
    help="Run what the bucket says although you did not launch the run here: all who may write there may run commands "
    "on this machine.",
)  # fmt: skip
@click.option(
    "--signed-by", metavar="KEY", help="Run what this public key has signed: then nobody needs trust the bucket."
)
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
    signed_by: str | None,
    once: bool,
    replica: int | None,
    gpus: str | None,
    ranks: int | None,
    hours: float | None,
    every_s: float,
) -> int:
    """Offer this machine to the run in URL: it takes a replica's place, and the next one's, until the run is over.

    The run needs `--executor join`; it may begin later. Credentials for the bucket and the run's secrets come from this
    machine's environment. SIGTERM lets the replica publish what it has, and leaves with exit code 75. With a LINK that
    `diloco invite` has made, this machine runs the replica that it names, needs no account, and runs no code but the
    link's; "-" reads the link from standard input, where no list of processes shows it.
    """
    from diloco_orchestrator.clock import SystemClock, random_token
    from diloco_orchestrator.join.link import BEGINNING, Link
    from diloco_orchestrator.join.machine import Identity, JoinSettings, Machine
    from diloco_orchestrator.protocol.record_format import Stamp
    from diloco_orchestrator.store.open_store import open_store
    from diloco_orchestrator.store.retrying import RetryPolicy

    ranks, joins = ranks_here(os.environ, ranks)
    if not joins:
        echo(f"process {os.environ['RANK']} of torchrun: process 0 joins, and starts the ranks", err=True)
        return 0
    clock, token = SystemClock(), random_token()
    patience = RetryPolicy(total_s=5.0, first_call_s=10.0)  # what fails is asked again every few seconds
    if url == "-":
        url = sys.stdin.read().strip()
    link = Link.parse(url) if url.startswith(BEGINNING) else None
    settings = JoinSettings(replica, once, hours, gpus, ranks, every_s, signed_by)
    lent: Lent | None = None
    if link is None:
        trusts = trust_bucket or signed_by is not None
        store = _folder_of_run(url, clock, patience, hours if trusts else 0.0, every_s)
        why_not = _runs_all if trusts else only_own_offers(store)
    else:
        if trust_bucket or signed_by or replica is not None:
            raise click.UsageError("a link names the replica and the key: leave out the other options about them.")
        lent = _lent_by(link, clock, patience, every_s)
        store = open_store(link.url, link.storage_options(), clock=clock, retry=patience)
        settings, why_not = of_link(link, settings), only_code_of(link, store)
    machine = Machine(
        store,
        settings,
        Identity(token, platform.node(), os.getpid()),
        environ=os.environ,
        clock=clock,
        stamp=Stamp(token, clock.wall_time),
        say=lambda words: echo(words, err=True),
        why_not=why_not,
        lent=lent,
    )
    interrupted = []

    def leave(number: int, _: object) -> None:
        name = signal.Signals(number).name
        interrupted.append(name)
        machine.leave(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    with _explained(link, lent):
        code = machine.run()
    return EXIT_INTERRUPTED if interrupted[:1] == ["SIGINT"] else code


def _folder_of_run(url: str, clock: "Clock", patience: "RetryPolicy", hours: float | None, every_s: float) -> "Store":
    """The folder of the run in `url`. A local one that is missing is waited for, and not created: a reader makes none.

    `hours`: how long; None: for ever. Raises `NoSuchRun` if it is still missing then.
    """
    from diloco_orchestrator.errors import NoSuchRun
    from diloco_orchestrator.store.open_store import absolute_url, open_store

    waits_until, said = math.inf if hours is None else clock.now() + 3600 * hours, False
    while True:
        try:
            return open_store(absolute_url(url), clock=clock, retry=patience, must_exist=True)
        except NoSuchRun as error:
            if clock.now() >= waits_until:
                raise
            if not said:
                echo(f"{error} Waiting for it.", err=True)
            said = True
            clock.sleep(every_s)


def _lent_by(link: "Link", clock: "Clock", patience: "RetryPolicy", every_s: float) -> "Lent | None":
    """The newest access to the store that was lent to this machine, in use until the command ends.

    None if the link lends none, so that this machine's own account counts. A store that cannot be reached, or whose
    run.json is missing, is asked again every `every_s` seconds. Raises `ConfigError` if the store refuses what was
    lent, and for another run than the link names: nothing is taken from that.
    """
    from diloco_orchestrator.errors import NoSuchRun, StoreUnavailable
    from diloco_orchestrator.join.grants import Lent, LentCredentials
    from diloco_orchestrator.join.machine import check_is_run_of_link
    from diloco_orchestrator.join.windows import LentRequests
    from diloco_orchestrator.run_log.run_log import RunLog
    from diloco_orchestrator.run_log.run_store import of_run
    from diloco_orchestrator.store.open_store import open_store

    if link.credentials is None and not link.requests:
        return None
    command = click.get_current_context()
    folder = Path(command.with_resource(TemporaryDirectory(prefix="diloco-link-")))
    lent: Lent
    if link.credentials is None:
        lent = LentRequests(link, folder)
    else:
        lent = LentCredentials(link, link.credentials, folder, clock)
    command.with_resource(lent.in_this_process())
    with _explained(link, lent):
        while True:  # before what it opens is opened
            try:
                store = of_run(open_store(link.url, link.storage_options(), clock=clock, retry=patience), {})
                check_is_run_of_link(RunLog(store), link.run_sha256)
                lent.find(store)
                return lent
            except (StoreUnavailable, NoSuchRun) as error:
                echo(str(error), err=True)
                clock.sleep(every_s)


@contextmanager
def _explained(link: "Link | None", lent: "Lent | None") -> Iterator[None]:
    """Context in which a refusal of a link's credentials says what the machine's user can do."""
    from diloco_orchestrator.errors import ConfigError, StoreDenied

    try:
        yield
    except StoreDenied as error:
        if link is None:
            raise
        until = "" if lent is None else f", which end at {lent.ends}"
        raise ConfigError(
            f"{link.url} does not accept this link's credentials{until}; is this machine's clock right? Otherwise ask "
            f"for another link. ({error})"
        ) from None


def _runs_all(offer: "Offer") -> str:
    return ""


def ranks_here(environ: Mapping[str, str], ranks: int | None) -> tuple[int | None, bool]:
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
    from diloco_orchestrator.run_log.launched_here import settings_begun_here, why_not_launched_here
    from diloco_orchestrator.run_log.run_log import RunLog

    try:
        why = why_not_launched_here(RunLog(store))
    except NoSuchRun:
        why = "there is no run in it yet"
    if why:
        raise ConfigError(
            f"this machine would run the code that {store.url} holds, and {why}: whoever may write to the bucket "
            "chooses what runs here, with this user's files and credentials. Name the key that signed the run, "
            "--signed-by KEY, or pass --trust-bucket if you trust all who may write there."
        )

    def why_not(offer: "Offer") -> str:
        run_log = RunLog(store)  # that this user may have launched anew since
        if not why_not_launched_here(run_log) and is_of_run(offer, run_log, settings_begun_here(run_log)):
            return ""
        return (
            "its command, environment or code is not that of the run which you launched: somebody else may have put it "
            "there. Pass --trust-bucket if you trust all who may write to the bucket."
        )

    return why_not


def is_of_run(offer: "Offer", run_log: "RunLog", settings: Iterable[str]) -> bool:
    """Whether command, environment and code of an offered attempt follow from run.json.

    `settings`: digests of the settings that legs (from start or resume to stop) of the run may have changed.
    """
    from diloco_orchestrator.protocol import keys
    from diloco_orchestrator.protocol.launched import Launched
    from diloco_orchestrator.supervision.launch_request import LaunchRequests

    run, found = run_log.run, (offer.run_id, list(offer.command), offer.env, offer.code)
    secrets = dict.fromkeys(run.secret_names, "")
    for changed in ("", *sorted(settings)):
        requests = LaunchRequests(run, Launched(run_log.run_sha256, changed), run_log.store.url, secrets=secrets)
        command, env = requests.program(offer.replica_id, offer.attempt, shares_machine=False)
        if found == (run.run_id, command, env, keys.code(run.code_sha256 or "")):
            return True
    return False


def only_code_of(link: "Link", store: "Store") -> Callable[["Offer"], str]:
    """A function that returns why an offered attempt is not of the run and code that `link` names; empty if it is."""
    from diloco_orchestrator.protocol.launched import settings_sha256
    from diloco_orchestrator.run_log.run_log import RunLog

    def why_not(offer: "Offer") -> str:
        run_log = RunLog(store)
        settings = {settings_sha256(begin.settings) for begin in run_log.begins() if begin.settings}
        if run_log.run.code_sha256 == link.code_sha256 and is_of_run(offer, run_log, settings):
            return ""
        return "its command, environment or code is not that of the run and the code which the link names"

    return why_not


def of_link(link: "Link", settings: "JoinSettings") -> "JoinSettings":
    """Settings of a machine with a link: `settings`, and what the link names."""
    from diloco_orchestrator.protocol.signatures import KEY_BYTES, from_text
    from diloco_orchestrator.run_log.run_store import Identity as UserIdentity

    return replace(
        settings,
        replica=link.replica_id,
        signed_by=link.signed_by,
        run_sha256=link.run_sha256,
        user=UserIdentity(from_text(link.seed, KEY_BYTES)),
    )
