"""Calls of the Hugging Face Jobs API: endpoint, namespace, token, and translation of the SDK's errors.

`hf_objects` has the labels and the meaning of a job's stage, `hf_jobs` the order of calls.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.executors.answers import (
    TRANSIENT_STATUSES,
    Failure,
    answer_within,
    error_of,
    items_while,
    odd_reply,
    unreadable,
)
from diloco_orchestrator.executors.contract import ExecutorDenied, ExecutorError, MissingSdk, Unavailable
from diloco_orchestrator.executors.hf_objects import Job, hardware_of, has_ended, job_of, jobs_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_READ_TIMEOUT_S = 10.0
_LIST_TIMEOUT_S = 5.0  # of the list of hardware, for which there is a substitute
_CALL_S = 60.0  # for a call of the SDK: its HTTP client waits for ever (httpx's timeout=None)
_SILENCE_S = 150.0  # of a followed log, after which the job is polled; the SDK opens a silent stream anew after 120 s


class _Gone(ExecutorError):
    """The service has no such job."""


_SAYS = "Hugging Face says {said!r} (HTTP {status})."
_FAILURES = (
    Failure(
        ExecutorDenied,
        (),
        f"{_SAYS} Check the token (HF_TOKEN, `hf auth login`) and its right to write Jobs.",
        (401, 403),
    ),
    Failure(
        ExecutorDenied,
        (),
        f"{_SAYS} Jobs need positive credit: see https://huggingface.co/settings/billing.",
        (402,),
    ),
    Failure(_Gone, (), f"{_SAYS} Check the job's id and the namespace.", (404,)),
    Failure(Unavailable, (), f"{_SAYS} This passes; try again later.", TRANSIENT_STATUSES),
    Failure(ExecutorError, (), f"{_SAYS} Try again.", (409,)),
    Failure(ExecutorDenied, (), f"{_SAYS} Correct the request: hardware, image, namespace.", range(400, 500)),
    Failure(ExecutorError, (), f"{_SAYS} Try again."),
)


class HFJobsApi:
    """Calls of the Hugging Face Jobs API at one endpoint, with one token.

    `namespace`: owner of the jobs; None: the token's own user, fetched once. Every call raises `ExecutorDenied` for
    refused credentials or requests, `Unavailable` while the service is down, overloaded or unreachable, `ExecutorError`
    for other failures.
    """

    def __init__(self, endpoint: str | None, token: str | None, namespace: str | None) -> None:
        self._given_endpoint = endpoint
        self._token = token
        self.given_namespace = namespace
        self._found_namespace: str | None = None
        self._lock = threading.Lock()
        self._hardware: dict[str, float | None] | None = None

    @property
    def endpoint(self) -> str:
        return str(self._given_endpoint or _sdk().constants.ENDPOINT).rstrip("/")

    @property
    def namespace(self) -> str:
        if self.given_namespace is not None:
            return self.given_namespace
        with self._lock:  # once, because whoami has a strict rate limit
            if self._found_namespace is None:
                url = f"{self.endpoint}/api/whoami-v2"
                me = self._read(url).json()
                if not (isinstance(me, dict) and isinstance(me.get("name"), str) and me["name"]):
                    raise odd_reply(f"reading {url}", "a user", me)
                self._found_namespace = str(me["name"])
            return self._found_namespace

    def run(self, job: Mapping[str, Any], what: str) -> str:
        """Start a job and return its id. `what`: names the launch in errors."""
        with _errors_of(what, launching=True):
            volumes = [_sdk().Volume(**each) for each in job["volumes"]]
            arguments: Any = {**job, "volumes": volumes or None, "namespace": self.namespace}
            with _readable(what):
                return str(answer_within(_CALL_S, what, lambda: self._sdk_api().run_job(**arguments)).id)

    def hardware(self) -> dict[str, float | None] | None:
        """US dollars an hour (None: unit unknown) by name of hardware, read once; None if the list is unreadable."""
        with self._lock:
            if self._hardware is None:
                try:
                    url = f"{self.endpoint}/api/jobs/hardware"
                    listed = self._read(url, timeout_s=_LIST_TIMEOUT_S, needs_token=False).json()
                    self._hardware = hardware_of(listed, f"reading {url}")
                except ExecutorError:
                    return None
            return self._hardware

    def get(self, job_id: str, namespace: str) -> Job | None:
        """One job; None if the service has none of this id. `namespace`: the job's owner."""
        url = f"{self.endpoint}/api/jobs/{namespace}/{job_id}"
        try:
            return job_of(self._read(url).json(), f"reading {url}")
        except _Gone:
            return None

    def find(self, labels: Mapping[str, str], namespace: str | None = None, stages: Sequence[str] = ()) -> list[Job]:
        """All jobs with these labels in these stages, by default in any, ended ones included. `namespace`: their owner;
        None: that of this object.

        An empty list that a proxy returns in the service's place counts as no jobs, because nothing distinguishes it. A
        launch then creates a job, whose reply is checked; a poll requests each job that the listing lacks.
        """
        url: str | None = f"{self.endpoint}/api/jobs/{namespace or self.namespace}"
        asked = {"label": [f"{name}={value}" for name, value in labels.items()], "stage": list(stages)}
        params: dict[str, Any] | None = {name: values for name, values in asked.items() if values}
        jobs: list[Job] = []
        try:
            while url:
                page = self._read(url, params)
                jobs += jobs_of(page.json(), f"reading {url}")
                url, params = page.links.get("next", {}).get("url"), None
        except _Gone as error:  # here a 404 means that the namespace does not exist
            raise ExecutorDenied(str(error)) from None
        # Filtered again: a server that ignores the filter must not make us adopt another attempt's job.
        return [job for job in jobs if labels.items() <= (job.get("labels") or {}).items()]

    def cancel(self, job_id: str, namespace: str) -> bool:
        """End a job. Returns False if the service has none of this id.

        The SDK's own `cancel_job` reads no reply, so that a proxy's page would count as success. A reply other than the
        job is confirmed by requesting the job.
        """
        what = f"cancelling job {job_id}"
        url = f"{self.endpoint}/api/jobs/{namespace}/{job_id}"
        try:
            answer = self._ask("POST", f"{url}/cancel", what).content
            try:
                job_of(json.loads(answer), what)
            except (ValueError, Unavailable):
                job = self.get(job_id, namespace)
                if job is not None and not has_ended(job):
                    raise odd_reply(what, "the job, which has not ended", answer) from None
        except _Gone:
            return False
        return True

    def log_lines(self, job_id: str, namespace: str, follow: bool, tail: int | None) -> Iterator[str]:
        """Lines of a job's output; none if the service has no job of this id.

        `follow`: until its end; `tail`: the last ones.
        """

        def read() -> Iterator[str]:
            with _readable(what):
                api = self._sdk_api()
                yield from api.fetch_job_logs(job_id=job_id, namespace=namespace, follow=follow, tail=tail)

        def is_running() -> bool:
            job = self.get(job_id, namespace)
            return job is not None and not has_ended(job)

        what = f"reading the log of job {job_id}"
        try:
            with _errors_of(what):
                if follow:
                    lines: Iterable[str] = items_while(is_running, _SILENCE_S, read())
                else:
                    lines = answer_within(_CALL_S, what, lambda: list(read()))
                    if not lines:
                        self._check_log(job_id, namespace, what)
                for line in lines:
                    yield line.rstrip("\n")
        except _Gone:
            return

    def _check_log(self, job_id: str, namespace: str, what: str) -> None:
        """Raise `Unavailable` if the reply to a log request is no stream of events, in which the SDK finds no line."""
        url = f"{self.endpoint}/api/jobs/{namespace}/{job_id}/logs"
        headers = _sdk().utils.build_hf_headers(token=self._token)
        session = _sdk().utils.get_session()
        with session.stream("GET", url, params={"tail": 1}, headers=headers, timeout=_READ_TIMEOUT_S) as response:
            kind = response.headers.get("content-type", "")
        if response.status_code == 200 and not kind.startswith("text/event-stream"):
            raise odd_reply(what, "a stream of events", kind)

    def _sdk_api(self) -> "HfApi":
        api: HfApi = _sdk().HfApi(endpoint=self.endpoint, token=self._token)
        return api

    def _read(
        self,
        url: str,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        needs_token: bool = True,
    ) -> Any:
        """The response of a GET, which holds JSON. The SDK's own calls have no timeout, or retry for minutes.

        `timeout_s`: None for the default. `needs_token`: raise `ExecutorDenied` if this machine has no Hugging Face
        token. Raises `Unavailable` for a reply that is no JSON.
        """
        if needs_token and self._token is None and _sdk().get_token() is None:
            raise ExecutorDenied("there is no Hugging Face token here. Run `hf auth login`, or set HF_TOKEN.")
        what = f"reading {url}"
        response = self._ask("GET", url, what, params, timeout_s or _READ_TIMEOUT_S)
        try:
            response.json()
        except ValueError:
            raise odd_reply(what, "JSON", response.content) from None
        return response

    def _ask(
        self, method: str, url: str, what: str, params: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        utils = _sdk().utils
        with _errors_of(what):
            headers = utils.build_hf_headers(token=self._token)  # reads the token anew, which may be another by now
            response = utils.get_session().request(
                method, url, params=params, headers=headers, timeout=timeout_s or _CALL_S
            )
            utils.hf_raise_for_status(response)
        return response


def _sdk() -> ModuleType:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise MissingSdk(
            "HFJobsExecutor needs huggingface_hub, which is not installed: pip install 'diloco-orchestrator[hf]'"
        ) from None
    return huggingface_hub


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Context for calls of Hugging Face's SDK: raises `Unavailable` where a reply lacks a field that the SDK reads."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise unreadable(what, error) from None


@contextmanager
def _errors_of(what: str, launching: bool = False) -> Iterator[None]:
    """Context that translates errors of the SDK. `what`: the action, for messages.

    `launching`: True for a call that starts a job. A 404 then is an `ExecutorError`; otherwise it means that the job
    does not exist, and raises `_Gone`.
    """
    http_error = _sdk().errors.HfHubHTTPError
    try:
        yield
    except http_error as error:
        words = getattr(error, "server_message", None) or error.response.reason_phrase
        rows = [row for row in _FAILURES if not (launching and row.error is _Gone)]
        raise error_of(what, words, rows, error.response.status_code, error.response.headers) from None
    except (*http_error.__bases__, ValueError) as error:  # the HTTP library's own: httpx or, with later SDKs, httpx2
        raise Unavailable(
            f"{what}: {type(error).__name__}: {error}. Check that this machine reaches huggingface.co, and try again."
        ) from None
