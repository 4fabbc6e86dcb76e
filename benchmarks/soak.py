"""A long run looked at for what grows: memory, file handles, objects in the bucket, requests per round.

    make soak MINUTES=60
    make soak-table

Three replicas, rounds of two seconds, over a signed S3 server on loopback. A sample every half minute goes to
runs/soak.jsonl, so that an interrupted soak keeps what it saw; another call adds a piece of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faulty_proxy import Faults, FaultyProxy, proxy_before
from s3_server import running_server

from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.store.open_store import open_store

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "soak.jsonl"
REPLICAS = 3
EVERY_S = 30.0
SETTINGS: dict[str, Any] = {
    "replicas": REPLICAS,
    "rounds": 1_000_000,
    "sync_every": 8,
    "snapshot_every": 20,
    "args": {"step_s": 0.25},
    "guard": {"rule": "heldout", "min_steps": 1_000_000},
    "timing": {"poll_s": 0.5, "heartbeat_s": 5.0},
    "retention": {"payloads": "needed", "snapshots": 3},
}
_LAUNCHER = """
import json, sys
from diloco_orchestrator import LocalProcessExecutor, launch
given = json.loads(sys.argv[1])
executor = LocalProcessExecutor(given["folder"])
launch("paced:train", store=given["store"], executor=executor, **given["settings"]).wait()
"""


def piece(minutes: float) -> None:
    """Run for so long; every sample is a line of the results."""
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="diloco-soak-") as folder, running_server() as server:
        bucket = server.make_bucket("soak")
        with proxy_before(server.url, Faults()) as (proxy, url):
            os.environ.update({**server.environ(), "AWS_ENDPOINT_URL": url})
            os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), *sys.path])
            store = f"s3://{bucket}/run"
            given = {"folder": f"{folder}/executor", "store": store, "settings": SETTINGS}
            launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER, json.dumps(given)])
            direct = {**server.options(), "endpoint_url": server.url}  # our own looks are not counted
            try:
                _sample_until(time.time() + 60 * minutes, store, direct, launcher, proxy)
            finally:
                subprocess.run([sys.executable, "-m", "diloco_orchestrator.cli.main", "halt", store], check=False)
                launcher.wait(timeout=300)


def _sample_until(
    end: float, url: str, options: dict[str, Any], launcher: "subprocess.Popen[bytes]", proxy: FaultyProxy
) -> None:
    reader = _reader(url, options, launcher)
    pids: dict[str, int] = {}
    while len(pids) < REPLICAS or not reader.commits():
        assert launcher.poll() is None, "the run ended before it began"
        claims = {i: reader.attempts.claim(i, 1) for i in range(REPLICAS)}
        pids = {f"replica {i}": claim.pid for i, claim in claims.items() if claim is not None}
        time.sleep(0.5)
    pids["coordinator"] = launcher.pid
    piece_id, began = f"{time.time():.0f}", time.time()
    requests, commits = Counter(proxy.requests), list(reader.commits())
    while time.time() < end:
        assert launcher.poll() is None, "the run ended"
        time.sleep(EVERY_S)
        before, rounds_before = requests, commits
        requests, commits = Counter(proxy.requests), list(reader.commits())
        done = len(commits) - len(rounds_before)
        sample = {
            "piece": piece_id,
            "seconds": time.time() - began,
            "rounds": commits[-1].round,
            "memory_mib": {who: _memory_mib(pid) for who, pid in pids.items()},
            "handles": {who: len(list(Path(f"/proc/{pid}/fd").iterdir())) for who, pid in pids.items()},
            "objects": _objects(reader),
            "requests_per_round": {
                kind: count / max(1, done) for kind, count in sorted((requests - before).items())
            },
            "round_s": (time.time() - began) / max(1, len(commits)),
        }  # fmt: skip
        with RESULTS.open("a") as results:
            results.write(json.dumps(sample) + "\n")


def _reader(url: str, options: dict[str, Any], launcher: "subprocess.Popen[bytes]") -> RunReader:
    while True:
        try:
            return RunReader(open_store(url, options))
        except Exception:
            assert launcher.poll() is None, "the run did not begin"
            time.sleep(0.2)


def _memory_mib(pid: int) -> float:
    """Resident, without what it maps from files: those pages come and go with the system's mood."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no RssAnon")


def _objects(reader: RunReader) -> dict[str, int]:
    """The log, which stays, apart from what retention bounds."""
    found: Counter[str] = Counter()
    for info in reader.store.list(""):
        parts = info.key.split("/")
        if parts[0] == "rounds":
            found["payloads" if parts[2] == "payload" else "commits and manifests"] += 1
        elif parts[0] == "replicas":
            found["states" if "state" in parts else "attempts"] += 1
        else:
            found[parts[0]] += 1
    return dict(found)


def table() -> None:
    """First and last tenth of each piece, side by side."""
    samples = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for piece_id in sorted({each["piece"] for each in samples}):
        _print_piece([each for each in samples if each["piece"] == piece_id])


def _print_piece(samples: Sequence[dict[str, Any]]) -> None:
    tenth = max(1, len(samples) // 10)
    first, last = samples[:tenth], samples[-tenth:]
    minutes, rounds = samples[-1]["seconds"] / 60, samples[-1]["rounds"]
    print(f"{minutes:.0f} minutes, {rounds} rounds of {samples[-1]['round_s']:.2f} s, {len(samples)} samples\n")
    print("| | first tenth | last tenth |\n|---|---|---|")
    for group, unit in (("memory_mib", " MiB"), ("handles", " file handles"), ("objects", " objects")):
        for name in sorted({name for each in samples for name in each[group]}):
            print(f"| {name}{unit} | {_mean(first, group, name):.1f} | {_mean(last, group, name):.1f} |")
    for name in sorted({name for each in samples for name in each["requests_per_round"]}):
        early, late = (_mean(part, "requests_per_round", name) for part in (first, last))
        if max(early, late) >= 0.05:
            print(f"| {name}, a round | {early:.2f} | {late:.2f} |")


def _mean(samples: Sequence[dict[str, Any]], group: str, name: str) -> float:
    return sum(each[group].get(name, 0) for each in samples) / len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["piece", "table"])
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    if given.command == "piece":
        piece(given.minutes)
    else:
        table()


if __name__ == "__main__":
    main()
