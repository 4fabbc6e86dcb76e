"""`SyncSchedule`: the inner steps at which the fragments of a model are published and synchronised in turn."""

from dataclasses import dataclass

from diloco_orchestrator.errors import ConfigError


@dataclass(frozen=True)
class SyncSchedule:
    """The settings by which fragments are synchronised in turn. Raises `ConfigError` if they are inconsistent."""

    sync_every: int  # inner steps between two synchronisations of the same fragment (H)
    fragments: int
    delay: int = 0  # inner steps between publishing a fragment and waiting for its average
    alpha: float = 0.0  # share of the local values that is kept when a fragment is synchronised

    def __post_init__(self) -> None:
        if self.sync_every < 1 or self.sync_every % self.fragments:
            multiple = self.fragments * max(1, -(-self.sync_every // self.fragments))
            raise ConfigError(
                f"sync_every={self.sync_every} is not divisible by fragments={self.fragments}: each fragment moves "
                f"once in sync_every steps. Choose a multiple, such as {multiple}."
            )
        if not 0 <= self.delay < self.round_steps:
            raise ConfigError(
                f"fragment_sync_delay={self.delay} must be below sync_every / fragments = {self.round_steps}, and not "
                "negative: a fragment is synchronised before the next one is published."
            )
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"fragment_update_alpha={self.alpha} must be between 0 and 1.")

    @property
    def round_steps(self) -> int:
        """Inner steps of a round, which synchronises one fragment."""
        return self.sync_every // self.fragments

    @property
    def publish_at(self) -> int:
        """The number of inner steps in a round after which its fragment is published."""
        return self.round_steps - self.delay

    @property
    def overlaps(self) -> bool:
        """Whether local parameters differ from the base after synchronising: with a sync delay or update alpha."""
        return self.delay > 0 or self.alpha > 0
