"""Audits of real runs: honest replicas are equal bit for bit, liars are caught as often as the draw promises."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import comb
from pathlib import Path

import pytest
from audited_simulation import audited, counts, played
from dishonest_workloads import LIAR, LIE
from real_runs import FAST
from simulation_plan import plan_of

from diloco_orchestrator import LocalProcessExecutor, attach, launch
from diloco_orchestrator import audit as audit_run
from diloco_orchestrator.inspection.audit.auditor import Auditor
from diloco_orchestrator.inspection.audit.findings import (
    AuditOutcome,
    RangeFinding,
    TrainingRange,
    caught_probability,
    drawn,
)
from diloco_orchestrator.store.open_store import open_store

pytestmark = pytest.mark.slow

# By round, all of replica 1. After a copied state the next range would be trained from it: that lie is the last one.
LIES = {2: "skip", 3: "heldout", 4: "copy", 5: "scale", 7: "stale", 8: "state"}
SEEDS = 1000
ERROR = 1e-6  # probability with which the frequencies of a right draw would fail one comparison
CLASS_FACT = "cpu"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass(frozen=True)
class AuditedRun:
    """A run of two replicas and eight rounds in which one lies in six of them, and the finding about every range."""

    folder: Path
    auditor: Auditor
    findings: dict[TrainingRange, RangeFinding]
    before: dict[str, bytes]


@pytest.fixture(scope="module")
def dishonest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditedRun]:
    folder = tmp_path_factory.mktemp("dishonest")
    settings = {"replicas": 2, "rounds": 8, "sync_every": 4, **FAST}
    os.environ[LIE] = ",".join(f"{round_}={kind}" for round_, kind in LIES.items())
    try:
        executor = LocalProcessExecutor(folder / "executor")
        launch("dishonest_workloads:train", store=str(folder / "bucket"), executor=executor, **settings).wait()
    finally:
        del os.environ[LIE]
    before = files_of(folder / "bucket")
    with Auditor(open_store(str(folder / "bucket"))) as auditor:
        findings = {range_: auditor.audited(range_) for range_ in auditor.ranges}
        yield AuditedRun(folder, auditor, findings, before)


def test_every_honest_segment_is_equal_and_every_lie_is_found(dishonest):
    assert len(dishonest.findings) == 16
    differing = {range_ for range_, found in dishonest.findings.items() if found.outcome is AuditOutcome.DIFFERS}
    assert {(s.round, s.replica_id) for s in differing} == {(round_, LIAR) for round_ in LIES}
    equal = [found for range_, found in dishonest.findings.items() if range_ not in differing]
    assert {found.outcome for found in equal} == {AuditOutcome.EQUAL} and {found.distance for found in equal} == {0.0}
    assert all(found.steps == 4 and found.follows == found.range_.round - 1 for found in dishonest.findings.values())
    scaled = next(found for s, found in dishonest.findings.items() if LIES.get(s.round) == "scale" and s in differing)
    assert scaled.distance == pytest.approx(0.001 / 1.001, rel=1e-3) and scaled.words == "payload differ"
    copied = next(found for s, found in dishonest.findings.items() if LIES.get(s.round) == "state" and s in differing)
    assert copied.words == "state differ" and copied.distance == 0.0  # of the payload


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_honest_segments_of_a_run_with_a_lossy_codec_are_equal_and_a_lie_is_found(codec, tmp_path, monkeypatch):
    monkeypatch.setenv(LIE, "3=skip")
    settings = {"replicas": 2, "rounds": 3, "sync_every": 4, **FAST, "codec": codec}
    executor = LocalProcessExecutor(tmp_path / "executor")
    launch("dishonest_workloads:train", store=str(tmp_path / "bucket"), executor=executor, **settings).wait()
    monkeypatch.delenv(LIE)
    done = audit_run(str(tmp_path / "bucket"), draw=6, seed=1)
    found = {(each.range_.round, each.range_.replica_id): each.outcome for each in done.findings}
    assert len(found) == 6 and found.pop((3, LIAR)) is AuditOutcome.DIFFERS
    assert set(found.values()) == {AuditOutcome.EQUAL}


def test_nothing_is_written_to_the_bucket(dishonest):
    assert files_of(dishonest.folder / "bucket") == dishonest.before


@pytest.mark.parametrize("draw", [2, 5])
@pytest.mark.parametrize("lies", [1, 2, 4])
def test_liars_are_caught_as_often_as_the_draw_promises(dishonest, draw, lies):
    """Over 1,000 seeds: each range was trained again once, and a draw is a function of its seed."""
    ranges, head = dishonest.auditor.ranges, dishonest.auditor.head
    kept = set(list(LIES)[:lies])  # a liar of so many ranges: the findings about the other lies are left out
    guilty = {s for s, found in dishonest.findings.items() if found.outcome is AuditOutcome.DIFFERS and s.round in kept}
    caught = sum(bool(guilty & set(drawn(ranges, draw, seed, head))) for seed in range(SEEDS))
    expected = caught_probability(len(ranges), lies, draw)
    assert expected >= 1 - (1 - lies / len(ranges)) ** draw
    mass = [comb(SEEDS, k) * expected**k * (1 - expected) ** (SEEDS - k) for k in range(SEEDS + 1)]
    assert 2 * min(sum(mass[: caught + 1]), sum(mass[caught:])) > ERROR, f"{caught} of {SEEDS}, expected {expected}"


def test_the_command_prints_a_table_and_exits_with_4_for_a_lie(dishonest):
    auditor = dishonest.auditor
    liar = next(s for s, found in dishonest.findings.items() if found.outcome is AuditOutcome.DIFFERS)
    honest = next(s for s, found in dishonest.findings.items() if found.outcome is AuditOutcome.EQUAL)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for wanted, code in ((liar, 4), (honest, 0)):
        seed = next(seed for seed in range(10_000) if drawn(auditor.ranges, 1, seed, auditor.head) == [wanted])
        command = [sys.executable, "-m", "diloco_orchestrator.cli.main", "audit", str(dishonest.folder / "bucket")]
        options = ["--draw", "1", "--seed", str(seed), *(["--json"] if code else [])]
        done = subprocess.run([*command, *options], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        if code:
            (found,) = json.loads(done.stdout)["findings"]
            assert (found["round"], found["replica"], found["outcome"]) == (wanted.round, wanted.replica_id, "DIFFERS")
        else:
            assert f"--seed {seed}" in done.stdout and "equal" in done.stdout


def on_another_processor(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same run with another processor in all claims, and with the digests that follow from that."""
    kinds = ("/claim.", "contributions", "commit.json")
    chained = [name for name in files if any(kind in name for kind in kinds)]
    # Claims, then manifests and commit of each round: manifests name claims, commits name manifests and each other.
    chained.sort(key=lambda name: ("/claim." not in name, name.split("/")[1], "commit.json" in name, name))
    changed, digests = dict(files), {}
    for name in [*chained, *sorted(set(files) - set(chained))]:
        data = files[name]
        if name.endswith(".json"):
            for old, new in digests.items():
                data = data.replace(old, new)
        if "/claim." in name:
            body = json.loads(data)
            body["hardware"][CLASS_FACT] = "Z80"
            data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        changed[name] = data
        digests[sha256(files[name]).hexdigest().encode()] = sha256(data).hexdigest().encode()
    return changed


def test_another_class_of_machine_is_held_to_the_bound(dishonest, tmp_path):
    """The claims name another processor; what a lie of a thousandth changes is within the bound, a skipped step not."""
    for name, data in on_another_processor(dishonest.before).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with Auditor(open_store(str(tmp_path)), trust_bucket=True) as auditor:
        found = {
            LIES.get(s.round, "honest"): auditor.audited(s)
            for s in auditor.ranges
            if s.replica_id == LIAR and (s.round in (1, 5) or LIES.get(s.round) == "skip")
        }
    assert found["honest"].outcome is AuditOutcome.EQUAL and found["honest"].bound is None
    assert found["scale"].outcome is AuditOutcome.WITHIN_BOUND and found["scale"].bound == 0.25 / 4
    assert "cpu Z80 there" in found["scale"].words
    assert found["skip"].outcome is AuditOutcome.DIFFERS and found["skip"].distance > found["skip"].bound


def test_four_replicas_a_second_leg_and_code_that_travelled(tmp_path):
    """The module is only in the run's archive: it is removed from where the run was launched."""
    code = tmp_path / "code"
    code.mkdir()
    source = (Path(__file__).parents[1] / "support/tiny_workloads.py").read_text()
    (code / "travelling_workload.py").write_text(source)
    sys.path.insert(0, str(code))
    settings = {"replicas": 4, "rounds": 1, "sync_every": 3, **FAST, "replica_state": "round"}
    store, executor = str(tmp_path / "bucket"), LocalProcessExecutor(tmp_path / "executor")
    try:
        launch("travelling_workload:train", store=store, executor=executor, code=str(code), **settings).wait()
        run = attach(store, executor=executor)
        run.resume(rounds=1).wait()
    finally:
        sys.path.remove(str(code))
    (code / "travelling_workload.py").unlink()
    done = audit_run(store, draw=8, seed=1)
    assert {found.outcome for found in done.findings} == {AuditOutcome.EQUAL}
    assert len(done.findings) == done.ranges == 8 and done.audited == 8
    assert {found.range_.round for found in done.findings} == {1, 3} and "All of the run" in done.words()


@pytest.mark.parametrize("first", range(0, 24, 4))
def test_simulated_runs_with_all_kinds_of_faults_are_repeated_bit_for_bit(first, tmp_path):
    """Crashes, cuts, carried work, abstentions, fragments and delays: equal, or named with the reason."""
    total: Counter[str] = Counter()
    for seed in range(first, first + 4):
        found = audited(played(replace(plan_of(seed, replica_state="round"), collapse=False)), tmp_path)
        for range_, (outcome, words, _) in found.items():
            assert outcome is not AuditOutcome.DIFFERS, f"seed {seed}, {range_}: {words}"
            assert outcome is AuditOutcome.EQUAL or words
        total += counts(found)
    assert total[AuditOutcome.EQUAL] > total[AuditOutcome.NOT_AUDITABLE]
