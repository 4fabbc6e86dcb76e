"""Counts the store requests of runs while they go on: by whom, of which kind, a round and an hour, beside the plan.

    make requests-live                                          # fleets and rounds of several sizes, on virtual time
    make requests-live OPTIONS="--replicas 4 --round-s 25"      # one of them, in detail
    make requests-live OPTIONS="--replicas 4 --round-s 25 --real"       # the same with processes: some five minutes

With `--real` `diloco run` launches replicas on this machine and shows the run, as a user has it; without, the same code
runs on a clock that jumps (`virtual_requests.py`). Requests are counted as HTTP in front of a signed S3 server on
loopback, those of the launcher at one port and those of the replicas at another. Each round counts from the commit
before it to its own. The first, which starts the replicas, is counted apart, and the final evaluation round left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import virtual_requests
from count_requests import BUCKET, ROOT, URL, Request, counting
from s3_server import running_server

from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store

REPLICAS = (2, 4, 7)
ROUNDS = ((25.0, 11), (300.0, 11), (1800.0, 11))  # seconds of one, and how many
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


@dataclass(frozen=True)
class Counted:
    """The requests of a run by who sent them, in the order of their replies, and when its rounds ended."""

    seen: Mapping[str, Sequence[Request]]
    committed_at: Sequence[float]  # of round 1 and so on, in seconds

    def until(self, round_: int) -> dict[str, list[Request]]:
        """The requests until a round's commit, that one included."""
        key = f"rounds/{round_:08}/commit.json"
        made = (r.at for r in self.seen["replicas"] if (r.kind, r.status, r.key) == ("CREATE", 200, key))
        at = next(made)
        return {who: [each for each in requests if each.at <= at] for who, requests in self.seen.items()}

    def between(self, first: int, last: int) -> dict[str, list[Request]]:
        """The requests after the commit of round `first`, until that of round `last`."""
        before, until = self.until(first), self.until(last)
        return {who: requests[len(before[who]) :] for who, requests in until.items()}


def play_real(given: argparse.Namespace) -> Counted:
    """A run of processes on this machine."""
    with tempfile.TemporaryDirectory() as folder, running_server() as server:
        server.make_bucket(BUCKET)
        with counting(server) as launcher, counting(server) as replicas:
            environ = {**os.environ, **server.environ(), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": folder}
            environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{launcher.server_port}"
            theirs = ["--env", f"AWS_ENDPOINT_URL=http://127.0.0.1:{replicas.server_port}"]
            command = [sys.executable, "-m", "diloco_orchestrator.cli.main", "run", *arguments(given), *theirs]
            subprocess.run(command, cwd=folder, env=environ, stdout=sys.stderr, check=True)
            seen = {"launcher and screen": list(launcher.seen), "replicas": list(replicas.seen)}
            commits = RunLog(open_store(URL, server.options())).commits()
            return Counted(seen, [commit.at for commit in commits])


def play_virtual(given: argparse.Namespace) -> Counted:
    """The same on virtual time."""
    step_s = given.round_s / given.steps
    return Counted(*virtual_requests.play(given.replicas, given.rounds, given.steps, step_s, given.spread))


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


def table(run: Counted, given: argparse.Namespace, details: bool) -> str:
    """In Markdown: requests a round by who, what and kind, then an hour, then those of the plan."""
    rounds, seconds = given.rounds - 1, run.committed_at[given.rounds - 1] - run.committed_at[0]
    counted = run.between(1, given.rounds)
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
    begun = run.until(1)
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


def fleets(given: argparse.Namespace) -> str:
    """In Markdown: requests of fleets of several sizes in rounds of several lengths, counted and as planned."""
    names = ("replicas", "a round takes", *KINDS, "all, a round", "`diloco plan`", "plan / counted", "all, an hour")
    lines = [f"| {' | '.join(names)} | launch and first round |", "|---" * (len(names) + 1) + "|"]
    for replicas in REPLICAS:
        for round_s, rounds in ROUNDS:
            each = argparse.Namespace(**{**vars(given), "replicas": replicas, "round_s": round_s, "rounds": rounds})
            run = play_virtual(each)
            seconds = (run.committed_at[rounds - 1] - run.committed_at[0]) / (rounds - 1)
            requests = [each for found in run.between(1, rounds).values() for each in found]
            kinds, told = Counter(map(kind_of, requests)), planned(each, seconds)
            all_, plan = len(requests) / (rounds - 1), sum(told.values())
            cells = [*(f"{kinds[kind] / (rounds - 1):.1f}" for kind in KINDS), f"**{all_:.1f}**", f"{plan:.1f}"]
            ends = [f"{plan / all_:.2f}", f"{all_ * 3600 / seconds:.0f}", str(sum(map(len, run.until(1).values())))]
            lines.append(f"| {' | '.join([str(replicas), f'{seconds:.1f} s', *cells, *ends])} |")
    return "\n".join(lines)


def _row(name: str, counts: Sequence[float]) -> str:
    return f"| {name} | {' | '.join(f'{count:.1f}' for count in counts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="one fleet in detail; by default several, in short")
    parser.add_argument("--round-s", type=float, default=25.0)
    parser.add_argument("--steps", type=int, default=25, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=11, help="a multiple of ten, and one: snapshots count evenly")
    parser.add_argument("--spread", type=float, default=0.2, help="share by which the time of an inner step varies")
    parser.add_argument("--details", action="store_true", help="also by key")
    parser.add_argument("--real", action="store_true", help="processes, and a clock that nobody moves")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: at least 2, because counting begins with the first commit.")
    if given.real and given.replicas is None:
        parser.error("--real needs --replicas.")
    if given.replicas is None:
        print(fleets(given))
    else:
        print(table((play_real if given.real else play_virtual)(given), given, given.details))


if __name__ == "__main__":
    main()
