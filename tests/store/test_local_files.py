"""Which folders lie on a disk of this machine."""

from pathlib import Path

import pytest

from diloco_orchestrator.store.local_files import is_on_local_disk

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
