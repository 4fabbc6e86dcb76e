"""Disturbs a real run: kills, stops and preempts its processes at random times; tells from its records what it cost."""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faulty_proxy import Faults, FaultyProxy

from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_store import of_run
from diloco_orchestrator.store.open_store import open_store

COORDINATOR, NETWORK = -1, -2
_STOPPED_S = 15.0
_BROKEN_S = 20.0
_BROKEN = Faults.all_at(0.05)  # share of requests, for each of six kinds of fault

_PROGRAM = """
import json, sys
from diloco_orchestrator import LocalProcessExecutor, attach, launch
given = json.loads(sys.argv[1])
executor = LocalProcessExecutor(given["executor"])
if given["attach"]:
    run = attach(given["store"], executor=executor)
else:
    run = launch(given["entrypoint"], store=given["store"], executor=executor, **given["settings"])
print("ready", flush=True)
run.wait()
"""


@dataclass(frozen=True)
class Fault:
    """One injected fault."""

    at: float  # wall clock
    what: str  # "kill -9", "stop", "notice", "network"
    whom: int  # replica, COORDINATOR or NETWORK
    attempt: int = 0
    lost_steps: int = 0  # inner steps of the open round at that time, by the last heartbeat


@dataclass
class Report:
    """What a disturbed run did, from its own records."""

    seconds: float
    commits: int
    applied: int
    participation: float  # contributions averaged over contributions possible
    steps_per_s: float  # inner steps that counted
    survivors_s: list[float]  # from a kill of a replica to the others' next commit
    back_s: list[float]  # from a kill to the replica's own next contribution
    faults: list[Fault]
    disagreement: str
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Chaos:
    """Runs `entrypoint` in `url` for a while and disturbs it."""

    def __init__(
        self,
        folder: Path,
        url: str,
        entrypoint: str,
        settings: Mapping[str, Any],
        environ: Mapping[str, str],
        path: Sequence[str],
        proxy: FaultyProxy,
        broken_s: float = _BROKEN_S,
    ) -> None:
        """`proxy`: the network between the run and its store, which one of the faults breaks for `broken_s`."""
        self._broken_s = broken_s
        self._folder = folder
        self._proxy, self._resting = proxy, proxy.faults
        self._url = url
        self._entrypoint = entrypoint
        self._settings = dict(settings)
        joined = os.pathsep.join([*path, *sys.path])
        self._environ = {**os.environ, **environ, "PYTHONPATH": joined}
        self._coordinator: subprocess.Popen[str] | None = None
        self._stopped: dict[int, float] = {}  # pid -> when to continue it
        self._broken_until = 0.0
        self.faults: list[Fault] = []

    def run(self, seconds: float, faults_per_hour: float, seed: int, rounds: int = 0, faults: int = 0) -> Report:
        """Disturb from the first commit on, for so long and with at least so many faults; then halt and report.

        Not before `rounds` more outer steps are taken, undisturbed if need be: where starting a process takes longer
        than the pause between two faults, none ever would be.
        """
        chance = random.Random(seed)
        self._start(attach=False)
        try:
            reader = self._reader()
            _wait(lambda: reader.commits())
            began = time.time()
            next_at = began + _gap(chance, faults_per_hour)
            wanted = reader.commits()[-1].outer_step + rounds
            while (disturbing := time.time() < began + seconds or len(self.faults) < faults) or reader.commits()[
                -1
            ].outer_step < wanted:
                self._tend()
                if disturbing and time.time() >= next_at:
                    self._strike(chance, reader)
                    next_at = time.time() + _gap(chance, faults_per_hour)
                time.sleep(0.1)
            return self._end(reader, began)
        finally:
            self._tear_down()

    # -- processes -----------------------------------------------------------------------------------------------

    def _start(self, attach: bool) -> None:
        import json

        given = {
            "executor": str(self._folder / "executor"),
            "attach": attach,
            "store": self._url,
            "entrypoint": self._entrypoint,
            "settings": self._settings,
        }
        log = (self._folder / "coordinator.log").open("a")
        self._coordinator = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(given)],
            env=self._environ,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def _tend(self) -> None:
        """Continue what was stopped long enough, mend the network; attach again where the coordinator is gone."""
        if time.time() >= self._broken_until:
            self._proxy.faults = self._resting
        for pid, until in list(self._stopped.items()):
            if time.time() >= until:
                del self._stopped[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if self._coordinator is not None and self._coordinator.poll() is not None:
            self._start(attach=True)

    def _strike(self, chance: random.Random, reader: RunReader) -> None:
        whom = chance.choice([NETWORK, COORDINATOR, *range(self._settings["replicas"])])
        if whom == NETWORK:
            self._proxy.faults, self._broken_until = _BROKEN, time.time() + self._broken_s
            self.faults.append(Fault(time.time(), "network", NETWORK))
            return
        if whom == COORDINATOR:
            assert self._coordinator is not None
            self._coordinator.kill()
            self._coordinator.wait()
            self.faults.append(Fault(time.time(), "kill -9", COORDINATOR))
            return
        attempt = reader.attempts.numbers(whom)[-1]
        claim, pulse = reader.attempts.claim(whom, attempt), reader.attempts.heartbeat(whom, attempt)
        if claim is None or reader.attempts.exit(whom, attempt) is not None:
            return  # it is starting: the next draw strikes
        what = chance.choice(["kill -9", "kill -9", "stop", "notice"])
        number = {"kill -9": signal.SIGKILL, "stop": signal.SIGSTOP, "notice": signal.SIGTERM}[what]
        with suppress(ProcessLookupError):
            os.kill(claim.pid, number)
            if what == "stop":
                self._stopped[claim.pid] = time.time() + _STOPPED_S
            training = pulse is not None and pulse.phase == "training"  # else its answer is published
            lost = pulse.inner_step if pulse is not None and training and what == "kill -9" else 0
            self.faults.append(Fault(time.time(), what, whom, attempt, lost))

    def _end(self, reader: RunReader, began: float) -> Report:
        ended = time.time()
        report = self._report(reader, began, ended)
        self._proxy.faults = self._resting
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        subprocess.run(
            [sys.executable, "-m", "diloco_orchestrator.cli.main", "halt", self._url], env=self._environ, check=True
        )
        _wait(lambda: reader.log.result(1) is not None)
        found = verify_run(reader.store).disagreement
        report.disagreement = "" if found is None else f"{found.key}: {found.words}"
        return report

    def _tear_down(self) -> None:
        if self._coordinator is not None:
            with suppress(ProcessLookupError):
                self._coordinator.kill()
        with suppress(Exception):
            reader = self._reader()
            for replica_id in range(self._settings["replicas"]):
                for attempt in reader.attempts.numbers(replica_id):
                    claim = reader.attempts.claim(replica_id, attempt)
                    if claim is not None and reader.attempts.exit(replica_id, attempt) is None:
                        with suppress(ProcessLookupError):
                            os.kill(claim.pid, signal.SIGKILL)

    def _reader(self) -> RunReader:
        _wait(lambda: _exists(self._url))
        return RunReader(of_run(open_store(self._url)))

    # -- the report ----------------------------------------------------------------------------------------------

    def _report(self, reader: RunReader, began: float, ended: float) -> Report:
        commits = [c for c in reader.commits() if began <= c.at <= ended]
        applied = [c for c in commits if c.applied]
        replicas = self._settings["replicas"]
        averaged = [a for c in applied for a in c.answers if a.averaged]
        steps = sum(origin.steps for a in averaged for origin in a.origins)
        kills = [f for f in self.faults if f.what == "kill -9" and f.whom >= 0]
        after = [min((c.at for c in commits if c.at > kill.at), default=None) for kill in kills]
        back = [self._next_contribution(reader, kill, commits) for kill in kills]
        return Report(
            seconds=ended - began,
            commits=len(commits),
            applied=len(applied),
            participation=len(averaged) / max(1, replicas * len(applied)),
            steps_per_s=steps / (ended - began),
            survivors_s=[at - kill.at for kill, at in zip(kills, after, strict=True) if at is not None],
            back_s=[at - kill.at for kill, at in zip(kills, back, strict=True) if at is not None],
            faults=self.faults,
            disagreement="not looked at",
        )

    def _next_contribution(self, reader: RunReader, kill: Fault, commits: Sequence[Any]) -> float | None:
        for commit in commits:
            if commit.at < kill.at:
                continue
            for answer in commit.answers:
                if answer.averaged and answer.replica_id == kill.whom and answer.attempt > kill.attempt:
                    manifest = ContributionReader(reader.store).of(commit.round, kill.whom)
                    return None if manifest is None else manifest.at
        return None


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _exists(url: str) -> bool:
    try:
        RunReader(open_store(url))
    except Exception:
        return False
    return True


def _gap(chance: random.Random, per_hour: float) -> float:
    return chance.expovariate(per_hour / 3600) if per_hour else 1e9


def _wait(condition: Any) -> None:
    while not condition():
        time.sleep(0.1)
