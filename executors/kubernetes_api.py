"""Calls of the Kubernetes API: connection, replies as plain data, translation of HTTP statuses and network errors.

`kubernetes_jobs` maps attempts to objects.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_orchestrator.executors.answers import TRANSIENT_STATUSES, Failure, error_of, odd_reply
from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    ExecutorError,
    MissingSdk,
    NoCapacity,
    Unavailable,
)
from diloco_orchestrator.executors.kubernetes_objects import QUOTA, object_of
from diloco_orchestrator.executors.kubernetes_template import CONTAINER

if TYPE_CHECKING:
    from kubernetes.client import Configuration
    from kubernetes.client.exceptions import ApiException
    from urllib3 import BaseHTTPResponse

_CALL_S = (10, 30)  # seconds to connect, to answer
_KINDS = {"job": "Job", "pod": "Pod", "secret": "Secret", "service": "Service", "event": "Event"}
_STAMPED = re.compile(rb"\d{4}-\d\d-\d\dT\S+ ")  # the time in front of each line of a log
_FOLLOW_S = (10, 300)  # seconds; a replica may be silent for long, and a log that timed out is opened again


_FAILURES = (
    Failure(  # others' Jobs end, and the same call succeeds
        NoCapacity, (QUOTA,), "there is no room ({said}). Wait until others end, or raise the quota.", (403,)
    ),
    Failure(
        ExecutorDenied,
        (),
        "access is refused ({status}: {said}). Check who you are to the cluster (kubectl auth whoami), and what that "
        "may do here.",
        (401, 403),
    ),
    Failure(
        ExecutorDenied,
        (),
        "it is refused as invalid ({status}: {said}). Change the request.",
        (400, 404, 405, 413, 422),
    ),
    Failure(Unavailable, (), "it failed ({status}: {said}). Try again.", TRANSIENT_STATUSES),
    Failure(ExecutorError, (), "it failed ({status}: {said}). Try again."),
)


class KubernetesApi:
    """Calls to one cluster, connected to at the first call.

    `login` makes the SDK's configuration and may raise `ExecutorDenied`; `needed_by` names the executor in the error
    about a missing SDK. After a 401 the login is repeated, which reads tokens and files anew, and the call once more.
    Every call raises `ExecutorDenied` for refused or invalid requests, `NoCapacity` for an exceeded quota,
    `Unavailable` while the API server is down, overloaded or unreachable or for a reply that is not the API's,
    `ExecutorError` for other failures.
    """

    def __init__(self, login: "Callable[[], Configuration]", needed_by: str) -> None:
        self._login = login
        self._needed_by = needed_by
        self._connecting = threading.Lock()
        self._apis: Mapping[str, Any] | None = None

    def call(
        self, verb: str, about: str, *args: Any, answers: tuple[int, ...] = (), **options: Any
    ) -> dict[str, Any] | None:
        """The reply of the SDK's method `verb` about the object `about`; None for an HTTP status in `answers`."""
        response = self._send(verb, about, *args, answers=answers, timeout_s=_CALL_S, **options)
        if response is None:
            return None
        try:
            data = response.data
        except _network_errors() as error:
            raise _unreachable(about, error) from None
        what, kind = f"asking Kubernetes about {about}", _kind_of(verb)
        try:
            reply = json.loads(data)
        except ValueError:
            raise odd_reply(what, "JSON", data) from None
        return object_of(reply, kind, what)

    def items(self, kind: str, namespace: str, selector: str, by: str = "label") -> list[dict[str, Any]]:
        """Objects of a kind ("job", "pod", "event") that `selector` chooses, by their labels or (`by`) "field"s."""
        chosen: dict[str, Any] = {f"{by}_selector": selector}
        reply = self.call(f"list_namespaced_{kind}", f"the {kind}s of {selector}", namespace, **chosen)
        return list((reply or {}).get("items") or [])

    def log_lines(self, pod: str, namespace: str, follow: bool, tail: int | None) -> Iterator[str]:
        """Lines of a pod's log, each with its time in front; none before the pod's start or without its node.

        Raises `Unavailable` for a reply in which no line has a time: a node's error, or a proxy's page. Among lines
        with a time, lines without one are left out. `follow`: go on until the pod ends; `tail`: the last lines only.
        """
        stream = self._send(
            "read_namespaced_pod_log",
            f"the log of {pod}",
            pod,
            namespace,
            answers=(400, 404),
            timeout_s=_FOLLOW_S if follow else _CALL_S,
            container=CONTAINER,  # a cluster may add others to the pod
            follow=follow,
            timestamps=True,
            **({} if tail is None else {"tail_lines": tail}),
        )
        odd = None
        for line in _lines(stream) if stream is not None else ():
            if _STAMPED.match(line):
                odd = b""
                yield line.decode(errors="replace")
            elif odd is None and line:
                odd = line
        if odd:
            raise odd_reply(f"reading the log of {pod}", "a log with a time in each line", odd)

    def _send(
        self,
        verb: str,
        about: str,
        *args: Any,
        answers: tuple[int, ...],
        timeout_s: tuple[int, int],
        **options: Any,
    ) -> "BaseHTTPResponse | None":
        """Call the SDK's method `verb` and return the raw response; None for an HTTP status in `answers`.

        The response is raw because the SDK's own models refuse fields that a newer server adds. `about`: the object.
        `timeout_s`: seconds to connect, and to answer.
        """
        apis = self._connected()
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config import ConfigException

        def send(apis: Mapping[str, Any]) -> "BaseHTTPResponse":
            method = getattr(apis["job" if verb.endswith("_job") else "core"], verb)
            response: BaseHTTPResponse = method(*args, _preload_content=False, _request_timeout=timeout_s, **options)
            return response

        try:
            try:
                return send(apis)
            except ApiException as error:
                if error.status != 401:
                    raise
                return send(self._connected(instead_of=apis))
        except ApiException as error:
            if error.status in answers:
                return None
            raise _refusal(about, error) from None
        except ConfigException as error:
            raise ExecutorDenied(f"the login to Kubernetes failed: {error}. Does kubectl work here?") from None
        except _network_errors() as error:
            raise _unreachable(about, error) from None

    def _connected(self, instead_of: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """The SDK's API objects for Jobs and for the core API, by "job" and "core", cached after the first login.

        `instead_of`: API objects whose login the server refused; if they are still the cached ones, log in again.
        Raises `MissingSdk`, or `ExecutorDenied` if the login fails.
        """
        with self._connecting:
            if self._apis is None or self._apis is instead_of:
                try:
                    from kubernetes import client
                except ImportError:
                    raise MissingSdk(
                        f"the {self._needed_by} executor needs the Kubernetes client, which is not installed. "
                        "Install it: pip install 'diloco-orchestrator[eks]'"
                    ) from None
                from urllib3.util import Retry

                configuration = self._login()
                # urllib3's default waits for a silent server four times, and sleeps for as long as `Retry-After` says.
                # Callers try again; once is for a connection that the server closed between two calls.
                configuration.retries = Retry(1, status=0, respect_retry_after_header=False)
                connection = client.ApiClient(configuration)
                self._apis = {"job": client.BatchV1Api(connection), "core": client.CoreV1Api(connection)}
            return self._apis


def _kind_of(verb: str) -> str:
    """The kind of object that the SDK's method `verb` returns: "JobList" for list_namespaced_job."""
    action, _, kind = verb.partition("_namespaced_")
    return "Status" if action == "delete" else _KINDS[kind] + ("List" if action == "list" else "")


def login_by_kubeconfig(kubeconfig: str | None, context: str | None, other_ways: str = "") -> "Configuration":
    """The client configuration of a kubeconfig, by default the usual one; without any, that of this process's pod.

    Raises `ExecutorDenied` if there is none; `other_ways` ends its advice.
    """
    import kubernetes.config as kubernetes_config
    import yaml
    from kubernetes import client

    config: Any = kubernetes_config
    configuration = client.Configuration()
    usual = config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION.split(":")
    named = kubeconfig is not None or context is not None
    try:
        if named or any(Path(path).expanduser().exists() for path in usual):
            config.load_kube_config(kubeconfig, context, configuration, persist_config=False)
        else:
            config.load_incluster_config(configuration)
    except (config.ConfigException, yaml.YAMLError, OSError) as error:  # half of a file that is being rewritten
        raise ExecutorDenied(
            f"no Kubernetes cluster is configured: {str(error).rstrip('.')}. Name a kubeconfig that works with "
            f"kubectl{other_ways}."
        ) from None
    return configuration


def _lines(stream: "BaseHTTPResponse") -> Iterator[bytes]:
    """Lines of a response as they arrive. Raises `ExecutorError` for a broken connection, after the last whole line."""
    rest = b""
    try:
        for chunk in stream.stream():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
        if rest:
            yield rest
    except _network_errors() as error:
        raise _unreachable("a log", error) from None
    finally:
        stream.close()


def _network_errors() -> tuple[type[Exception], ...]:
    from urllib3.exceptions import HTTPError

    return (HTTPError, OSError)


def _unreachable(about: str, error: Exception) -> Unavailable:
    return Unavailable(f"the Kubernetes API did not answer about {about}: {error}. Try again.")


def _refusal(about: str, error: "ApiException") -> ExecutorError:
    try:
        words = str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        words = str(error.reason)
    return error_of(f"asking Kubernetes about {about}", words, _FAILURES, int(error.status or 0), error.headers)
