"""The report page while its run goes on: written anew after each round, and served to a browser of this machine."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from cli_support import ROOT, diloco_here
from protocol_fleet import Fleet, play, report
from real_runs import wait_for

from diloco_orchestrator.cli.live_report import PageServer, keep_up
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Halt


class Meanwhile(ManualClock):
    """A clock whose every sleep lets the next thing happen to the run."""

    def __init__(self, happens: Iterator[Callable[[], object]]) -> None:
        super().__init__()
        self._happens = happens

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        next(self._happens)()


@pytest.fixture
def server() -> Iterator[PageServer]:
    found = PageServer(0)
    with found.serving():
        yield found


def asked(server: PageServer, path: str = "/", **headers: str) -> tuple[int, str | None, str]:
    """Status, the Refresh header, and body of a GET."""
    host = server.url.removeprefix("http://").rstrip("/")
    connection = HTTPConnection(host)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers["Refresh"], answer.read().decode()


def test_the_page_follows_the_run_to_its_end_in_the_file_and_in_the_browser(tmp_path: Path, server: PageServer):
    fleet = Fleet(replicas=2, rounds=9)
    participants = fleet.join_all()
    seen: list[tuple[int, str | None, str]] = []
    file = tmp_path / "page.html"

    def a_round() -> None:
        seen.append(asked(server))
        assert seen[-1][2] == file.read_text() and list(tmp_path.iterdir()) == [file]
        play(participants, [1.0, 1.0], [report(i) for i in (0, 1)])

    def stops() -> None:
        record = Halt(**Stamp("test", lambda: 1000.0)(), leg=1, by="test", reason="enough")
        fleet.store.create(keys.halt(1), record.to_bytes())
        a_round()

    def until_it_is_seen() -> Iterator[Callable[[], object]]:
        yield from (a_round, a_round, stops)
        while True:
            yield lambda: None

    status = keep_up(fleet.store, file, server, Meanwhile(until_it_is_seen()))
    assert status.state == "halted" and len(status.rounds) == 3
    assert [page.count("0 of 9") + page.count("1 of 9") + page.count("2 of 9") for _, _, page in seen] == [1, 1, 1]
    assert all(code == 200 and refresh == "5" for code, refresh, _ in seen)
    code, refresh, last = asked(server)
    assert (code, refresh) == (200, None) and "halted: " in last and "enough" in last and last == file.read_text()


def test_only_this_machine_by_its_own_name_gets_the_page(server: PageServer):
    server.show("the page", 5)
    port = server.url.rpartition(":")[2].rstrip("/")
    assert asked(server, Host=f"localhost:{port}")[::2] == (200, "the page")
    for host in (f"evil.example:{port}", "localhost", "", f"127.0.0.1.evil.example:{port}"):
        assert asked(server, Host=host)[::2] == (404, "")
    assert asked(server, path="/etc/passwd")[0] == 404
    assert server._server.server_address[0] == "127.0.0.1"


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path):
    from diloco_orchestrator.cli.live_report import replace_file

    file = tmp_path / "page.html"
    replace_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "half of a pair \ud800")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_port_that_is_taken_and_influence_are_refused(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = diloco_here("report", str(tmp_path), "page.html", "--serve", "--port", port, cwd=tmp_path)
    assert done.returncode == 2 and f"Port {port} of this machine" in done.stderr
    done = diloco_here("report", str(tmp_path), "page.html", "--follow", "--influence", cwd=tmp_path)
    assert done.returncode == 2 and "--influence reads all payloads" in done.stderr


@pytest.mark.slow
def test_the_command_serves_a_run_that_goes_on_and_its_last_page_until_ctrl_c(tmp_path: Path):
    url, page = str(tmp_path / "run"), tmp_path / "page.html"
    launch = ["demo", "--store", url, "--rounds", "2", "--replicas", "1"]
    running = subprocess.Popen([sys.executable, "-m", "diloco_orchestrator.cli.main", *launch], cwd=ROOT)
    wait_for((tmp_path / "run" / "run.json").exists, "the run is there")
    command = [sys.executable, "-m", "diloco_orchestrator.cli.main", "report", url, str(page), "--serve"]
    serving = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert serving.stderr is not None
    address = serving.stderr.readline().split()[0]
    assert running.wait() == 0
    assert serving.stderr.readline() == "Ctrl-C ends the page\n"
    connection = HTTPConnection(address.removeprefix("http://").rstrip("/"))
    connection.request("GET", "/")
    assert "completed" in connection.getresponse().read().decode() and "completed" in page.read_text()
    serving.send_signal(signal.SIGINT)
    assert serving.wait() == 0
