"""Counts the store requests of `pull`, `attach`, `status` and `verify` on a finished run of seven rounds.

    make requests
    make requests SOURCES="--source OLD_CHECKOUT --source ."

Every checkout plays the run itself, in its own format (two replicas, a snapshot every three rounds), and it is put into
a signed S3 server on loopback. Each operation is a process of its own, and its requests are counted as HTTP in front of
that server: the counting uses nothing of what it measures, so every checkout is counted in the same way, retries
included. `--source` is a checkout to import from, by default this one; with two of them cells read "before → after".
"""

import argparse
import http.client
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
from s3_server import S3Server, running_server

ROOT = Path(__file__).parents[1]
RUN = "completed"
BUCKET = "requests"
URL = f"s3://{BUCKET}/{RUN}"

# In 0.1.0 the command was a module; later it is the module `main` of a package.
_COMMAND = """
import importlib.util, runpy
name = "diloco_orchestrator.cli"
is_package = importlib.util.find_spec(name).submodule_search_locations is not None
runpy.run_module(name + ".main" * is_package, run_name="__main__")
"""
# The run; with everybody in every round, so that the same objects come out every time.
_PLAY = """
import sys
from diloco_orchestrator import LocalProcessExecutor, launch
launch(
    "old_run_workload:train", store=sys.argv[1], executor=LocalProcessExecutor(sys.argv[2]), rounds=7, replicas=2,
    sync_every=4, snapshot_every=3, quorum="all", heldout_items=[0, 1, 2, 3], guard={"min_steps": 1000},
    timing={"poll_s": 0.05, "heartbeat_s": 0.5},
).wait()
"""
_STATUS = """
import sys
from diloco_orchestrator import RunReader, open_store
RunReader(open_store(sys.argv[1])).status()
"""
_ATTACH = """
import sys
from diloco_orchestrator import LocalProcessExecutor, attach
attach(sys.argv[1], executor=LocalProcessExecutor(sys.argv[2]))
"""
# Name: program and arguments; {folder} is an empty one.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "diloco pull (newest: a snapshot)": (_COMMAND, "pull", URL, "{folder}/model"),
    "diloco pull --round 5 (rebuilt from snapshot 3)": (_COMMAND, "pull", URL, "{folder}/model", "--round", "5"),
    "diloco pull --round 2 (rebuilt from snapshot 0)": (_COMMAND, "pull", URL, "{folder}/model", "--round", "2"),
    "attach(url), nothing launched": (_ATTACH, URL, "{folder}/executor"),
    "RunReader(store).status()": (_STATUS, URL),
    "diloco status": (_COMMAND, "status", URL, "--json"),
    "diloco verify": (_COMMAND, "verify", URL, "--json"),
}


@dataclass(frozen=True)
class Request:
    """One HTTP request, as the server was asked it."""

    kind: str  # GET, LIST, CREATE (PUT if absent), PUT, HEAD, DELETE
    key: str  # below the run's folder; of a LIST its prefix
    status: int
    reply_bytes: int
    at: float  # seconds on this process's monotonic clock, when the server had replied


class Tally:
    """What one operation asked for."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = len(requests)
        self.kinds = Counter(request.kind for request in requests)
        gets = [request for request in requests if request.kind == "GET"]
        self.absent = sum(request.status == 404 for request in gets)
        self.times_read = Counter(request.key for request in gets if request.status in (200, 206))
        self.bytes_read = sum(request.reply_bytes for request in gets)

    def cells(self) -> dict[str, str]:
        """By column."""
        others = self.requests - sum(self.kinds[kind] for kind in ("GET", "LIST", "CREATE", "PUT"))
        return {
            "requests": str(self.requests),
            "GET": str(self.kinds["GET"]),
            "of them absent": str(self.absent),
            "LIST": str(self.kinds["LIST"]),
            "CREATE": str(self.kinds["CREATE"]),
            "PUT": str(self.kinds["PUT"]),
            "others": str(others),
            "objects read": str(len(self.times_read)),
            "of them more than once": str(len(self.read_again())),
            "KiB read": f"{self.bytes_read / 1024:.0f}",
        }

    def read_again(self) -> dict[str, int]:
        """Objects that were read more than once, and how often."""
        return {key: times for key, times in sorted(self.times_read.items()) if times > 1}

    def words(self) -> str:
        """`read_again` in short: keys that differ in numbers only, and were read equally often, are told as one."""
        alike: dict[tuple[str, int], list[str]] = defaultdict(list)
        for key, times in self.read_again().items():
            alike[re.sub(r"\d+", "#", key), times].append(key)
        told = [
            f"{found[0]} {times} times" if len(found) == 1 else f"{len(found)} of {pattern} {times} times each"
            for (pattern, times), found in alike.items()
        ]
        return ", ".join(told) or "nothing"


# -- counting ---------------------------------------------------------------------------------------------------------


class CountingServer(ThreadingHTTPServer):
    """Forwards every request to `target` (host:port) unchanged, so that signatures hold, and notes it."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = target
        self.seen: list[Request] = []


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingServer

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = http.client.HTTPConnection(self.server.target)
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            server.putheader(name, value)
        server.endheaders(body)
        reply = server.getresponse()
        data = reply.read()
        server.close()
        self.server.seen.append(_request(self.command, self.path, "If-None-Match" in self.headers, reply.status, data))
        self.send_response_only(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        length = reply.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed per request."""


def _request(method: str, target: str, only_if_absent: bool, status: int, data: bytes) -> Request:
    split = urlsplit(target)
    key = unquote(split.path).removeprefix(f"/{BUCKET}").removeprefix(f"/{RUN}/")
    kind = method
    if method == "GET" and "list-type" in split.query:
        kind, key = "LIST", parse_qs(split.query).get("prefix", [""])[0].removeprefix(f"{RUN}/")
    elif method == "PUT" and only_if_absent:
        kind = "CREATE"
    return Request(kind, key, status, len(data), time.monotonic())


@contextmanager
def counting(server: S3Server) -> Iterator[CountingServer]:
    """A counting server in front of `server`."""
    front = CountingServer(urlsplit(server.url).netloc)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    try:
        yield front
    finally:
        front.shutdown()
        thread.join()
        front.server_close()


def play(source: Path, folder: Path) -> None:
    """Play the run of a checkout into `folder`."""
    workload = os.pathsep.join([str(source), str(ROOT / "tests" / "support")])
    command = [sys.executable, "-P", "-c", _PLAY, str(folder / RUN), str(folder / "executor")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": workload}
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)


def upload(server: S3Server, folder: Path) -> None:
    """The run's objects, past the counting server."""
    client = boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
    )
    for path in sorted(path for path in (folder / RUN).rglob("*") if path.is_file()):
        client.put_object(Bucket=BUCKET, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes())


def count(source: Path, server: S3Server) -> dict[str, Tally]:
    """By operation; each in a process that imports from `source`."""
    tallies = {}
    with counting(server) as front:
        environ = {
            **os.environ,
            **server.environ(),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{front.server_port}",
            "PYTHONPATH": str(source),
        }
        for name, (program, *args) in OPERATIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                given = [arg.format(folder=folder) for arg in args]
                command = [sys.executable, "-c", program, *given]
                front.seen.clear()
                subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
                tallies[name] = Tally(front.seen)
    return tallies


def _check_source(source: Path) -> None:
    """Another `diloco_orchestrator` may be installed; the one of `source` must be what is imported."""
    code = "import diloco_orchestrator; print(diloco_orchestrator.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(source)}
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tempfile.gettempdir(),
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if not Path(found.stdout.strip()).is_relative_to(source):
        raise SystemExit(f"--source {source} holds no diloco_orchestrator: {found.stdout.strip()} was imported.")


# -- printing ---------------------------------------------------------------------------------------------------------


def table(counted: Sequence[dict[str, Tally]]) -> str:
    """In Markdown; a cell has one number per source."""
    columns = list(counted[0][next(iter(OPERATIONS))].cells())
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in OPERATIONS:
        sources = [tallies[name].cells() for tallies in counted]
        cells = (" → ".join(cells[column] for cells in sources) for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=lambda text: Path(text).resolve(), action="append", help="repeatable, twice")
    sources = parser.parse_args().source or [ROOT]
    if len(sources) > 2:
        parser.error("--source is given more than twice: one checkout, or one before and one after a change.")
    for source in sources:
        _check_source(source)
    counted = []
    for source in sources:
        with tempfile.TemporaryDirectory() as folder, running_server() as server:
            play(source, Path(folder))
            server.make_bucket(BUCKET)
            upload(server, Path(folder))
            counted.append(count(source, server))
    print(table(counted))
    for when, tallies in zip(("before", "after") if len(sources) == 2 else ("",), counted, strict=True):
        print(f"\nRead more than once{when and ', '}{when}:\n")
        print("\n".join(f"- {name}: {tally.words()}" for name, tally in tallies.items()))


if __name__ == "__main__":
    main()
