"""Digests that pin a run's configuration, passed on the command line of every process that the run starts.

A process reads its configuration from the bucket, where others may write. So it refuses a run.json or settings of a leg
(start or resume to stop) whose digests are not those on its command line, which were computed when the run was
launched.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import JsonValue

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import Sha256, sha256_hex
from diloco_orchestrator.protocol.record_format import canonical_json
from diloco_orchestrator.protocol.records import Begin

_RUN, _SETTINGS = "--run-sha256", "--settings-sha256"


def settings_sha256(settings: Mapping[str, JsonValue]) -> Sha256:
    """The sha256 of the settings (name to value) that a leg (start or resume to stop) changes; empty if none."""
    return sha256_hex(canonical_json(dict(settings))) if settings else ""


@dataclass(frozen=True)
class Launched:
    """Digests of run.json and of the settings that one leg, the rounds from a start or resume to a stop, changes."""

    run_sha256: Sha256  # of the bytes of run.json
    settings_sha256: Sha256 = ""  # of the settings that the leg changes; empty if it changes none

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the command line options by which a process gets the digests of run.json and of settings changed by a
        resume.
        """
        parser.add_argument(_RUN, required=True, help="of run.json, as the launcher knows it")
        parser.add_argument(_SETTINGS, default="", help="of the settings that the leg changes")

    @classmethod
    def of_options(cls, options: argparse.Namespace) -> Self:
        return cls(options.run_sha256, options.settings_sha256)

    def arguments(self) -> list[str]:
        """The digests of run.json, and of the settings changed by the last resume, as command line options."""
        settings = [_SETTINGS, self.settings_sha256] if self.settings_sha256 else []
        return [_RUN, self.run_sha256, *settings]

    def check_run(self, run_json: bytes, url: str) -> None:
        """Raise `ConfigError` unless `run_json` has the digest on the process's command line. `url`: for the error."""
        if (found := sha256_hex(run_json)) != self.run_sha256:
            raise ConfigError(
                f"{keys.RUN} in {url} has the sha256 {found[:12]}, and this process was launched for "
                f"{self.run_sha256[:12]}: it was changed after the launch, and says what would run here. Put the "
                "launcher's bytes back, or launch the run again in a new folder."
            )

    def check_leg(self, begin: Begin, url: str) -> None:
        """Raise `ConfigError` unless the settings that `begin`, a start or resume, changes have the digest on the
        command line.

        `url`: the run's address, for the error.
        """
        if settings_sha256(begin.settings) != self.settings_sha256:
            names = ", ".join(sorted(begin.settings)) or "no setting"
            raise ConfigError(
                f"{keys.begin(begin.leg)} in {url} changes {names}, with other values than those for which this "
                "process was launched: somebody else wrote it. Halt the run, look at that record, and resume from a "
                "machine that you trust."
            )
