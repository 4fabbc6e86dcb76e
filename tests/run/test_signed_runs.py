"""Signed runs with real processes, attacked by somebody who may write to the bucket and has no key."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fast_s3 import running_fast_s3
from real_runs import FAST
from record_examples import EXAMPLES

from diloco_orchestrator import ConfigError, LocalProcessExecutor, RunReader, attach, launch, verify
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.kinds import KINDS, kind_of
from diloco_orchestrator.protocol.records import Halt, Run
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import of_run, operator_of_run
from diloco_orchestrator.signing.kept_keys import ENV_RUN_KEY, state_folder
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store

pytestmark = pytest.mark.slow
SETTINGS = {"replicas": 2, "rounds": 3, "sync_every": 3, **FAST}
ROUNDS = 1000  # whose names are taken before the run begins


class Attacker:
    """Holds the bucket's credentials and no key. Reads what is there, and creates whatever it likes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.written: set[str] = set()

    def create(self, key: str, data: bytes) -> None:
        for name in (key, f"{key}/{'A' * 86}"):
            if self.store.create(name, data):
                self.written.add(name)

    def before(self) -> None:
        """Take the names of records of many rounds, attempts and legs with what is no record."""
        for round_ in range(1, ROUNDS + 1):
            self.create(keys.commit(round_), b"junk" if round_ % 2 else b'{"record":"commit","schema_version":99}\n')
        for round_ in range(1, 8):
            for replica_id in range(2):
                self.create(keys.contribution(round_, replica_id), b"{}")
                self.create(keys.payload(round_, replica_id, 1, 0), b"other bytes")
                self.create(keys.state(replica_id, round_, 1), b"other bytes")
                self.create(keys.checked(round_, replica_id, 1), b"{}")
                self.create(keys.reduced(round_, replica_id), b"{}")
            self.create(keys.reduced_shard(round_, 0), b"other bytes")
            for name in ("model.safetensors", "snapshot.json"):
                for take in ("", "r0", "r1"):
                    self.create(keys.snapshot(round_, name, take), b"junk")
        for replica_id in range(2):
            for attempt in range(1, 5):
                for form in (keys.intent, keys.handle, keys.cancel, keys.exit_record, keys.log_text):
                    self.create(form(replica_id, attempt), b"{}")
                self.create(keys.CLAIMS[1](replica_id, attempt), b"{}")
        self.create(keys.START, b"{}")

    def during(self, log: RunLog) -> None:
        """Forge every kind of record, well formed and after the genuine ones, for what comes next."""
        for name, record in EXAMPLES.items():
            kind = kind_of(record) if name != "all_reduce_part" and type(record) in {k.record for k in KINDS} else None
            if kind is None or isinstance(record, Run) or (key := kind.key(record)) is None:
                continue
            self.create(key, record.to_bytes())
        stamp = {"write_id": "forged", "at": 0.0}
        self.create(keys.halt(1), Halt(**stamp, leg=1, by="nobody", reason="forged").to_bytes())
        for info in list(self.store.list(keys.ROUNDS)):  # genuine objects under the names of the next round
            if info.key not in self.written and (round_ := keys.parse_round(info.key)) is not None:
                later = info.key.replace(keys.round_name(round_), keys.round_name(round_ + 1))
                if self.store.create(later, self.store.get(info.key)):
                    self.written.add(later)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[str, dict]]:
    with running_fast_s3() as server:
        yield "s3://bucket/run", {"key": "anybody", "secret": "anything", "endpoint_url": server.url}


def test_a_signed_run_ends_with_the_undisturbed_digest_whatever_is_forged(bucket, finished, tmp_path):
    url, options = bucket
    attacker = Attacker(open_store(url, options))
    attacker.before()
    executor = LocalProcessExecutor(tmp_path / "executor")
    run = launch("tiny_workloads:train", store=url, storage_options=options, executor=executor, signed=True, **SETTINGS)
    result = run.wait(on_poll=lambda: attacker.during(run._watched.log))
    undisturbed = RunReader(open_store(str(finished.folder))).commits()
    commits = RunReader(open_store(url, options)).commits()
    assert result.status == "completed"
    assert [commit.base_digest for commit in commits] == [commit.base_digest for commit in undisturbed]
    assert not any(commit.empty_rounds for commit in commits)
    done = verify(url, storage_options=options, signed_by=run.status().signed_by)
    assert {line.partition(": ")[0] for line in done.unsigned} <= attacker.written
    assert len(done.unsigned) == 1000
    assert done.agrees and 3 in run.status().snapshots


def test_no_key_is_in_the_bucket_or_in_what_replicas_print(tmp_path):
    run = _launched(tmp_path)
    run.wait()
    kept = [path.read_text().strip() for path in state_folder(os.environ, "keys").iterdir()]
    stored = [path.read_bytes() for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    stored += [path.read_bytes() for path in (tmp_path / "executor").rglob("*") if path.is_file()]
    assert kept and not any(b"diloco-key" in data or text.encode() in data for data in stored for text in kept)


def test_who_has_no_key_watches_and_the_key_resumes(tmp_path, monkeypatch):
    run = _launched(tmp_path)
    run.wait()
    (kept,) = [
        path for path in state_folder(os.environ, "keys").iterdir() if path.name.endswith(run.status().signed_by[8:])
    ]
    text = kept.read_text().strip()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    executor = LocalProcessExecutor(tmp_path / "executor")
    with pytest.raises(ConfigError, match=run.status().signed_by):
        attach(str(tmp_path / "bucket"), executor=executor)
    assert verify(str(tmp_path / "bucket"), signed_by=run.status().signed_by).agrees
    assert not verify(str(tmp_path / "bucket"), signed_by="ed25519:" + "A" * 43).agrees
    monkeypatch.setenv(ENV_RUN_KEY, text)
    assert attach(str(tmp_path / "bucket"), executor=executor).resume(rounds=1).wait().status == "completed"


def test_a_run_whose_key_leaked_goes_on_with_new_keys(finished, tmp_path):
    """A thief has the operator's keys of before: what it writes in the leg that follows counts for nothing."""
    run = _launched(tmp_path)
    store = open_store(str(tmp_path / "bucket"))
    stolen = operator_of_run(run._watched.run, run._watched.store, "steal")
    thief = of_run(store, {ENV_RUN_KEY: stolen.text()})
    run.rotate_keys("the operator's key is in a log")
    result = run.wait()
    log = RunLog(store)
    assert result.status == "completed" and log.newest_leg() == 2
    assert [commit.base_digest for commit in RunReader(store).commits()][-1] == _last_base(finished.folder)
    with pytest.raises(ConfigError, match="needs keys of"):
        thief.create(keys.halt(2), Halt(write_id="forged", at=0.0, leg=2, by="thief", reason="forged").to_bytes())
    done = verify(str(tmp_path / "bucket"), signed_by=run.status().signed_by)
    assert done.agrees and done.checked["rotations of keys"] == 1


def _last_base(folder: Path) -> str | None:
    return RunReader(open_store(str(folder))).commits()[-1].base_digest


def _launched(tmp_path: Path):
    executor = LocalProcessExecutor(tmp_path / "executor")
    store = str(tmp_path / "bucket")
    return launch("tiny_workloads:train", store=store, executor=executor, signed=True, **SETTINGS)
