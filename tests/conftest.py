"""Fixtures that several folders of tests share."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from s3_server import S3Server, running_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests of this process."""
    with running_server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """A new empty bucket on `s3_server`."""
    return s3_server.make_bucket(f"bucket-{uuid4().hex[:12]}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for about 256 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small disk here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
