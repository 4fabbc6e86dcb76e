"""Keeps the page about a run up to date until the run stops: in its file, and for a browser of this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

from diloco_orchestrator.cli.report_page import page
from diloco_orchestrator.clock import Clock, ThreadBackground
from diloco_orchestrator.inspection.report import Report
from diloco_orchestrator.inspection.status import RunReader, RunStatus
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.store.base import Store

_POLL_S = 1.0  # between two polls of the run; most of them cost no request
_REFRESH_S = 5, 60  # a browser asks again after a round's length, within these bounds
_HERE = "127.0.0.1"


class PageServer:
    """The newest page about a run at `url`, for browsers of this machine only.

    While the run goes on, a header asks the browser to load it again; the page itself is the one that the file holds.
    Requests that call this machine by another name are refused: otherwise a web site that the user visits could read
    the page, by a name of its own that it points to this machine.
    """

    def __init__(self, port: int) -> None:
        self._lock = Lock()
        self._body, self._again_s = b"", 1  # until the first page is there
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                serving._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the terminal is the run's."""

        self._server = ThreadingHTTPServer((_HERE, port), Handler)
        self._names = {f"{name}:{self._server.server_port}" for name in (_HERE, "localhost")}
        self.url = f"http://{_HERE}:{self._server.server_port}/"

    def show(self, html: str, again_s: int) -> None:
        """Serve `html` from now on. `again_s`: seconds after which a browser loads the page again; 0: it does not."""
        with self._lock:
            self._body, self._again_s = html.encode(), again_s

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        with self._lock:
            body, again_s = self._body, self._again_s
        known = request.headers.get("Host") in self._names and request.path == "/"
        request.send_response(200 if known else 404)
        request.send_header("Content-Type", "text/html; charset=utf-8")
        request.send_header("Cache-Control", "no-store")
        if known and again_s:
            request.send_header("Refresh", str(again_s))
        request.end_headers()
        if known:
            request.wfile.write(body)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Context in which a thread answers the browsers' requests."""
        thread = Thread(target=self._server.serve_forever, name="report page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def keep_up(store: Store, destination: Path, server: PageServer | None, clock: Clock) -> RunStatus:
    """Write the page about the run to `destination` after every round, until the run has stopped.

    The file is replaced as a whole, so that whoever opens it finds a complete page. Returns the last status. Raises as
    `RunReader.status` does.
    """
    seen, drawn = SeenStore.of(store, clock), None
    reader = RunReader(seen)
    while True:
        status = reader.status()
        goes_on = status.state in ("starting", "running")
        if not goes_on:
            seen.forget()
        if (known := (status.state, len(status.rounds))) != drawn:
            html = page(Report.read(reader, ThreadBackground()))
            replace_file(destination, html)
            if server is not None:
                server.show(html, round(min(max(seen.round_s, _REFRESH_S[0]), _REFRESH_S[1])) if goes_on else 0)
            drawn = known
        if not goes_on:
            return status
        seen.follow(reader.log)
        clock.sleep(_POLL_S)


def replace_file(destination: Path, text: str) -> None:
    """Write `text` (UTF-8) to `destination`, which holds either its old or its new content at any time."""
    beside = destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(destination)
    finally:
        beside.unlink(missing_ok=True)
