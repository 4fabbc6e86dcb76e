"""Digests that pin a run's configuration: they travel in the command of every process that the run starts.

A process reads its configuration from the bucket. Who may write there could name another entrypoint or other arguments
once the launcher has looked; a process refuses what its command does not name.
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
    """The digest of the settings that a leg changes, by name; empty if it changes none."""
    return sha256_hex(canonical_json(dict(settings))) if settings else ""


@dataclass(frozen=True)
class Launched:
    """The configuration of one leg, by digests."""

    run_sha256: Sha256  # of the bytes of run.json
    settings_sha256: Sha256 = ""  # of the settings that the leg changes; empty if it changes none

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options that `arguments` gives, which `of_options` reads."""
        parser.add_argument(_RUN, required=True, help="of run.json, as the launcher knows it")
        parser.add_argument(_SETTINGS, default="", help="of the settings that the leg changes")

    @classmethod
    def of_options(cls, options: argparse.Namespace) -> Self:
        return cls(options.run_sha256, options.settings_sha256)

    def arguments(self) -> list[str]:
        """The options of a process's command."""
        settings = [_SETTINGS, self.settings_sha256] if self.settings_sha256 else []
        return [_RUN, self.run_sha256, *settings]

    def check_run(self, run_json: bytes, url: str) -> None:
        """Raise `ConfigError` unless these are the bytes of run.json that the launcher knows."""
        if (found := sha256_hex(run_json)) != self.run_sha256:
            raise ConfigError(
                f"{keys.RUN} in {url} has the sha256 {found[:12]}, and this process was launched for "
                f"{self.run_sha256[:12]}: it was changed after the launch, and says what would run here. Put the "
                "launcher's bytes back, or launch the run again in a new folder."
            )

    def check_leg(self, begin: Begin, url: str) -> None:
        """Raise `ConfigError` unless the leg changes the settings that the launcher knows, and no others."""
        if settings_sha256(begin.settings) != self.settings_sha256:
            names = ", ".join(sorted(begin.settings)) or "no setting"
            raise ConfigError(
                f"{keys.begin(begin.leg)} in {url} changes {names}, with other values than those for which this "
                "process was launched: somebody else wrote it. Halt the run, look at that record, and resume from a "
                "machine that you trust."
            )
