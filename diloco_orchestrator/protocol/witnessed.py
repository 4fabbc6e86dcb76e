"""Record by which a witness, who neither launched nor trains, states the newest commit that it has seen of a run's log.

It is stored in a folder or bucket of the witness's own, not in the run's. `inspection.witness` writes and checks it.
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
    """Record heads/<round>.<digits>.json: at the witness's time `at` this commit was the last one of the log."""

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
        """Key of the statement in the witness's own folder or bucket."""
        return statement_key(self.round, self.commit_sha256[:16])


def witnessed_bytes(body: bytes) -> bytes:
    """The bytes that a witness signs for the statement with content `body`."""
    return b"diloco witnessed 1\n" + body
