"""What machines cost: tables with a date, spot told apart from on demand, and what the user says."""

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from unittest import mock

import pytest

from diloco_orchestrator.clock import ManualClock
from executors import (
    EKSExecutor,
    HFJobsExecutor,
    KubernetesExecutor,
    LocalProcessExecutor,
    MixedExecutor,
    ModalExecutor,
    eks_jobs,
)
from executors.contract import LaunchRequest, hourly_usd, price_of
from executors.prices import EC2, EC2_GPUS, HF_JOBS, MODAL, Price, PriceTable, modal_price
from executors.registry import make_executor

REQUEST = LaunchRequest("run", 0, 1, ["python"])
A_YEAR = 365


TABLES = (HF_JOBS, MODAL, EC2)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_no_table_is_older_than_a_year(table: PriceTable):
    age = (date.today() - table.as_of).days
    assert 0 <= age < A_YEAR, f"{table.name} is {age} days old: read {table.url}, and set as_of"


def test_every_shared_instance_has_a_price():
    shared = {kind for kind, gpus in EC2_GPUS.items() if gpus > 1}
    assert {kind for kind in EC2.usd if kind.endswith(("24xlarge", "48xlarge", ".12xlarge"))} == shared


def test_every_kind_of_hardware_that_the_sdk_names_has_a_price():
    from huggingface_hub import JobHardware

    assert {each.value for each in JobHardware} == set(HF_JOBS.usd)


def test_only_what_the_provider_says_itself_is_shown_as_confirmed():
    own = {"github.com/huggingface/", "github.com/aws/"}
    for table in TABLES:
        assert ("unconfirmed" in table.source) == (not table.confirmed_by)
        assert not table.confirmed_by or any(each in table.confirmed_by for each in own)
    assert "unconfirmed" in MODAL.source and PriceTable("x", "", date(2026, 1, 1), {}).source.endswith("unconfirmed")


@pytest.mark.parametrize(
    "executor",
    [
        LocalProcessExecutor(hourly_usd=1.25),
        ModalExecutor(gpu="H100", hourly_usd=1.25),
        HFJobsExecutor(hourly_usd=1.25),
        KubernetesExecutor(hourly_usd=1.25),
        EKSExecutor(hourly_usd=1.25, instance_type="p5.48xlarge"),
        MixedExecutor([(KubernetesExecutor(hourly_usd=1.25), 1)]),
    ],
    ids=lambda executor: executor.name,
)
def test_what_the_user_says_wins_everywhere(executor):
    assert hourly_usd(executor, REQUEST) == 1.25


def test_a_price_by_ranks_is_that_of_replicas_with_as_many():
    executor = make_executor("slurm", {"hourly_usd": "8:24,1:3.5"})
    prices = [hourly_usd(executor, replace(REQUEST, ranks=ranks)) for ranks in (8, 4, 1)]
    assert prices == [24.0, None, 3.5]
    assert hourly_usd(KubernetesExecutor(hourly_usd="2"), replace(REQUEST, ranks=8)) == 2.0


@pytest.mark.parametrize("said", ["", "8:", "8:24,", "0:3", "8:24,8:25", "8:24,3", "1:nan", "-1", "one"])
def test_a_text_that_is_no_price_is_refused(said: str):
    with pytest.raises(ValueError, match=r'no number of US dollars an hour.*as in "8:24,1:3.5"'):
        KubernetesExecutor(hourly_usd=said)


def test_a_price_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no number of US dollars"):
        KubernetesExecutor(hourly_usd=-1)
    with pytest.raises(ValueError, match="no number of US dollars"):
        LocalProcessExecutor(hourly_usd=float("nan"))


def test_a_sandbox_costs_its_dearest_gpu_its_cores_and_its_memory_times_the_regions_factor():
    assert modal_price([], None, None, []) == Price(
        pytest.approx(0.1419 + 0.0242, abs=1e-4), modal_price([], None, None, []).source
    )
    assert modal_price([], 0.25, 128, []) == modal_price([], None, None, [])  # a replica uses more than that
    plain = modal_price(["A100", "H100"], 4, 16384, [])
    assert plain is not None and plain.hourly_usd == pytest.approx(3.9492 + 4 * 0.1419 + 16 * 0.0242, abs=1e-4)
    assert "preemptible" in plain.source and "2026" in plain.source and "4 cores and 16 GiB" in plain.source
    broad, narrow = modal_price(["T4"], None, None, ["us"]), modal_price(["T4"], None, None, ["us", "eu-west"])
    assert broad is not None and narrow is not None
    assert narrow.hourly_usd / broad.hourly_usd == pytest.approx(1.75 / 1.5, abs=1e-3)
    exactly = modal_price(["H100!"], None, None, [])
    assert exactly is not None and exactly.hourly_usd == pytest.approx(3.9492 + 0.1419 + 0.0242, abs=1e-4)
    assert ModalExecutor(gpu="B200+").price(REQUEST) is None  # or a B300, whose price is in no table
    assert modal_price(["Z900"], None, None, []) is None and ModalExecutor(gpu="Z900").price(REQUEST) is None


@pytest.fixture
def no_aws() -> Iterator[None]:
    keys = dict.fromkeys(("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    with mock.patch.dict(os.environ, {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/none"}):
        for name in keys:
            os.environ.pop(name, None)
        yield


def test_on_demand_is_the_tables_and_a_replica_pays_for_its_share(no_aws: None):
    one = price_of(EKSExecutor(instance_type="g6e.xlarge", gpu=1, spot=False), REQUEST)
    assert one is not None and one.hourly_usd == 1.861 and "on-demand" in one.source and "2026-02-09" in one.source
    share = price_of(EKSExecutor(instance_type="p5.48xlarge", gpu=1, spot=False), REQUEST)
    assert share is not None and share.hourly_usd == 55.04 / 8
    assert price_of(EKSExecutor(spot=False), REQUEST) is None  # of any instance
    assert price_of(EKSExecutor(instance_type="x9.nano", spot=False), REQUEST) is None


def test_a_replica_pays_for_all_machines_of_a_kind_that_no_table_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eks_jobs, "newest_spot_price", lambda *_: Price(40.0, "EC2's spot price in us-east-1"))
    executor = EKSExecutor("c", instance_type="p9.48xlarge", region="us-east-1", gpu=1, ranks_per_machine=8)
    prices = [price_of(executor, replace(REQUEST, ranks=ranks)) for ranks in (1, 8, 16)]
    assert [price and price.hourly_usd for price in prices] == [40.0, 40.0, 80.0]


def test_spot_is_what_aws_says_now_or_at_most_the_price_on_demand(no_aws: None, monkeypatch: pytest.MonkeyPatch):
    away = price_of(EKSExecutor(instance_type="g5.xlarge", region="us-east-1", cluster="c"), REQUEST)
    assert away is not None and away.hourly_usd == 1.006 and "spot price cannot be read" in away.source
    asked: list[str] = []

    def newest(session: object, kind: str, wall_time: float) -> Price:
        asked.append(kind)
        return Price(0.41, "EC2's spot price in us-east-1")

    monkeypatch.setattr(eks_jobs, "newest_spot_price", newest)
    executor = EKSExecutor(instance_type="g5.xlarge", region="us-east-1", cluster="c")
    now = Price(0.41, "EC2's spot price in us-east-1", tflops=70.0)  # with the listed speed of its A10G
    assert [price_of(executor, REQUEST), price_of(executor, REQUEST)] == [now, now]
    assert asked == ["g5.xlarge"]  # kept for ten minutes


def test_a_spot_price_that_cannot_be_asked_for_anew_is_the_last_one(monkeypatch: pytest.MonkeyPatch):
    """A machine without a price would not be counted towards max_cost_usd."""
    answers = [Price(40.0, "EC2's spot price"), None, Price(50.0, "EC2's spot price")]
    monkeypatch.setattr(eks_jobs, "newest_spot_price", lambda *_: answers.pop(0))
    clock = ManualClock()
    executor = EKSExecutor("c", instance_type="p9.48xlarge", region="us-east-1", clock=clock)
    found = []
    for _ in range(3):
        found.append(price_of(executor, REQUEST))
        clock.advance(601.0)
    assert [price and price.hourly_usd for price in found] == [40.0, 40.0, 50.0]
