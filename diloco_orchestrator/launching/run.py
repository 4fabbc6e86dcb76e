"""`launch`, `attach` and `Run`: how a user starts, supervises and stops a run.

`supervision.coordinator` supervises, `inspection.status` reads. Replicas go on when this process ends.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any, Unpack, cast

from pydantic import JsonValue

from diloco_orchestrator.clock import Backoff, Clock, SystemClock, ThreadBackground, in_parallel, random_token
from diloco_orchestrator.config import GuardSettings, check_track, config_of_leg
from diloco_orchestrator.errors import (
    ConfigError,
    ObjectMissing,
    RunFailed,
    RunFolderTaken,
    RunNotFinished,
    StoreError,
    as_config_errors,
)
from diloco_orchestrator.executors.contract import ServerlessExecutor
from diloco_orchestrator.executors.local_process import replicas_in
from diloco_orchestrator.executors.processes import launcher_of
from diloco_orchestrator.executors.registry import executor_of
from diloco_orchestrator.guard import CollapseStopError, Verdict
from diloco_orchestrator.inspection.logs import executor_of_run, log_lines
from diloco_orchestrator.inspection.status import DefaultModel, ReplicaRow, RoundRow, RunReader, RunStatus
from diloco_orchestrator.inspection.terminal import drawn_live
from diloco_orchestrator.launching.prepare import LaunchOptions, TrainFunction, prepare_launch
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run as RunRecord
from diloco_orchestrator.protocol.replica_names import grouped, replicas
from diloco_orchestrator.run_log.append import create_run, request_halt, request_scale
from diloco_orchestrator.run_log.launched_here import note_failure, note_head, remember, remember_leg
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import check_signed_by, keep_key, of_run
from diloco_orchestrator.run_log.seen_store import SeenStore
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import SUPERVISING, absolute_url, open_store
from diloco_orchestrator.store.probe import probe
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from diloco_orchestrator.supervision.launch_request import LaunchRequests, check_images
from diloco_orchestrator.supervision.next_leg import auto_resume, begin_next_leg
from diloco_orchestrator.supervision.rotation import rotate
from diloco_orchestrator.supervision.trackers import RoundTracker, open_tracker

log = logging.getLogger(__name__)

_POLL = Backoff(first_s=0.05, longest_s=1.0, factor=1.2)  # between two steps of the coordinator
_LAUNCH_PATIENCE_S = 60.0  # how long `launch` waits for machines; `wait` reports what is refused later
_LAST_LINES = 30  # lines of the log of a replica that ended without a traceback


@dataclass(frozen=True)
class RunResult:
    """The end of a run: its state, reason, number of rounds, last snapshot and metrics."""

    status: str  # "completed" or "halted"
    url: str
    rounds: int  # commits, the final evaluation round included
    outer_steps: int
    reason: str
    verdict: Verdict | None  # set when the guard fired
    snapshot: str  # folder of the model to take: the newest, after a halt by the guard the best by held-out score;
    # transformers loads it if the model is one of its own
    model: DefaultModel  # its round and score, and those of the newest
    metrics: list[RoundRow]
    head: str  # round and sha256 of the last commit: `verify --expect` compares them with the log

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Run:
    """A launched run. `wait` supervises it; without supervision replicas train on, but dead ones are not relaunched."""

    def __init__(self, reader: RunReader, means: Means, track: str | None = None) -> None:
        """`track`: tracker to which this process sends metrics, in the form of the setting `track`; None: nowhere.

        The setting in run.json is ignored, because whoever can write to the bucket could choose a folder or project
        here.
        """
        means.executor.use_store(reader.store.url, means.storage_options)
        self.url = reader.store.url
        self._seen = SeenStore.of(reader.store, means.clock)
        self._watched = reader if reader.store is self._seen else RunReader(self._seen)
        self._means = means
        self._interrupted = False  # by Ctrl-C: then no leg begins by itself
        self._coordinator = self._coordinate()
        self._track = track
        self._tracker = self._tracker_of(reader.log.run, track)
        self._untracked = reader.new_rows()

    def __repr__(self) -> str:
        return f"Run({self.url!r})"

    def _coordinate(self) -> Coordinator:
        """A coordinator for the rounds since the run's start or last resume."""
        threads = ThreadBackground()
        return Coordinator(self._watched, self._means, threads, threads)

    @staticmethod
    def _tracker_of(record: RunRecord, track: str | None) -> RoundTracker | None:
        if track is None:
            if record.config.track is not None:
                log.info("the run was launched with track=…: pass track= (--track) to send its metrics from here too")
            return None
        return RoundTracker(lambda: open_tracker(track, record.run_id, record.config.model_dump(mode="json")))

    def wait(
        self, timeout: float | None = None, on_poll: Callable[[], None] | None = None, *, progress: bool = True
    ) -> RunResult:
        """Supervise until the run ends.

        Dead replicas are relaunched within the run's budgets. `on_poll` is called after every step of the supervision.
        Without it the run is drawn on a terminal (stderr) or in a notebook, unless `progress` is False. A resume that
        `on_halt` asks for is done and supervised too. Ctrl-C halts the run after its open round; a second one stops it
        at once. KeyboardInterrupt is raised once it has ended, and says how to go on.

        Raises:
            CollapseStopError: the guard fired, unless the run was launched with `strict=False`.
            RunFailed: the run ended without completing; the text holds the replicas' tracebacks.
            TimeoutError: the run goes on after `timeout` seconds; nothing was stopped.
            StoreError: the store refuses calls or has no room, for longer than this waits. The error is also kept in
                this user's state folder, where `diloco status` finds it.
        """
        if progress and on_poll is None:
            with drawn_live(lambda: self.status(as_seen=True)) as draw:
                return self._wait(timeout, draw)
        return self._wait(timeout, on_poll)

    def _wait(self, timeout: float | None, on_poll: Callable[[], None] | None) -> RunResult:
        run_log = self._reader.log
        note_failure(run_log, "")
        try:
            self._supervise(timeout, on_poll)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._stop_on_interrupt(on_poll)) from None
        except StoreError as error:
            note_failure(run_log, f"{type(error).__name__}: {error}")
            raise
        result = self.result()
        if result.verdict is not None and self._reader.log.run.config.strict:
            raise CollapseStopError(result.verdict)
        return result

    def _supervise(self, timeout: float | None, on_poll: Callable[[], None] | None) -> None:
        deadline = None if timeout is None else self._means.clock.now() + timeout
        pauses = _POLL.pauses()
        while not self._coordinator.step() or self._auto_resume():
            self._update_tracker()
            if on_poll is not None:
                on_poll()
            if deadline is not None and self._means.clock.now() >= deadline:
                raise TimeoutError(f"{self.url} still runs after {timeout:g} s. Call wait() again, or halt() it.")
            self._means.clock.sleep(next(pauses))
        self._seen.forget()
        self._update_tracker()
        if self._tracker is not None:
            self._tracker.close()
        if on_poll is not None:
            on_poll()

    def _auto_resume(self) -> bool:
        """Begin the next leg after a halt by the guard, if the setting `on_halt` asks for it. True if a leg began.

        False also after Ctrl-C. Raises `ConfigError` if options, secrets or code for the launch are missing here.
        """
        run_log = self._reader.log
        if self._interrupted or (begin := auto_resume(run_log, self._means.stamp)) is None:
            return False
        remember_leg(run_log, begin)
        self._coordinator = self._coordinate()
        self._coordinator.check_means()
        return True

    def _update_tracker(self) -> None:
        if self._tracker is not None:
            self._tracker.update(self._untracked.read())

    def _stop_on_interrupt(self, on_poll: Callable[[], None] | None) -> str:
        """Halt the run, supervise it until it has ended, and return how it ended, with the command that goes on.

        A third Ctrl-C returns at once, with the command that ends what may still run.
        """
        self._interrupted = True
        log.warning("Ctrl-C: halting after the open round; press again to stop at once")
        try:
            with suppress(ConfigError):  # the run has ended meanwhile
                self.halt("Ctrl-C")
            self._supervise(None, on_poll)
        except KeyboardInterrupt:
            log.warning("Ctrl-C again: stopping now; the open round's work is dropped")
            try:
                self._coordinator.stop("halted", "Ctrl-C twice")
                self._supervise(None, on_poll)
            except KeyboardInterrupt:
                url = quote(self.url)
                return f"left before all replicas had ended: diloco attach {url} ends those that are left"
        state = self.status().state
        return f"{state}; to go on: diloco resume {quote(self.url)}" if state == "halted" else f"the run is {state}"

    def result(self) -> RunResult:
        """The end of the run, also if the guard fired. Raises `RunFailed`, or `RunNotFinished` while it goes on."""
        result = self._reader.log.result(self._coordinator.leg)
        if result is None:
            raise RunNotFinished(
                f"{self.url} goes on, so that it has no result yet. Call wait() for it, or status() for where it is."
            )
        status = self.status()
        if result.status == "failed":
            raise RunFailed(f"{self.url} failed: {result.reason}\n{self._errors(status)}".rstrip())
        return RunResult(
            status=result.status,
            url=self.url,
            rounds=result.round,
            outer_steps=result.outer_steps,
            reason=result.reason,
            verdict=result.verdict,
            snapshot=self._reader.snapshot_url(status.model.round),
            model=status.model,
            metrics=status.rounds,
            head=status.head,
        )

    def _errors(self, status: RunStatus) -> str:
        """Tracebacks of the replicas without exit code 0, or their last lines of output; equal texts are given once."""
        found = [(r.replica_id, r.error or self._last_lines(r)) for r in status.replicas if r.exit_code != 0]
        return "\n".join(f"--- {replicas(ids)} ---\n{words}" for ids, words in grouped(found) if words)

    def _last_lines(self, replica: ReplicaRow) -> str:
        return "\n".join(self.logs(replica.replica_id, replica.attempt, tail=_LAST_LINES))

    @property
    def _reader(self) -> RunReader:
        """The coordinator's `RunReader`, whose next call reads the bucket as it is now."""
        self._seen.forget()
        return self._watched

    def status(self, *, as_seen: bool = False) -> RunStatus:
        """The state of the run since its last start or resume, and all its rounds, from the bucket. Raises
        `StoreError`.

        `as_seen`: the state that `wait` has seen last, which costs a few requests in ten rounds, for a display beside
        it.
        """
        reader = self._watched if as_seen else self._reader
        status = reader.status()
        note_head(reader.log, status.head)
        return status

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per committed round, oldest first: the fields of `RoundRow`, as in `diloco status --json`."""
        return [asdict(row) for row in self._reader.rows()]

    def halt(self, reason: str = "halt() was called") -> None:
        """Request that the run stops after its open round; then `wait` returns. Raises `ConfigError` if it has ended.

        `reason`: goes into the commit that stops the run.
        """
        request_halt(self._reader.log, "user", reason, self._means.stamp)

    def rotate_keys(self, why: str) -> None:
        """Replace the keys of a signed run, because one of them has leaked. Returns at once.

        The run halts after its open round, and whoever supervises it (`wait`) on the launcher's machine begins the next
        leg with new keys. What was written before goes on to count. `why`: goes into the records. Raises `ConfigError`
        without the run's own key, which its launcher's state folder has, and for an unsigned run.
        """
        rotate(self._reader.log, "user", why, self._means.stamp)

    def scale(self, replicas: int) -> None:
        """Train with another number of replicas from now on, in a run with `max_replicas`. Returns at once.

        Scaled up, the lowest ids without a replica get one, which is averaged from its second round on at the latest.
        Scaled down, the highest ids publish what they have trained of the open round and leave. Needs a coordinator
        (`wait`, or `diloco attach` anywhere). Raises `ConfigError` for fewer than the run's `replicas`, for more than
        `max_replicas`, and after the run's end.
        """
        request_scale(self._reader.log, replicas, "user", self._means.stamp)

    def snapshots(self) -> list[int]:
        """Rounds with a complete snapshot, oldest first; 0 is the first base."""
        return self._reader.snapshots()

    def resume(
        self,
        rounds: int | None = None,
        from_round: int | None = None,
        why: str = "resume() was called",
        *,
        override_guard: str = "",
        guard: GuardSettings | None = None,
        ranks_per_replica: int | list[int] | None = None,
        replicas: int | None = None,
        outer: Mapping[str, JsonValue] | None = None,
        args: Mapping[str, JsonValue] | None = None,
    ) -> "Run":
        """Resume a run that has stopped: begin its next leg (until its next stop), and launch the replicas.

        `rounds`: outer steps to take, by default those left. `from_round`: the base to start from, by default the one
        that the run stopped on, and after a halt by the guard the one with the best held-out score. `override_guard`:
        the reason for which the guard begins anew, with a new baseline and the settings in `guard`; everybody sees it
        in the leg's record and in `status`. By default the guard goes on from its state at that base. `replicas`: how
        many the leg begins with, in a run with `max_replicas`; by default as many as the leg before began with.
        `ranks_per_replica`: from now on, where machines of another size go on with the run. `outer`, `args`: other
        settings of the outer optimizer, {"lr": 0.4}, and other values of `ctx.args`, from now on. Raises `ConfigError`
        for a run that goes on, for settings that a leg cannot change or without a reason, or naming the nearest base
        for a round that left none.
        """
        run_log, executor = self._reader.log, self._means.executor
        change: Mapping[str, JsonValue] = {
            **_given(replicas=replicas, ranks_per_replica=cast(JsonValue, ranks_per_replica)),
            **{f"outer.{name}": value for name, value in (outer or {}).items()},
            **{f"args.{name}": value for name, value in (args or {}).items()},
        }
        leg = config_of_leg(run_log.run.config, {**run_log.begins()[-1].settings, **change}, guard=True)
        launching = self._means.requests(run_log, Launched(run_log.run_sha256), leg)
        launching.check(executor)
        _check_credentials(executor, launching)
        begin = begin_next_leg(
            run_log,
            rounds=rounds,
            from_round=from_round,
            by="resume",
            why=why,
            stamp=self._means.stamp,
            override_guard=override_guard,
            guard=cast(Mapping[str, JsonValue] | None, guard),
            change=change,
        )
        remember_leg(run_log, begin)
        return _supervised(run_log, self._means, self._track)

    def logs(self, replica_id: int, attempt: int | None = None, tail: int | None = None) -> Iterator[str]:
        """Output lines of an attempt (default: the newest), from its executor while it runs, then from the bucket.

        `tail`: only this many of the last lines.
        """
        return log_lines(self._reader, replica_id, attempt, tail, self._means.executor)


def _given(**settings: JsonValue) -> Mapping[str, JsonValue]:
    return {name: value for name, value in settings.items() if value is not None}


def launch(
    entrypoint: str | TrainFunction, *, store: str, clock: Clock | None = None, **options: Unpack[LaunchOptions]
) -> Run:
    """Start a run in the folder `store` and launch its replicas.

    Args:
        entrypoint: the training function, called with a `ReplicaContext` in each replica: a function at the top level
            of an importable module, or its name, "package.module:function".
        store: the run's own folder; local replicas need one on this disk.
        executor: where replicas run; by default processes of this machine. A name, such as "slurm", is that executor
            without options.
        storage_options: credentials and endpoint in s3fs spelling; they reach replicas as secrets of their provider.
        secrets: variables for replicas that no record may hold, such as {"HF_TOKEN": …}. Whoever attaches to the run
            hands them over again.
        code: what replicas on other machines import: a folder, or `CodeBundle(…)` for several. By default the package
            or module of `entrypoint`. Files that git ignores stay here; files that look like secrets are refused.
        requirements: packages that replicas need: a requirements file, or a list of its lines; by default
            `diloco-lock.txt` beside the code, if there is one (`diloco lock`). With hashes pip checks them over there
            and installs nothing else. Replicas on this machine use what is installed here, which is checked.
        pin: where no hashes are given, "auto" has uv list them now, and goes on without, saying why, if uv cannot;
            "given" asks no index; "require" refuses a package without a hash and an image named by tag.
        heldout_items: JSON items for `ctx.heldout_items`.
        signed: sign what launcher and replicas write, so that nothing else in the folder counts. The run's private key
            is kept in this user's state folder; whoever attaches elsewhere needs it in DILOCO_RUN_KEY. By default runs
            in a bucket are signed, but for those that machines join, and runs in a folder of a disk are not.
        **options: also the fields of `RunConfig`: replicas, rounds, sync_every, args, seed, outer, guard, strict, …
            `guard` is {"rule": "sequential"} by default; {"rule": "heldout", …}: `HeldOutGuard`, with a
            `decline_patience` of 6 and not 3, which halts healthy noisy runs; "off": scores are not judged.

    Raises:
        ConfigError: an invalid argument or setting, with the nearest known name; or a function that no other process
            can import by name.
        RunFolderTaken: `store` holds another run, or the replicas of one that was removed go on to write there.
        StoreError: `store` cannot be used.
        ExecutorDenied: the executor's provider refuses the credentials.
    """
    clock = clock or SystemClock()
    stamp = Stamp(random_token(), clock.wall_time)
    prepared = prepare_launch(entrypoint, store, options, run_id=f"run-{random_token()}", stamp=stamp(), dry=False)
    storage_options, secrets = options.get("storage_options") or {}, options.get("secrets") or {}
    folder = open_store(prepared.url, storage_options, clock=clock, retry=SUPERVISING)
    opened = SeenStore.of(of_run(folder), clock)
    background = ThreadBackground()
    in_parallel(
        background,
        [lambda: probe(opened, background), lambda: _check_credentials(prepared.executor, prepared.launching)],
    )
    _check_removed(folder, signed=prepared.key is not None)
    if prepared.archive is not None:
        log.info("%s", "\n".join(prepared.words()))
        code = keys.code(prepared.archive.sha256)
        if not opened.create(code, prepared.archive.data):  # with equal bytes it would count as created
            raise RunFolderTaken(f"{prepared.url} holds other bytes than the code to send as {code}. Use a new folder.")
    if prepared.key is not None:
        words = "signed: only who holds the run's keys goes on with it. They are in %s; for another machine: %s"
        log.info(words, keep_key(prepared.key).parent, f"diloco key {quote(prepared.url)} --export")
    run_log = create_run(opened, prepared.run, by="launch", stamp=stamp)
    remember(run_log)
    config = prepared.config
    if options.get("heldout_items") and (few := config.too_few_to_fold):
        log.warning("%s", few)
    if why := config.why_by_tokens:
        log.info("%s", why)
    for words in filter(None, (prepared.unpaid, prepared.unsigned)):
        log.warning("%s", words)
    return _supervised(run_log, Means(prepared.executor, clock, stamp, storage_options, secrets), config.track)


def _check_removed(folder: Store, *, signed: bool) -> None:
    """Raise `RunFolderTaken` if a run was removed from the folder and its replicas write there, or have done so since.

    They never read run.json again, and the new run would meet their commits and heartbeats. Objects are no reason for a
    `signed` run, in which nothing counts that its own keys have not signed; nor are claims alone, which whoever may
    write can leave, and which count for no attempt that was intended after them.
    """
    if _holds_run(folder):
        return  # `create_run` refuses
    processes = [] if "://" in folder.url else replicas_in(folder.url)
    left = (info.key for prefix in (keys.REPLICAS, keys.ROUNDS) if not signed for info in folder.list(prefix))
    found = next((key for key in left if (of := keys.parse_attempt(key)) is None or of.name != keys.CLAIM), None)
    if not (processes or found) or _holds_run(folder):  # what was found may be of a launch that began meanwhile
        return
    if processes:
        pids = " ".join(map(str, processes))
        launchers = sorted({pid for each in processes if (pid := launcher_of(each)) is not None})
        first = (
            f" Process {launchers[0]} launches them again if it waits for that run: end it first." if launchers else ""
        )
        raise RunFolderTaken(
            f"the run that was in {folder.url} was removed while its replicas were alive: they go on to write there, "
            f"and a new run would read that.{first} End them, remove what they wrote, and launch "
            f"again: kill -9 {pids}; rm -r {quote(folder.url)}. Or choose another folder."
        )
    raise RunFolderTaken(
        f"{folder.url} holds {found} and no {keys.RUN}: a run was removed from it, and its replicas have written there "
        "since. A new run would read that. If they are alive, end them; then remove what is left, and launch again, or "
        "choose another folder."
    )


def _holds_run(folder: Store) -> bool:
    try:
        folder.get(keys.RUN)
    except ObjectMissing:
        return False
    return True


def attach(
    url: str,
    *,
    executor: ServerlessExecutor | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    trust_bucket: bool = False,
    track: str | None = None,
    clock: Clock | None = None,
    signed_by: str | None = None,
) -> Run:
    """Supervise a run that somebody launched, from its bucket alone: after the launcher died, or beside it.

    Attempts that run already are not launched again. `executor`: by default the launcher's, made again from run.json
    with this process's credentials, which is refused unless this user launched the run on this machine, or
    `trust_bucket` is set; an executor class of your own must be passed. Digests of images that a lock gave the run are
    used on the same terms. `storage_options`, `secrets`: as for `launch`. `track`: as the setting; by default no
    metrics are sent from here, whatever run.json says. `signed_by`: the public key that must have signed the run.
    Raises `NoSuchRun`, and `ConfigError` if the executor, secrets, or keys of a signed run are missing, and for an
    unsigned run while DILOCO_RUN_KEY is set.
    """
    check_track(track)
    clock = clock or SystemClock()
    with as_config_errors():
        given = None if executor is None else executor_of(executor)
    store = open_store(absolute_url(url), storage_options, clock=clock, retry=SUPERVISING, must_exist=True)
    reader = RunReader(SeenStore.of(of_run(store), clock))
    check_signed_by(reader.run, store.url, signed_by)
    made = given or executor_of_run(reader, "supervision", trust_bucket)
    # The log that was checked is the log that runs.
    run = Run(
        reader, Means(made, clock, Stamp(random_token(), clock.wall_time), storage_options or {}, secrets or {}), track
    )
    if not trust_bucket:
        check_images(reader.log, made)
    run._coordinator.check_means()
    return run


def _supervised(run_log: RunLog, means: Means, track: str | None) -> Run:
    """A `Run` after launching all replicas for which the provider has machines within `_LAUNCH_PATIENCE_S`.

    Ctrl-C meanwhile ends the run as it does in `wait`: machines that nobody supervises cost money without a limit.
    """
    run = Run(RunReader(run_log.store, run_log), means, track)
    try:
        run._coordinator.step()
        run._coordinator.wait_for_launches(_LAUNCH_PATIENCE_S)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(run._stop_on_interrupt(None)) from None
    return run


def _check_credentials(executor: ServerlessExecutor, launching: LaunchRequests) -> None:
    """Raise `ExecutorDenied` if the provider refuses the credentials, before anything is written."""
    executor.find(launching.run.run_id)  # the cheapest call that needs credentials
    if not executor.shares_machine and "://" not in launching.url:
        log.warning("replicas run elsewhere, and the run's folder is a path: it must be mounted there as well")
