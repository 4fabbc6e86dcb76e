"""Session tokens on a clock moved by hand: who hands them out, botocore's renewal, and what obstore keeps of them."""

from datetime import UTC, datetime
from typing import Any

from botocore.credentials import RefreshableCredentials

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.store.s3_credentials import BotocoreCredentials


class Source:
    """Hands out tokens by a clock: each lives `life_s`, and the next one is there `ahead_s` before its end."""

    def __init__(self, clock: Clock, life_s: float, ahead_s: float, age_s: float) -> None:
        self.clock, self.life_s, self.ahead_s = clock, life_s, ahead_s
        self.asked = 0
        self._ends = clock.wall_time() - age_s + life_s

    def __call__(self) -> dict[str, str]:
        self.asked += 1
        if self._ends - self.clock.wall_time() <= self.ahead_s:
            self._ends = self.clock.wall_time() + self.life_s
        ends = datetime.fromtimestamp(self._ends, UTC).isoformat()
        return {"access_key": "k", "secret_key": "s", "token": str(self._ends), "expiry_time": ends}


def renewed_from(source: Source) -> RefreshableCredentials:
    """botocore's own, on the source's clock."""
    now = source()
    return RefreshableCredentials(
        now["access_key"],
        now["secret_key"],
        now["token"],
        datetime.fromisoformat(now["expiry_time"]),
        source,
        method="test",
        time_fetcher=lambda: datetime.fromtimestamp(source.clock.wall_time(), UTC),
    )


class AsObstore:
    """Keeps what a provider gives until `refresh_threshold` before its `expires_at`, as obstore does."""

    def __init__(self, source: Source) -> None:
        self.now = lambda: datetime.fromtimestamp(source.clock.wall_time(), UTC)
        self.provider = BotocoreCredentials(renewed_from(source), self.now)
        self.kept: Any = None

    def token_ends(self) -> float:
        """When the token ends with which a request is signed now."""
        if self.kept is None or self.kept["expires_at"] - self.now() <= self.provider.refresh_threshold:
            self.kept = self.provider()
        return float(self.kept["token"])
