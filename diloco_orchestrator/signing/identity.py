"""Identity of a user: a key pair by which a launcher of a signed run certifies that user without sending a secret.

The private half stays in the user's state folder. The public half is a text that anybody may see: a key that signs, and
one to which the private keys for object names are encrypted (X25519, HKDF, ChaCha20-Poly1305).
"""

import base64
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.signatures import KEY_BYTES, from_text, public_text, to_text

_PUBLIC = "diloco-user-"  # begins the text of a public identity
_NONCE = bytes(12)  # each sealing has a key of its own, from a new ephemeral key


@dataclass(frozen=True)
class PublicIdentity:
    """The public half of a user's identity (key pair)."""

    signing: bytes  # public Ed25519 key
    sealing: bytes  # public X25519 key

    @classmethod
    def parse(cls, text: str) -> Self:
        """The public half of an identity (key pair) from its text. Raises `ConfigError` for another text, such as one
        that was cut.
        """
        try:
            if not text.startswith(_PUBLIC):
                raise ValueError("another beginning")
            data = from_text(text.removeprefix(_PUBLIC), 2 * KEY_BYTES)
        except ValueError:
            raise ConfigError(
                f"this is no identity of a user: one is {_PRIVATE_WORDS}. Ask your colleague for the line again."
            ) from None
        return cls(data[:KEY_BYTES], data[KEY_BYTES:])

    def text(self) -> str:
        return _PUBLIC + to_text(self.signing + self.sealing)

    @property
    def key(self) -> str:
        """The public key that checks this user's signatures, as records name it."""
        return public_text(self.signing)

    @property
    def digest(self) -> str:
        """Digest of the public half, 32 hex digits, by which the user's certificate in the bucket is named."""
        return sha256_hex(self.text().encode())[:32]

    def seal(self, context: str, secret: bytes) -> str:
        """The encryption of `secret`, as text, which only the holder of the private half can decrypt.

        `context`: what it is for, such as the digest of the run; `Identity.opened` needs the same text.
        """
        ephemeral = X25519PrivateKey.generate()
        public = ephemeral.public_key().public_bytes_raw()
        shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(self.sealing))
        sealed = _cipher(shared, public, self, context).encrypt(_NONCE, secret, None)
        return base64.urlsafe_b64encode(public + sealed).decode()


_PRIVATE_WORDS = f"{_PUBLIC} and 86 characters, as `diloco key --me` prints it"


@dataclass(frozen=True)
class Identity:
    """A user's identity (key pair) with its private half."""

    seed: bytes = field(repr=False)  # 32 bytes

    @cached_property
    def signing(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self._derived(b"signing"))

    @cached_property
    def _sealing(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._derived(b"sealing"))

    def _derived(self, purpose: bytes) -> bytes:
        return HKDF(SHA256(), KEY_BYTES, None, b"diloco identity " + purpose).derive(self.seed)

    @cached_property
    def public(self) -> PublicIdentity:
        return PublicIdentity(
            self.signing.public_key().public_bytes_raw(), self._sealing.public_key().public_bytes_raw()
        )

    def opened(self, context: str, sealed: str) -> bytes:
        """The decrypted secret of `sealed`, a result of `PublicIdentity.seal` with the same `context`.

        Raises `ConfigError` if it was encrypted for another user or context, or changed.
        """
        try:
            data = base64.urlsafe_b64decode(sealed)
            shared = self._sealing.exchange(X25519PublicKey.from_public_bytes(data[:KEY_BYTES]))
            cipher = _cipher(shared, data[:KEY_BYTES], self.public, context)
            return cipher.decrypt(_NONCE, data[KEY_BYTES:], None)
        except (ValueError, InvalidTag):
            raise ConfigError(
                "what is sealed in the bucket for this user cannot be opened: it was made for another one, or changed. "
                "Ask the launcher to name the line that `diloco key --me` prints here."
            ) from None


def _cipher(shared: bytes, ephemeral: bytes, to: PublicIdentity, context: str) -> ChaCha20Poly1305:
    info = b"diloco sealed 1\n%s\n" % context.encode() + ephemeral + to.sealing
    return ChaCha20Poly1305(HKDF(SHA256(), KEY_BYTES, None, info).derive(shared))
