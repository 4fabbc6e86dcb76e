"""Commands that follow a run for days, and a bucket that answers nobody for longer than other commands wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import ROOT
from fast_s3 import running_fast_s3
from faulty_proxy import Faults, proxy_before
from protocol_fleet import Fleet, play, report
from real_runs import wait_for

from diloco_orchestrator import open_store

RUN = "s3://b/run"
WATCHERS = {
    "watch": ("watch", RUN),
    "witness": ("witness", RUN, "--to", "s3://b/heads", "--every", "1"),
    "track": ("track", RUN, "--to", "tensorboard:curves", "--follow"),
    "report": ("report", RUN, "page.html", "--follow"),
    "logs": ("logs", RUN, "--follow"),
}


@pytest.mark.slow
def test_who_watches_a_run_waits_an_outage_out_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two minutes in which every request gets a 503: other commands give up after 90 s."""
    with running_fast_s3() as server, proxy_before(server.url, Faults()) as (proxy, url):
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        fleet = Fleet(replicas=2, rounds=2, store=open_store(RUN), scored=True)
        participants = fleet.join_all()
        play(participants, [1.0, 1.0], [report(i, 0.5) for i in (0, 1)])
        watching = {}
        for name, command in WATCHERS.items():
            watching[name] = subprocess.Popen(
                [sys.executable, "-m", "diloco_orchestrator.cli.main", *command],
                cwd=tmp_path,
                env={**os.environ, **server.environ(url), "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
                stdout=(tmp_path / f"{name}.out").open("w"),
                stderr=(tmp_path / f"{name}.err").open("w"),
            )
        said = {name: tmp_path / f"{name}.err" for name in WATCHERS}
        try:
            wait_for((tmp_path / "page.html").exists, "the page")
            wait_for(lambda: "head " in (tmp_path / "witness.out").read_text(), "the first statement")
            wait_for(lambda: "round 1" in (tmp_path / "watch.out").read_text(), "the first round")
            wait_for(lambda: list((tmp_path / "curves").rglob("events*")), "the first curves")
            asked = sum(proxy.requests.values())
            wait_for(lambda: sum(proxy.requests.values()) > asked + 5, "polls")
            proxy.faults = Faults(refused=1.0)
            for name, file in said.items():
                gone = lambda: watching[name].poll() is not None  # noqa: E731, B023
                wait_for(lambda: "Waiting since" in file.read_text() or gone(), name)  # noqa: B023
                assert not gone(), (name, file.read_text())
            proxy.faults = Faults()
            for _ in range(2):
                play(participants, [1.0, 1.0], [report(i, 0.5) for i in (0, 1)])
            codes = {name: process.wait() for name, process in watching.items()}
        finally:
            for process in watching.values():
                process.kill()
                process.wait()
    texts = {name: file.read_text() for name, file in said.items()}
    assert codes == dict.fromkeys(WATCHERS, 0), texts
    for name, text in texts.items():
        assert text.count("Waiting since") == text.count("answers again") == 1, (name, text)
        assert "until it answers." in text and "Traceback" not in text
