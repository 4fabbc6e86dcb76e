"""`Places`: each attempt goes to the place that its request names, and back to it by its handle."""

import json
import math

import pytest

from executors import (
    HFJobsExecutor,
    LocalProcessExecutor,
    ModalExecutor,
    Places,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
)
from executors.contract import LaunchRequest, hourly_usd, price_of
from executors.prices import listed_tflops
from executors.registry import make_fleet, recreate, spec_of


class Told(LocalProcessExecutor):
    """Answers for everything with the folder that it was made with, and keeps the handles that it is given."""

    def __init__(self, folder: str, usd: float = 1.0) -> None:
        super().__init__(folder, hourly_usd=usd)
        self.folder, self.given = folder, list[ReplicaHandle]()

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        return ReplicaHandle(self.name, request.run_id, request.replica_id, request.attempt, self.folder)

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        self.given.append(handle)
        return ReplicaStatus(ReplicaState.RUNNING, native_state=self.folder)

    def find(self, run_id: str) -> list[ReplicaHandle]:
        return [ReplicaHandle(self.name, run_id, int(self.folder[-1]), 1, self.folder)]


@pytest.fixture
def places(tmp_path) -> Places:
    return Places({"near": Told(f"{tmp_path}/1"), "far": Told(f"{tmp_path}/2", usd=2.5)}, usd_per_hour=20)


def test_an_attempt_is_launched_at_the_place_of_its_request_and_asked_for_by_the_place_in_its_handle(places):
    handles = [places.launch(LaunchRequest("run", 0, n, [], place=name)) for n, name in ((1, "far"), (2, "near"))]
    assert [each.executor for each in handles] == ["far", "near"]
    assert [status.native_state[-1] for status in places.poll_many(handles)] == ["2", "1"]
    assert [each.executor for each in places.places["far"].given] == ["local"]  # as that executor made it
    assert [each.executor for each in places.find("run")] == ["near", "far"]
    assert places.has(handles[0]) and not places.has(ReplicaHandle("modal", "run", 0, 1, "n"))
    with pytest.raises(ValueError, match=r"'modal' is none of this run's places: near, far\."):
        places.poll(ReplicaHandle("modal", "run", 0, 1, "n"))


def test_each_place_has_its_price_and_machines_that_join_cost_nothing_unless_it_is_said(places):
    assert [hourly_usd(places, LaunchRequest("r", 0, 1, [], place=name)) for name in ("near", "far")] == [1.0, 2.5]
    joined = make_fleet(["join", "modal"], {})[0]
    assert hourly_usd(joined, LaunchRequest("r", 0, 1, [], place="join")) == 0.0
    paid = make_fleet(["join", "modal"], {"join": {"hourly_usd": 0.3}})[0]
    assert hourly_usd(paid, LaunchRequest("r", 0, 1, [], place="join")) == 0.3


def test_places_are_made_again_from_their_record_in_their_order():
    made = Places({"z": ModalExecutor("T4"), "a": HFJobsExecutor("t4-small")}, usd_per_hour=20)
    again = recreate(json.loads(json.dumps(spec_of(made), sort_keys=True)))
    assert isinstance(again, Places) and list(again.places) == ["z", "a"] and again.usd_per_hour == 20
    assert again.plan(LaunchRequest("run", 2, 1, ["python"], place="a"))["flavor"] == "t4-small"
    assert again.name == made.name == "z+a"


def test_executors_without_counts_are_places_to_choose_from():
    executor, count = make_fleet(["modal", "hf-jobs"], {"modal": {"gpu": "T4"}}, usd_per_hour=8.0)
    assert isinstance(executor, Places) and count is None and executor.usd_per_hour == 8.0


@pytest.mark.parametrize(
    ("specs", "usd_per_hour", "words"),
    [
        (["modal", "modal"], 8.0, "--executor modal is given twice"),
        (["modal:2", "hf-jobs"], None, "say how many replicas go to hf-jobs: --executor hf-jobs:2; or give no counts"),
        (["modal"], 8.0, "--usd-per-hour is for several places"),
        (["modal:1", "hf-jobs:1"], 8.0, "--usd-per-hour is for several places"),
    ],
)
def test_what_cannot_be_meant_is_refused(specs, usd_per_hour, words):
    with pytest.raises(ValueError, match=words):
        make_fleet(specs, {}, usd_per_hour)


@pytest.mark.parametrize("usd", [0, -1.0, math.nan, math.inf, "20"])
def test_a_limit_that_is_no_number_of_dollars_is_refused(usd):
    with pytest.raises(ValueError, match="is no number of US dollars above 0"):
        Places([LocalProcessExecutor()], usd_per_hour=usd)


def test_two_places_of_one_name_and_no_place_are_refused():
    with pytest.raises(ValueError, match=r"two places are called 'modal': name them, Places\(\{'modal-1': …"):
        Places([ModalExecutor("T4"), ModalExecutor("A100")])
    with pytest.raises(ValueError, match="has no place"):
        Places([])


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [("A100-80GB", 312), ("A10G", 70), ("l4x4", 121), ("l40sx1", 362), ("g6e.xlarge", 362), ("g6.xlarge", 121),
     ("p5.4xlarge", 989), ("cpu-basic", None), ("z900", None)],
)  # fmt: skip
def test_a_kind_of_machine_has_its_gpus_listed_speed(kind, tflops):
    assert listed_tflops(kind) == tflops


def test_prices_of_lists_carry_the_listed_speed():
    request = LaunchRequest("r", 0, 1, [])
    assert price_of(ModalExecutor(gpu=["H100", "L4"]), request).tflops == 121  # the slower of those that it may get
    assert price_of(ModalExecutor(gpu="T4", hourly_usd=1.0), request).tflops is None
