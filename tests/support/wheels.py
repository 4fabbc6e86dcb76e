"""Wheels of tiny packages, for tests in which pip itself installs."""

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path


def wheel(folder: Path, name: str, version: str = "1.0", body: str = "", needs: Sequence[str] = ()) -> str:
    """Write a wheel of a package whose one module holds `body`. Returns its digest as pip spells it: `sha256:…`.

    Equal arguments give equal bytes.
    """
    module, record = name.replace("-", "_"), ""
    info = f"{module}-{version}.dist-info"
    metadata = "".join(f"Requires-Dist: {each}\n" for each in needs)
    files = {
        f"{module}.py": body,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as opened:
        for file, text in files.items():
            opened.writestr(zipfile.ZipInfo(file), text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{file},sha256={digest},{len(text)}\n"
        opened.writestr(zipfile.ZipInfo(f"{info}/RECORD"), f"{record}{info}/RECORD,,\n")
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
