"""Ed25519 keys of a signed run: the run's own, those of operators that it certifies, and those of attempts.

`cryptography` does the arithmetic; `protocol.signatures` has the bytes that are signed.
"""

import base64
import os
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import ValidationError

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.record_format import Part
from diloco_orchestrator.protocol.signatures import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Certificate,
    Operator,
    SignedBy,
    certified_bytes,
    from_text,
    operator_bytes,
    public_bytes,
    public_text,
    to_text,
)

_BUNDLE = "diloco-keys-"  # begins the text of a process's keys
_PRIVATE = "diloco-key-"  # begins a private key's text; `redaction` removes what has these forms wherever it is printed


class _Secret(Part):
    """The private keys of a process, as JSON below the text of `Signer.text`."""

    key: str  # private
    names: tuple[str, ...]  # private, by epoch, the same for all processes of the run
    certificate: Certificate | Operator


@dataclass(frozen=True)
class Signer:
    """The private keys of one process of a run: a launcher or coordinator, or an attempt (process) of a replica."""

    key: Ed25519PrivateKey = field(repr=False)
    names: tuple[Ed25519PrivateKey, ...] = field(repr=False)  # sign names of stored objects, by epoch from 1 on
    certificate: Certificate | Operator
    run_key: Ed25519PrivateKey | None = field(default=None, repr=False)  # of who holds that too

    @property
    def is_operator(self) -> bool:
        """Whether the keys are those of a launcher or coordinator."""
        return isinstance(self.certificate, Operator)

    def text(self) -> str:
        """The private keys as text, for a secret store or an environment variable."""
        names = tuple(text_of(each) for each in self.names)
        secret = _Secret(key=text_of(self.key), names=names, certificate=self.certificate)
        return _BUNDLE + base64.urlsafe_b64encode(secret.model_dump_json().encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, signed_by: SignedBy, run_sha256: Sha256) -> Self:
        """The keys from `text`. Raises `ConfigError` for a text that is cut or damaged, and for keys of another run."""
        try:
            data = text.strip().removeprefix(_BUNDLE)
            secret = _Secret.model_validate_json(base64.urlsafe_b64decode(data + "=" * (-len(data) % 4)))
            signer = cls(_private(secret.key), tuple(_private(each) for each in secret.names), secret.certificate)
        except (ValidationError, ValueError):
            raise ConfigError(
                "the keys of a signed run in an environment variable are damaged: they were cut or changed on their "
                "way from the launcher. If they are an attempt's, cancel it, and the coordinator launches the next."
            ) from None
        certified = is_certified(secret.certificate, signed_by, run_sha256) and bool(signer.names)
        if (
            not certified
            or public_key_of(signer.key) != secret.certificate.key
            or public_key_of(signer.names[0]) != signed_by.names
        ):
            raise ConfigError(
                f"the keys in an environment variable are of another run: run.json names {signed_by.key}. If they are "
                "an attempt's, launch the attempt by a coordinator of this run."
            )
        return signer

    def of_attempt(self, run_sha256: Sha256, replica_id: int, attempt: int) -> "Signer":
        """The private keys of an attempt (process) of a replica, derived from this operator's: the same at every call.

        `run_sha256`: of the bytes of run.json; the keys sign for this run only. Raises `TypeError`, a bug of ours, for
        the keys of an attempt.
        """
        if not isinstance(self.certificate, Operator):
            raise TypeError("attempts launch nothing")
        who = replica_id, attempt
        key = _derived(self.key.private_bytes_raw(), b"attempt %s %d %d" % (run_sha256.encode(), *who))
        public = public_key_of(key)
        certificate = Certificate(
            replica_id=replica_id,
            attempt=attempt,
            key=public,
            operator=self.certificate,
            signature=to_text(self.key.sign(certified_bytes(run_sha256, who, public))),
        )
        return Signer(key, self.names, certificate)


@dataclass(frozen=True)
class RunKey:
    """The private key of a run, from which its launcher's keys and those for object names are derived. It certifies
    others.
    """

    seed: bytes = field(repr=False)  # 32 bytes
    beginning: ClassVar[str] = _PRIVATE  # of its text

    @classmethod
    def generate(cls) -> Self:
        """A new private key of a run, from the system's random numbers."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Private key of a run from its text form. Raises `ConfigError` for another text, such as one that was cut."""
        try:
            return cls(_seed(text.strip()))
        except ValueError:
            raise ConfigError(
                f"this is no key of a run: one is {_PRIVATE} and 43 characters, as `diloco key --export` prints it."
            ) from None

    def text(self) -> str:
        """The private key as text, for a secret store."""
        return _PRIVATE + to_text(self.seed)

    @cached_property
    def signed_by(self) -> SignedBy:
        """The public keys of the run, as run.json names them."""
        return SignedBy(key=public_key_of(self.private), names=public_key_of(self.names(1)))

    @cached_property
    def private(self) -> Ed25519PrivateKey:
        """The key with which certificates of operators and rotations are signed."""
        return Ed25519PrivateKey.from_private_bytes(self.seed)

    def names(self, epoch: int) -> Ed25519PrivateKey:
        """The private key that signs the names of stored objects in an epoch, which lasts from one rotation of keys to
        the next.
        """
        return _derived(self.seed, b"names %d" % epoch)

    def operator(self, run_sha256: Sha256, epoch: int = 1) -> Signer:
        """The private keys of the launcher, and of a coordinator on its machine: the same at every call.

        `epoch`: number of the keys: 1, and one more after each rotation.
        """
        key = _derived(self.seed, b"operator %s %d" % (run_sha256.encode(), epoch))
        certificate = self.certified(run_sha256, epoch, public_key_of(key))
        return Signer(key, tuple(map(self.names, range(1, epoch + 1))), certificate, self.private)

    def certified(self, run_sha256: Sha256, epoch: int, public: str) -> Operator:
        """The certificate of an operator's public key, valid in one run and from one epoch (rotation of keys) on."""
        signature = to_text(self.private.sign(operator_bytes(run_sha256, epoch, public)))
        return Operator(epoch=epoch, key=public, signature=signature)


def is_certified(certificate: Certificate | Operator, signed_by: SignedBy, run_sha256: Sha256) -> bool:
    """Whether a certificate goes back to the run's key: signed by it, or by an operator whose certificate it has
    signed.
    """
    if isinstance(certificate, Certificate):
        said = certified_bytes(run_sha256, certificate.who, certificate.key)
        by = certificate.operator
        return is_by(by.key, certificate.signature, said) and is_certified(by, signed_by, run_sha256)
    said = operator_bytes(run_sha256, certificate.epoch, certificate.key)
    return is_by(signed_by.key, certificate.signature, said)


def is_by(public_key: str, signature: str, signed: bytes) -> bool:
    """Whether the private key of `public_key` made `signature` over the bytes `signed`; both are texts of records."""
    try:
        _verifier(public_key).verify(from_text(signature, SIGNATURE_BYTES), signed)
    except (InvalidSignature, ValueError):  # the latter: bytes that are no point of the curve
        return False
    return True


@lru_cache(maxsize=4096)  # of a run's replicas
def _verifier(public_key: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_bytes(public_key))


def _seed(text: str) -> bytes:
    if not text.startswith(_PRIVATE):
        raise ValueError("no private key")
    return from_text(text.removeprefix(_PRIVATE), KEY_BYTES)


def _private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_seed(text))


def public_key_of(key: Ed25519PrivateKey) -> str:
    """The public half of a key, as text."""
    return public_text(key.public_key().public_bytes_raw())


def _derived(seed: bytes, purpose: bytes) -> Ed25519PrivateKey:
    kdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"diloco " + purpose)  # RFC 5869
    return Ed25519PrivateKey.from_private_bytes(kdf.derive(seed))


def text_of(key: Ed25519PrivateKey) -> str:
    """A private key as text, for secrets."""
    return _PRIVATE + to_text(key.private_bytes_raw())
