"""A genuine Ceph with its S3 gateway on this machine: ceph-mon, one ceph-osd in memory and radosgw over a folder.

Needs the packages radosgw, ceph-mon, ceph-osd and ceph-common of Debian or Ubuntu (`make ceph`, as root), or the folder
CEPH_ROOT with these packages unpacked (`dpkg -x`). The daemons run as this user on ports that are free, without
logins among themselves, and end with the context. Objects are in memory, at most 1 GiB of them.
"""

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from genuine_slurm import _free_ports
from s3_server import S3Server

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_PATIENCE_S = 120.0  # ends a start that hangs
_KEY, _SECRET = "CEPHTESTS", "secret-of-the-ceph-user-0042"

_CONF = """
[global]
fsid = {fsid}
mon_host = 127.0.0.1:{mon_port}
public_addr = 127.0.0.1
ms_bind_msgr2 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
osd_objectstore = memstore
memstore_device_bytes = 1073741824
run_dir = {folder}
admin_socket = {folder}/$name.asok
pid_file = {folder}/$name.pid
log_file = {folder}/$name.log
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
plugin_dir = {libraries}/ceph
erasure_code_dir = {libraries}/ceph/erasure-code
osd_class_dir = {libraries}/rados-classes
rgw_frontends = beast endpoint=127.0.0.1:{s3_port}
rgw_dns_name = 127.0.0.1
"""


def _environ() -> dict[str, str]:
    root = os.environ.get("CEPH_ROOT")
    if root is None:
        return dict(os.environ)
    libraries = [f"{root}/{_LIBRARIES}", f"{root}/{_LIBRARIES}/ceph", f"{root}/lib/x86_64-linux-gnu"]
    return {
        **os.environ,
        "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages",  # of the program `ceph`
    }


def skip_without_ceph() -> None:
    """Skip the test where Ceph is not installed."""
    path = _environ()["PATH"]
    if absent := [name for name in _PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"Ceph is not installed here ({', '.join(absent)}): `make ceph` installs it on Debian and Ubuntu")


@contextmanager
def running_ceph(folder: Path) -> Iterator[S3Server]:
    """The gateway, and a user that owns what it makes. `folder`: new; its path must be short enough for sockets."""
    skip_without_ceph()
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    mon_port, s3_port = _free_ports(2)
    fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
    libraries = Path(os.environ.get("CEPH_ROOT", "/")) / _LIBRARIES
    given = {"fsid": fsid, "folder": folder, "libraries": libraries, "mon_port": mon_port, "s3_port": s3_port}
    conf = folder / "ceph.conf"
    conf.write_text(_CONF.format(**given))
    with ExitStack() as stack:

        def call(program: str, *words: str) -> str:
            done = subprocess.run(
                [program, "-c", str(conf), *words],
                env=_environ(),
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
                check=False,
            )
            assert done.returncode == 0, f"{program} {words}: {done.stdout}{done.stderr}"
            return done.stdout

        def start(program: str, *words: str) -> "subprocess.Popen[bytes]":
            with (folder / f"{program}.out").open("ab") as output:
                daemon = subprocess.Popen(
                    [program, "-c", str(conf), "-f", *words],
                    env=_environ(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
            return daemon

        def is_up() -> bool:
            """An OSD that asks the monitor before it has its map ends with "wrong fsid"."""
            if osds[-1].poll() is not None:
                osds.append(start("ceph-osd", "-i", "0"))
            return "1 up" in call("ceph", "-s")

        url = f"http://127.0.0.1:{s3_port}"
        call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", str(folder / "map"))
        call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "map"))
        start("ceph-mon", "-i", "a")
        call("ceph", "osd", "new", osd_id)  # waits for the monitor
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        osds = [start("ceph-osd", "-i", "0")]
        _wait(is_up, folder, "the OSD is up")
        start("radosgw", "-n", "client.rgw")
        _wait(lambda: _answers(url), folder, "the gateway answers")
        user = ["--uid", "tests", "--display-name", "tests", "--access-key", _KEY, "--secret-key", _SECRET]
        call("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        yield S3Server(url, _KEY, _SECRET)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.URLError:
        return False


def _wait(condition: Callable[[], bool], folder: Path, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.out")))
        assert time.monotonic() < deadline, f"Ceph: never happened: {what}\n{logs}"
        time.sleep(0.1)
