"""Which failures pass by themselves: statuses, `Retry-After`, and networks that break, through the real SDKs."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from loopback_hf import LoopbackHF
from loopback_kubernetes import LoopbackKubernetes, running_kubernetes

from executors.answers import retry_after_s
from executors.contract import ExecutorDenied, ServerlessExecutor, Unavailable
from executors.hf_jobs import HFJobsExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.testing import request_of


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        (None, None),
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": " 120 "}, 120.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "Sun, 22 Nov 2026 08:00:30 GMT", "Date": "Sun, 22 Nov 2026 08:00:00 GMT"}, 30.0),
        ({"Retry-After": "Sun, 22 Nov 2026 07:00:00 GMT", "Date": "Sun, 22 Nov 2026 08:00:00 GMT"}, 0.0),
        ({"Retry-After": "Sun, 22 Nov 2026 08:00:30 GMT"}, None),
        ({"Retry-After": "Sun, 22 Nov 2026 08:00:30 GMT", "Date": "Sun, 22 Nov 2026 08:00:00"}, None),
    ],
)
def test_the_header_gives_seconds_or_nothing(headers, seconds):
    assert retry_after_s(headers) == seconds


STAY = "import time; time.sleep(600)"


@dataclass
class Place:
    """An executor, and the server that answers it."""

    executor: ServerlessExecutor
    server: LoopbackHF | LoopbackKubernetes


@pytest.fixture(params=["hf", "kubernetes"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "hf":
        with LoopbackHF() as service:
            yield Place(HFJobsExecutor(endpoint=service.endpoint, token=service.token), service)
    else:
        with running_kubernetes() as cluster:
            config = cluster.write_kubeconfig(tmp_path / "kubeconfig")
            yield Place(KubernetesExecutor(kubeconfig=config, image="python:3.12"), cluster)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_that_is_down_or_busy_is_unavailable(place: Place, status: int):
    place.server.failing = status
    with pytest.raises(Unavailable, match=str(status)) as caught:
        place.executor.launch(request_of(STAY))
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize("status", [429, 503])
def test_the_pause_that_a_server_asks_for_is_in_the_error(place: Place, status: int):
    place.server.failing, place.server.retry_after = status, "17"
    with pytest.raises(Unavailable) as caught:
        place.executor.launch(request_of(STAY))
    assert caught.value.retry_after_s == 17.0


@pytest.mark.parametrize("status", [400, 403, 422])
def test_what_would_fail_again_is_denied(place: Place, status: int):
    place.server.failing = status
    with pytest.raises(ExecutorDenied):
        place.executor.launch(request_of(STAY))


@pytest.mark.parametrize("fault", ["refused", "closed"])
def test_a_network_that_is_broken_is_unavailable(fault: str, tmp_path: Path):
    """Nobody listens, or whoever listens closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if fault == "refused":
            listener.close()
        else:
            threading.Thread(target=closing, args=(listener,), daemon=True).start()
        with pytest.raises(Unavailable):
            HFJobsExecutor(endpoint=f"http://127.0.0.1:{port}", token="hf_x", namespace="me").launch(request_of(STAY))


def closing(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()
