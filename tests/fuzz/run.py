"""Looks for mutated records and buckets that make a reader fail: `make fuzz RECORDS=1000000 BUCKETS=10000`.

Prints every kind of failure with a seed, and how much memory was gained. `--seed 7` reads one bucket again. A bucket
over which nothing ends for `--limit-s` is a failure, and its process is killed.
"""

import argparse
import collections
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from mutated_buckets import build_bucket, parse_mutated, read, read_mutated

_CHUNK = 1000  # records a task
_LONG = 5  # one bucket of so many is of a long run, whose log has segments
_MOST_MIB = 200  # that one bucket may take, or that all of them may leave behind
_WARM = 20  # buckets of a process, after which what it holds is compared


@dataclass(frozen=True)
class Task:
    """One bucket, or the records of some seeds from `seed` on."""

    kind: str
    seed: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.seed}" + (f" to {self.seed + self.count - 1}" if self.count > 1 else "")


@dataclass(frozen=True)
class Done:
    """What one task showed, and the memory of its process in MiB."""

    task: Task
    failed: list[str]
    peak_growth: float
    held: float


# -- in the process that reads ----------------------------------------------------------------------------------------


def records(folder: Path, task: Task) -> list[str]:
    """What failed among the records of the task's seeds."""
    failed = []
    for seed in range(task.seed, task.seed + task.count):
        try:
            parse_mutated(folder, seed)
        except Exception:
            failed.append(f"record {seed}\n{traceback.format_exc()}")
    return failed


def folder_of(work: Path, seed: int) -> Path:
    return work / ("long" if seed % _LONG == _LONG - 1 else "short")


def bucket(work: Path, seed: int) -> list[str]:
    """What failed in one bucket."""
    with tempfile.TemporaryDirectory() as own:
        os.environ["XDG_STATE_HOME"] = f"{own}/state"  # where commands note the heads that they have seen
        try:
            read_mutated(folder_of(work, seed), Path(own), seed)
        except BaseException as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            return [f"bucket {seed}\n{notes}\n{traceback.format_exc()}"]
    return []


def memory_mib(name: str) -> float:
    """`VmRSS`, what this process holds, or `VmHWM`, the most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def serve(work: Path, connection: Connection, stack: Path, limit_s: float) -> None:
    """Carry out tasks until the other end closes. The first answer, None, says that everything is loaded.

    `stack`: a file for what this process does shortly before the limit.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as own:
        for folder in ("short", "long"):
            out = Path(own) / folder
            out.mkdir()
            read(work / folder, out)
    connection.send(None)
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.9 * limit_s, file=stack.open("w"))
        reset_peak()
        before = memory_mib("VmRSS")
        failed = bucket(work, task.seed) if task.kind == "bucket" else records(work / "short", task)
        grown = memory_mib("VmHWM") - before
        faulthandler.cancel_dump_traceback_later()
        if grown > _MOST_MIB:
            failed = [*failed, f"{task}\ntook {grown:.0f} MiB"]
        connection.send(Done(task, failed, grown, memory_mib("VmRSS")))


# -- in the process that counts ---------------------------------------------------------------------------------------


class Reader:
    """A process that reads, and the task it has had since `since`."""

    _count = 0

    def __init__(self, work: Path, limit_s: float) -> None:
        Reader._count += 1
        self.stack = work / f"stack-{Reader._count}"
        self.connection, other = multiprocessing.Pipe()
        given = work, other, self.stack, limit_s
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=given, daemon=True)
        self.process.start()
        other.close()
        self.task: Task | None = None
        self.since = time.monotonic()
        self.tasks = 0
        self.held_first = self.held = 0.0

    def give(self, task: Task | None) -> None:
        self.task, self.since = task, time.monotonic()
        if task is not None:
            self.connection.send(task)

    def note(self, done: Done) -> None:
        self.tasks += 1
        self.held = done.held
        if self.tasks <= _WARM:
            self.held_first = done.held

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


@dataclass
class Findings:
    """What all tasks showed, failures by the last lines of what was raised."""

    failed: "collections.Counter[str]" = field(default_factory=collections.Counter)
    example: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    peak_growth: float = 0.0
    left_behind: float = 0.0
    hung: int = 0
    done: "collections.Counter[str]" = field(default_factory=collections.Counter)  # records and buckets

    def add(self, task: Task, text: str) -> None:
        lines = text.strip().splitlines()
        site = "\n".join(lines[2:8] if "no end after" in lines[0] else lines[-4:])[-400:]
        self.failed[site] += 1
        if site not in self.example:
            self.example[site] = text
            print(f"--- new: {text}\n", flush=True)
        self.seeds.setdefault(site, []).append(task.seed)

    def add_held(self, reader: Reader) -> None:
        left = reader.held - reader.held_first
        self.left_behind = max(self.left_behind, left)
        if left > _MOST_MIB:
            self.add(Task("process", reader.tasks), f"{reader.tasks} tasks left {left:.0f} MiB behind")


def run(work: Path, tasks: Iterator[Task], processes: int, limit_s: float) -> Findings:
    """Give tasks to processes until there are none. One that does not answer for `limit_s` is killed and replaced."""
    found = Findings()
    readers = [Reader(work, limit_s) for _ in range(processes)]
    try:
        _serve_all(readers, work, tasks, limit_s, found)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    for reader in readers:
        found.add_held(reader)
        reader.end()
    return found


def _serve_all(readers: list[Reader], work: Path, tasks: Iterator[Task], limit_s: float, found: Findings) -> None:
    tasks_done, began = 0, time.monotonic()
    while readers:
        ready = wait([reader.connection for reader in readers], timeout=1.0)
        for reader in list(readers):
            if reader.connection in ready:
                try:
                    answer: Done | None = reader.connection.recv()
                except EOFError:
                    found.add(reader.task or Task("start", 0), f"{reader.task}\nended its process")
                    reader.end()
                    readers[readers.index(reader)] = Reader(work, limit_s)
                    continue
                if answer is not None:
                    reader.note(answer)
                    found.peak_growth = max(found.peak_growth, answer.peak_growth)
                    for text in answer.failed:
                        found.add(answer.task, text)
                    found.done[answer.task.kind] += answer.task.count
                    tasks_done += 1
                    if tasks_done % 500 == 0:
                        print(f"{tasks_done} tasks, {time.monotonic() - began:.0f} s: {answer.task}", flush=True)
                reader.give(next(tasks, None))
                if reader.task is None:
                    found.add_held(reader)
                    reader.end()
                    readers.remove(reader)
            elif time.monotonic() - reader.since > limit_s:
                found.hung += 1
                stack = reader.stack.read_text() if reader.stack.exists() else ""
                found.add(reader.task or Task("start", 0), f"{reader.task}: no end after {limit_s:.0f} s\n{stack}")
                found.add_held(reader)
                reader.end()
                readers[readers.index(reader)] = Reader(work, limit_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--buckets", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--limit-s", type=float, default=60.0, help="s without an end, after which it counts as a hang")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build_bucket(work / "short")
        build_bucket(work / "long", rounds=11)
        if given.seed is not None:
            failed = bucket(work, given.seed)
            print("\n".join(failed or [f"seed {given.seed}: every command ended as it should"]))
            return bool(failed)
        record_seeds = range(given.first, given.first + given.records, _CHUNK)
        bucket_seeds = range(given.first, given.first + given.buckets)
        last = given.first + given.records
        chunks = (Task("record", seed, min(_CHUNK, last - seed)) for seed in record_seeds)
        tasks = (*chunks, *(Task("bucket", seed) for seed in bucket_seeds))
        found = run(work, iter(tasks), given.processes, given.limit_s)
    for site, count in found.failed.most_common():
        seeds = ", ".join(map(str, sorted(found.seeds[site])[:20]))
        print(f"--- {count} times, of seeds {seeds}: {site}\n")
    done = ", ".join(f"{count} {kind}s" for kind, count in found.done.items())
    print(
        f"{done or 'nothing'} in {time.monotonic() - began:.0f} s with {given.processes} processes: "
        f"{sum(found.failed.values())} failures of {len(found.failed)} kinds, {found.hung} hung; one took at most "
        f"{found.peak_growth:.0f} MiB, all of a process left at most {found.left_behind:.0f} MiB behind"
    )
    return bool(found.failed)


if __name__ == "__main__":
    sys.exit(main())
