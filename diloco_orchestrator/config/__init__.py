"""The run's configuration: one frozen tree with default, unit and reason beside each field.

It is built from Python keywords or command-line options, and frozen into `run.json`.
"""

from diloco_orchestrator.config.keywords import GuardSettings, OuterSettings, RunSettings
from diloco_orchestrator.config.parts import (
    GUARD_RULES,
    GuardConfig,
    OnHaltConfig,
    OuterConfig,
    RetentionConfig,
    RetryConfig,
    TimingConfig,
)
from diloco_orchestrator.config.run_config import (
    COORDINATE_WISE,
    RunConfig,
    changed,
    check_track,
    config_of_leg,
    make_config,
)

__all__ = [
    "COORDINATE_WISE",
    "GUARD_RULES",
    "GuardConfig",
    "GuardSettings",
    "OnHaltConfig",
    "OuterConfig",
    "OuterSettings",
    "RetentionConfig",
    "RetryConfig",
    "RunConfig",
    "RunSettings",
    "TimingConfig",
    "changed",
    "check_track",
    "config_of_leg",
    "make_config",
]
