"""Calls of Ray's REST API for jobs, with a time limit each, and translation of what goes wrong.

Over HTTP rather than by Ray's SDK, whose calls have no time limit, and whose 70 MB a laptop would need to launch.
`ray_jobs` has the order of calls and the meaning of a job's state.
"""

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from diloco_orchestrator.executors.answers import TRANSIENT_STATUSES, Failure, error_of, odd_reply
from diloco_orchestrator.executors.contract import ExecutorDenied, ExecutorError, MissingSdk, Unavailable

_CALL_S = 60.0  # a head node answers in milliseconds; a busy one in seconds

Job = Mapping[str, Any]


class _Exists(ExecutorError):
    """The cluster has a job of this id already."""


class _Gone(ExecutorError):
    """The cluster has no job of this id."""


_SAYS = "Ray says {said!r} (HTTP {status})."
_FAILURES = (
    # Ray answers 500 for whatever its own code raises: the text distinguishes.
    Failure(_Exists, ("already exists",), _SAYS),
    Failure(ExecutorDenied, (), f"{_SAYS} Check the cluster's token (RAY_AUTH_TOKEN).", (401, 403)),
    Failure(_Gone, ("does not exist",), _SAYS, (404,)),
    Failure(ExecutorDenied, ("ValueError", "TypeError"), f"{_SAYS} Correct the executor's options.", (400, 500)),
    Failure(Unavailable, (), f"{_SAYS} This passes; try again later.", TRANSIENT_STATUSES),
    Failure(ExecutorDenied, (), f"{_SAYS} Check address=, which is that of Ray's dashboard.", range(400, 500)),
)


class RayApi:
    """Calls to the jobs API of one cluster, at the address of its dashboard.

    The token of the cluster, if it has one, is read for every call, as Ray's own tools read it: RAY_AUTH_TOKEN, or the
    file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token; RAY_JOB_HEADERS holds further headers as JSON. Every call raises
    `ExecutorDenied` where these are refused, `Unavailable` while the cluster does not answer.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def submit(self, body: Mapping[str, Any], what: str) -> bool:
        """Submit a job; False if the cluster has one of this id, even ended. `what`: the action, for errors."""
        try:
            answer = self._json("POST", "/api/jobs/", what, json=body)
        except _Exists:
            return False
        if not isinstance(answer, dict) or answer.get("submission_id") != body["submission_id"]:
            raise odd_reply(what, "the job", answer)
        return True

    def upload(self, name: str, files: Mapping[str, str]) -> str:
        """Store a package of text files, unpacked on the node of a job that names the returned URI.

        Ray deletes it when no job names it any more.
        """
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
        self._request("GET", f"/api/packages/gcs/{name}", "reserving a package", missing_ok=True)  # keeps it until used
        self._request("PUT", f"/api/packages/gcs/{name}", "uploading a package", content=packed.getvalue())
        return f"gcs://{name}"

    def jobs(self) -> dict[str, Job]:
        """All jobs that were submitted through this API and are not deleted, by id."""
        what = f"listing the jobs of {self.address}"
        listed = self._json("GET", "/api/jobs/", what)
        if not isinstance(listed, list) or not all(isinstance(job, dict) and "status" in job for job in listed):
            raise odd_reply(what, "a list of jobs", listed)
        return {job["submission_id"]: job for job in listed if job.get("submission_id")}

    def job(self, job_id: str) -> Job:
        """The job with this id, which must exist."""
        what = f"reading job {job_id}"
        job = self._json("GET", f"/api/jobs/{job_id}", what)
        if not isinstance(job, dict) or "status" not in job:
            raise odd_reply(what, "a job", job)
        return job

    def stop(self, job_id: str) -> bool:
        """Ask Ray to end a job. True if the cluster has a job of this id, even an ended one; else False."""
        try:
            self._json("POST", f"/api/jobs/{job_id}/stop", f"stopping job {job_id}")
        except _Gone:
            return False
        return True

    def log(self, job_id: str) -> str:
        """The whole output of a job; empty if there is none of this id."""
        what = f"reading the log of job {job_id}"
        try:
            answer = self._json("GET", f"/api/jobs/{job_id}/logs", what)
        except _Gone:
            return ""
        if not isinstance(answer, dict) or not isinstance(answer.get("logs"), str | None):
            raise odd_reply(what, "a log", answer)
        return answer.get("logs") or ""

    def _json(self, method: str, path: str, what: str, **content: Any) -> Any:
        response = self._request(method, path, what, **content)
        try:
            return response.json()
        except ValueError:
            raise odd_reply(what, "JSON", response.content) from None

    def _request(self, method: str, path: str, what: str, missing_ok: bool = False, **content: Any) -> Any:
        httpx = _httpx()
        try:
            response = httpx.request(
                method, f"{self.address}{path}", headers=_headers(), timeout=_CALL_S, follow_redirects=False, **content
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise Unavailable(
                f"{what}: {type(error).__name__}: {error}. Check that {self.address} is Ray's dashboard and can be "
                "reached from here (`ray dashboard`, `kubectl port-forward`), and try again."
            ) from None
        if response.is_success or (missing_ok and response.status_code == 404):
            return response
        if response.is_redirect:
            raise Unavailable(
                f"{what}: {self.address} points elsewhere (HTTP {response.status_code}), as a login page does. "
                "Give what it asks for in RAY_JOB_HEADERS, or try again."
            )
        # A traceback, of which the last lines say what happened.
        said = "\n".join(response.text.strip().splitlines()[-2:]) or response.reason_phrase
        raise error_of(what, said, _FAILURES, response.status_code, response.headers)


def _headers() -> dict[str, str]:
    headers: dict[str, str] = {}
    if given := os.environ.get("RAY_JOB_HEADERS"):
        try:
            headers.update(json.loads(given))
        except ValueError:
            raise ExecutorDenied('RAY_JOB_HEADERS is not JSON. Write it like {"Authorization": "Bearer …"}.') from None
    if token := os.environ.get("RAY_AUTH_TOKEN") or _token_in_file():
        headers.setdefault("Authorization", f"Bearer {token}")
    return headers


def _token_in_file() -> str:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    return path.read_text().strip() if path.is_file() else ""


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError:
        raise MissingSdk(
            "RayExecutor needs httpx, which is not installed: pip install 'diloco-orchestrator[ray]'"
        ) from None
    return httpx
