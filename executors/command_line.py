"""`CommandLine`: runs a provider's command line tools and maps their failures to executor errors by a table.

Independent of any provider: each executor has its own table and parses its tools' output.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from diloco_orchestrator.executors.answers import Failure, error_of, failure_here
from diloco_orchestrator.executors.contract import MissingSdk, Unavailable

PATIENCE_S = 60.0  # seconds without an answer after which a tool is ended


class CommandLine:
    """Runs a provider's command line tools as this user.

    Args:
        words: Beginning of every command: a program and its first arguments; none for a provider of several programs.
        failures: Table of failures, of which the first row that fits counts; without one an `ExecutorError` is raised.
        missing: What to do where the program is not installed, as a sentence.
        environment: Makes the tools' environment; this process's by default.
    """

    def __init__(
        self,
        *words: str,
        failures: Sequence[Failure] = (),
        missing: str = "Install it.",
        environment: Callable[[], Mapping[str, str]] = os.environ.copy,
    ) -> None:
        self._words, self._failures, self._missing, self._environment = words, failures, missing, environment

    def run(
        self,
        *arguments: str,
        what: str = "",
        given: str = "",
        secrets: Mapping[str, str] | None = None,
        known: Sequence[str] = (),
    ) -> str:
        """The tool's standard output; also if it fails with a message that has one of the parts in `known`.

        `what`: the action, for errors; by default the command's first words. `given`: the tool's standard input.
        `secrets`: variables over the environment. Raises `MissingSdk` without the program, `Unavailable` if it does not
        finish within a minute or this machine cannot start it now, else the error of the first of the `failures` given
        to the constructor that its message has a part of, or `ExecutorError`.
        """
        command = self._command(arguments)
        what = what or " ".join([*self._words[:1], arguments[0]])
        try:
            done = subprocess.run(
                command,
                input=given,
                env={**self._environment(), **(secrets or {})},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what}: no answer for {PATIENCE_S:g} s. Try again.") from None
        except OSError as error:  # a login node often has no process left
            raise failure_here(what, error) from None
        said = done.stderr or done.stdout
        if done.returncode == 0 or any(part in said for part in known):
            return done.stdout
        raise error_of(what, said, self._failures)

    def lines(self, *arguments: str) -> Iterator[str]:
        """Lines of standard output and error, as the tool prints them. The tool is ended when the caller stops reading.

        Raises as `run` does if the tool fails; the message is then its last line.
        """
        with subprocess.Popen(
            self._command(arguments),
            env=dict(self._environment()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            line = ""
            try:
                for line in process.stdout:
                    yield line.rstrip("\n")
                if process.wait() != 0:
                    raise error_of(" ".join([*self._words[:1], arguments[0]]), line, self._failures)
            finally:
                process.terminate()

    def _command(self, arguments: Sequence[str]) -> list[str]:
        name, *rest = *self._words, *arguments
        program = shutil.which(name)
        if program is None:
            raise MissingSdk(f"{name} is not on the PATH. {self._missing}")
        return [program, *rest]
