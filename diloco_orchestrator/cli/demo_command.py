"""`diloco demo`: launches the demo workload, displays its progress, and explains the result in words."""

import os
import platform
import shutil
import signal
import sys
import time
from typing import Any

from diloco_orchestrator.cli.progress import follow, say
from diloco_orchestrator.cli.shared import EXIT_COMPLETED, EXIT_FAILED, EXIT_HALTED
from diloco_orchestrator.config import TimingConfig
from diloco_orchestrator.demo.text import load_corpus
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.status import RoundRow, RunReader, RunStatus
from diloco_orchestrator.inspection.terminal import Console, megabytes
from diloco_orchestrator.launching.run import Run, RunResult, launch
from diloco_orchestrator.store.open_store import open_store

ENTRYPOINT = "diloco_orchestrator.demo.workload:train"
SYNC_EVERY = 20
ROUNDS = 28  # two minutes on 2 cores: 3.5 s a round, 20 s to start and end
HACK_ROUNDS = 12
HACK_AFTER = 4 * SYNC_EVERY  # inner steps of healthy training before the collapse
KILL_AT_ROUND = 3  # commits seen before the kill
TIMING = TimingConfig(heartbeat_s=1.0, poll_s=0.1)  # a folder's requests cost nothing


def show(
    *,
    text: str | None,
    store: str | None,
    replicas: int,
    rounds: int | None,
    seed: int,
    quorum: str | None,
    kill_one: bool,
    hack: bool,
    as_json: bool,
) -> int:
    """Run the demo with the options of `diloco demo`, and return the exit code."""
    load_corpus(text)  # refuses a bad --text before anything is launched
    url = store or time.strftime("runs/demo-%Y%m%d-%H%M%S")
    killer = _Killer(replicas) if kill_one else None
    began = time.monotonic()

    def start() -> Run:
        run = launch(
            ENTRYPOINT,
            store=url,
            replicas=replicas,
            rounds=rounds or (HACK_ROUNDS if hack else ROUNDS),
            sync_every=SYNC_EVERY,
            seed=seed,
            quorum=_quorum(quorum),
            strict=False,  # the summary explains a halt; nothing needs to be raised
            args={"text": text, "hack_after": HACK_AFTER if hack else None},
            guard={"rule": "heldout", "min_steps": 3, "ema_alpha": 0.5} if hack else {},
            timing=TIMING,
        )
        if killer is not None:
            killer.reader = RunReader(open_store(run.url))
        return run

    def summarise(result: RunResult, console: Console) -> None:
        say(console)
        _say_outcome(result, console, replicas, time.monotonic() - began)
        if killer is not None:
            say(console, killer.story(result.metrics))
        if hack:
            _say_hack(result, console)
        _say_next(result, console, kill_one, hack)

    if hack:
        _announce_hack()
    code = follow(start, as_json=as_json, on_status=killer.strike if killer else None, summarise=summarise)
    if hack:  # meant to halt
        return EXIT_COMPLETED if code == EXIT_HALTED else EXIT_FAILED
    return code


def _quorum(given: str | None) -> Any:
    if given is not None and given != "all" and not given.isdecimal():
        raise ConfigError(f'--quorum {given}: write a number or "all", or leave it out.')
    return int(given) if given and given.isdecimal() else given


def _announce_hack() -> None:
    say(
        Console(stderr=True),
        f"--hack: after {HACK_AFTER} healthy inner steps every replica trains on one passage over and over. Its loss "
        "falls there, and rises on held-out text. The kill-switch is set for a run of a dozen rounds: the rule heldout "
        "with min_steps=3 and ema_alpha=0.5 (the default rule, sequential, learns the noise of 18 rounds first).",
    )


class _Killer:
    """Sends SIGKILL to one training replica on this machine, once, after `KILL_AT_ROUND` commits."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.reader: RunReader | None = None
        self.victim: int | None = None
        self.round = 0

    def strike(self, status: RunStatus) -> None:
        """Kill a training replica once `KILL_AT_ROUND` commits exist, unless one was killed already."""
        if self.victim is not None or status.round < KILL_AT_ROUND or status.state != "running":
            return
        # Heartbeats are rounds apart: whoever has begun and not ended trains the round after the newest commit.
        alive = [r for r in status.replicas if not r.state.startswith(("launching", "ended"))]
        if not alive or self.reader is None:
            return
        victim = alive[-1]
        claim = self.reader.attempts.claim(victim.replica_id, victim.attempt)
        if claim is not None and claim.host == platform.node():
            os.kill(claim.pid, signal.SIGKILL)
            self.victim, self.round = victim.replica_id, status.round + 1

    def story(self, rows: list[RoundRow]) -> str:
        if self.victim is None:
            return "--kill-one: the run was over before a replica could be killed; give it more --rounds."
        trained = [row for row in rows if row.contributors]
        without = [row.round for row in trained if self.victim not in row.contributors]
        killed = f"--kill-one: replica {self.victim} was killed -9 in round {self.round}. "
        if not without:
            return (
                f"{killed}Its next attempt rebuilt the base from the bucket and trained that round again; the round "
                "has its contribution, none was lost."
            )
        share = sum(len(row.contributors) for row in trained) / (len(trained) * self._replicas)
        listed = ", ".join(map(str, without))
        if without[-1] == trained[-1].round:
            return f"{killed}The others went on without it and the run ended before it was back."
        return (
            f"{killed}The others went on without it (round {listed}); its next attempt rebuilt the base from the "
            f"bucket and took part again from round {without[-1] + 1} on. Participation: {share:.0%} of the "
            "contributions that were possible."
        )


def _say_outcome(result: RunResult, console: Console, replicas: int, seconds: float) -> None:
    scored = [row for row in result.metrics if row.heldout is not None]
    say(console, f"{result.status} after {result.outer_steps} outer steps of {replicas} replicas in {seconds:.0f} s")
    if result.status != "completed":
        say(console, f"why:       {result.reason}")
    if len(scored) > 1:
        first, last = scored[0].heldout or 0.0, scored[-1].heldout or 0.0
        say(
            console,
            f"held-out:  {first:.3f} -> {last:.3f} nats per byte, on files that no replica trained on",
        )
    rows = [row for row in result.metrics if row.bytes_up]
    if rows:
        up, down = rows[0].bytes_up, rows[0].bytes_down
        say(console, f"moved:     {megabytes(up)} up and {megabytes(down)} down in each of {len(rows)} rounds")
    say(console, f"snapshot:  {result.snapshot}")
    say(console, f"model:     {result.model.words()}")


def _say_hack(result: RunResult, console: Console) -> None:
    if result.verdict is None:
        say(console, "--hack: the kill-switch did not fire; give it more --rounds.")
        return
    say(console, "--hack: what the kill-switch saw")
    for row in result.metrics:
        if row.heldout is not None and row.loss is not None:
            gap = row.proxy_real_gap or 0.0
            numbers = f"training loss {row.loss:.3f}, held-out before {row.heldout:.3f}, gap {gap:+.3f}"
            say(console, f"  round {row.round:2d}: {numbers}")
    say(
        console,
        f"  All replicas stopped at round {result.rounds}, which was not applied. The snapshot is of "
        f"{result.model.words()}.",
    )


def _say_next(result: RunResult, console: Console, kill_one: bool, hack: bool) -> None:
    diloco = "diloco" if shutil.which("diloco") else sys.argv[0]  # as it was typed
    load = f"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained({result.snapshot!r}))"
    say(console, "\nNext:")
    say(console, f"  {diloco} status {result.url}")
    say(console, f'  {sys.executable} -c "{load}"')
    if not kill_one:
        say(console, f"  {diloco} demo --kill-one       kill -9 a replica in mid-run")
    if not hack:
        say(console, f"  {diloco} demo --hack           let the held-out score collapse")
    say(console, f"  {diloco} run my_pkg.train:train --store runs/mine   your own training")
