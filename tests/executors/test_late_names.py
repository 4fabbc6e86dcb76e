"""A provider that knows a name before it shows it, or shows one twice: through the real SDKs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopback_hf import LoopbackHF
from loopback_kubernetes import running_kubernetes
from loopback_modal import LoopbackModal

from executors.contract import ServerlessExecutor, Unavailable
from executors.hf_jobs import HFJobsExecutor
from executors.kubernetes_jobs import KubernetesExecutor
from executors.modal_sandboxes import ModalExecutor
from executors.remote_base import attempt_name
from executors.testing import request_of

STAY = "import time; time.sleep(600)"
REQUEST = request_of(STAY)


@dataclass
class Place:
    """An executor, its service, and what makes the service hide the attempt, or show it again."""

    executor: ServerlessExecutor
    service: Any
    hide: Callable[[bool], None]


@pytest.fixture(params=["hugging face", "kubernetes", "modal"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    def hide_name(on: bool) -> None:
        service.hides = {attempt_name(REQUEST)} if on else set()

    if request.param == "hugging face":
        with LoopbackHF() as service:
            executor = HFJobsExecutor(endpoint=service.endpoint, token=service.token)
            yield Place(executor, service, lambda on: setattr(service, "hides", on))
    elif request.param == "kubernetes":
        with running_kubernetes() as service:
            kubeconfig = service.write_kubeconfig(tmp_path / "kubeconfig")
            yield Place(KubernetesExecutor(kubeconfig=kubeconfig, image="any"), service, hide_name)
    else:
        with LoopbackModal() as service:
            yield Place(ModalExecutor("tests", client=service.client()), service, hide_name)


def test_a_name_that_exists_and_is_not_shown_yet_is_waited_for(place: Place):
    """On Kubernetes and Modal another launcher has made it; Hugging Face has just answered with its id."""
    if not isinstance(place.service, LoopbackHF):
        place.executor.launch(REQUEST)
    place.hide(True)
    with pytest.raises(Unavailable, match=r"Launch .* again"):
        place.executor.launch(REQUEST)
    place.hide(False)
    handle = place.executor.launch(REQUEST)
    assert place.executor.find(REQUEST.run_id) == [handle]


def test_an_attempt_that_a_listing_names_twice_is_one(place: Place):
    handles = [place.executor.launch(REQUEST), place.executor.launch(request_of(STAY, replica_id=1))]
    place.service.repeats = True
    assert place.executor.find(REQUEST.run_id) == handles
    assert len(place.executor.poll_many(handles)) == 2
