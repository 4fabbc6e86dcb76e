"""Chaos with real processes: what faults cost a run of four replicas. Made in pieces; every piece adds to the table.

    make chaos MINUTES=10 RATE=15      # faults an hour; 0 is the undisturbed twin that throughput is compared with
    make chaos-table

The store is a signed S3 server on loopback behind a proxy; one of the faults is that the proxy breaks three requests in
ten for 20 s. Inner steps are paced, so that about half of the cores stay idle.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos_run import Chaos, median
from faulty_proxy import Faults, proxy_before
from s3_server import running_server

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "chaos.jsonl"
REPLICAS, SYNC_EVERY, STEP_S = 4, 12, 0.25  # a round of 3 s
SETTINGS = {
    "replicas": REPLICAS,
    "rounds": 1_000_000,
    "sync_every": SYNC_EVERY,
    "snapshot_every": 10,
    "args": {"step_s": STEP_S},
    "guard": {"rule": "heldout", "min_steps": 1_000_000},
    "timing": {"poll_s": 0.5, "heartbeat_s": 2.0},
    "retry": {"max_errors": 1_000_000, "hung_after_s": 60.0},
    "retention": {"payloads": "needed", "snapshots": 3},
}


def piece(minutes: float, per_hour: float, seed: int) -> None:
    """Run once and add the report to the results."""
    with tempfile.TemporaryDirectory(prefix="diloco-chaos-") as folder, running_server() as server:
        bucket = server.make_bucket("chaos")
        with proxy_before(server.url, Faults(), seed) as (proxy, url):
            environ = {**server.environ(), "AWS_ENDPOINT_URL": url}
            os.environ.update(environ)
            store, path = f"s3://{bucket}/run", [str(ROOT / "benchmarks")]
            chaos = Chaos(Path(folder), store, "paced:train", SETTINGS, environ, path, proxy)
            report = chaos.run(60 * minutes, per_hour, seed)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as results:
        results.write(json.dumps({"per_hour": per_hour, "seed": seed, **report.to_json()}) + "\n")
    words = report.disagreement or "everything agrees"
    print(f"{report.applied} rounds, {len(report.faults)} faults, participation {report.participation:.1%}; {words}")


def table() -> None:
    """All pieces so far, by faults an hour."""
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rates = sorted({each["per_hour"] for each in found})
    calm = _mean([each for each in found if not each["per_hour"]], "steps_per_s")
    print("| faults an hour | minutes | faults | kills | rounds committed | participation | throughput | "
          "kill to the survivors' next commit, median and worst | kill to its next contribution, median | "
          "inner steps redone a kill | verify |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for rate in rates:
        print(_row(rate, [each for each in found if each["per_hour"] == rate], calm))


def _row(rate: float, pieces: list[dict[str, Any]], calm: float) -> str:
    faults = [fault for each in pieces for fault in each["faults"]]
    kills = [fault for fault in faults if fault["what"] == "kill -9" and fault["whom"] >= 0]
    survivors = [s for each in pieces for s in each["survivors_s"]]
    back = [s for each in pieces for s in each["back_s"]]
    commits, applied = sum(each["commits"] for each in pieces), sum(each["applied"] for each in pieces)
    throughput = _mean(pieces, "steps_per_s") / calm if calm else float("nan")
    broken = [each["disagreement"] for each in pieces if each["disagreement"]]
    cells = [
        f"{rate:g}",
        f"{sum(each['seconds'] for each in pieces) / 60:.0f}",
        len(faults),
        len(kills),
        f"{applied} of {commits} ({applied / max(1, commits):.1%})",
        f"{sum(each['participation'] * each['applied'] for each in pieces) / max(1, applied):.1%}",
        f"{throughput:.1%}",
        f"{median(survivors):.1f} s, {max(survivors):.1f} s" if survivors else "-",
        f"{median(back):.1f} s" if back else "-",
        f"{sum(fault['lost_steps'] for fault in kills) / len(kills):.1f}" if kills else "-",
        broken[0] if broken else "agrees",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _mean(pieces: list[dict[str, Any]], name: str) -> float:
    """Weighted by time."""
    seconds = sum(each["seconds"] for each in pieces)
    return sum(each[name] * each["seconds"] for each in pieces) / seconds if seconds else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["piece", "table"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults-per-hour", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    if given.command == "piece":
        piece(given.minutes, given.faults_per_hour, given.seed)
    else:
        table()


if __name__ == "__main__":
    main()
