"""Signed tokens of service accounts, as an API server with the same key issues them; an expired one on request."""

import base64
import json
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

ISSUER = "https://kubernetes.default.svc"


def write_key(path: Path) -> None:
    """A new RSA key, as --service-account-signing-key-file reads it."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(*pem, serialization.NoEncryption()))


def expired(token: str, key: Path) -> str:
    """The same token, issued an hour earlier and past its end since a minute, with a right signature."""
    head, claims, _ = token.split(".")
    body: dict[str, Any] = json.loads(base64.urlsafe_b64decode(claims + "=="))
    now = int(time.time())
    body |= {"iat": now - 3600, "nbf": now - 3600, "exp": now - 60}
    signed = f"{head}.{_encoded(json.dumps(body).encode())}"
    private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    assert isinstance(private, rsa.RSAPrivateKey)
    return f"{signed}.{_encoded(private.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
