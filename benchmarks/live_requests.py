"""Counts the store requests of a run while it goes on: by whom, of which kind, a round and an hour, beside the plan.

    make requests-live                                   # rounds of 25 s, some five minutes
    make requests-live OPTIONS="--round-s 1800 --rounds 3"

`diloco run` launches replicas on this machine, over a signed S3 server on loopback, and shows the run, as a user has
it. Requests are counted as HTTP in front of that server, those of the launcher at one port and those of the replicas at
another. Each round counts from the commit before it to its own. The first, which starts the replicas, has a row of its
own; the final evaluation round is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence

from count_requests import BUCKET, ROOT, URL, Request, counting
from s3_server import running_server

KINDS = ("PUT", "GET", "LIST")  # as they are paid: a CREATE is a PUT
_PAYLOAD = ("/payload/", "/state/", "snapshots/")  # in keys of what grows with the model; all else is control


def arguments(given: argparse.Namespace) -> list[str]:
    """Arguments of `diloco run` and `diloco plan`."""
    args = {"step_s": given.round_s / given.steps, "spread": given.spread}
    return [
        *(f"{ROOT}/benchmarks/paced.py:train", "--store", URL, "--sync-every", str(given.steps)),
        *("--replicas", str(given.replicas), "--rounds", str(given.rounds)),
        *(each for name, value in args.items() for each in ("--arg", f"{name}={value}")),
    ]


def play(given: argparse.Namespace) -> dict[str, list[Request]]:
    """The requests of a run, by who sent them, in the order of their replies."""
    with tempfile.TemporaryDirectory() as folder, running_server() as server:
        server.make_bucket(BUCKET)
        with counting(server) as launcher, counting(server) as replicas:
            environ = {**os.environ, **server.environ(), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": folder}
            environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{launcher.server_port}"
            theirs = ["--env", f"AWS_ENDPOINT_URL=http://127.0.0.1:{replicas.server_port}"]
            command = [sys.executable, "-m", "diloco_orchestrator.cli.main", "run", *arguments(given), *theirs]
            subprocess.run(command, cwd=folder, env=environ, stdout=sys.stderr, check=True)
            return {"launcher and screen": launcher.seen, "replicas": replicas.seen}


def planned(given: argparse.Namespace, round_s: float) -> dict[str, float]:
    """The requests of a round that `diloco plan` foretells, by kind."""
    command = [sys.executable, "-m", "diloco_orchestrator.cli.main", "plan", *arguments(given), "--json"]
    command += ["--round-s", str(round_s)]
    made = subprocess.run(command, cwd=tempfile.gettempdir(), stdout=subprocess.PIPE, check=True)
    return dict(json.loads(made.stdout)["round"]["requests"])


def kind_of(request: Request) -> str:
    return "PUT" if request.kind == "CREATE" else request.kind


def is_payload(request: Request) -> bool:
    return any(part in f"/{request.key}" or request.key.startswith(part) for part in _PAYLOAD)


def of_key(request: Request) -> str:
    """The request with numbers and tokens left out of its key."""
    parts = ["#" if any(c.isdigit() for c in part) and "." not in part else part for part in request.key.split("/")]
    parts = [f"#.{part.rpartition('.')[2]}" if part[:1].isdigit() else part for part in parts]
    found = {404: ", absent", 412: ", exists"}.get(request.status, "")
    return f"{request.kind} {'/'.join(parts)}{found}"


def table(seen: dict[str, list[Request]], given: argparse.Namespace, details: bool) -> str:
    """In Markdown: requests a round by who, what and kind, then an hour, then those of the plan."""
    made = (r for r in seen["replicas"] if (r.kind, r.status) == ("CREATE", 200))
    ends = {r.key: r.at for r in made if r.key.endswith("/commit.json")}
    first, last = sorted(ends)[0], f"rounds/{given.rounds:08}/commit.json"
    rounds, seconds = given.rounds - 1, ends[last] - ends[first]
    counted = {
        who: [each for each in requests if ends[first] < each.at <= ends[last]] for who, requests in seen.items()
    }
    rows: list[tuple[str, Sequence[Request]]] = []
    for who, requests in counted.items():
        for what, payload in (("control", False), ("payload", True)):
            rows.append((f"{who}, {what}", [each for each in requests if is_payload(each) is payload]))
    everything = [each for requests in counted.values() for each in requests]
    rows.append(("**all, a round**", everything))
    lines = [f"| {rounds} rounds of {seconds / rounds:.1f} s | all | {' | '.join(KINDS)} |", "|---" * 5 + "|"]
    for name, requests in rows:
        kinds = Counter(map(kind_of, requests))
        lines.append(_row(name, [len(requests) / rounds, *(kinds[kind] / rounds for kind in KINDS)]))
    told = planned(given, seconds / rounds)
    lines.append(_row("`diloco plan`", [sum(told.values()), *(told[kind] for kind in KINDS)]))
    kinds = Counter(map(kind_of, everything))
    hour = 3600 / seconds
    lines.append(_row("all, an hour", [len(everything) * hour, *(kinds[kind] * hour for kind in KINDS)]))
    begun = {who: [each for each in requests if each.at <= ends[first]] for who, requests in seen.items()}
    starting = [each for requests in begun.values() for each in requests]
    kinds = Counter(map(kind_of, starting))
    lines.append(_row("launch and first round", [len(starting), *(kinds[kind] for kind in KINDS)]))
    if details:
        for who, requests in counted.items():
            lines += [f"\n{who}, a round:\n"]
            lines += [f"- {n / rounds:.1f} {what}" for what, n in Counter(map(of_key, requests)).most_common()]
        for who, requests in begun.items():
            lines += [f"\n{who}, launch and first round:\n"]
            lines += [f"- {n} {what}" for what, n in Counter(map(of_key, requests)).most_common()]
    return "\n".join(lines)


def _row(name: str, counts: Sequence[float]) -> str:
    return f"| {name} | {' | '.join(f'{count:.1f}' for count in counts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--round-s", type=float, default=25.0)
    parser.add_argument("--steps", type=int, default=25, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=11, help="a multiple of ten, and one: snapshots count evenly")
    parser.add_argument("--spread", type=float, default=0.2, help="share by which the time of an inner step varies")
    parser.add_argument("--details", action="store_true", help="also by key")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: at least 2, because counting begins with the first commit.")
    print(table(play(given), given, given.details))


if __name__ == "__main__":
    main()
