"""Segments of the log: readers of history need few requests, and nothing is believed that the single commits deny."""

import logging
import sys
from collections.abc import Callable

import pytest
from long_history import LongRun
from protocol_fleet import play
from record_examples import EXAMPLES

from diloco_orchestrator.clock import ThreadBackground, in_parallel
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.keys import SegmentKey
from diloco_orchestrator.protocol.records import Commit
from diloco_orchestrator.run_log.entries import CommitEntry
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.segments import (
    Manifests,
    SegmentReader,
    list_segments,
    missing_segments,
    segment_bytes,
)
from diloco_orchestrator.store.memory import MemoryStore

FIRST = SegmentKey(1, 100, "commits")
MANIFESTS = SegmentKey(1, 100, "manifests")
TAIL = SegmentKey(201, 210, "commits")


@pytest.fixture(scope="module")
def long() -> dict[str, bytes]:
    """Every object of a run of 215 rounds."""
    run = LongRun(215)
    run.write_segments()
    return {info.key: run.store.get(info.key) for info in run.store.list("")}


@pytest.fixture
def run(long: dict[str, bytes]) -> LongRun:
    run = LongRun(0)
    for key, data in long.items():
        run.store.put(key, data)
    run.store.forget()
    return run


def rounds_of(run: LongRun) -> list[int]:
    return [row.round for row in RunReader(run.store).rows()]


def test_scores_of_many_bases_cost_one_reading_of_the_log(run: LongRun):
    reader = RunReader(run.store)
    reader.heldout_of_base(0)
    run.store.forget()
    reader.heldout_of_base(10), reader.best_scored()
    assert set(run.store.gets) == {keys.commit(216)} and run.store.lists <= 1, (run.store.gets, run.store.lists)


def test_pull_of_the_default_model_reads_the_log_once(run: LongRun, tmp_path):
    assert copy_model(RunLog(run.store), tmp_path / "model") == 215
    segments = [key for key in run.store.gets if key.startswith(keys.LOG)]
    assert segments and len(segments) == len(set(segments)), segments


def test_which_segments_a_log_has():
    assert missing_segments([], 9) == []
    assert missing_segments([], 35) == [SegmentKey(f, f + 9, "commits") for f in (1, 11, 21)]
    wanted = [SegmentKey(1, 100, "manifests"), SegmentKey(1, 100, "commits")]
    assert missing_segments([], 100) == missing_segments([], 109) == wanted
    assert missing_segments([FIRST], 210) == [
        MANIFESTS,
        SegmentKey(101, 200, "manifests"),
        SegmentKey(101, 200, "commits"),
        SegmentKey(201, 210, "commits"),
    ]


def test_a_segment_holds_the_exact_lines_of_its_commits_and_of_the_manifests_they_name(run: LongRun):
    data = run.store.get(str(FIRST))
    assert data == b"".join(run.store.get(keys.commit(round_)) for round_ in range(1, 101))
    named = [(r, replica_id) for r in range(1, 101) for replica_id in (0, 1)]
    assert run.store.get(str(MANIFESTS)) == b"".join(run.store.get(keys.contribution(*each)) for each in named)


def test_a_segment_of_manifests_has_64_mib_at_the_most_and_lacks_what_does_not_fit():
    """A replica whose manifests are as long as they may be had who joins those of 100 rounds hold 800 MiB."""
    store, large = MemoryStore(), bytes(8 * 2**20 - 9).replace(b"\0", b" ")
    lines = [b"%d" % number + large + b"\n" for number in range(9)] + [b"short\n"]
    for replica_id, line in enumerate(lines):
        store.put(keys.contribution(1, replica_id), line)
    commit = EXAMPLES["commit"].model_copy(update={"round": 1})
    answers = tuple(
        commit.answers[0].model_copy(update={"replica_id": i, "manifest_sha256": sha256_hex(line)})
        for i, line in enumerate(lines)
    )
    entry = CommitEntry.of_no_commit(1, "", "").counted(commit.model_copy(update={"answers": answers}))
    data = segment_bytes(store, MANIFESTS, [entry])
    assert data == b"".join([*lines[:8], lines[9]]) and len(data) <= 64 * 2**20
    found = Manifests(MANIFESTS, data.splitlines(keepends=True))
    assert [found.lacks(line) for line in lines] == 10 * [False]
    assert found.lacks(b"another that is short\n")


def test_status_reads_each_segment_once_and_the_newest_commits_singly(run: LongRun):
    status = RunReader(run.store).status()
    assert [row.round for row in status.rounds] == list(range(1, 216)) and status.round == 215
    singles = [key for key in run.store.gets if keys.commit.parse(key)]
    segments = [key for key in run.store.gets if key.startswith(keys.LOG)]
    assert len(segments) == len(set(segments)) == 3
    assert set(singles) == {keys.commit(r) for r in range(211, 217)}  # 216: not there yet
    assert not any(keys.contribution.parse(key) for key in run.store.gets)


def test_a_run_of_nine_rounds_costs_no_request_for_segments():
    run = LongRun(9)
    RunReader(run.store).status()
    commits = [key for key in run.store.gets if keys.commit.parse(key)]
    assert not any(key.startswith(keys.LOG) for key in run.store.gets)
    assert sorted(set(commits)) == [keys.commit(r) for r in range(1, 11)]
    assert run.store.lists == 4  # legs, snapshots, attempts, which start the replicas follow


@pytest.mark.parametrize("read", [lambda run: RunReader(run.store).status(), lambda run: verify_run(run.store)])
def test_while_few_replicas_have_begun_the_start_is_not_asked_for_with_every_round(read: Callable[[LongRun], object]):
    """Half of the replicas follow a start, and the others might still begin with another one."""
    found = []
    for rounds in (3, 9):
        run = LongRun(rounds)
        run.store.delete(keys.follows(1))
        read(run)
        found.append(run.store.lists)
    assert found[0] == found[1]


def test_a_log_longer_than_its_segments_is_read_to_its_end(run: LongRun):
    run.store.delete(str(SegmentKey(101, 200, "commits")))
    assert rounds_of(run) == list(range(1, 216))


# -- bad input --------------------------------------------------------------------------------------------------------


def lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def forged(line: bytes) -> bytes:
    return Commit.from_bytes(line, "").model_copy(update={"reason": "forged"}).to_bytes()


BAD: dict[str, Callable[[bytes], bytes]] = {
    "a changed commit in the middle": lambda d: b"".join([*lines(d)[:50], forged(lines(d)[50]), *lines(d)[51:]]),
    "a changed last commit": lambda d: b"".join([*lines(d)[:-1], forged(lines(d)[-1])]),
    "a round missing": lambda d: b"".join([*lines(d)[:50], *lines(d)[51:]]),
    "two rounds exchanged": lambda d: b"".join([lines(d)[1], lines(d)[0], *lines(d)[2:]]),
    "truncated": lambda d: d[:-100],
    "empty": lambda d: b"",
    "not UTF-8": lambda d: d[:1000] + b"\xff\xfe" + d[1002:],
    "not JSON": lambda d: b"\n".join([b"hello"] * 100) + b"\n",
    "one line too many": lambda d: d + lines(d)[-1],
    "a piece of a line too many": lambda d: d + lines(d)[0][:100],
}


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("which", [FIRST, SegmentKey(101, 200, "commits")])
def test_a_segment_that_disagrees_is_named_and_the_single_commits_are_read(
    how: str, which: SegmentKey, run: LongRun, caplog: pytest.LogCaptureFixture
):
    expected = RunReader(run.store).rows()
    run.store.put(str(which), BAD[how](run.store.get(str(which))))
    with caplog.at_level(logging.WARNING):
        reader = RunReader(run.store)
        reader.snapshots()
        assert reader.rows() == expected
    assert [r.getMessage() for r in caplog.records if str(which) in r.getMessage()]
    assert len([r for r in caplog.records if "disagrees" in r.getMessage()]) == 1


@pytest.mark.parametrize("how", BAD)
def test_verify_names_a_segment_that_disagrees(how: str, run: LongRun):
    run.store.put(str(FIRST), BAD[how](run.store.get(str(FIRST))))
    found = verify_run(run.store).disagreement
    assert found is not None and found.key == str(FIRST), found


def test_verify_names_a_segment_of_another_run(run: LongRun):
    run.store.put(str(FIRST), run.store.get(str(SegmentKey(101, 200, "commits"))))
    found = verify_run(run.store).disagreement
    assert found is not None and found.key == str(FIRST)


def test_a_segment_continues_exactly_what_was_read_before_it(run: LongRun):
    """Its round 50 is another commit than the one that was read, though its next ones name the right one."""
    data = run.store.get(str(FIRST))
    entry = RunLog(run.store).commit(50)
    assert entry is not None
    reader = SegmentReader(run.store, run.fleet.config)
    assert [each.commit.round for each, _ in reader.read(FIRST, entry.position)] == list(range(51, 101))
    run.store.put(str(FIRST), b"".join([*lines(data)[:49], forged(lines(data)[49]), *lines(data)[50:]]))
    with pytest.raises(RecordInvalid, match="its round 50 is not the commit that was read before"):
        SegmentReader(run.store, run.fleet.config).read(FIRST, entry.position)


def test_a_tail_segment_whose_last_commit_was_changed_is_refused_at_the_end_of_the_log(run: LongRun):
    for round_ in range(211, 216):
        run.store.delete(keys.commit(round_))
    run.store.put(str(TAIL), BAD["a changed last commit"](run.store.get(str(TAIL))))
    reader = RunReader(run.store)
    reader.snapshots()
    assert reader.rows()[-1].reason != "forged"


def test_verify_streams_segments_and_agrees(run: LongRun):
    done = verify_run(run.store)
    assert done.agrees, done.disagreement
    assert done.checked["rounds"] == 215 and done.checked["manifests"] == 430
    singles = [key for key in run.store.gets if keys.commit.parse(key) or keys.contribution.parse(key)]
    # Five commits of the tail and the one that is not there; its manifests; and for what the log claims of the bases
    # 190, 200 and 210 the commit of the round and the one before, and of the former two, whose payloads are gone, the
    # next commit with two manifests.
    assert len(singles) == 5 + 1 + 2 * 15 + 3 * 2 + 2 * 3
    assert max(run.store.gets.count(key) for key in run.store.gets if key.startswith(keys.LOG)) == 1


@pytest.mark.parametrize("key", [keys.commit(40), keys.contribution(40, 1)])
def test_verify_misses_a_single_object_that_a_segment_still_holds(key: str, run: LongRun):
    data = run.store.get(key)
    run.store.delete(key)
    found = verify_run(run.store).disagreement
    assert found is not None and found.key == key and "is missing" in found.words
    run.store.put(key, data[:-10] + b"\n")
    found = verify_run(run.store).disagreement
    assert found is not None and found.key == key and "bytes" in found.words


def test_verify_names_a_segment_that_lacks_a_manifest(run: LongRun):
    kept = lines(run.store.get(str(MANIFESTS)))
    run.store.put(str(MANIFESTS), b"".join(kept[:7] + kept[8:]))
    found = verify_run(run.store).disagreement
    assert found is not None and found.key == str(MANIFESTS) and "lacks a manifest" in found.words


# -- writing ----------------------------------------------------------------------------------------------------------


def test_replicas_write_the_segments_of_a_run_and_a_later_round_completes_what_is_missing():
    run = LongRun(197)
    for segment in missing_segments([], 100):
        run.store.create(str(segment), b"held by a writer that never finished")
    run.store.delete(str(FIRST))
    participants = [run.fleet.join(replica_id) for replica_id in range(2)]
    for _ in range(4):
        play(participants, [0.0, 0.0])
    for participant in participants:
        participant._segments.wait()
    written = list_segments(run.store)
    assert {FIRST, SegmentKey(101, 200, "commits"), SegmentKey(101, 200, "manifests")} <= set(written)
    assert run.store.get(str(FIRST)) == b"".join(run.store.get(keys.commit(r)) for r in range(1, 101))
    run.store.forget()
    log = RunLog(run.store)
    log.snapshots()
    assert [commit.round for commit in log.commits()] == list(range(1, 202))
    assert str(SegmentKey(101, 200, "commits")) in run.store.gets


def test_two_writers_write_equal_bytes(run: LongRun, long: dict[str, bytes]):
    for segment in list_segments(run.store):
        run.store.delete(str(segment))
    run.rounds = 215
    run.write_segments()
    assert {k: v for k, v in long.items() if k.startswith(keys.LOG)} == {
        str(segment): run.store.get(str(segment)) for segment in list_segments(run.store)
    }


def test_two_threads_may_read_segments_of_one_log():
    store = MemoryStore()
    segments = [SegmentKey(first, first + 9, "commits") for first in range(1, 40, 10)]
    for segment in segments:
        store.put(str(segment), b"no commit\n" * 10)
    reader = SegmentReader(store, make_config({"entrypoint": "m:f"}))
    reader.refresh()

    def read() -> None:
        for number in range(10_000):
            assert reader.previous_of(segments[number % 4].first) is None

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_parallel(ThreadBackground(), [read, read])
    finally:
        sys.setswitchinterval(before)
