"""The same run in several places, by dollars a round."""

from pathlib import Path

import pytest

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.costs import egress_usd_per_gb
from diloco_orchestrator.launching.places import compare, place_of, table_of


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "my_train.py").write_text("def train(ctx):\n    ...\n")
    return tmp_path


def test_places_are_ordered_by_what_the_whole_run_costs_and_unknown_prices_come_last(code: Path):
    texts = [
        "kubernetes",
        "modal,gpu=H100,round_s=20",
        "kubernetes,hourly_usd=1.5",
        "eks,instance_type=g5.xlarge,spot=false",
    ]
    places = [place_of(text, 60.0) for text in texts]
    given = {"code": code, "replicas": 4, "rounds": 10, "parameters": 124_000_000}
    plans = compare(places, "my_train:train", "s3://bucket/run", **given)
    assert [place.executor.name for place, _ in plans] == ["eks", "modal", "kubernetes", "kubernetes"]
    cheap, modal, _, unknown = (plan for _, plan in plans)
    assert cheap.round_usd == pytest.approx(4 * 1.006 * 60 / 3600 + cheap.round.requests_usd)  # within the region
    assert modal.round.bytes_down is not None and modal.hourly_usd is not None
    moved = modal.round.bytes_down / 1e9 * 0.09
    assert modal.round_usd == pytest.approx(modal.hourly_usd * 20 / 3600 + modal.round.requests_usd + moved)
    assert modal.run_usd == pytest.approx(10 * modal.round_usd) and unknown.run_usd is None
    lines = table_of(plans)
    assert len(lines) == 5 and lines[0].startswith("place") and "say hourly_usd" in lines[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modl", "did you mean 'modal'"),
        ("modal,gpus=T4", "did you mean 'gpu'"),
        ("modal,gpu", "not of the form option=value"),
        ("eks,spot=perhaps", "neither true nor false"),
        ("modal,round_s=fast", "could not convert"),
    ],
)
def test_a_place_that_cannot_be_is_refused(text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        place_of(text, 60.0)


def test_several_gpus_are_joined_by_plus():
    assert place_of("modal,gpu=H100+A100", 60.0).executor.options == {
        "app": "diloco",
        "gpu": ["H100", "A100"],
        "oidc": False,
        "timeout_s": 86400,
    }


def test_reading_from_another_cloud_costs_and_within_a_region_it_does_not():
    assert egress_usd_per_gb("modal", "s3://b/x", "") == 0.09 and egress_usd_per_gb("eks", "s3://b/x", "") == 0.0
    assert egress_usd_per_gb("modal", "s3://b/x", "https://a.r2.cloudflarestorage.com") == 0.0
    assert egress_usd_per_gb("modal", "fsspec+s3://b/x", "") == 0.09 and egress_usd_per_gb("modal", "/mnt/b", "") == 0.0
    assert egress_usd_per_gb("hf-jobs", "gs://b/x", "") == 0.12
