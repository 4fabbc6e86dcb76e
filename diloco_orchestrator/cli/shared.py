"""Common parts of the commands: exit codes, options and their parsing, the reader of a URL, output as text or JSON.

Whoever can write to the bucket chooses the reasons, host names and log lines that a reader sees, so all text is printed
without characters that move the terminal's cursor or change its colours.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diloco_orchestrator.redaction import shown

if TYPE_CHECKING:
    from diloco_orchestrator.inspection.status import RunReader
    from diloco_orchestrator.inspection.verify.loading import OwnCode
    from diloco_orchestrator.protocol.record_format import Stamp
    from diloco_orchestrator.store.base import Store

EXIT_COMPLETED, EXIT_FAILED, EXIT_USAGE, EXIT_HALTED, EXIT_DISAGREES, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, on stdout.")
signed_by_option = click.option("--signed-by", metavar="KEY", help="The public key that must have signed the run.")
optional_url_argument = click.argument("url", metavar="[URL]", required=False)
url_argument = click.argument("url", metavar="URL")
trust_option = click.option(
    "--trust-bucket", is_flag=True,
    help="Use the executor and the image digests that run.json names although you did not launch the run here: all who "
    "may write there may run commands on this machine.",
)  # fmt: skip
secret_option = click.option(
    "--secret", "secret_names", metavar="NAME", multiple=True,
    help="Hand this variable of your environment to replicas as a secret of their provider. Repeatable.",
)  # fmt: skip


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the options `--score`, `--build` and `--items`, the caller's code that makes and scores models."""
    for name, kind, about in (
        ("items", "NAME", "The held-out items.  [default: those given to launch]"),
        ("build", "FN", "Makes the model, where neither transformers nor PEFT does."),
        ("score", "FN", "Your heldout(model, items): score the models here."),
    ):
        command = click.option(f"--{name}", metavar=f"PKG.MOD:{kind}", help=about)(command)
    return command


def own_code(build: str | None, score: str | None, items: str | None) -> "OwnCode":
    """The caller's code that these options name. Raises `ConfigError` for what is not there."""
    from diloco_orchestrator.inspection.verify.loading import OwnCode

    return OwnCode(named_object("build", build), named_object("score", score), named_object("items", items))


class ExecutorCommand(click.Command):
    """A command with `--executor` and the options of the executors that the command line names.

    `executor_default`: in words, what a command line without `--executor` means.
    """

    executor_default = "local"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from diloco_orchestrator.cli.executor_options import named, places_with

        ctx.meta["executors"] = named(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # With several executors, as --modal-gpu beside --eks-gpu.
            told_apart = any(each.endswith(error.option_name[1:]) for each in error.possibilities or ())
            if not told_apart and (places := places_with(error.option_name)):
                ctx.fail(f"{error.option_name} is no option here. It goes with --executor {' or '.join(places)}.")
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from diloco_orchestrator.cli.executor_options import executor_options

        own = super().get_params(ctx)
        taken = {flag for parameter in own for flag in parameter.opts}
        return [*own, *executor_options(ctx.meta.get("executors", ()), taken, self.executor_default)]


def store_of(url: str, *, watches: bool = False) -> "Store":
    """The existing store at `url`. Until a request succeeds, retries end after 10 s: the URL may be wrong.

    `watches`: for a command that follows a run; retries never end then once a request has succeeded.
    """
    from diloco_orchestrator.run_log.run_store import of_run
    from diloco_orchestrator.store.open_store import INTERACTIVE, WATCHING, absolute_url, open_store

    return of_run(open_store(absolute_url(url), retry=WATCHING if watches else INTERACTIVE, must_exist=True))


def reader_of(url: str, signed_by: str | None = None, *, watches: bool = False) -> "RunReader":
    """A reader of the run whose folder is `url`, with the store of `store_of`. Raises `NoSuchRun`.

    `signed_by`: the public key that must have signed the run, else `ConfigError`; None: any or none.
    """
    from diloco_orchestrator.inspection.status import RunReader
    from diloco_orchestrator.run_log.run_store import check_signed_by

    reader = RunReader(store_of(url, watches=watches))
    if signed_by is not None:
        check_signed_by(reader.run, reader.store.url, signed_by)
    return reader


def stamp() -> "Stamp":
    """A new stamp, which gives the records that a command writes their ids and times."""
    from diloco_orchestrator.clock import SystemClock, random_token
    from diloco_orchestrator.protocol.record_format import Stamp

    return Stamp(random_token(), SystemClock().wall_time)


def importable(target: str) -> str:
    """The "module:function" that PKG.MOD:FUNCTION or FILE.py:FUNCTION names, once its folder is on sys.path.

    The current folder is on sys.path afterwards, too. Raises `ConfigError` for a file that does not exist.
    """
    import sys

    from diloco_orchestrator.errors import ConfigError

    sys.path.insert(0, str(Path.cwd()))
    file, _, function = target.rpartition(":")
    if not file.endswith(".py"):
        return target
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"{target}: there is no file {path}. Check its path, or name PKG.MOD:FUNCTION.")
    sys.path.insert(0, str(path.parent))
    return f"{path.stem}:{function}"


def named_object(option: str, name: str | None) -> Any:
    """The object that the value of an option names as "package.module:name" or "file.py:name"; None for None.

    Raises `ConfigError` if it is missing. `option`: for errors.
    """
    if name is None:
        return None
    import importlib

    from diloco_orchestrator.errors import ConfigError, nearest

    module, _, attribute = importable(name).partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--{option} {name}: {module!r} cannot be imported ({error}). Run it where it can.") from None
    if not attribute or not hasattr(found, attribute):
        close = nearest(attribute, dir(found))
        hint = f"Did you mean {close!r}?" if close else "Write it as package.module:name or file.py:name."
        raise ConfigError(f"--{option} {name}: {module} has no {attribute!r}. {hint}")
    return getattr(found, attribute)


def texts(flag: str, given: tuple[str, ...]) -> dict[str, str]:
    """The K=V pairs of an option as a dict. `flag`: the option as errors name it.

    Raises `click.UsageError` for another form or a name given twice.
    """
    found: dict[str, str] = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{flag} {pair}: write it as K=V.")
        if name in found:
            raise click.UsageError(f"{flag} {name} is given twice.")
        found[name] = text
    return found


def pairs(flag: str, given: tuple[str, ...]) -> dict[str, Any]:
    """The K=V pairs of an option as a dict. A value that is JSON is parsed, any other is kept as text.

    `flag`: the option as errors name it. Raises `click.UsageError` for another form or a name given twice.
    """
    found: dict[str, Any] = {}
    for name, text in texts(flag, given).items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def echo(text: str, *, err: bool = False) -> None:
    """Print `text` with control characters replaced (`redaction.shown`)."""
    click.echo(shown(text), err=err)


def say(as_json: bool, body: dict[str, Any], words: str) -> None:
    """Print `body` as JSON if `as_json` is set, else the line `words`."""
    echo(json.dumps(body) if as_json else words)
