"""Preference pairs through data-juicer, whose command runs in an environment that a slow test makes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from composer.normalize import DJNormalizer, NormalizedDPOPair, NormalizerFailed, pairs_of, rows_of
from composer.pairs import DPOPair
from environments import make_environment

GOOD, OTHER = "This answer has enough words.", "Another answer with enough words."


def pair(chosen: Any, rejected: Any, **metadata: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "q"}], "chosen": chosen, "rejected": rejected, **metadata}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# -- rows and pairs ---------------------------------------------------------------------------------------------------


def test_pairs_of_both_shapes_come_back_equal_with_their_metadata():
    metadata = [{"agreement": 2, "teachers": ("a", "b")}, {"nested": {"é": [1, None]}}]
    given = [pair(GOOD, OTHER, **metadata[0]), pair(said(GOOD), said(OTHER), **metadata[1])]
    assert pairs_of(given, rows_of(given)) == [
        NormalizedDPOPair(each["prompt"], each["chosen"], each["rejected"], others)
        for each, others in zip(given, metadata, strict=True)
    ]


def test_a_pair_is_left_out_if_one_of_its_rows_is():
    given = [pair(GOOD, OTHER), pair(GOOD, OTHER), pair(GOOD, OTHER, number=3)]
    rows = [row for row in rows_of(given) if (row["pair"], row["side"]) not in {(0, "chosen"), (1, "rejected")}]
    (kept,) = pairs_of(given, rows)
    assert kept.metadata == {"number": 3}


def test_texts_are_those_that_come_out():
    given = [pair(said(GOOD), OTHER)]
    rows = [{**row, "text": row["text"].upper()} for row in rows_of(given)]
    (kept,) = pairs_of(given, rows)
    assert (kept.chosen, kept.rejected) == (said(GOOD.upper()), OTHER.upper())


def test_rejected_answers_never_count_as_duplicates():
    rows = rows_of([pair(GOOD, OTHER)] * 30)
    assert len({row["dedup"] for row in rows if row["side"] == "rejected"}) == 30
    assert all(row["dedup"].replace(" ", "").isalpha() for row in rows if row["side"] == "rejected")
    assert {row["dedup"] for row in rows if row["side"] == "chosen"} == {GOOD}


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_missing_command_and_a_failing_one_are_reported_with_what_they_said(tmp_path: Path):
    given = [pair(GOOD, OTHER)]
    with pytest.raises(NormalizerFailed, match="there is no command 'dj-of-nobody': make an environment"):
        DJNormalizer(dj_process="dj-of-nobody").normalize(given)
    failing = tmp_path / "dj-process"
    failing.write_text("#!/bin/sh\necho 'no operator of this name' >&2\nexit 3\n")
    failing.chmod(0o755)
    with pytest.raises(NormalizerFailed, match=r"ended with 3 over .*normalize.yaml:\nno operator of this name"):
        DJNormalizer(dj_process=str(failing)).normalize(given)
    with pytest.raises(ValueError, match=r"recipe other.yaml is neither a file"):
        DJNormalizer("other.yaml")
    assert DJNormalizer(dj_process="dj-of-nobody").normalize([]) == []


@pytest.fixture(scope="session")
def dj_process(tmp_path_factory: pytest.TempPathFactory) -> str:
    """data-juicer's command: `DJ_PROCESS`, one on the path, or that of an environment made here."""
    if found := os.environ.get("DJ_PROCESS") or shutil.which("dj-process"):
        return found
    packages = ["py-data-juicer==1.6.1", "aiohttp"]
    return str(make_environment(tmp_path_factory.mktemp("dj") / "venv", packages, with_ours=False) / "dj-process")


@pytest.mark.slow
def test_data_juicer_filters_both_answers_and_leaves_out_duplicates(dj_process: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where its caches go
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    of_replay = DPOPair("s1", [{"role": "user", "content": "q"}], "A pair of the replay itself.", OTHER, 2, ("a",), "m")
    given = [
        pair(GOOD, OTHER, number=0),
        pair("ok", OTHER, number=1),  # too short
        pair("A second answer, good enough.", "ok", number=2),  # the rejected one is too short
        pair("12345 67890 !!!! 12345 678 90 ????", OTHER, number=3),  # special characters
        pair(said("this ANSWER has enough words"), said(OTHER), number=4),  # a duplicate but for its characters
        pair(said("A third answer, good enough."), said(OTHER), number=5),
        of_replay,
    ]
    kept = DJNormalizer(dj_process=dj_process).normalize(given)
    assert [each.metadata.get("number", "replay") for each in kept] == [0, 5, "replay"]
    assert kept[1].chosen == said("A third answer, good enough.")
    assert kept[2].metadata["trace_model"] == "m" and kept[2].prompt == of_replay.prompt
