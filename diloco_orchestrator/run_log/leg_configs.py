"""`LegConfigs`: the configuration of each leg, from run.json and the settings that the record of the leg changes."""

from collections.abc import Callable

from diloco_orchestrator.config import RunConfig, config_of_leg
from diloco_orchestrator.errors import NoSuchRun
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin
from diloco_orchestrator.run_log.entries import Entry


class LegConfigs:
    """Validates each leg's settings once. `run`: of run.json. `begin_of`: leg -> its record, None if it has none."""

    def __init__(self, run: RunConfig, begin_of: Callable[[int], Entry[Begin] | None]) -> None:
        self._run = run
        self._begin_of = begin_of
        self._known: dict[str, RunConfig] = {}  # by the digest of the leg's record

    def of(self, leg: int) -> RunConfig:
        """The configuration of a leg.

        Raises `ConfigError` if its record names a setting that no leg can change, `NoSuchRun` if it has no record.
        """
        begin = self._begin_of(leg)
        if begin is None:
            raise NoSuchRun(f"leg {leg} has no {keys.begin(leg)}: it was deleted. Start a new run.")
        return self.of_begin(begin)

    def of_begin(self, begin: Entry[Begin]) -> RunConfig:
        """The configuration of the leg with this record. Raises `ConfigError` as `of` does."""
        if begin.sha256 not in self._known:
            self._known[begin.sha256] = config_of_leg(self._run, begin.record.settings, guard=True)
        return self._known[begin.sha256]
