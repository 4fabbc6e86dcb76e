"""Signs a folder with a model in the format of OpenSSF's model-signing, whose verifier can check it on any machine.

The library of that name signs. The key is derived from this user's identity, the key pair in the state folder that
`diloco key --me` shows.
"""

import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.run_log.run_store import Identity, identity_of_user

SIGNATURE = "model.sig"  # as the verifier looks for it
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the curve P-256 (FIPS 186-4)


def check_can_sign() -> None:
    """Raise `ConfigError` unless the library model-signing is installed."""
    try:
        import_module("model_signing")
    except ImportError:
        raise ConfigError(
            "signing a model needs OpenSSF's library: pip install 'diloco-orchestrator[sign]', or model-signing."
        ) from None


def sign_folder(folder: Path, but: Iterable[str] = ()) -> None:
    """Write `model.sig` into a folder: digests of its files, signed by this user. `but`: names of files to leave out.

    Raises `ConfigError` if the library model-signing is not installed, or this user's key pair cannot be read.
    """
    check_can_sign()
    hashing: Any = import_module("model_signing.hashing")  # in parts without types
    signing: Any = import_module("model_signing.signing")
    private = _model_key(identity_of_user())
    with tempfile.TemporaryDirectory(prefix="diloco-sign-") as secret:  # made with mode 0700
        path = Path(secret) / "key.pem"
        path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        files = hashing.Config().set_ignored_paths(paths=[SIGNATURE, *but])
        signer = signing.Config().set_hashing_config(files).use_elliptic_key_signer(private_key=path)
        signer.sign(folder, folder / SIGNATURE)


def public_pem() -> str:
    """The public key that checks this user's signatures of models, as PEM."""
    public = _model_key(identity_of_user()).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _model_key(identity: Identity) -> ec.EllipticCurvePrivateKey:
    """The private key on the curve P-256, which the format demands, derived from a user's identity (key pair)."""
    # 48 bytes, so that the remainder is as good as uniform (FIPS 186-5, A.2.1)
    number = HKDF(SHA256(), 48, None, b"diloco models").derive(identity.seed)
    return ec.derive_private_key(int.from_bytes(number) % (_ORDER - 1) + 1, ec.SECP256R1())
