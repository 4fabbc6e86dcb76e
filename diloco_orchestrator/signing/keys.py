"""Ed25519 keys of a signed run: the run's own, and those of launched attempts, which are derived from it.

`cryptography` does the arithmetic; `protocol.signatures` has the bytes that are signed.
"""

import os
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import ValidationError

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.record_format import Part, canonical_json
from diloco_orchestrator.protocol.signatures import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Certificate,
    SignedBy,
    certified_bytes,
    from_text,
    public_bytes,
    public_text,
    to_text,
)

_PRIVATE = "diloco-key-"  # begins a private key's text; `redaction` removes what has this form wherever it is printed


class _Secret(Part):
    """The keys of an attempt as JSON, as they are in its environment variable."""

    key: str  # private, of the attempt
    name_key: str  # private, the same for all attempts of the run
    certificate: Certificate


@dataclass(frozen=True)
class Signer:
    """The private keys of one process of a run: the run's key, or an attempt's with its certificate."""

    key: Ed25519PrivateKey = field(repr=False)
    name_key: Ed25519PrivateKey = field(repr=False)  # signs the names under which objects are stored
    certificate: Certificate | None = None  # of an attempt; None: `key` is the run's

    @classmethod
    def of_secret(cls, text: str, signed_by: SignedBy, run_sha256: Sha256) -> Self:
        """The keys of an attempt from `RunKey.attempt_secret`.

        Raises `ConfigError` for a text that is cut or damaged, and for keys of another run.
        """
        try:
            secret = _Secret.model_validate_json(text)
            signer = cls(_private(secret.key), _private(secret.name_key), secret.certificate)
        except (ValidationError, ValueError):
            raise ConfigError(
                "the attempt's key, a secret environment variable, is damaged: it was cut or changed on its way from "
                "the launcher. Cancel the attempt; the coordinator launches the next."
            ) from None
        certified = is_certified(secret.certificate, signed_by, run_sha256)
        if (
            not certified
            or _public(signer.key) != secret.certificate.key
            or _public(signer.name_key) != signed_by.names
        ):
            raise ConfigError(
                f"the attempt's key is of another run: run.json names {signed_by.key}. Launch the attempt by a "
                "coordinator of this run."
            )
        return signer


@dataclass(frozen=True)
class RunKey:
    """The private key of a run, from which the keys of its attempts follow."""

    seed: bytes = field(repr=False)  # 32 bytes

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
        """The public keys of the run, for run.json."""
        return SignedBy(key=_public(self.signer.key), names=_public(self.signer.name_key))

    @cached_property
    def signer(self) -> Signer:
        """The keys with which a launcher or coordinator signs: the run's own."""
        return Signer(Ed25519PrivateKey.from_private_bytes(self.seed), self._derived(b"names"))

    def attempt_secret(self, run_sha256: Sha256, replica_id: int, attempt: int) -> str:
        """The keys of an attempt as JSON. They are derived, so they are the same whenever and by whomever it is
        launched.

        `run_sha256`: digest of run.json, of the only run for which they sign.
        """
        who = replica_id, attempt
        key = self._derived(b"attempt %s %d %d" % (run_sha256.encode(), *who))
        public = _public(key)
        signature = to_text(self.signer.key.sign(certified_bytes(run_sha256, who, public)))
        certificate = Certificate(replica_id=replica_id, attempt=attempt, key=public, signature=signature)
        secret = _Secret(key=_text_of(key), name_key=_text_of(self.signer.name_key), certificate=certificate)
        return canonical_json(secret.model_dump(mode="json")).decode().strip()

    def _derived(self, purpose: bytes) -> Ed25519PrivateKey:
        kdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"diloco " + purpose)  # RFC 5869
        return Ed25519PrivateKey.from_private_bytes(kdf.derive(self.seed))


def is_certified(certificate: Certificate, signed_by: SignedBy, run_sha256: Sha256) -> bool:
    """Whether the run's key has signed the certificate for this run."""
    said = certified_bytes(run_sha256, certificate.who, certificate.key)
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


def _public(key: Ed25519PrivateKey) -> str:
    return public_text(key.public_key().public_bytes_raw())


def _text_of(key: Ed25519PrivateKey) -> str:
    return _PRIVATE + to_text(key.private_bytes_raw())
