"""A genuine Azurite, Microsoft's emulator of Azure Blob Storage, on this machine: it checks signatures and conditions.

Needs the npm package azurite (`make azurite` installs it into AZURITE_ROOT). It runs as this user on a port that is
free, keeps objects in memory, and ends with the context.
"""

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(os.environ.get("AZURITE_ROOT", "/tmp/azurite"))
_ACCOUNT = "devstoreaccount1"
# The key of every Azurite, as Microsoft documents it.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_STARTED = "successfully listens on "


@dataclass(frozen=True)
class Azurite:
    """A running server, as its user sees it."""

    endpoint: str  # with the account

    def options(self, **changes: Any) -> dict[str, Any]:
        """`storage_options` for it."""
        return {"account_name": _ACCOUNT, "account_key": _KEY, "endpoint": self.endpoint, **changes}

    def make_container(self, name: str, public: bool = False) -> str:
        """A new container. `public`: everybody may read and list it."""
        access = {"x-ms-blob-public-access": "container"} if public else {}
        headers = {**access, "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = [*("PUT", *[""] * 11), *(f"{key}:{headers[key]}" for key in sorted(headers))]
        text = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"])
        signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)).decode()
        headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
        url = f"{self.endpoint}/{name}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)):
            return name


@contextmanager
def running_azurite() -> Iterator[Azurite]:
    """A server. Skips the test where Azurite is not installed."""
    program = _ROOT / "node_modules/.bin/azurite-blob"
    if not program.exists() or shutil.which("node") is None:
        pytest.skip(f"Azurite is not installed here ({program}): `make azurite` installs it with npm")
    words = ["--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--silent"]
    server = subprocess.Popen([str(program), *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = next(line for line in server.stdout if _STARTED in line)
        yield Azurite(f"{line.partition(_STARTED)[2].strip()}/{_ACCOUNT}")
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
