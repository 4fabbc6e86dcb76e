"""A run that an earlier version has left, unpacked: a log of several rounds without the time to make one."""

import tarfile
from pathlib import Path

_PACKED = Path(__file__).parents[1] / "fixtures" / "kept_runs" / "runs.tar.xz"


def kept_run(folder: Path) -> Path:
    """The folder of one finished run, below `folder`."""
    with tarfile.open(_PACKED, "r:xz") as packed:
        packed.extractall(folder, filter="data")
    return next(path.parent for path in sorted(folder.rglob("run.json")))
