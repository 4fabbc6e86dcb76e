"""`Head`: round and digest of the newest commit that a reader has seen, noted outside the bucket.

The hash chain shows that no commit in the middle of the log was changed. It does not show that the last commits were
removed, or all of them; a noted head does.
"""

import re
from dataclasses import dataclass
from typing import Self

from diloco_orchestrator.errors import ConfigError

_FORM = re.compile(r"([0-9]{1,8}):([0-9a-f]{8,64})", re.ASCII)
_SHOWN = 16  # hex digits


@dataclass(frozen=True)
class Head:
    """The newest commit of a run: its round, and the sha256 of its bytes or at least the first 8 hex digits of it."""

    round: int
    sha256: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The head (last commit of a log) in `text`, such as "35:0123456789abcdef", with the digest whole or shortened.

        Raises `ConfigError` for text of another form.
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"{text!r} is no head: write it as `diloco status` prints it, such as 35:0123456789abcdef."
            )
        return cls(int(found[1]), found[2])

    def is_of(self, round_: int, sha256: str) -> bool:
        """Whether this head names the commit of `round_` with digest `sha256`; the head's digest may be shortened."""
        return self.round == round_ and sha256.startswith(self.sha256)

    def __str__(self) -> str:
        return f"{self.round}:{self.sha256}"

    @property
    def short(self) -> str:
        """The head (last commit of a log) as text with the first 8 digits of its digest, for people to compare."""
        return f"{self.round}:{self.sha256[:_SHOWN]}"


@dataclass(frozen=True)
class Noted:
    """A head (newest commit of a run's log) that somebody noted outside the run's bucket."""

    head: Head
    words: str = "was noted"  # completes "the head 35:0123… "
    run_sha256: str = ""  # of the run's run.json; empty: not noted
