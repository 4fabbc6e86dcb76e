"""The `diloco` command group, and how errors become messages and exit codes.

A command's imports are made when it runs, so that `--help` is quick. Exit codes: 0 completed, 1 failed, 2 usage, 3
halted (`demo --hack`: 0 when the guard halted it, as it should), 4 `verify` or `audit` found a disagreement, 130
Ctrl-C.
"""

import errno
import importlib
import io
import re
import sys
from typing import NoReturn

import click

from diloco_orchestrator.cli.shared import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, echo
from diloco_orchestrator.import_names import registered, registered_names

_HEAVY = ("torch", "transformers")  # what reads a bucket without computing works without
_INSTALL = (
    "pip install torch transformers, or diloco-orchestrator[train]. status, explain, logs, report, compare, track and "
    "join --help need neither, and verify checks all but tensors without."
)
_CLAUSE = 66  # characters beside the longest name, on 80 columns
ENTRY_POINTS = "diloco_orchestrator.commands"  # other packages' commands: each entry point is a `click.Command`
GROUPS = {  # by section of `diloco --help`: our commands, and where each is defined
    "Start": {
        "demo": "diloco_orchestrator.cli.run_commands:demo",
        "split": "diloco_orchestrator.split.command:split",
        "lock": "diloco_orchestrator.cli.before_commands:lock",
        "plan": "diloco_orchestrator.cli.run_commands:plan_",
        "run": "diloco_orchestrator.cli.run_commands:run_",
        "join": "diloco_orchestrator.cli.join_command:join",
        "invite": "diloco_orchestrator.cli.invite_command:invite",
    },
    "Look": {
        "status": "diloco_orchestrator.cli.read_commands:status",
        "watch": "diloco_orchestrator.cli.read_commands:watch",
        "logs": "diloco_orchestrator.cli.read_commands:logs",
        "explain": "diloco_orchestrator.cli.read_commands:explain",
        "report": "diloco_orchestrator.cli.read_commands:report",
        "compare": "diloco_orchestrator.cli.compare_command:compare",
        "track": "diloco_orchestrator.cli.read_commands:track",
        "snapshots": "diloco_orchestrator.cli.read_commands:snapshots",
    },
    "Check": {
        "check": "diloco_orchestrator.cli.before_commands:check",
        "doctor": "diloco_orchestrator.cli.before_commands:doctor",
        "verify": "diloco_orchestrator.cli.derive_commands:verify",
        "witness": "diloco_orchestrator.cli.witness_command:witness",
        "audit": "diloco_orchestrator.cli.derive_commands:audit",
        "whatif": "diloco_orchestrator.cli.derive_commands:whatif",
    },
    "Care": {
        "attach": "diloco_orchestrator.cli.run_commands:attach_",
        "scale": "diloco_orchestrator.cli.run_commands:scale",
        "halt": "diloco_orchestrator.cli.run_commands:halt",
        "resume": "diloco_orchestrator.cli.run_commands:resume",
        "pull": "diloco_orchestrator.cli.read_commands:pull",
        "push": "diloco_orchestrator.cli.read_commands:push",
        "gc": "diloco_orchestrator.cli.run_commands:gc",
        "key": "diloco_orchestrator.cli.read_commands:key",
        "revoke": "diloco_orchestrator.cli.invite_command:revoke",
    },
}
OURS = {name: where for group in GROUPS.values() for name, where in group.items()}


class Commands(click.Group):
    """The commands of `diloco`, and those of other packages by their entry points, each imported when it is called.

    No package can take one of our names: the list of commands names those that tried, on stderr. A command that does
    not load fails when it is called; the others work.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        theirs = registered_names(ENTRY_POINTS)
        for name in OURS.keys() & theirs:
            echo(f"a package registers a command {name!r}, which is not used: diloco has one of that name", err=True)
        return [*OURS, *sorted(theirs - OURS.keys())]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by group, each with the first clause of its help."""
        names = self.list_commands(ctx)
        groups = {**GROUPS, "Of other packages": [name for name in names if name not in OURS]}
        for group, members in groups.items():
            found = [(name, self.get_command(ctx, name)) for name in members]
            if rows := [(name.ljust(9), _first_clause(each.help or "")) for name, each in found if each is not None]:
                with formatter.section(group):
                    formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in OURS:
            module, _, attribute = OURS[cmd_name].partition(":")
            ours: click.Command = getattr(importlib.import_module(module), attribute)
            return ours
        try:
            found, where = registered("command", ENTRY_POINTS, cmd_name)
        except LookupError:
            return None
        except ValueError as error:
            return _broken(cmd_name, str(error))
        return found if isinstance(found, click.Command) else _broken(cmd_name, f"{where} is no `click.Command`.")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from diloco_orchestrator.errors import unknown_name

            ctx.fail(unknown_name("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


def _first_clause(text: str) -> str:
    clause = re.split(r"[:;.](?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
    return clause if len(clause) <= _CLAUSE else clause.partition(", ")[0]


def _broken(name: str, why: str) -> click.Command:
    def refuse() -> NoReturn:
        from diloco_orchestrator.errors import ConfigError

        raise ConfigError(why)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=refuse, help=f"Cannot be used: {why}", context_settings=anything)


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from diloco_orchestrator.cli.installed_version import installed_version

        echo(f"diloco, version {installed_version()}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the version, with the git commit that it is of, and exit.",
)  # fmt: skip
def diloco() -> None:
    """DiLoCo training whose only infrastructure is a bucket."""


def main() -> None:
    """Entry point of `diloco`: runs the command, prints expected errors without a traceback, exits with its code."""
    from diloco_orchestrator.errors import ConfigError, DilocoError, more_about
    from diloco_orchestrator.executors.contract import ExecutorError

    for stream in (sys.stdout, sys.stderr):  # where the locale is not UTF-8, what it lacks is written by number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = diloco.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt) as stopped:
        echo(str(stopped.__cause__ or stopped) or "interrupted", err=True)  # click raises Abort from the other
        code = EXIT_INTERRUPTED
    except (DilocoError, ExecutorError) as error:
        echo(f"Error: {error}\n{more_about(type(error))}", err=True)
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except ModuleNotFoundError as error:
        if error.name not in _HEAVY:
            raise
        echo(f"Error: this command computes, and needs {error.name}, which is not installed here: {_INSTALL}", err=True)
        code = EXIT_USAGE
    except BrokenPipeError:
        code = EXIT_FAILED
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:  # no file that the user named, nor a full screen
            raise
        where = "the output" if error.filename is None else error.filename
        echo(f"Error: {where}: {error.strerror}. Name another place, or make it one that can be written.", err=True)
        code = EXIT_FAILED
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
