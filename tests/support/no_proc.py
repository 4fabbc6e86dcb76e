"""A machine without /proc, as macOS is: runs a command where /proc is empty and psutil reads it from another folder.

`python no_proc.py FOLDER COMMAND…`, as root on Linux, in a mount namespace of its own. Every Python process in it
points psutil, which reads /proc on Linux, to FOLDER/proc.
"""

import os
import subprocess
import sys
from pathlib import Path

_CUSTOMIZE = "import psutil\n\npsutil.PROCFS_PATH = {!r}\n"


def available() -> bool:
    """Whether this process may make mount namespaces."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    proc, packages = folder / "proc", folder / "packages"
    for each in (proc, packages):
        each.mkdir(parents=True)
    (packages / "sitecustomize.py").write_text(_CUSTOMIZE.format(str(proc)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
    mounts = f'mount --rbind /proc "{proc}" && mount -t tmpfs none /proc && exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", mounts, "sh", *sys.argv[2:]])


if __name__ == "__main__":
    main()
