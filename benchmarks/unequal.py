"""What one slower machine among three costs the other two, with `steps="equal"` and with `steps="equal_time"`.

    make bench-unequal

Runs of three replicas in a folder, real processes, whose inner steps are paced (`paced`), so that other work on the
machine matters little; the last replica's steps are `slow` times as long. A round's time is the median of the time
between commits, without the first two. The first run has three equal machines.
"""

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from measuring import Results, Sample, heading, markdown, publish, sources_of

from diloco_orchestrator import LocalProcessExecutor, launch
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.store.open_store import open_store

# The last is a T4 among H100s, by the figures of their data sheets.
SLOW = (1.4, 4.0, 15.0)


def play(steps: str, slow: float, given: argparse.Namespace) -> Sample:
    """One run: its median time of a round, and tokens of a round, in all and of the slow replica."""
    with tempfile.TemporaryDirectory() as folder:
        bucket = f"{folder}/bucket"
        launch(
            "paced:train",
            store=bucket,
            executor=LocalProcessExecutor(f"{folder}/executor"),
            replicas=3,
            quorum=3,  # a round waits for every replica, up to its straggler deadline
            rounds=given.rounds,
            sync_every=given.sync_every,
            steps=steps,
            guard="off",
            timing={"poll_s": 0.05},
            args={"step_s": given.step_s, "slow": slow},
        ).wait()
        commits = [each for each in RunReader(open_store(bucket)).commits() if each.applied]
    lasted = [after.at - before.at for before, after in pairwise(commits)][1:]
    tokens = [{a.replica_id: a.tokens for a in commit.answers if a.averaged} for commit in commits[2:]]
    of_slow = mean(each.get(2, 0) for each in tokens)
    return {"round_s": median(lasted), "tokens": mean(sum(each.values()) for each in tokens), "of_slow": of_slow}


def table(samples: list[Sample]) -> str:
    first = samples[0]
    rows = [
        [
            f"{s['slow']:g} times slower" if s["slow"] > 1 else "as fast as the others",
            s["steps"],
            f"{s['round_s']:.2f} s",
            f"{s['round_s'] / first['round_s']:.2f}",
            f"{s['of_slow'] / (first['tokens'] / 3):.0%}",
            f"{s['tokens'] / s['round_s'] / (first['tokens'] / first['round_s']):.0%}",
        ]
        for s in samples
    ]
    columns = ["third machine", "steps", "a round", "of three equal ones", "its tokens a round", "tokens a second"]
    return markdown(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--slow", type=float, nargs="+", default=SLOW, help="times, of the third machine's steps")
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-unequal.jsonl")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/inside/performance.md")
    given = parser.parse_args()
    results = Results("unequal", given.results)
    results.begin(sources_of(None), vars(given))
    for steps, slow in (("equal", 1.0), *((steps, slow) for slow in given.slow for steps in ("equal", "equal_time"))):
        began = time.monotonic()
        results.add(steps=steps, slow=slow, **play(steps, slow, given))
        print(results.samples[-1], f"{time.monotonic() - began:.0f} s", flush=True)
    session, samples = results.newest()
    text = f"{heading(session)}\n\n{table(samples)}"
    print(text)
    if given.docs:
        publish("unequal", text, None)


if __name__ == "__main__":
    main()
