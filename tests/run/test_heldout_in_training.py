"""Whole runs in which a replica's training data holds a held-out item."""

import logging
import re
from pathlib import Path

import pytest
from real_runs import FAST, reader_of

from diloco_orchestrator import LocalProcessExecutor, Run, launch
from diloco_orchestrator.errors import RunFailed
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.split.files import Fields, split_files
from diloco_orchestrator.split.split import HeldoutSplit


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "all.txt").write_text("\n\n".join(f"a text about subject {i}" for i in range(120)))
    split_files([tmp_path / "all.txt"], tmp_path / "data", HeldoutSplit(share=0.1), Fields())
    return tmp_path / "data"


def launched(texts: Path, tainted: list[int], executor: LocalProcessExecutor) -> Run:
    args = {"folder": str(texts), "tainted": tainted}
    settings = {"replicas": 2, "rounds": 4, "sync_every": 3, **FAST}
    return launch("heldout_workloads:train", store=str(texts / "bucket"), executor=executor, args=args, **settings)


@pytest.mark.slow
def test_a_replica_with_a_held_out_item_in_its_data_stops_for_good_and_its_id_is_said_everywhere(
    executor, texts, caplog
):
    run = launched(texts, [1], executor)
    with caplog.at_level(logging.INFO), pytest.raises(RunFailed) as failed:
        run.wait()
    reader = reader_of(texts / "bucket")
    ended = reader.attempts.exit(1, 1)
    assert ended is not None and ended.code == 78 and ended.error is not None
    item = re.fullmatch(r"held-out item '(all\.txt#\d+)' in training", ended.reason)
    assert item is not None and f"held-out item {item[1]!r} (hash" in ended.error
    assert f"replica 1 cannot take part: {ended.reason}" in str(failed.value) and ended.reason in caplog.text
    assert [row.attempt for row in run.status().replicas] == [1, 1]  # not relaunched
    manifests = [keys.contribution(1, replica_id) for replica_id in (0, 1)]
    consumed = [Contribution.from_bytes(reader.store.get(key), key).consumed for key in manifests]
    assert [each and each.items for each in consumed] == [12, 12]


@pytest.mark.slow
def test_a_run_on_the_split_files_completes(executor, texts):
    assert launched(texts, [], executor).wait().status == "completed"
