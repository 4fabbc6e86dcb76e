"""The folders that lie on a disk of this machine, and reading of large files."""

from pathlib import Path

import pytest

from diloco_orchestrator.store.local_files import is_on_local_disk
from diloco_orchestrator.store.open_store import open_store

MOUNTS = """\
overlay / overlay rw,relatime 0 0
server:/export {folder}/far nfs4 rw 0 0
tmpfs {folder}/far/memory tmpfs rw 0 0
s3fs {folder}/bucket fuse.s3fs rw 0 0
server:/export {folder}/with\\040space nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "local"),
    [("near", True), ("far/a/b", False), ("far/memory/a", True), ("bucket/run", False), ("with space/a", False)],
)
def test_the_innermost_mount_decides(folder: str, local: bool, tmp_path: Path):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS.format(folder=tmp_path.resolve()))
    assert is_on_local_disk(tmp_path / folder, table) is local


def test_a_link_is_followed(tmp_path: Path):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS.format(folder=tmp_path.resolve()))
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    assert not is_on_local_disk(tmp_path / "link", table)


def test_a_system_without_the_table_counts_as_unknown(tmp_path: Path):
    assert not is_on_local_disk(tmp_path, tmp_path / "none")


@pytest.mark.slow
def test_an_object_of_more_than_2_gib_is_read_whole(tmp_path: Path):
    """One read of the system returns 2 GiB less a page at the most; a large model's embedding is one object."""
    store, size = open_store(str(tmp_path)), 2**31 + 5
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    assert len(store.get("large")) == size
