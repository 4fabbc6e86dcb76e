"""Starts one process with the image, machine, secrets and access to the bucket that a replica would have.

For `diloco doctor --executor … URL`, before a run costs money. `inspection.examination` has the checks.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from diloco_orchestrator.clock import Clock, random_token
from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.code_archive.pack import pack_ours
from diloco_orchestrator.code_archive.pinning import pinned
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.executors.contract import (
    CollectTimeout,
    ExecutorError,
    LaunchRequest,
    ReplicaState,
    ServerlessExecutor,
)
from diloco_orchestrator.executors.process_contract import parse_exit_line
from diloco_orchestrator.executors.remote_base import program_text
from diloco_orchestrator.inspection.doctor import Finding, remove_attempts
from diloco_orchestrator.launching.prepare import images_by_tag, images_words
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.process import ENV_STORAGE_OPTIONS
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import INTERACTIVE, open_store, options_elsewhere, readable_url
from diloco_orchestrator.supervision.credential_routes import check_route
from diloco_orchestrator.supervision.launch_request import extras_for, names_of

_PROGRAM = "diloco_orchestrator.inspection.examination"
_PATIENCE_S = 1800.0  # long enough to start a node, pull an image and install torch into it
_URL_LIFETIME_S = 6 * 3600.0
_TAIL_LINES = 60
_CLOCK_S = 30.0  # a difference that matters: stores refuse requests whose time is 15 minutes off


def examine_over_there(
    executor: ServerlessExecutor,
    url: str,
    clock: Clock,
    *,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """Findings of one process that is launched like replica 0; objects it left in the bucket are deleted.

    Nothing is launched if it would have no credentials for the bucket. A finding that is not ok names the error that a
    replica would fail with.
    """
    token = random_token()
    launching = executor.part(LaunchRequest(f"doctor-{token}", 0, 1, []))
    who = f"{launching.name} over there"
    key = f"{keys.DOCTOR}{token}/code.zip"
    executor.use_store(url, {})
    try:
        request = _request(launching, url, token, env or {}, secrets or {})
        check_route(url, {}, request, executor)
        store = open_store(url, clock=clock, retry=INTERACTIVE)
    except DilocoError as error:
        what, _, todo = str(error).partition(". ")
        yield Finding(f"{who}: launch", False, f"{what}.", todo)
        return
    left = ""
    try:
        if images := sorted(set(images_by_tag(launching.plan(request)))):
            words, _, todo = images_words(images).partition("; ")
            yield Finding(f"{who}: image", True, words, todo)
        yield from _launched(launching, request, store, key, url, who, clock)
    except (ExecutorError, DilocoError) as error:
        yield Finding(f"{who}: launch", False, str(error))
    finally:
        left = remove_attempts(launching, [request.run_id], clock)
        store.delete(key)
    if left:
        yield Finding(f"{who}: clean-up", False, left, f"Look for attempts of {request.run_id}, and end them there.")


def _request(
    executor: ServerlessExecutor,
    url: str,
    token: str,
    env: Mapping[str, str],
    secrets: Mapping[str, str],
) -> LaunchRequest:
    wanted = ["--gpu-wanted"] if _wants_gpu(executor) else []
    where = ["--store", url, *wanted]
    sent = dict(secrets)
    given = {**env, **names_of(secrets)}
    if options := {} if executor.shares_machine else options_elsewhere(url, {}):
        sent[ENV_STORAGE_OPTIONS] = json.dumps(options)
    if executor.shares_machine:
        command = ["python", "-P", "-m", _PROGRAM, *where]
    else:
        command = ["python", "-u", "-c", program_text(bootstrap), *where]
        given = {**given, bootstrap.ENV_PROGRAM: _PROGRAM}
    return LaunchRequest(f"doctor-{token}", 0, 1, command, env=given, secrets=sent)


def _wants_gpu(executor: ServerlessExecutor) -> bool:
    options = executor.options or {}
    return bool(options.get("gpu") or options.get("gpu_types"))


def _launched(
    executor: ServerlessExecutor,
    request: LaunchRequest,
    store: Store,
    key: str,
    url: str,
    who: str,
    clock: Clock,
) -> Iterator[Finding]:
    if not executor.shares_machine:
        extras = extras_for(url)
        listed = pinned("auto", None, False, extras, (), request.secrets, request.env)  # as a launch without a list
        archive = pack_ours(extras, listed.requirements)
        store.create(key, archive.data)
        signed = readable_url(url, None, key, _URL_LIFETIME_S)
        env, secrets = {bootstrap.ENV_SHA256: archive.sha256}, {bootstrap.ENV_URL: signed}
        request = replace(request, env={**request.env, **env}, secrets={**request.secrets, **secrets})
    began, began_at = clock.now(), clock.wall_time()
    handle = executor.launch(request)
    try:
        (result,) = executor.collect([handle], timeout=_PATIENCE_S, check=False)
    except CollectTimeout:
        words = f"it still runs or waits for a machine after {_PATIENCE_S / 60:.0f} minutes, and is cancelled"
        waits_for = executor.poll(handle).message
        words += f": {waits_for}" if waits_for else ""
        yield Finding(f"{who}: launch", False, words, "Look at the provider's page for this attempt.")
        return
    finally:
        executor.cancel(handle)
    ended_at = clock.wall_time()
    fields = parse_exit_line(executor.logs(handle, tail=_TAIL_LINES)) or {}
    value = fields.get("value")
    if result.status.state is not ReplicaState.SUCCEEDED or not isinstance(value, dict):
        words = str(fields.get("error") or result.error or result.status.message or result.status.state)
        lines = words.strip().splitlines() or ["it ended without a word"]
        what, _, todo = lines[-1].partition(". ")
        yield Finding(f"{who}: start", False, what, todo or "The lines before it are in the provider's log.")
        return
    yield Finding(f"{who}: start", True, f"examined and ended {clock.now() - began:.0f} s after the launch")
    for each in value["findings"]:
        yield Finding(f"{who}: {each['name']}", each["ok"], each["detail"], each["todo"])
    yield clock_finding(who, float(value["at"]), began_at, ended_at)


def clock_finding(who: str, at: float, began_at: float, ended_at: float) -> Finding:
    """The finding about the clock of the machine named `who`; not ok if it is ten minutes or more off this machine's.

    `at`: its time. `began_at`, `ended_at`: this machine's times between which `at` was read. All in seconds since 1970.
    """
    off_s = at - ended_at if at > ended_at else min(0.0, at - began_at)
    if abs(off_s) < _CLOCK_S:
        return Finding(f"{who}: clock", True, f"agrees with this machine's to {_CLOCK_S:g} s or better")
    words = f"it is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} this machine's"
    return Finding(f"{who}: clock", abs(off_s) < 600, words, "Set one of them: S3 refuses requests 15 minutes off.")
