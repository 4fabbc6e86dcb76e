"""Finds files that look like secrets among those to be packed: by name, by known tokens, and with detect-secrets.

detect-secrets (an extra, `pip install 'diloco-orchestrator[scan]'`) knows more kinds of credentials than we do. It is
loaded only here, when code is packed.
"""

import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from diloco_orchestrator.redaction import has_token_shape

log = logging.getLogger(__name__)

_NAMES = (
    ".env",
    ".env.*",
    "*.env",
    ".envrc",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.kdbx",
    "*.ppk",
    "*.tfvars",
    "*.tfstate",
    "id_rsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".netrc",
    ".pgpass",
    ".pypirc",
    ".npmrc",
    ".htpasswd",
    ".git-credentials",
    ".vault-token",
    ".dockercfg",
    ".dockerconfigjson",
    "credentials",
    "credentials.*",
    "secrets.*",
    "kubeconfig*",
    "*service*account*.json",
    ".modal.toml",
)
# What docker writes into its config.json at a login, beside "auths".
_LOGIN = re.compile(r'"(?:auth|identitytoken|registrytoken|password)"\s*:\s*"[^"]{4,}"')
_LARGEST = 4 * 2**20  # bytes of a file that are scanned: data, not code, is larger
# Detectors left out: those that find random text and addresses, because code is full of digests, and Artifactory's,
# which takes words such as "APDelegate" for tokens.
_LEFT_OUT = ("ArtifactoryDetector", "Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector")


def suspicious_files(files: Mapping[str, Path], but: Iterable[str]) -> dict[str, str]:
    """The files that look like secrets: name -> reason. `but`: patterns of names or paths that are not checked."""
    patterns = list(but)
    looked_at = {
        name: path
        for name, path in sorted(files.items())
        if not any(fnmatch(name, pattern) or fnmatch(path.name, pattern) for pattern in patterns)
    }
    found = {name: why for name, path in looked_at.items() if (why := _why_by_itself(path))}
    return found | _why_by_scanner({name: path for name, path in looked_at.items() if name not in found})


def _why_by_itself(path: Path) -> str:
    if any(fnmatch(path.name.lower(), pattern) for pattern in _NAMES):
        return "its name"
    with path.open("rb") as file:
        texts = list(_texts_in(file.read(_LARGEST)))
    if any(has_token_shape(text) for text in texts):
        return "a token"
    return "a login" if any('"auths"' in text and _LOGIN.search(text) for text in texts) else ""


def _texts_in(data: bytes) -> Iterator[str]:
    yield data.decode("latin-1")
    if max(data[::2].count(0), data[1::2].count(0)) > len(data) // 4:  # every second byte of most text
        yield data.replace(b"\0", b"").decode("latin-1")
    if data.startswith(b"\x1f\x8b"):
        with suppress(zlib.error):
            yield zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, _LARGEST).decode("latin-1")


def _why_by_scanner(files: Mapping[str, Path]) -> dict[str, str]:
    """Findings of detect-secrets by file; empty, with a warning, if it is not installed.

    Findings that are placeholders, names, or on a line with "pragma: allowlist secret" are left out. No service is
    asked whether a credential is valid.
    """
    try:
        from detect_secrets.core.scan import scan_file
        from detect_secrets.settings import default_settings
    except ImportError:
        log.warning(
            "code is looked through for known kinds of tokens only, because detect-secrets is not installed: "
            "pip install 'diloco-orchestrator[scan]'"
        )
        return {}
    found: dict[str, str] = {}
    with default_settings() as settings:
        settings.disable_plugins(*_LEFT_OUT)
        for name, path in files.items():
            first = next(scan_file(str(path)), None) if path.stat().st_size <= _LARGEST else None
            if first is not None:
                found[name] = f"{first.type}, line {first.line_number}"
    return found
