"""A public run on gs and az, read at the command line without credentials."""

import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from cli_support import diloco_here

RUNS = Path(__file__).parent.parent / "fixtures" / "kept_runs" / "runs.tar.xz"
_DATE = "Wed, 01 Jan 2020 00:00:00 GMT"


class Public(BaseHTTPRequestHandler):
    """Shows the files of a folder as the container `b`, in the words of GCS and of Azure, to whoever does not sign."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] is not None:
            return self._answer(401, b"")
        at = urlsplit(self.path)
        asked = parse_qs(at.query)
        if "list-type" in asked or "comp" in asked:
            return self._answer(200, self._listing(asked["prefix"][0], is_azure="comp" in asked).encode())
        file = self.server.folder / unquote(at.path).removeprefix("/b/")  # type: ignore[attr-defined]
        if not file.is_file():
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data, wanted = file.read_bytes(), self.headers["Range"]
        if wanted is None:
            return self._answer(200, data)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data)), len(data) - 1) + 1
        self._answer(206, data[start:end], f"bytes {start}-{end - 1}/{len(data)}")

    do_HEAD = do_GET  # noqa: N815

    def _listing(self, prefix: str, is_azure: bool) -> str:
        folder: Path = self.server.folder  # type: ignore[attr-defined]
        keys = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        found = [(escape(key), (folder / key).stat().st_size) for key in keys if key.startswith(prefix)]
        if is_azure:
            rest = "<Content-Type>x</Content-Type><Etag>1</Etag>"
            blobs = "".join(
                f"<Blob><Name>{key}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
                f"<Content-Length>{size}</Content-Length>{rest}</Properties></Blob>"
                for key, size in found
            )
            return f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        contents = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2020-01-01T00:00:00Z</LastModified><ETag>1</ETag>"
            f"<Size>{size}</Size></Contents>"
            for key, size in found
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"

    def _answer(self, status: int, body: bytes, of: str = "") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "ETag": '"1"', "Last-Modified": _DATE}.items():
            self.send_header(name, str(value))
        if of:
            self.send_header("Content-Range", of)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed per request."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadingHTTPServer]:
    folder = tmp_path_factory.mktemp("public")
    with tarfile.open(RUNS, "r:xz") as packed:
        packed.extractall(folder, filter="data")
    with ThreadingHTTPServer(("127.0.0.1", 0), Public) as server:
        server.folder = folder  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_public_run_is_read_as_the_one_in_a_folder(scheme: str, server: ThreadingHTTPServer, tmp_path: Path):
    at = f"http://127.0.0.1:{server.server_port}"
    environ = {
        "gs": {"GOOGLE_BASE_URL": at, "GOOGLE_SKIP_SIGNATURE": "true"},
        "az": {
            "AZURE_STORAGE_ENDPOINT": at,
            "AZURE_STORAGE_ACCOUNT_NAME": "lab",
            "AZURE_SKIP_SIGNATURE": "true",
        },
    }[scheme]
    here, there = str(server.folder / "voted"), f"{scheme}://b/voted"  # type: ignore[attr-defined]
    for command in ("status", "verify"):
        found = [
            diloco_here(command, url, "--json", cwd=tmp_path, environ={**environ, "XDG_STATE_HOME": str(tmp_path)})
            for url in (here, there)
        ]
        assert found[1].returncode == 0, found[1].stderr
        assert json.loads(found[1].stdout.replace(there, here)) == json.loads(found[0].stdout)
    for name, url in (("here", here), ("there", there)):
        for command in (
            ("pull", url, str(tmp_path / name)),
            ("report", url, str(tmp_path / f"{name}.html")),
        ):
            done = diloco_here(*command, cwd=tmp_path, environ=environ)
            assert done.returncode == 0, done.stderr
    models = [tmp_path / name / "model.safetensors" for name in ("here", "there")]
    assert models[0].read_bytes() == models[1].read_bytes() and (tmp_path / "there.html").exists()
