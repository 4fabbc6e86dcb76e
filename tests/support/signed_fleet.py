"""The folder of a signed run in memory, and how its processes see it."""

from record_examples import EXAMPLES

from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.protocol.signatures import Signature, named_bytes, signed_bytes, to_text
from diloco_orchestrator.protocol.signed_objects import stored_name
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, ENV_RUN_KEY
from diloco_orchestrator.signing.keys import RunKey, Signer
from diloco_orchestrator.signing.signed_store import SignedStore
from diloco_orchestrator.store.memory import MemoryStore

KEY, OTHER_KEY = RunKey(bytes(32)), RunKey(bytes([1] * 32))
MANIFEST = EXAMPLES["contribution"].model_copy(update={"replica_id": 1, "attempt": 1, "round": 7})
WHERE = keys.contribution(7, 1)


class Fleet:
    """The folder of a signed run, and how its processes see it."""

    def __init__(self, key: RunKey = KEY, invited: tuple[int, ...] = ()) -> None:
        self.stored = MemoryStore("memory://signed")
        config = make_config({"entrypoint": "m:f", "invited": list(invited)})
        run = Run(write_id="w", at=0.0, run_id="r", config=config, package_version="0", signed_by=key.signed_by)
        self.stored.create(keys.RUN, run.to_bytes())
        self.key, self.run_sha256 = key, sha256_hex(run.to_bytes())
        self.coordinator = SignedStore(self.stored, {ENV_RUN_KEY: key.text()})
        self.reader = SignedStore(self.stored, {})

    def secret(self, replica_id: int, attempt: int = 1) -> str:
        return self.signer(replica_id, attempt).text()

    def replica(self, replica_id: int, attempt: int = 1) -> SignedStore:
        return SignedStore(self.stored, {ENV_ATTEMPT_KEY: self.secret(replica_id, attempt)})

    def signer(self, replica_id: int, attempt: int = 1) -> Signer:
        return self.key.operator(self.run_sha256).of_attempt(self.run_sha256, replica_id, attempt)

    def name(self, key: str, take: int = 0) -> str:
        """The name under which the object is stored, as who holds a key can foretell it."""
        return stored_name(key, take, self.key.names(1).sign(named_bytes(self.run_sha256, key, take)))

    def sealed(self, signer: Signer, body: bytes, key: str = WHERE) -> bytes:
        """`body` with a signature by any signer, whether it may write that or not."""
        signature = to_text(signer.key.sign(signed_bytes(self.run_sha256, key, body)))
        return body + Signature(certificate=signer.certificate, signature=signature).line()

    def views(self) -> list[SignedStore]:
        return [self.coordinator, self.replica(0), self.reader]
