"""`RemoteExecutor`: the base class of executors. It has what all have in common: `poll`, `collect`, names, labels,
prices.

Each provider's module adds the rest: build the request, send it, translate the reply.
"""

import ast
import base64
import hashlib
import io
import json
import re
import uuid
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from diloco_orchestrator.executors import process_bootstrap, process_contract
from diloco_orchestrator.executors.clock import Clock, SystemClock
from diloco_orchestrator.executors.contract import (
    BY_EXIT_CODE,
    CollectTimeout,
    ExecutorDenied,
    ExecutorError,
    LaunchError,
    LaunchRequest,
    MissingSdk,
    ReplicaFailed,
    ReplicaHandle,
    ReplicaResult,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    Unavailable,
)
from diloco_orchestrator.executors.names import check_entrypoint, hint
from diloco_orchestrator.executors.prices import ANY_RANKS, Price, usd_by_ranks
from diloco_orchestrator.executors.process_bootstrap import ENV_ARGS, ENV_CODE, ENV_ENTRYPOINT
from diloco_orchestrator.executors.process_contract import (
    ENV_LEAVE_AFTER,
    ENV_RANK,
    ENV_WORLD_SIZE,
    EXIT_DONE,
    parse_exit_line,
)

_LEAVE_BEFORE_S = 300.0  # long enough to publish what is trained and a large optimizer's state
KILL_AFTER_S = 60  # seconds from SIGTERM at a request's own time limit to SIGKILL
LABEL_RUN, LABEL_REPLICA, LABEL_ATTEMPT = "diloco-run", "diloco-replica", "diloco-attempt"
_TRY_S = 0.1  # pause between two passes of `tries`
_TIMED_OUT_CODES = (124, -9, 128 + 9)  # coreutils' `timeout` ends with 124; with SIGKILL it ends itself too
_TOLD_CODES = (-15, 128 + 15)  # SIGTERM before the replica could answer it: while it installed, or was imported
_CODE_BYTES = 96 * 1024  # Linux takes 128 KiB in one environment variable
_LAUNCH_THREADS = 32
_TAIL_LINES = 30
_COLLECT_S = (0.02, 1.0)  # first and longest pause while collecting


class RemoteExecutor(ServerlessExecutor):
    """Base class of executors: gives `launch_replicas`, `poll`, `collect`, `price` and `close`.

    A subclass has a `name` and the six methods below; docs/recipes/write_an_executor.md shows one. A replica's
    environment is the request's `env` and `secrets` over the variables of its image.

    Args:
        hourly_usd: What one replica's machine costs in US dollars an hour, which wins over every list; as text such as
            "8:24,1:3.5" by the number of the replica's ranks.
        clock: Time, for tests.
    """

    shares_machine = False

    def __init__(self, *, hourly_usd: float | str | None = None, clock: Clock | None = None) -> None:
        self._given_usd = usd_by_ranks(hourly_usd)
        self._clock = clock or SystemClock()
        self._cancelled: set[str] = set()  # native ids, because a cancelled attempt that is gone looks like a lost one

    @abstractmethod
    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The status of each attempt, in the order of `handles`, of which there is at least one.

        May raise `ExecutorError`: `poll` and `poll_many` turn transient ones into UNKNOWN.
        """

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Mapping[str, Any],
        *,
        run_id: str | None = None,
        code: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[ReplicaHandle]:
        """Call `entrypoint(**entrypoint_args)` on `n_replicas` machines, all launched at once.

        The entrypoint's module must be in the image, or in the small folder `code`, which is sent along. Raises
        `LaunchError`, which holds the other handles, if only some could be launched.
        """
        known = ("run_id", "code", "env")
        if unknown := sorted(options):
            raise TypeError(f"unknown option {unknown[0]!r} of launch_replicas: {hint(unknown[0], known)}")
        run = run_id or f"{self.name}-{uuid.uuid4().hex[:12]}"
        requests = _function_requests(run, n_replicas, entrypoint, entrypoint_args, env or {}, code)
        launched, failed = [], {}
        with ThreadPoolExecutor(max_workers=min(len(requests), _LAUNCH_THREADS)) as threads:
            futures = [threads.submit(self.launch, request) for request in requests]  # each may take minutes
        for request, future in zip(requests, futures, strict=True):
            try:
                launched.append(future.result())
            except (ExecutorError, OSError) as error:
                failed[request.replica_id] = str(error)
        if failed:
            words = "; ".join(f"replica {replica_id}: {reason}" for replica_id, reason in failed.items())
            raise LaunchError(f"{len(failed)} of {len(requests)} replicas were not launched: {words}", launched, failed)
        return launched

    def price(self, request: LaunchRequest) -> Price | None:
        """The price of the request's machine: `hourly_usd` if the user gave it, else that of the provider's list."""
        if self._given_usd is None:
            return self._listed_price(request)
        usd = self._given_usd.get(request.ranks, self._given_usd.get(ANY_RANKS))
        return None if usd is None else Price(usd, "given as hourly_usd")

    def _listed_price(self, request: LaunchRequest) -> Price | None:
        """The price in the provider's list of one replica's machine, with a GPU for each rank; None if not known."""
        return None

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return self.poll_many([handle])[0]

    def poll_many(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses in the order of `handles`; all UNKNOWN while the provider does not respond."""
        try:
            return self.statuses(handles) if handles else []
        except (ExecutorDenied, MissingSdk):
            raise
        except ExecutorError as error:
            return [ReplicaStatus(ReplicaState.UNKNOWN, message=str(error))] * len(handles)

    def handle_of(
        self, run_id: str, labels: Mapping[str, Any] | None, native_id: str, native: Mapping[str, Any] | None = None
    ) -> ReplicaHandle:
        """The handle of an attempt that the provider lists under `native_id` with `labels`, its `attempt_labels`.

        `native`: what else is needed to reach it, as JSON. Raises `ExecutorDenied` if the labels are not an attempt's.
        """
        try:
            who = int((labels or {})[LABEL_REPLICA]), int((labels or {})[LABEL_ATTEMPT])
        except (KeyError, ValueError):
            raise ExecutorDenied(
                f"{native_id} has the name of an attempt of run {run_id}, and not its labels, so something else made "
                "it. Delete it, or give the run another id."
            ) from None
        return ReplicaHandle(self.name, run_id, *who, native_id, native or {})

    def tries(self, what: str, patience_s: float = 60.0) -> Iterator[None]:
        """Iterations of a retry loop that its body leaves by returning, with pauses between them.

        Raises `Unavailable` once `patience_s` seconds have passed since the first iteration. `what`: the event that the
        loop waits for, such as "the Job to be listed", for the error.
        """
        ends_at = self._clock.now() + patience_s
        while True:
            yield
            if self._clock.now() > ends_at:
                raise Unavailable(f"waited {patience_s:g} s for {what}. Try again.")
            self._clock.sleep(_TRY_S)

    def gone(self, native_id: str, words: str, native_state: str = "gone") -> ReplicaStatus:
        """The status of an attempt that the provider no longer knows.

        It is CANCELLED if this object cancelled it, else PREEMPTED with reason "lost". `words`: the message, such as
        "the Job is gone".
        """
        if native_id in self._cancelled:
            return ReplicaStatus(ReplicaState.CANCELLED, "user", None, native_state, f"cancelled; {words}")
        return ReplicaStatus(ReplicaState.PREEMPTED, "lost", None, native_state, f"{words}; nobody here cancelled it")

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None, check: bool = True
    ) -> list[ReplicaResult]:
        """Wait until all attempts have ended, by `poll_many`, and return their results in the order of `handles`.

        Each result has the exit line's value or error, read from the end of the log. Raises `CollectTimeout` after
        `timeout` seconds (None: no limit), and with `check` `ReplicaFailed` if an attempt did not succeed.
        """
        deadline = None if timeout is None else self._clock.now() + timeout
        pause_s, longest_s = _COLLECT_S
        while True:
            statuses = self.poll_many(handles)
            running = {h.replica_id: s for h, s in zip(handles, statuses, strict=True) if not s.state.ended}
            if not running:
                break
            if deadline is not None and self._clock.now() >= deadline:
                waits = "".join(f" Replica {i} is {s.state}: {s.message}." for i, s in running.items() if s.message)
                words = f"replicas {[*running]} still run after {timeout:g} s; nothing was cancelled.{waits}"
                raise CollectTimeout(words, [*running])
            self._clock.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)
        results = [self._result(handle, status) for handle, status in zip(handles, statuses, strict=True)]
        failed = [each for each in results if each.status.state is not ReplicaState.SUCCEEDED]
        if check and failed:
            raise ReplicaFailed("\n\n".join(map(_failure_text, failed)), results)
        return results

    def _result(self, handle: ReplicaHandle, status: ReplicaStatus) -> ReplicaResult:
        lines = list(self.logs(handle, tail=_TAIL_LINES))
        fields = parse_exit_line(lines) or {}
        if status.state is ReplicaState.SUCCEEDED:
            return ReplicaResult(handle, status, value=fields.get("value"))
        error = fields.get("traceback") or fields.get("error") or "\n".join(lines)
        return ReplicaResult(handle, status, error=str(error))


# -- functions in n processes -----------------------------------------------------------------------------------------


def _function_requests(
    run_id: str,
    n_replicas: int,
    entrypoint: str,
    entrypoint_args: Mapping[str, Any],
    env: Mapping[str, str],
    code: str | None = None,
) -> list[LaunchRequest]:
    """The requests that call `entrypoint(**entrypoint_args)` in `n_replicas` processes, one attempt each.

    The arguments are sent as JSON in the environment, with the Python files of the small folder `code`. Raises
    ValueError for an entrypoint of another form, arguments that JSON cannot hold, or a folder that is too large.
    """
    if n_replicas < 1:
        raise ValueError(f"n_replicas={n_replicas}: launch at least one.")
    check_entrypoint(entrypoint)
    try:
        args = json.dumps(dict(entrypoint_args))
    except (TypeError, ValueError) as error:
        raise ValueError(f"entrypoint_args are not JSON: {error}. Pass what JSON can hold.") from None
    shared = {**env, ENV_ENTRYPOINT: entrypoint, ENV_ARGS: args, ENV_WORLD_SIZE: str(n_replicas)}
    if code is not None:
        shared[ENV_CODE] = _packed_folder(Path(code))
    program = program_text(process_bootstrap)  # as text, because the image may not have this package
    return [
        LaunchRequest(
            run_id=run_id,
            replica_id=rank,
            attempt=1,
            command=["python", "-P", "-u", "-c", program],
            env={**shared, ENV_RANK: str(rank)},
        )
        for rank in range(n_replicas)
    ]


def _packed_folder(folder: Path) -> str:
    """The Python files of a folder as a zip in base64. Raises ValueError if it does not fit into the environment."""
    if not folder.is_dir():
        raise ValueError(f"code={str(folder)!r} is not a folder. Name the one that holds the entrypoint's package.")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.py")):
            archive.writestr(path.relative_to(folder).as_posix(), path.read_bytes())
    text = base64.b64encode(packed.getvalue()).decode()
    if len(text) > _CODE_BYTES:
        raise ValueError(
            f"the Python files of {folder} are {len(text)} bytes packed; {_CODE_BYTES} fit into an environment. "
            "Name a smaller folder, or put the code into the image."
        )
    return text


def _failure_text(result: ReplicaResult) -> str:
    status = result.status
    how = f"{status.state}" + (f" ({status.message})" if status.message else "")
    return f"replica {result.handle.replica_id}, attempt {result.handle.attempt}: {how}\n{result.error}".rstrip()


# -- commands, ends, names --------------------------------------------------------------------------------------------


def limited(command: Sequence[str], timeout_s: float | None) -> list[str]:
    """A command under coreutils' `timeout`. --foreground: signals reach the replica alone, as without it."""
    if timeout_s is None:
        return list(command)
    return ["timeout", "--foreground", f"--kill-after={KILL_AFTER_S}", f"{timeout_s:g}", *command]


def ended_status(
    code: int, native_state: str, *, cancelled: bool = False, timed: bool = False, oom: bool = False
) -> ReplicaStatus:
    """The status of an attempt whose process ended with `code`; negative, or 128 and more: killed by a signal.

    `native_state`: the provider's name of the state. `cancelled`: its cancel was requested. `timed`: it ran under
    coreutils' `timeout`. `oom`: it exceeded its memory limit. An attempt that ended with the exit code for success is
    SUCCEEDED even if it was cancelled.
    """
    message = "" if code == EXIT_DONE else f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    if cancelled and code != EXIT_DONE:
        state, reason = ReplicaState.CANCELLED, "user"
    elif oom and code != EXIT_DONE:
        state, reason = ReplicaState.FAILED, "oom"
    elif timed and code in _TIMED_OUT_CODES:
        state, reason = ReplicaState.TIMED_OUT, "deadline"
    elif code in _TOLD_CODES:
        state, reason = ReplicaState.PREEMPTED, "exit"
    else:
        state, reason = BY_EXIT_CODE.get(code, (ReplicaState.FAILED, "exit"))
    return ReplicaStatus(state, reason, code, native_state, message)


def env_within(request: LaunchRequest, limit_s: float) -> dict[str, str]:
    """The request's environment, plus a variable with the number of seconds after which the replica leaves by itself.

    That is some minutes before the provider ends the attempt at `limit_s` without a notice.
    """
    leave_s = limit_s - min(_LEAVE_BEFORE_S, 0.1 * limit_s)
    return {**request.env, ENV_LEAVE_AFTER: f"{leave_s:g}"}


def run_label(run_id: str) -> str:
    """The run's id in a form that every provider accepts: at most 40 lowercase letters, digits and hyphens.

    Different ids have different labels: an id that has to be changed or cut gets a digest appended.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if slug == run_id and 0 < len(slug) <= 40:
        return slug
    return f"{slug[:27].strip('-')}-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}".lstrip("-")


def run_selector(run_id: str) -> str:
    """The label selector "label=value" that finds a run's attempts in a provider's listing."""
    return f"{LABEL_RUN}={run_label(run_id)}"


def attempt_name(attempt: LaunchRequest | ReplicaHandle) -> str:
    """The provider's name of an attempt, a DNS label of at most 63 characters, by which a launch finds an older one."""
    return f"dl-{run_label(attempt.run_id)}-r{attempt.replica_id}-a{attempt.attempt}"


def attempt_labels(attempt: LaunchRequest | ReplicaHandle) -> dict[str, str]:
    """The provider's labels or tags of an attempt: run, replica and attempt number, which `find` reads."""
    return {
        LABEL_RUN: run_label(attempt.run_id),
        LABEL_REPLICA: str(attempt.replica_id),
        LABEL_ATTEMPT: str(attempt.attempt),
    }


def program_text(program: ModuleType) -> str:
    """The source of `program` with its import of `process_contract` replaced by the source of that module.

    Raises ValueError if the module does not import it exactly once, at the top level and under its own names.
    """
    source = Path(str(program.__file__)).read_text()
    imports = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and str(node.module).endswith(".process_contract")
    ]
    if len(imports) != 1 or any(alias.asname for alias in imports[0].names):
        raise ValueError(
            f"{program.__name__} cannot travel as text: it has {len(imports)} imports from process_contract. "
            "Write one `from …process_contract import NAME, …` at its top level, without `as`."
        )
    (found,) = imports
    lines = source.splitlines(keepends=True)
    contract = Path(process_contract.__file__).read_text()
    return "".join([*lines[: found.lineno - 1], contract, *lines[found.end_lineno :]])
