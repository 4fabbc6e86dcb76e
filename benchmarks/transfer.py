"""Measures PUT and GET of one large object through `open_store` against obstore itself, interleaved.

    make transfer
    python benchmarks/transfer.py --mib 64 --repeats 15 --tls

Both talk to the same server, which is in a process of its own, speaks just enough S3 and checks nothing, so that the
clients are what is measured. Over TLS obstore is measured with and without the hash of the body in the signature.
"""

import argparse
import contextlib
import os
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_OBJECTS: dict[str, bytearray] = {}


# -- the server -------------------------------------------------------------------------------------------------------


def serve(certificate: str) -> None:
    """Print the port, then answer for ever. `certificate`: a file with key and certificate, or empty."""
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
    if context:
        context.load_cert_chain(certificate)
    while True:
        threading.Thread(target=_connection, args=(listening.accept()[0], context), daemon=True).start()


def _connection(raw: socket.socket, context: ssl.SSLContext | None) -> None:
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) if context else raw as connection:
        buffered = b""
        while True:
            while b"\r\n\r\n" not in buffered:
                received = connection.recv(65536)
                if not received:
                    return
                buffered += received
            head, buffered = buffered.split(b"\r\n\r\n", 1)
            first, *lines = head.decode().split("\r\n")
            verb, path, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
            if verb == "PUT":
                buffered = _receive(connection, path, int(headers["content-length"]), buffered)
            else:
                _send(connection, verb, path, headers.get("range", ""))


def _receive(connection: socket.socket, path: str, size: int, buffered: bytes) -> bytes:
    body = bytearray(size)
    view, at = memoryview(body), min(size, len(buffered))
    view[:at] = buffered[:at]
    while at < size:
        at += connection.recv_into(view[at:])
    _OBJECTS[path] = body
    connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\n\r\n')
    return buffered[size:]


def _send(connection: socket.socket, verb: str, path: str, wanted: str) -> None:
    body = memoryview(_OBJECTS[path])
    status, extra = "200 OK", ""
    if found := _RANGE.match(wanted):
        start, end = int(found[1]), min(int(found[2] or len(body)) + 1, len(body))
        status, extra = "206 Partial Content", f"Content-Range: bytes {start}-{end - 1}/{len(body)}\r\n"
        body = body[start:end]
    date = "Last-Modified: Sun, 22 Nov 2026 00:00:00 GMT\r\n"
    connection.sendall(f'HTTP/1.1 {status}\r\nETag: "0"\r\n{date}{extra}Content-Length: {len(body)}\r\n\r\n'.encode())
    if verb == "GET":
        connection.sendall(body)


@contextlib.contextmanager
def running(certificate: str) -> Iterator[str]:
    """The server's address."""
    command = [sys.executable, __file__, "--serve", "--certificate", certificate]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.stdout.readline().strip()}"
    finally:
        server.kill()
        server.wait()


def make_certificate(folder: str) -> str:
    """A certificate of 127.0.0.1 that this process trusts."""
    both = Path(folder) / "both.pem"
    names = "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
    made = f"-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout {folder}/key.pem -out {folder}/cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", *names.split(), *made.split()],
        check=True,
        capture_output=True,
    )
    both.write_text((Path(folder) / "key.pem").read_text() + (Path(folder) / "cert.pem").read_text())
    os.environ["SSL_CERT_FILE"] = f"{folder}/cert.pem"
    return str(both)


# -- the clients ------------------------------------------------------------------------------------------------------


def clients(url: str, data: bytes) -> dict[str, Callable[[], Any]]:
    """What is measured, by name. The raw ones come first, as the others are compared with them."""
    import obstore
    from obstore.store import S3Store

    from diloco_orchestrator.store.open_store import open_store

    def raw(unsigned: bool) -> S3Store:
        return S3Store(
            "bucket",
            prefix="run",
            endpoint=url,
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret",
            unsigned_payload=unsigned,
            client_options={"allow_http": True},
        )

    tls = url.startswith("https")
    ours = open_store("s3://bucket/run", {"key": "key", "secret": "secret", "endpoint_url": url})
    same, signed = raw(tls), raw(False)
    found: dict[str, Callable[[], Any]] = {
        "PUT obstore": lambda: obstore.put(same, "key", data, use_multipart=False),
        "PUT open_store": lambda: ours.put("key", data),
        "GET obstore": lambda: obstore.get(same, "key").bytes(),
        "GET open_store": lambda: ours.get("key"),
    }
    if tls:
        found["PUT obstore, signed body"] = lambda: obstore.put(signed, "key", data, use_multipart=False)
    return found


def measure(url: str, mib: int, repeats: int) -> None:
    data = os.urandom(mib * 2**20)
    calls = clients(url, data)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        # In turn forwards and backwards: who comes after whom matters to a server that gives memory back.
        for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            call()
            if turn:  # the first opens connections
                seconds[name].append(time.perf_counter() - began)
    for name, each in seconds.items():
        raw = seconds[f"{name[:3]} obstore"]
        ratio = statistics.median(theirs / ours for theirs, ours in zip(raw, each, strict=True))
        print(
            f"{name:26s} {mib / statistics.median(each):6.0f} MiB/s   {ratio:.2f} x obstore (median of {repeats} pairs)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tls", action="store_true", help="over https")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--certificate", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.certificate)
        return
    with tempfile.TemporaryDirectory() as folder, running(make_certificate(folder) if args.tls else "") as url:
        measure(url, args.mib, args.repeats)


if __name__ == "__main__":
    main()
