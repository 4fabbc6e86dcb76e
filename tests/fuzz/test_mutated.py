"""A fast part of `make fuzz`: mutated records and buckets end in a result or an error of ours, never in a traceback."""

import shutil
from pathlib import Path

import pytest
from mutated_buckets import OF_STOPPED_RUNS, build_bucket, check, parse_mutated, read_mutated, run_commands

LOG_AND_MODEL = (
    ("status", "{url}"),
    ("logs", "{url}"),
    ("verify", "{url}"),
    ("pull", "{url}", "{out}/pulled"),
    ("halt", "{url}"),
)
# Each made a reader fail once: deep JSON in run.json, a missing begin.json, a payload in place of a log, a snapshot
# whose record names one file of several; a verdict with a threshold of 0; a first leg that begins after a later round.
FAILED_ONCE = (1657, 1110, 1662, 5315, 6991, 7193)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    build_bucket(folder)
    return folder


def test_mutated_records_are_read_or_refused(bucket: Path):
    accepted = [parse_mutated(bucket, seed) for seed in range(1000)]
    assert 0 < sum(accepted) < len(accepted)  # some mutations leave a record that is one


@pytest.mark.parametrize("seed", [*FAILED_ONCE, *range(3)])
def test_mutated_buckets_are_read_or_refused(bucket: Path, tmp_path: Path, seed: int):
    assert read_mutated(bucket, tmp_path, seed, LOG_AND_MODEL)


def test_who_follows_a_run_that_has_stopped_comes_to_its_end_without_a_result(bucket: Path, tmp_path: Path):
    """Seed 317: `logs --follow` waited for a result.json that somebody had removed."""
    copy, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(bucket, copy)
    out.mkdir()
    (copy / "legs/1/result.json").unlink()
    for outcome in run_commands(copy, out, OF_STOPPED_RUNS):
        check(outcome, out)
        assert outcome.code == 0


def test_mutations_of_a_number_that_has_no_float_are_made(bucket: Path):
    assert parse_mutated(bucket, 13688) in (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_mutated_buckets_are_read_or_refused_by_every_command(bucket: Path, tmp_path: Path, seed: int):
    assert read_mutated(bucket, tmp_path, seed)
