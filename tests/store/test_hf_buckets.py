"""Storage buckets of Hugging Face, `hf://buckets/…`, over a look-alike of their S3 gateway with its documented quirks.

The contract of stores runs over it too: `test_contract.py`.
"""

import re
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest
from hf_gateway import HfGateway, _Gateway
from real_runs import FAST, digests

from diloco_orchestrator import LocalProcessExecutor, RunReader, launch, plan_launch
from diloco_orchestrator.clock import ManualClock, SystemClock
from diloco_orchestrator.errors import ConfigError, StoreDenied
from diloco_orchestrator.inspection.doctor import examine_store
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.store.open_store import open_store, readable_url
from diloco_orchestrator.supervision.launch_request import extras_for

KEYS = {"key": "HFAKx", "secret": "s"}


@pytest.fixture
def url(hf_gateway: HfGateway) -> str:
    return hf_gateway.url(f"bucket-{uuid4().hex[:12]}")


def test_bodies_come_from_the_cdn_which_sees_no_signature(hf_gateway: HfGateway, url: str):
    store, before = open_store(url, hf_gateway.options()), hf_gateway.server.redirected
    body = bytes(range(256)) * 2**15
    store.put("a/key", body)
    assert store.get("a/key") == body and store.get("a/key", 3, 9) == body[3:9]
    assert hf_gateway.server.redirected == before + 2


def test_what_others_are_to_read_has_a_signed_address(hf_gateway: HfGateway, url: str):
    open_store(url, hf_gateway.options()).put("code.tar", b"archive")
    with urllib.request.urlopen(readable_url(url, hf_gateway.options(), "code.tar", 60.0)) as reply:
        assert reply.read() == b"archive"


def test_endpoint_and_region_of_the_environment_are_those_of_another_store(
    hf_gateway: HfGateway, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "auto")
    assert open_store(url, hf_gateway.options()).create("key", b"x")
    assert open_store("hf://buckets/me/b/run", KEYS).endpoint == "https://s3.hf.co/me"


def test_who_has_no_right_is_told_at_the_first_call(hf_gateway: HfGateway, url: str):
    for place, options in (
        (url, {**hf_gateway.options(), "secret": "wrong"}),
        (url, {**hf_gateway.options(), "token": "of a session"}),
        (url.replace("/lab/", "/somebody/"), hf_gateway.options()),
    ):
        with pytest.raises(StoreDenied):
            open_store(place, options).put("key", b"x")


def test_keys_that_are_missing_are_told_with_where_they_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreDenied, match=r"Set AWS_ACCESS_KEY_ID .*keys \(HFAK…\) are made from a token"):
        open_store("hf://buckets/me/b/run")


@pytest.mark.parametrize("url", ["hf://buckets/", "hf://buckets/me", "hf://buckets/me/"])
def test_an_address_without_bucket_is_refused(url: str):
    with pytest.raises(ConfigError, match=r"names no bucket\. Write hf://buckets/NAMESPACE/NAME/folder"):
        open_store(url, KEYS)


def test_the_doctor_finds_it_fit_and_leaves_nothing(hf_gateway: HfGateway, url: str):
    found = list(examine_store(url, SystemClock(), hf_gateway.options()))
    assert [finding.name for finding in found] == ["credentials", "store", "latency", "throughput"]
    assert all(finding.ok for finding in found)
    assert list(open_store(url, hf_gateway.options()).list("")) == []


def test_replicas_elsewhere_install_what_the_gateway_takes():
    assert extras_for("hf://buckets/me/b/run") == ["s3"] and extras_for("hf://datasets/me/texts") == []


@pytest.mark.parametrize(("replicas", "requests"), [(4, 700), (7, 1700)])
def test_a_plan_says_how_much_of_the_quota_of_five_minutes_a_run_takes(replicas: int, requests: int):
    executor, url = LocalProcessExecutor(), "hf://buckets/me/b/run"
    plan = plan_launch("tiny_workloads:train", url, executor=executor, replicas=replicas, round_s=25.0)
    (line,) = (line for line in plan.lines() if line.startswith("quota:"))
    assert f"; who waits asks every {0.5 * (4 * replicas + 10):.0f} s, to fit 1,000" in line
    said = re.search(r"about (\d+) requests in five minutes; the Hub allows 1,000 \(free\)", line)
    assert said is not None and int(said[1]) == pytest.approx(requests, rel=0.1)
    fits = re.search(r"; rounds of (\d+) s keep to 1,000$", line)
    assert (fits is None) == (requests < 1000)
    if fits is not None:
        longer = plan_launch("tiny_workloads:train", url, executor=executor, replicas=replicas, round_s=float(fits[1]))
        assert sum(longer.round.requests.values()) * 300 / float(fits[1]) == pytest.approx(1000, rel=0.05)


def test_where_the_requests_of_five_minutes_are_used_up_the_next_comes_after_a_tenth_of_them(
    hf_gateway: HfGateway, url: str, monkeypatch: pytest.MonkeyPatch
):
    class UsedUp(_Gateway):
        refused = 0

        def do_PUT(self) -> None:  # noqa: N802
            if UsedUp.refused:
                return super().do_PUT()
            UsedUp.refused += 1
            self._whole_body()
            return self._error(429, "TooManyRequests", self.path)

    monkeypatch.setattr(hf_gateway.server, "RequestHandlerClass", UsedUp)
    clock = ManualClock()
    open_store(url, hf_gateway.options(), clock=clock).put("key", b"x")
    assert UsedUp.refused == 1 and 30.0 <= clock.now() <= 37.5


@pytest.mark.slow
def test_a_whole_run_has_the_bits_of_one_in_a_folder(hf_gateway: HfGateway, url: str, tmp_path: Path):
    given = {**FAST, "replicas": 2, "rounds": 2, "sync_every": 3, "env": {"OMP_NUM_THREADS": "1"}}
    executor = LocalProcessExecutor(tmp_path / "executor")
    launch("tiny_workloads:train", store=str(tmp_path / "bucket"), executor=executor, **given).wait()
    run = launch("tiny_workloads:train", store=url, storage_options=hf_gateway.options(), executor=executor, **given)
    assert run.wait().status == "completed"
    reader = RunReader(open_store(url, hf_gateway.options()))
    assert [commit.base_digest for commit in reader.commits()] == digests(tmp_path / "bucket")
    assert verify_run(reader.store).agrees
