"""Formats of signed runs: public keys, certificates, the signature at the end of an object, the bytes that are signed.

`signing` makes and checks signatures; `protocol.signed_objects` has which objects are signed. The threat model is in
docs/inside/signed-runs.md.
"""

import base64
import binascii
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, ValidationError

from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.record_format import Part, canonical_json

KEY_BYTES, SIGNATURE_BYTES = 32, 64  # of Ed25519 (RFC 8032)
_PUBLIC = "ed25519:"


def to_text(data: bytes) -> str:
    """`data` as URL-safe base64 without padding: 43 characters for a key, 86 for a signature."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(text: str, size: int) -> bytes:
    """The bytes of which `to_text` made `text`, base64 of `size` bytes. Raises `ValueError` for any other text."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != size or to_text(data) != text:  # several texts decode to the same bytes
        raise ValueError(f"{text[:12]}… is not {size} bytes in URL-safe base64")
    return data


def public_text(data: bytes) -> str:
    """A public key of 32 bytes as people see it: "ed25519:" and 43 characters."""
    return _PUBLIC + to_text(data)


def public_bytes(text: str) -> bytes:
    """The 32 bytes of a public key from `public_text`. Raises `ValueError` for another text."""
    if not text.startswith(_PUBLIC):
        raise ValueError(f"{text[:16]!r} is no public key: one begins with {_PUBLIC}")
    return from_text(text.removeprefix(_PUBLIC), KEY_BYTES)


def _checked(text: str) -> str:
    public_bytes(text)
    return text


PublicKey: TypeAlias = Annotated[str, AfterValidator(_checked)]  # str in code; records check its form
_Signature: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{86}$")]


class SignedBy(Part):
    """The public keys of a signed run, in run.json."""

    key: PublicKey  # the run's: signs certificates of operators, and rotations
    names: PublicKey  # signs names of objects until the first rotation; launched replicas share its private key


class Operator(Part):
    """The run key's signed statement that a public key belongs to a launcher or coordinator of the run."""

    epoch: int = Field(ge=1)  # 1, and one more for each rotation of the run's keys before
    key: PublicKey
    signature: _Signature  # by the run's key, over `operator_bytes`


class Certificate(Part):
    """An operator key's signed statement that a public key belongs to one attempt (launched process) of the run."""

    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    key: PublicKey
    operator: Operator  # whose key has signed
    signature: _Signature  # over `certified_bytes`

    @property
    def who(self) -> tuple[int, int]:
        """(replica id, attempt) to which the certified key belongs."""
        return self.replica_id, self.attempt


class Signature(Part):
    """The last line of a signed object: the author's signature over the bytes before it."""

    certificate: Certificate | Operator | None  # of the key that signed; None: the run's key did
    signature: _Signature  # over `signed_bytes`

    def line(self) -> bytes:
        """This signature as one line of canonical JSON, the last line of the object that it signs."""
        return canonical_json(self.model_dump(mode="json"))


LONGEST_LINE = 1024  # bytes of a signature's line


def operator_bytes(run_sha256: Sha256, epoch: int, key: str) -> bytes:
    """The bytes that the run's key signs to certify `key` (as `public_text`) for a launcher or coordinator.

    `epoch`: number of the keys, from which on the certificate is valid: 1, and one more after each rotation.
    """
    return b"diloco operator 1\n%s\n%d %s\n" % (run_sha256.encode(), epoch, key.encode())


def certified_bytes(run_sha256: Sha256, who: tuple[int, int], key: str) -> bytes:
    """The bytes that an operator's key signs to certify `key` (as `public_text`) for `who`: (replica id, attempt)."""
    return b"diloco certificate 1\n%s\n%d %d\n%s\n" % (run_sha256.encode(), *who, key.encode())


def named_bytes(run_sha256: Sha256, key: str, take: int = 0) -> bytes:
    """The bytes signed by the key from which a signed run derives the stored name of the object at `key`.

    The signature becomes the last part of that name, so that only holders of the key can foretell it. `take`: above 0
    for further names of the object, used where somebody has put an unsigned object under those before.
    """
    return b"diloco name 1\n%s\n%d %s\n" % (run_sha256.encode(), take, key.encode())


def signed_bytes(run_sha256: Sha256, key: str, body: bytes) -> bytes:
    """The bytes that the author of the object with this key and content signs."""
    return b"diloco object 1\n%s\n%s\n" % (run_sha256.encode(), key.encode()) + body


def split_signed(data: bytes) -> tuple[bytes, Signature] | None:
    """Content and signature of a signed object; None if its last line is no signature."""
    cut = data.rfind(b"\n", 0, -1) + 1
    if not cut or len(data) - cut > LONGEST_LINE:
        return None
    try:
        return data[:cut], Signature.model_validate_json(data[cut:])
    except ValidationError:
        return None
