"""Mutated buckets: every command that reads one ends in an exit code with a message, whatever the bucket holds.

Left out: `doctor`, which reads no object of a run, and `push`, which reads what `pull` does and needs the Hub. `audit`
stops before it starts the training function. `watch` and `logs --follow` are for runs that have stopped.
"""

import contextlib
import io
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutations import mutated
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Exit, Handle, Heartbeat
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Record, Stamp
from diloco_orchestrator.protocol.rounds import Position, result_of
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status", "{url}"),
    ("status", "{url}", "--json"),
    ("verify", "{url}"),
    ("verify", "{url}", "--expect", "2:0123456789abcdef"),
    ("verify", "{url}", "--load", "--build", "protocol_fleet:tiny_model"),
    ("explain", "{url}"),
    ("report", "{url}", "{out}/report.html"),
    ("report", "{url}", "{out}/report.html", "--influence", "--csv", "{out}/influence.csv"),
    ("whatif", "{url}", "--round", "1", "--without", "0"),
    ("whatif", "{url}", "--round", "2", "--outer-lr", "0.4"),
    ("audit", "{url}", "--draw", "1", "--seed", "1", "--trust-bucket"),
    ("logs", "{url}"),
    ("logs", "{url}", "--replica", "1", "--tail", "1", "--json"),
    ("snapshots", "{url}"),
    ("pull", "{url}", "{out}/pulled"),
    ("pull", "{url}", "{out}/rebuilt", "--round", "1", "--json"),
    ("gc", "{url}", "--dry-run"),
    ("gc", "{url}", "--dry-run", "--payloads", "needed"),
    ("halt", "{url}"),
)
# Slow, or like others: for one seed in four. The last three are refused, since they run what the bucket names.
SELDOM: tuple[tuple[str, ...], ...] = (
    ("verify", "{url}", "--json"),
    ("audit", "{url}", "--draw", "1", "--seed", "1"),
    ("attach", "{url}"),
    ("resume", "{url}"),
)
# They wait for the end of a run that goes on, as they should. Also for one seed in four.
OF_STOPPED_RUNS: tuple[tuple[str, ...], ...] = (("watch", "{url}"), ("logs", "{url}", "--follow"))
_STOPPED = ("completed", "halted", "failed")
_ODD_NAMES = ("a b", "..x", "%2e%2e", "007.json", "٣.json", "x\ny", "\udc80", "-", "0.json.bak", "commit.json")


# Keys that a finished run of one leg does not have, and that readers look at.
_FOREIGN = (
    *(keys.halt(leg) for leg in (1, 2, 999)),
    *(keys.begin(leg) for leg in (2, 3, 999)),
    *(keys.result(leg) for leg in (2, 999)),
    *(build(replica_id, 2) for replica_id in (0, 7) for build in (keys.intent, keys.heartbeat, keys.exit_record)),
    keys.cancel(0, 1),
    keys.join_offer("dl-run-1-r0-a1"),
    *(keys.join_record("dl-run-1-r0-a1", "0" * 64, name) for name in (keys.JOIN_TAKEN, keys.JOIN_LEASE, keys.JOIN_END)),
)


def mutate_bucket(folder: Path, rng: random.Random) -> list[str]:
    """Make one to four changes to the files of a run, and put one there that it does not have, for one seed in three.

    Returns what was done, for the one who reads a failure.
    """
    done = []
    for _ in range(rng.randint(1, 4)):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        path = rng.choice(files)
        key, what = str(path.relative_to(folder)), rng.randrange(10)
        if what < 6:
            path.write_bytes(mutated(path.read_bytes(), rng))
            done.append(f"mutated {key}")
        elif what == 6:
            path.unlink()
            done.append(f"removed {key}")
        elif what == 7:
            other = rng.choice(files)
            path.write_bytes(other.read_bytes())
            done.append(f"{other.relative_to(folder)} over {key}")
        elif what == 8:
            name = rng.choice(_ODD_NAMES)
            with contextlib.suppress(OSError):
                path.with_name(name).write_bytes(path.read_bytes())
            done.append(f"{name!a} beside {key}")
        else:
            path.unlink()
            kind = rng.choice(["fifo", "link", "folder"])
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "link":
                path.symlink_to("/etc/hostname")
            else:
                path.mkdir()
            done.append(f"a {kind} as {key}")
    if rng.random() < 1 / 3:  # drawn last, so that seeds do above what they did before
        key = rng.choice(_FOREIGN)
        source = rng.choice(sorted(folder.rglob("*.json")))
        data = source.read_bytes() if source.is_file() and not source.is_symlink() else b"{}"
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # something that is no file was put there above
            (folder / key).write_bytes(mutated(data, rng) if rng.random() < 0.7 else data)
        done.append(f"{source.relative_to(folder)} or a mutation of it as {key}")
    return done


class Outcome:
    """What one command did: its exit code, what it printed, and its seconds."""

    def __init__(self, argv: Sequence[str], code: object, text: str, seconds: float) -> None:
        self.argv, self.code, self.text, self.seconds = argv, code, text, seconds


def run_commands(folder: Path, out: Path, commands: Sequence[Sequence[str]] = COMMANDS) -> Iterator[Outcome]:
    """Run commands over a bucket in this process. Raises what a command raises beside its exit."""
    from diloco_orchestrator.cli.main import main

    for command in commands:
        argv = [part.format(url=folder, out=out) for part in command]
        printed, began, before, path = io.StringIO(), time.perf_counter(), sys.argv, list(sys.path)
        sys.argv = ["diloco", *argv]
        code: object = 0
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                main()
        except SystemExit as end:
            code = end.code
        finally:
            sys.argv = before
            sys.path[:] = path  # some commands put the current folder in front
        yield Outcome(argv, code, printed.getvalue(), time.perf_counter() - began)


def check(outcome: Outcome, out: Path) -> None:
    """Raise `AssertionError` unless a command ended as commands end, with text that cannot move a terminal."""
    assert outcome.code in (0, 1, 2, 3, 4), (outcome.argv, outcome.code)
    assert "Traceback" not in outcome.text, outcome.text
    odd = {character for character in outcome.text if ord(character) < 32 and character not in "\n\t"}
    assert not odd & {"\x1b", "\x07", "\x00"}, (outcome.argv, odd, outcome.text[:2000])
    for path in out.rglob("*"):
        assert path.resolve().is_relative_to(out.resolve()), f"{path} leads out of {out}"


def build_bucket(folder: Path, rounds: int = 3) -> None:
    """A whole run of two replicas, with every kind of object that the reading commands look at.

    From ten rounds on it has segments of the log.
    """
    stamp = Stamp("fuzz", lambda: 1.7e9)
    fleet = Fleet(replicas=2, rounds=rounds, store=open_store(str(folder)), snapshot_every=2, scored=True)
    replicas = fleet.join_all()
    for round_ in range(rounds + 1):
        play(replicas, [0.5, -0.25], [report(share, 0.5 + 0.01 * round_, 0.4) for share in range(2)])
    store = fleet.store
    for replica_id in range(2):
        who = {**stamp(), "replica_id": replica_id, "attempt": 1}
        for key, record in (
            (keys.handle(replica_id, 1), Handle(**who, handle={"native": {"pid": 1}}, hourly_usd=1.5)),
            (keys.exit_record(replica_id, 1), Exit(**who, code=0, reason="done", round=4)),
        ):
            store.put(key, record.to_bytes())
        beat = Heartbeat(**who, counter=9, phase="training", round=4, inner_step=3, loss=2.5)
        store.put(keys.heartbeat(replica_id, 1), beat.to_bytes())
        store.put(keys.log_text(replica_id, 1), b"step 1\nstep 2\n")
    last = list(RunLog(store).after(Position.at_start(sha256_hex(store.get(keys.START)))))[-1]
    result = result_of(last.commit, last.sha256, stamp())
    store.put(keys.result(1), result.to_bytes())


def parse_mutated(folder: Path, seed: int) -> bool:
    """Parse one record of a bucket, mutated as the seed says. Whether it was accepted.

    Raises whatever is no `DilocoError`: that is what this looks for.
    """
    rng = random.Random(seed)
    kinds = {kind.record: kind for kind in Record.__subclasses__()}
    path = rng.choice(sorted(folder.rglob("*.json")))
    data = path.read_bytes()
    kind = kinds.get(json.loads(data).get("record"))
    if kind is None:
        return False  # the model's own config.json
    try:
        record = kind.from_bytes(mutated(data, rng), path.name)
    except DilocoError as error:
        str(error).encode()
        return False
    record.to_bytes()
    return True


def read_mutated(folder: Path, work: Path, seed: int, commands: Sequence[Sequence[str]] = COMMANDS) -> list[str]:
    """Copy a bucket, mutate the copy as the seed says, and run commands over it. Returns what was done to it.

    Raises what a command raises beside its exit, and `AssertionError` for an ending that none may have.
    """
    rng, bucket, out = random.Random(seed), work / "bucket", work / "out"
    for old in (bucket, out):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(folder, bucket)
    out.mkdir()
    done = mutate_bucket(bucket, rng)
    try:
        seldom = commands is COMMANDS and seed % 4 == 0
        read(bucket, out, (*commands, *SELDOM) if seldom else commands, waiting=seldom)
    except BaseException as error:
        error.add_note(f"seed {seed}: {'; '.join(done)}")
        raise
    return done


def read(bucket: Path, out: Path, commands: Sequence[Sequence[str]] = COMMANDS, waiting: bool = True) -> None:
    """Run commands over a bucket. Raises as `read_mutated` does.

    `waiting`: those that wait for its end, too, if it has stopped.
    """
    state = None
    for outcome in run_commands(bucket, out, commands):
        check(outcome, out)
        if outcome.argv[0] == "status" and outcome.argv[-1] == "--json" and outcome.code == 0:
            state = json.loads(outcome.text)["state"]
    if waiting and state in _STOPPED:
        for outcome in run_commands(bucket, out, OF_STOPPED_RUNS):
            check(outcome, out)
