"""The record by which a witness, somebody who neither launched nor trains, states the head of a run's log it has seen.

It lies in a place of the witness's own, not in the run's folder. `inspection.witness` writes and checks it.
"""

from typing import ClassVar

from pydantic import Field

from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.head import Head
from diloco_orchestrator.protocol.keys import Form
from diloco_orchestrator.protocol.record_format import Record
from diloco_orchestrator.protocol.signatures import PublicKey

HEADS = "heads/"
statement_key = Form("heads/<round>.<token>.json")  # the token: the first 16 digits of the commit's digest


class Witnessed(Record):
    """heads/<round>.<digits>.json: this commit was the last one of the log. `at`: when, on the witness's clock."""

    record: ClassVar[str] = "witnessed"
    url: str  # of the run's folder, as the witness reached it
    run_sha256: Sha256
    round: int = Field(ge=1)
    commit_sha256: Sha256
    witness: PublicKey

    @property
    def head(self) -> Head:
        return Head(self.round, self.commit_sha256)

    @property
    def key(self) -> str:
        """Where the statement lies in the witness's place."""
        return statement_key(self.round, self.commit_sha256[:16])


def witnessed_bytes(body: bytes) -> bytes:
    """The bytes that a witness signs for a statement with this content."""
    return b"diloco witnessed 1\n" + body
