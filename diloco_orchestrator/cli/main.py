"""The `diloco` command group, and how errors become messages and exit codes.

Kept light: what a command needs is imported when it runs, so that `--help` is quick. Exit codes: 0 completed, 1 failed,
2 usage, 3 halted (`demo --hack`: 0 when it halted as meant), 4 `verify` or `audit` found a disagreement, 130 Ctrl-C.
"""

import sys

import click

from diloco_orchestrator.cli import (
    care_commands,
    join_command,
    read_commands,
    run_commands,
    split_command,
    whatif_command,
)
from diloco_orchestrator.cli.shared import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from diloco_orchestrator.protocol.version import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION)
def diloco() -> None:
    """DiLoCo training whose only infrastructure is a bucket."""


_SINGLE = (join_command.join, split_command.split, whatif_command.whatif)
for _command in (*run_commands.COMMANDS, *read_commands.COMMANDS, *care_commands.COMMANDS, *_SINGLE):
    diloco.add_command(_command)


def main() -> None:
    """Entry point of `diloco`: runs the command, prints expected errors without a traceback, exits with its code."""
    from diloco_orchestrator.cli.shown import echo
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
        echo(f"Error: {error}", err=True)
        code = EXIT_USAGE
    except (DilocoError, ExecutorError) as error:
        echo(f"Error: {error}", err=True)
        code = EXIT_FAILED
    except BrokenPipeError:
        code = EXIT_FAILED
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
