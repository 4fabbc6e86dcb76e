"""An S3 look-alike on loopback that is fast enough to be measured against: objects in memory, requests counted.

It serves what obstore asks for: GET with ranges, PUT with If-None-Match, HEAD, DELETE, listings and multipart uploads.
Signatures are not checked; `s3_server` has a server that checks them. As a program it prints one line of JSON, {url},
and serves until it is killed.
"""

import argparse
import bisect
import html
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

CONTROL = "/-/"  # requests below this path are the benchmark's own and are not counted
_PAGE = 1000  # keys in one reply to a listing, as in S3
_TIME = "2020-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class FastS3:
    """A running server, as its user sees it."""

    url: str

    def environ(self, url: str = "") -> dict[str, str]:
        """What a user would export. `url`: a proxy before the server."""
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "us-east-1",
        }

    def requests(self) -> Counter[str]:
        """Requests by kind (GET, LIST, CREATE, PUT, HEAD, DELETE, POST) since the last call; the count starts anew."""
        return Counter(json.loads(self._control("requests")))

    def moved(self) -> Counter[str]:
        """Bytes of objects that were read ("down") and written ("up") since the last call; the count starts anew."""
        return Counter(json.loads(self._control("moved")))

    def payload_bytes(self) -> Counter[str]:
        """Bytes of payloads that each rank of a replica on this machine has moved: by "<up|down> <replica>.<rank>".

        Of saved states those written, by "state <replica>.<rank>", and the largest object.
        """
        return Counter(json.loads(self._control("payload_bytes")))

    def forget(self, part: str) -> int:
        """Delete every object whose key contains `part`. Returns how many there were."""
        return int(self._control(f"forget?part={quote(part)}"))

    def strike(self, peer: str, part: str, name: str) -> None:
        """Send the signal `name` to the rank `peer`, "<replica>.<rank>", when it first writes an object whose key
        contains `part`, before it gets an answer."""
        self._control(f"strike?peer={peer}&part={quote(part)}&name={name}")

    def _control(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{CONTROL}{path}") as reply:
            return bytes(reply.read())


@contextmanager
def running_fast_s3(folder: Path | None = None) -> Iterator[FastS3]:
    """A server in a process of its own. `folder`: its files are objects from the start, the first part of each path
    being the bucket."""
    command = [sys.executable, __file__, *([str(folder)] if folder else [])]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield FastS3(**json.loads(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


class Objects:
    """Objects by `bucket/key`, in key order. Thread-safe."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}
        self._keys: list[str] = []
        self._parts: dict[str, dict[int, bytes]] = {}  # of multipart uploads, by upload id
        self._lock = threading.Lock()

    def load(self, folder: Path) -> None:
        self._bodies = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}
        self._keys = sorted(self._bodies)

    def get(self, key: str) -> bytes | None:
        return self._bodies.get(key)

    def put(self, key: str, body: bytes, only_if_absent: bool) -> bool:
        with self._lock:
            if key not in self._bodies:
                bisect.insort(self._keys, key)
            elif only_if_absent:
                return False
            self._bodies[key] = body
            return True

    def delete(self, key: str) -> None:
        with self._lock:
            if self._bodies.pop(key, None) is not None:
                del self._keys[bisect.bisect_left(self._keys, key)]

    def forget(self, part: str) -> int:
        found = [key for key in list(self._keys) if part in key]
        for key in found:
            self.delete(key)
        return len(found)

    def keys(self, prefix: str, after: str) -> tuple[list[str], bool]:
        """The first keys with a prefix, later than `after`, and whether there are more."""
        with self._lock:
            begin = bisect.bisect_right(self._keys, after) if after else bisect.bisect_left(self._keys, prefix)
            begin = max(begin, bisect.bisect_left(self._keys, prefix))
            page = self._keys[begin : begin + _PAGE + 1]
        found = [key for key in page if key.startswith(prefix)]
        return found[:_PAGE], len(found) > _PAGE

    def begin_upload(self) -> str:
        with self._lock:
            upload = f"upload-{len(self._parts)}"
            self._parts[upload] = {}
            return upload

    def add_part(self, upload: str, number: int, body: bytes) -> None:
        self._parts[upload][number] = body

    def complete_upload(self, upload: str, key: str, only_if_absent: bool) -> bool:
        parts = self._parts[upload]
        return self.put(key, b"".join(parts[number] for number in sorted(parts)), only_if_absent)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = Objects()
        self.counted: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()
        self.strikes: list[dict[str, str]] = []  # by `FastS3.strike`, still to come


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # headers and a small body leave in one packet
    server: Server

    def _serve(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        if (body := self._whole_body()) is None:
            return None
        if split.path.startswith(CONTROL):
            return self._control(split.path.removeprefix(CONTROL), query)
        key = unquote(split.path).lstrip("/")
        create = "If-None-Match" in self.headers
        kind = "LIST" if "list-type" in query else "CREATE" if create and self.command == "PUT" else self.command
        self.server.counted[kind] += 1
        self.server.moved["up"] += len(body)
        if body and "/payload/" in key:
            self.server.payload_bytes[f"up {self._peer}"] += len(body)
        if body and "/state/" in key:
            self.server.payload_bytes[f"state {self._peer}"] += len(body)
            largest = self.server.payload_bytes["largest of a state"]
            self.server.payload_bytes["largest of a state"] = max(largest, len(body))
        for each in [each for each in self.server.strikes if body and each["part"] in key]:
            if each["peer"] == self._peer:
                self.server.strikes.remove(each)
                os.kill(self._process, signal.Signals[each["name"]])
        match kind:
            case "LIST":
                self._list(key.rstrip("/"), query)
            case "GET" | "HEAD":
                self._get(key)
            case "DELETE":
                self.server.objects.delete(key)
                self._reply(204)
            case "POST":
                self._post(key, query, create, body)
            case _ if "partNumber" in query:
                self.server.objects.add_part(query["uploadId"], int(query["partNumber"]), body)
                self._reply(200, headers={"ETag": f'"{query["partNumber"]}"'})
            case _:
                self._created(self.server.objects.put(key, body, create), key)
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _whole_body(self) -> bytes | None:
        """The request's body; None if the client left before its end. S3 keeps nothing of such a request."""
        size = int(self.headers.get("Content-Length", 0))
        try:
            body = self.rfile.read(size)
        except OSError:  # the client reset the connection
            body = b""
        self.close_connection = self.close_connection or len(body) < size
        return body if len(body) == size else None

    def _control(self, path: str, query: dict[str, str]) -> None:
        if path == "requests":
            counted, self.server.counted = self.server.counted, Counter()
            return self._reply(200, json.dumps(counted).encode())
        if path == "moved":
            moved, self.server.moved = self.server.moved, Counter()
            return self._reply(200, json.dumps(moved).encode())
        if path == "payload_bytes":
            return self._reply(200, json.dumps(self.server.payload_bytes).encode())
        if path == "strike":
            self.server.strikes.append(query)
            return self._reply(200)
        return self._reply(200, str(self.server.objects.forget(query["part"])).encode())

    @cached_property
    def _process(self) -> int:
        """The pid of the process at the other end of this connection."""
        return process_of(self.client_address[1], self.server.server_port)

    @cached_property
    def _peer(self) -> str:
        """The replica and the rank at the other end of this connection, "<replica>.<rank>"."""
        return rank_of(self._process)

    def _created(self, done: bool, key: str) -> None:
        if done:
            self._reply(200, headers={"ETag": '"1"'})
        else:
            self._error(412, "PreconditionFailed", key)

    def _get(self, key: str) -> None:
        body = self.server.objects.get(key)
        if body is None:
            return self._error(404, "NoSuchKey", key)
        headers, status = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2020 00:00:00 GMT"}, 200
        view = memoryview(body)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            view, status = view[int(first) : int(last) + 1 if last else None], 206
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(view) - 1}/{len(body)}"
        self.server.moved["down"] += len(view)
        if "/payload/" in key:
            self.server.payload_bytes[f"down {self._peer}"] += len(view)
        return self._reply(status, view, headers)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after", "")
        found, more = self.server.objects.keys(f"{bucket}/{query.get('prefix', '')}", f"{bucket}/{after}" * bool(after))
        names = [key.removeprefix(f"{bucket}/") for key in found]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{_TIME}</LastModified><ETag>&quot;1&quot;</ETag>"
            f"<Size>{len(self.server.objects.get(key) or b'')}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, name in zip(found, names, strict=True)
        )
        token = f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>" if more else ""
        self._xml(
            f"<ListBucketResult><Name>{escape(bucket)}</Name><KeyCount>{len(found)}</KeyCount><MaxKeys>{_PAGE}</MaxKeys>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{entries}{token}</ListBucketResult>"
        )

    def _post(self, key: str, query: dict[str, str], create: bool, body: bytes) -> None:
        if "delete" in query:
            names = [html.unescape(name) for name in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for name in names:
                self.server.objects.delete(f"{key.rstrip('/')}/{name}")
            done = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
            self._xml(f"<DeleteResult>{done}</DeleteResult>")
        elif "uploads" in query:
            upload = self.server.objects.begin_upload()
            self._xml(
                f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        elif self.server.objects.complete_upload(query["uploadId"], key, create):
            self._xml(
                "<CompleteMultipartUploadResult><Location>here</Location><Bucket>b</Bucket>"
                f"<Key>{escape(key)}</Key><ETag>&quot;1&quot;</ETag></CompleteMultipartUploadResult>"
            )
        else:
            self._error(412, "PreconditionFailed", key)

    def _xml(self, text: str) -> None:
        self._reply(200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str, key: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>-</Message><Key>{escape(key)}</Key></Error>"
        self._reply(status, text.encode(), {"Content-Type": "application/xml"})

    def _reply(self, status: int, body: "bytes | memoryview" = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed per request."""


def process_of(port: int, server_port: int) -> int:
    """The pid of the replica's process on this machine that connects from `port`, by Linux's /proc; 0 for none."""
    ends = f":{port:04X}", f":{server_port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next((row[9] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])), "")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if "--replica-id" in words and f"socket:[{inode}]" in map(os.readlink, (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # it has ended
            continue
    return 0


def rank_of(pid: int) -> str:
    """ "<replica>.<rank>" of a replica's process; "" if there is none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        names = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return ""
    rank = next((name.removeprefix("RANK=") for name in names if name.startswith("RANK=")), "0")
    return f"{words[words.index('--replica-id') + 1]}.{rank}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    given = parser.parse_args()
    server = Server()
    if given.folder:
        server.objects.load(given.folder)
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
