"""Replicas of several ranks, with real processes over gloo: the same training as by one, deaths, and bad input."""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fast_s3 import running_fast_s3
from island_workloads import WIDTH, memory_group
from real_runs import FAST, digests, reader_of, taken_away_in_mid_round

from diloco_orchestrator import LocalProcessExecutor, Run, RunResult, launch, pull, whatif
from diloco_orchestrator import audit as audit_run
from diloco_orchestrator.errors import RunFailed
from diloco_orchestrator.inspection.audit.findings import AuditOutcome
from diloco_orchestrator.inspection.verify import verify
from diloco_orchestrator.run_log.attempts import AttemptRecords

pytestmark = pytest.mark.slow

NEAR = 1e-4  # nats per token: sums of gradients over ranks round otherwise than over the rows of one batch

Start = Callable[..., tuple[Run, Path]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    def start(entrypoint: str = "train", **settings: Any) -> tuple[Run, Path]:
        folder = tmp_path_factory.mktemp("island")
        executor = LocalProcessExecutor(folder / "executor", grace_s=5.0)
        settings = {**FAST, "replicas": 2, "rounds": 3, "sync_every": 4, "seed": 3, "shard_mib": 1, **settings}
        settings = {"store": str(folder / "bucket"), **settings}
        return launch(f"island_workloads:{entrypoint}", executor=executor, **settings), folder / "bucket"

    return start


@pytest.fixture(scope="module")
def alone(start: Start) -> tuple[RunResult, Path]:
    """Two replicas of one process."""
    run, bucket = start(args={"model": "plain"})
    return run.wait(), bucket


@pytest.fixture(scope="module")
def islands(start: Start) -> tuple[RunResult, Path]:
    """Two replicas of two ranks, sharded by `fully_shard`."""
    run, bucket = start(args={"model": "fsdp"}, ranks_per_replica=2)
    return run.wait(), bucket


def _scores(result: RunResult) -> list[float | None]:
    return [row.heldout for row in result.metrics]


def _names(bucket: Path) -> set[str]:
    """The names of a run's objects, without those that are drawn."""
    names = (str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file())
    return {name for name in names if "claim." not in name and "want/" not in name}


# -- the same training ------------------------------------------------------------------------------------------------


def test_sharded_islands_train_what_single_processes_do(alone, islands):
    result, _ = islands
    assert _scores(result) == pytest.approx(_scores(alone[0]), abs=NEAR)
    assert [row.tokens for row in result.metrics] == [row.tokens for row in alone[0].metrics]
    assert [row.contributors for row in result.metrics] == [[0, 1]] * 3 + [[]]


def test_a_bucket_says_nothing_of_ranks_but_their_number_in_manifests(alone, islands):
    assert _names(islands[1]) == _names(alone[1])
    for bucket, ranks in ((alone[1], None), (islands[1], 2)):
        manifests = [json.loads(path.read_text()) for path in sorted(bucket.glob("rounds/*/contributions/*.json"))]
        assert {manifest.get("ranks") for manifest in manifests} == {ranks}
    start_of = [json.loads((each[1] / "start.json").read_text()) for each in (alone, islands)]
    assert start_of[0]["parameters"] == start_of[1]["parameters"]
    assert start_of[0]["base_digest"] == start_of[1]["base_digest"]
    first = [sorted((each[1] / "snapshots/00000000").rglob("*.safetensors")) for each in (alone, islands)]
    assert [path.name for path in first[0]] == ["model.safetensors", "outer.safetensors"]
    assert [path.read_bytes() for path in first[1]] == [path.read_bytes() for path in first[0]]


@pytest.mark.parametrize("model", ["fsdp", "tp"])
def test_parameters_that_are_not_trained_have_the_same_digest_and_bytes_whatever_the_ranks(start, model):
    """Sharded by rows and by columns; no rank has one whole."""
    found = []
    for ranks in (1, 2):
        args = {"model": model, "hidden": 30, "frozen": ["hidden.0.weight", "hidden.2.weight"]}
        run, bucket = start(args=args, replicas=1, rounds=1, ranks_per_replica=ranks)
        run.wait()
        assert verify(str(bucket)).agrees
        snapshot = (bucket / "snapshots/00000000/model.safetensors").read_bytes()
        found.append((json.loads((bucket / "start.json").read_text())["frozen"], snapshot))
    assert found[1] == found[0] and found[0][0]["tensors"] == 2


def test_all_islands_have_the_same_base_in_every_round(islands):
    for folder in sorted(islands[1].glob("rounds/*/contributions")):
        manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        assert len(manifests) == 2 and len({manifest["base_digest"] for manifest in manifests}) == 1


def test_the_run_of_islands_verifies_and_its_models_are_pulled_and_asked_for_what_would_be(islands, tmp_path):
    url = str(islands[1])
    report = verify(url)
    assert report.agrees, report
    assert pull(url, tmp_path / "model", 2) == 2
    found = whatif(url, round=2, without=[1])
    assert found.digest not in digests(islands[1]) and found.digest_as_it_was == digests(islands[1])[2]


def test_what_islands_have_trained_is_trained_again_by_as_many_ranks(islands):
    done = audit_run(str(islands[1]), draw=6, seed=1)
    assert [(each.outcome, each.words) for each in done.findings] == [(AuditOutcome.EQUAL, "")] * 6


def test_a_rank_that_lies_is_found_by_an_audit(start, monkeypatch):
    monkeypatch.setenv("ISLAND_LIE", "1")  # of rank 1 in round 2
    run, bucket = start(args={"model": "ddp"}, replicas=1, ranks_per_replica=2, rounds=2)
    run.wait()
    monkeypatch.delenv("ISLAND_LIE")
    found = {each.range_.round: each.outcome for each in audit_run(str(bucket), draw=2, seed=1).findings}
    assert found == {1: AuditOutcome.EQUAL, 2: AuditOutcome.DIFFERS}


@pytest.mark.parametrize(("model", "ranks"), [("tp", [2, 1]), ("tp_fsdp", [4, 1])])
def test_tensor_parallel_islands_train_what_single_processes_do(start, model, ranks):
    """Ranks that share a batch score the same items, and their tokens count once."""
    results = []
    for ranks_per_replica in (1, ranks):
        run, bucket = start(args={"model": model, "hidden": 20_012}, ranks_per_replica=ranks_per_replica)
        results.append(run.wait())
        assert verify(str(bucket)).agrees
    assert _scores(results[1]) == pytest.approx(_scores(results[0]), abs=NEAR)
    assert [row.tokens for row in results[1].metrics] == [row.tokens for row in results[0].metrics]


@pytest.mark.parametrize(("model", "ranks"), [("ddp", 2), ("fsdp", [3, 1]), ("plain", [2, 1])])
def test_islands_of_any_sizes_train_what_single_processes_do(start, alone, model, ranks):
    run, bucket = start(args={"model": model}, ranks_per_replica=ranks)
    assert _scores(run.wait()) == pytest.approx(_scores(alone[0]), abs=NEAR)
    assert verify(str(bucket)).agrees


@pytest.mark.parametrize("delay", [0, 1])
def test_an_odd_number_of_ranks_with_mixed_precision_and_fragments_goes_on_where_it_was_killed(start, tmp_path, delay):
    settings = {"replicas": 1, "ranks_per_replica": 3, "fragments": 2, "fragment_sync_delay": delay}
    args = {"model": "fsdp", "bf16": True, "offload": True}
    run, bucket = start(args=args, **settings)
    run.wait()
    fault = {"what": "SIGKILL", "replica": 0, "rank": 2, "step": 5, "once": str(tmp_path / "once")}
    again, killed = start(args={**args, "fault": fault}, **settings)
    again.wait()
    assert digests(killed) == digests(bucket) and verify(str(killed)).agrees


def test_a_model_is_wrapped_in_a_replica_of_one_rank_too_where_others_are_of_several(start, alone):
    """Also after a resume with one rank for all, and in an audit: torch's process group is there."""
    run, bucket = start(args={"model": "always_ddp"}, ranks_per_replica=[2, 1], rounds=2)
    run.wait()
    result = run.resume(rounds=1, ranks_per_replica=1).wait()
    assert _scores(result)[-1] == pytest.approx(_scores(alone[0])[-1], abs=NEAR)
    done = audit_run(str(bucket), draw=6, seed=1)
    assert [(each.outcome, each.words) for each in done.findings] == [(AuditOutcome.EQUAL, "")] * 6


def test_a_run_goes_on_with_another_number_of_ranks(start, alone):
    run, bucket = start(args={"model": "fsdp"}, rounds=2, ranks_per_replica=2)
    run.wait()
    result = run.resume(rounds=1, ranks_per_replica=[1, 3]).wait()
    assert _scores(result)[-1] == pytest.approx(_scores(alone[0])[-1], abs=NEAR)  # three ranks have 3, 3 and 2 rows
    assert verify(str(bucket)).agrees
    newest = sorted(bucket.glob("rounds/*/contributions/1.json"))[-1]
    assert json.loads(newest.read_text())["ranks"] == 3


@pytest.mark.parametrize(
    ("model", "ranks", "settings"),
    [
        ("ddp", [2, 1, 1], {"replicas": 3, "path": "scatter_reduce"}),
        ("fsdp", [2, 1], {"fragments": 2, "fragment_sync_delay": 1, "codec": "2bit"}),
    ],
    ids=["scatter_reduce", "beside training, with residuals"],
)
def test_islands_train_what_single_processes_do_however_shards_are_averaged(start, model, ranks, settings):
    scores = []
    for ranks_per_replica in (1, ranks):
        run, bucket = start(args={"model": model}, ranks_per_replica=ranks_per_replica, **settings)
        scores.append(_scores(run.wait()))
        assert verify(str(bucket)).agrees
    assert scores[1] == pytest.approx(scores[0], abs=NEAR)


@pytest.mark.parametrize("state", ["none", "round"])
@pytest.mark.parametrize(
    ("model", "mib", "tied"),
    [("fsdp", 64, 0.0), ("fsdp", 41.4, 0.6), ("ddp", 41.4, 0.6), ("fsdp", 160, 0.3)],
    ids=lambda value: str(value),
)
def test_each_rank_holds_and_moves_its_part_of_the_base(start, tmp_path, monkeypatch, model, mib, tied, state):
    """Each of four ranks owns a quarter of the shards, base and momenta, moves their bytes and writes a quarter
    of a saved state.

    `mib`: of the model, in shards of 1 MiB. `tied`: the embedding's share of it, which is also the head. Beside a
    rank's part the blocks of 512 KiB of arithmetic, some in each thread, are few.
    """
    c = mib * 2**20
    vocabulary = max(29, round(tied * c / 4 / WIDTH))
    hidden = round((c / 4 - vocabulary * WIDTH) / (2 * WIDTH + 1))
    measured = tmp_path / "measured"
    measured.mkdir()
    with running_fast_s3() as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        settings = {"store": "s3://bucket/run", "ranks_per_replica": [4, 1], "snapshot_every": 100, "rounds": 3}
        # Without scores: the activations of scoring are the model's, and larger than what is measured.
        args = {"model": model, "hidden": hidden, "vocabulary": vocabulary, "measured": str(measured), "heldout": False}
        run, _ = start(args=args, replica_state=state, guard={"rule": "off"}, **settings)
        run.wait()
        moved = server.payload_bytes()
    up, down = ([moved[f"{way} 0.{rank}"] for rank in range(4)] for way in ("up", "down"))
    shards = [len(range(rank, math.ceil(mib), 4)) * 2**20 for rank in range(4)]  # of each rank, bytes
    shards[(math.ceil(mib) - 1) % 4] -= math.ceil(mib) * 2**20 - c  # the last one is shorter
    assert (
        up == pytest.approx([3 * each for each in shards], rel=0.01) and sum(up) == moved["up 1.0"]
    )  # of three rounds
    assert down == pytest.approx([each * sum(down) / c for each in shards], rel=0.01)  # and to verify the last base
    assert sum(down) >= 3 * c
    if state == "round":
        pieces = math.ceil(2 * c / 2**20)  # of two moments, and of the little that is beside them one more
        written = [3 * len(range(rank, pieces + 1, 4)) * 2**20 for rank in range(4)]
        assert moved["largest of a state"] <= 2**20, "as large as a shard"
        for rank in range(4):
            assert moved[f"state 0.{rank}"] == pytest.approx(written[rank], abs=3 * 2**20)
    for rank in range(4):
        held, most = (int(number) for number in (measured / f"0.{rank}").read_text().split())
        print(f"rank {rank}: held {4 * held / c:.2f}, at the peak {4 * most / c:.2f} times its part of {mib} MiB")
        assert 1.99 * shards[rank] <= held <= 2.5 * c / 4, (rank, held / c)
        assert most <= 3.5 * c / 4, (rank, most / c)


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "rank", "reason", "log"),
    [
        ("SIGKILL", 1, r"rank 1 of 2 was killed by signal 9 \(SIGKILL", "rank 0 ended too"),
        ("SIGKILL", 0, r"rank 0 of 2 was killed by signal 9 \(SIGKILL", "rank 1 ended too"),
        ("raise", 1, "rank 1 of 2: RuntimeError", "planted"),
        ("memory", 1, "rank 1 of 2: RuntimeError", "can't allocate memory: you tried to allocate 4294967296 bytes"),
        pytest.param(
            "memory of the group",
            1,
            r"rank 1 of 2 was killed by signal 9 \(SIGKILL, as the kernel",
            "rank 0 ended too",
            marks=pytest.mark.skipif(memory_group() is None, reason="no memory cgroup can be made here"),
        ),
        ("SIGSTOP", 1, "rank 1 of 2 gave no sign of life for 10 s", "the stacks of rank 1"),
        ("sleep", 1, "rank 1 of 2 did not come to a collective in which rank 0 waited for 10 s", "in _fault"),
        ("supervisor", 1, "", ""),
    ],
)
def test_an_island_that_loses_a_rank_is_named_relaunched_and_ends_with_the_same_bits(
    start, islands, tmp_path, what, rank, reason, log
):
    fault = {"what": what, "replica": 1, "rank": rank, "step": 6, "once": str(tmp_path / "once")}
    retry = {"backoff_s": 0.0, "hung_after_s": 10.0}
    run, bucket = start(args={"model": "fsdp", "fault": fault}, ranks_per_replica=2, retry=retry)
    result = run.wait()
    assert digests(bucket) == digests(islands[1])
    assert [row.contributors for row in result.metrics] == [[0, 1]] * 3 + [[]]  # the other island lost no round
    if reason:
        ended = reader_of(bucket).attempts.exit(1, 1)
        assert ended is not None and ended.code == 1
        assert re.search(reason, ended.reason), ended.reason
        assert log in (bucket / "replicas/1/attempts/1/log.txt").read_text()
    assert not _processes_of(bucket)
    if what == "memory of the group":
        group = Path((tmp_path / "once").read_text())
        assert "oom_kill 1\n" in (group / "memory.oom_control").read_text()
        group.rmdir()


@pytest.mark.parametrize(
    ("name", "rank", "reason"),
    [
        ("SIGKILL", 1, r"rank 1 of 2 was killed by signal 9 \(SIGKILL"),
        ("SIGSTOP", 1, "rank 1 of 2 gave no sign of life for 10 s"),
        ("SIGSTOP", 0, "rank 0 of 2 gave no sign of life for 10 s"),
    ],
)
def test_an_island_that_loses_a_rank_while_its_state_is_saved_ends_with_the_same_bits(
    start, islands, monkeypatch, name, rank, reason
):
    """The rank is lost as it writes a piece of the state; the others wait for it."""
    with running_fast_s3() as server:
        for variable, value in server.environ().items():
            monkeypatch.setenv(variable, value)
        server.strike(f"1.{rank}", "/state/", name)
        url, retry = "s3://bucket/run", {"backoff_s": 0.0, "hung_after_s": 10.0}
        run, _ = start(args={"model": "fsdp"}, store=url, ranks_per_replica=2, retry=retry, replica_state="round")
        run.wait()
        assert digests(url) == digests(islands[1])
        ended = reader_of(url).attempts.exit(1, 1)
        assert ended is not None and re.search(reason, ended.reason), ended
        assert verify(url).agrees


def test_a_rank_that_imports_for_longer_than_a_hung_one_may_be_silent_is_waited_for(start, tmp_path, monkeypatch):
    """Rank 1 needs 15 s more than rank 0 before it has imported torch, and a hung rank is ended after 10 s."""
    slow = "import os, time\nif os.environ.get('RANK') == '1' and 'LOCAL_RANK' in os.environ: time.sleep(15)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    retry = {"backoff_s": 0.0, "hung_after_s": 10.0, "max_errors": 0}
    run, bucket = start(args={"model": "ddp", "hidden": 31}, replicas=1, rounds=1, ranks_per_replica=2, retry=retry)
    run.wait()
    assert reader_of(bucket).attempts.exit(0, 1).code == 0


def test_a_rank_that_never_comes_to_attach_is_waited_for_as_long_as_a_start_may_take(start, tmp_path):
    fault = {"what": "sleep", "replica": 0, "rank": 1, "step": -1, "once": str(tmp_path / "once")}
    settings = {"replicas": 1, "ranks_per_replica": 2, "retry": {"backoff_s": 0.0, "hung_after_s": 5.0}}
    timing = {**FAST["timing"], "startup_timeout_s": 40.0}
    run, bucket = start(args={"model": "plain", "hidden": 31, "fault": fault}, timing=timing, **settings)
    with pytest.raises(RunFailed):
        run.wait()
    ended = reader_of(bucket).attempts.exit(0, 1)
    assert ended is not None and ended.code == 78
    said = "not every rank of this replica reached ctx.attach.*Ranks 1 failed"
    assert ended.error is not None and re.search(said, ended.error), ended


def test_an_island_whose_ranks_all_wait_for_ever_is_replaced(start, tmp_path):
    """All send signs of life, and none waits in a collective for another."""
    fault = {"what": "sleep", "replica": 0, "rank": "every", "step": 6, "once": str(tmp_path / "once")}
    settings = {"replicas": 1, "rounds": 2, "ranks_per_replica": 2, "retry": {"backoff_s": 0.0, "hung_after_s": 6.0}}
    timing = {**FAST["timing"], "heartbeat_s": 1.0}
    run, bucket = start(args={"model": "ddp", "hidden": 31, "fault": fault}, timing=timing, **settings)
    run.wait()
    ended = reader_of(bucket).attempts.exit(0, 1)
    assert ended is not None and ended.code == 1 and ended.reason == "rank 0 of 2: TrainingStuck"
    assert "time.sleep(3600)" in ended.error and "no step for 6" in ended.error and not _processes_of(bucket)


def test_a_bit_that_is_wrong_in_the_shard_of_a_rank_is_corrected(start, tmp_path):
    once = tmp_path / "once"
    fault = {"what": "flip", "replica": 1, "rank": 1, "step": 5, "once": str(once)}
    run, bucket = start(args={"model": "fsdp", "fault": fault}, ranks_per_replica=2)
    run.wait()
    assert once.read_text() == "1"  # a shard that rank 1 alone holds
    assert "and is rebuilt as" in (bucket / "replicas/1/attempts/1/log.txt").read_text()
    manifests = sorted(bucket.glob("rounds/*/contributions/*.json"))
    claims = [json.loads(path.read_text())["base_digest"] for path in manifests]
    wrong = [first != second for first, second in zip(claims[::2], claims[1::2], strict=True)]
    assert wrong[:2] == [False, True] and not any(wrong[2:]) and verify(str(bucket)).agrees


def _processes_of(bucket: Path) -> list[int]:
    """The living processes with this bucket on their command line, except this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(bucket).encode() in line and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("entrypoint", ["train", "train_with_workers"])
def test_a_preempted_island_publishes_its_part_and_goes_on(start, tmp_path, entrypoint):
    """The notice goes to all processes of the group, as at many providers; loaders' worker processes do not get it."""
    args = {"model": "ddp", "hidden": 31, "folder": str(tmp_path)}
    run, bucket = start(entrypoint, args=args, rounds=1, sync_every=10_000, quorum=1, ranks_per_replica=[2, 1])

    def notify(attempts: AttemptRecords) -> None:
        claim = attempts.claim(0, 1)
        assert claim is not None and os.getpgid(claim.pid) == claim.pid
        os.killpg(claim.pid, signal.SIGTERM)

    taken_away_in_mid_round(run, bucket, notify)
    workers = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert set(workers) == ({"worker"} if entrypoint == "train_with_workers" else set())
    assert len(workers) >= 3 * 2 * (entrypoint == "train_with_workers")  # two of each rank that began to train


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("train_with_other_models", "rank 1 of this replica brings another model than rank 0: parameter 'bias'"),
        ("train_a_stage_of_a_pipeline", "stages of a pipeline cannot be attached"),
        ("train_with_ties_in_two_groups", "belong into one group: fully_shard([model.embedding, model.head])"),
        ("train_attached_in_rank_0", "not every rank of this replica reached ctx.attach"),
        ("train_that_never_attaches_in_rank_1", "returned without calling ctx.attach"),
        ("train_without_ddp", "has other values in rank 1 than in rank 0"),
        ("train_that_ends_early_in_rank_1", "rank 1 of 2: ended early"),
        ("train_with_fsdp1", "fully_shard (FSDP2) instead"),
    ],
)
def test_a_workload_that_ranks_cannot_train_is_refused_with_the_remedy(start, entrypoint, words):
    retry = {"backoff_s": 0.0, "hung_after_s": 5.0}
    settings = {"replicas": 1, "rounds": 1, "retry": retry, "guard": "off", "quorum": None}
    run, bucket = start(entrypoint, ranks_per_replica=2, **settings)
    with pytest.raises(RunFailed):
        run.wait()
    ended = reader_of(bucket).attempts.exit(0, 1)
    assert ended is not None and ended.code == 78
    assert words in f"{ended.reason} {ended.error}"
