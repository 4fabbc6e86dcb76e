"""From `launch` to the first inner step and the first manifest, on one core: where the seconds go.

    make bench-startup

A run of two replicas in a folder is launched by a process of its own; both replicas and the launcher share the cores in
`--cores`. The replica's process began at the time in /proc; its workload writes down the clock and its CPU seconds when
it is called, before and after `attach`, and after the first inner step. The phases of a replica follow one another; the
slowest replica counts. Bare processes, as many at once, are measured beside them: a replica cannot start faster than
torch is imported and an optimizer is made, which imports more of torch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import Results, Sample, Source, markdown, middle, parser_of, pick, run, scratch_folder
from svg_chart import Bar, Group, bars

_LAUNCHER = """
import json, sys, time
began = time.time()
from diloco_orchestrator import LocalProcessExecutor, launch
given = json.loads(sys.argv[1])
run = launch("first_step:train", store=given["store"], executor=LocalProcessExecutor(given["executor"]),
             replicas=given["replicas"], rounds=1, sync_every=1, args={"folder": given["marks"]},
             timing={"poll_s": 0.05, "heartbeat_s": 5.0})
cpu_s = time.process_time()
run.wait()
print(json.dumps({"began": began, "cpu_s": cpu_s}))
"""
_BARE = {
    "python": "pass",
    "import torch": "import torch",
    "torch and AdamW": "import torch; torch.optim.AdamW([torch.zeros(1, requires_grad=True)])",
}
_LIMIT = "torch and AdamW"
# Phase: the marks between which it lies.
PHASES = {
    "launch, until the process": ("launch", "process"),
    "interpreter, imports, claim": ("process", "claimed"),
    "load the workload": ("claimed", "called"),
    "model, optimizer": ("called", "model"),
    "attach: first base": ("model", "attached"),
    "first inner step": ("attached", "stepped"),
    "first manifest": ("stepped", "manifest"),
}


def measure(given: argparse.Namespace, sources: Sequence[Source], results: Results) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])  # children inherit it
    for repetition in range(given.repetitions):
        for source in sources:
            with scratch_folder(given.folder) as folder:
                marks = start_once(source, Path(folder), given.replicas)
            slowest = max(marks, key=lambda each: float(each["manifest"]))
            phases = {name: slowest[end] - slowest[begin] for name, (begin, end) in PHASES.items()}
            results.add(
                arm=source.name,
                repetition=repetition,
                replicas=given.replicas,
                cores=given.cores,
                wall_s=slowest["manifest"] - slowest["launch"],
                cpu_s=slowest["cpu_stepped"],
                cpu_launcher_s=slowest["cpu_launcher"],
                **phases,
            )
        for name, program in _BARE.items():
            wall_s, cpu_s = bare(sources[0], program, given.replicas)
            results.add(
                arm=name,
                repetition=repetition,
                replicas=given.replicas,
                cores=given.cores,
                wall_s=wall_s,
                cpu_s=cpu_s,
            )


def start_once(source: Source, folder: Path, replicas: int) -> list[dict[str, float]]:
    """Launch a run of one round. Returns for each replica the times of its marks, in seconds since 1970."""
    marks = folder / "marks"
    marks.mkdir()
    given = {"store": f"{folder}/run", "executor": f"{folder}/executor", "marks": str(marks), "replicas": replicas}
    paths = [str(source.path), str(Path(__file__).parent / "workloads")]
    environ = source.environ(PYTHONPATH=os.pathsep.join(paths))
    command = [sys.executable, "-P", "-c", _LAUNCHER, json.dumps(given)]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the run failed:\n{done.stderr[-3000:]}")
    launcher = json.loads(done.stdout)
    found = []
    for replica_id in range(replicas):
        mark = json.loads((marks / f"{replica_id}.json").read_text())
        run = folder / "run"
        (claimed,) = (run / "replicas" / f"{replica_id}" / "attempts" / "1").glob("claim.*")
        claim = json.loads(claimed.read_text())
        manifest = run / "rounds" / "00000001" / "contributions" / f"{replica_id}.json"
        ends = {"claimed": claim["at"], "manifest": manifest.stat().st_mtime}
        found.append({**mark, **ends, "launch": launcher["began"], "cpu_launcher": launcher["cpu_s"]})
    return found


def bare(source: Source, program: str, count: int) -> tuple[float, float]:
    """Seconds until as many processes at once have run a program, and CPU seconds of each."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # Without torch's teardown, which a replica does not wait for either.
        command = [sys.executable, "-P", "-c", f"import os; {program}; os._exit(0)"]
        # Sessions of their own, as replicas have: the kernel shares the cores out among sessions.
        processes = [
            subprocess.Popen(command, cwd=folder, env=source.environ(), start_new_session=True) for _ in range(count)
        ]
        used = [os.wait4(process.pid, 0)[2] for process in processes]
        for process in processes:
            process.returncode = 0
    return time.perf_counter() - began, sum(each.ru_utime + each.ru_stime for each in used) / count


def _arms(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(sample["arm"] for sample in samples))


def table(samples: Sequence[Sample]) -> str:
    arms = _arms(samples)
    rows = []
    for name in PHASES:
        cells = [f"{middle(own, name):.2f}" if name in own[0] else "" for own in (pick(samples, arm=a) for a in arms)]
        rows.append([name, *cells])
    whole = []
    for arm in arms:
        walls = [sample["wall_s"] for sample in pick(samples, arm=arm)]
        whole.append(f"{middle(pick(samples, arm=arm), 'wall_s'):.2f} ({min(walls):.2f} to {max(walls):.2f})")
    rows.append(["all, to the first manifest", *whole])
    rows.append(["CPU s of a process", *(f"{middle(pick(samples, arm=arm), 'cpu_s'):.2f}" for arm in arms)])
    launchers = [pick(samples, arm=arm) for arm in arms]
    cells = [f"{middle(own, 'cpu_launcher_s'):.2f}" if "cpu_launcher_s" in own[0] else "" for own in launchers]
    rows.append(["CPU s of the launcher, until `launch` returns", *cells])
    limit = pick(samples, arm=_LIMIT)
    ratios = [f"{middle(pick(samples, arm=arm), 'wall_s') / middle(limit, 'wall_s'):.2f}" for arm in arms]
    rows.append([f"x {_LIMIT}", *ratios])
    first = samples[0]
    words = f"{first['replicas']} replicas and their launcher on {first['cores']} core(s); seconds, medians."
    return f"{words}\n\n{markdown(['phase', *arms], rows)}"


def picture(samples: Sequence[Sample]) -> str:
    drawn = []
    limit = middle(pick(samples, arm=_LIMIT), "wall_s")
    for arm in _arms(samples):
        own = pick(samples, arm=arm)
        if "first manifest" in own[0]:
            whole = f"{middle(own, 'wall_s'):.1f} s"
            drawn.append(Bar(arm, [middle(own, name) for name in PHASES], limit=limit, text=whole))
    group = Group(f"{samples[0]['replicas']} replicas on {samples[0]['cores']} core(s)", drawn)
    title = "From launch to the first manifest, seconds"
    return bars(title, [group], "s", legend=list(PHASES), limit=_LIMIT)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1, help="for the launcher and all replicas; default 1")
    parser.add_argument("--folder", type=Path, help="where runs are written; default /dev/shm")
    run("startup", parser, measure, table, picture)


if __name__ == "__main__":
    main()
