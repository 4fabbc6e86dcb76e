"""The kinds of records: each has keys and writers, and docs/reference/protocol.md lists them."""

import ast
from pathlib import Path

import pytest
from parsed import nodes_of
from record_examples import EXAMPLES

from diloco_orchestrator.protocol import keys, kinds
from diloco_orchestrator.protocol.allreduce_records import AllReducePart

ROOT = Path(__file__).parents[2]
OF_RUNS = {name: example for name, example in EXAMPLES.items() if not isinstance(example, AllReducePart)}


def test_every_record_of_a_run_has_a_kind():
    assert sorted(kind.record.record for kind in kinds.KINDS) == sorted(OF_RUNS)


def row(kind: kinds.Kind) -> str:
    """A kind of record as a line of the table in docs/reference/protocol.md."""
    texts = (form.text.replace("<job>", "dl-<run>-r<id>-a<attempt>") for form in kind.forms)
    forms = " or ".join(f"`{text}`" for text in texts)
    writers = ", ".join("its attempt" if kind.by_itself else role for role in kind.writers)
    return (
        f"| {kind.record.__name__} | {forms} | {writers or 'earlier versions'} | {kind.most_bytes // kinds.MIB} MiB |"
    )


def test_the_docs_have_the_table_of_kinds():
    lines = ["| record | key | written by | at most |", "|---|---|---|---|", *map(row, kinds.KINDS)]
    assert "\n".join(lines) in (ROOT / "docs/reference/protocol.md").read_text()


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_record_that_names_every_part_of_its_key_has_that_key(name: str):
    kind = kinds.kind_of(OF_RUNS[name])
    key = kind.key(OF_RUNS[name])
    placed = [
        "start",
        "claim",
        "snapshot",
        "offer",
        "invitation",
        "taken",
        "lease",
        "join_cancel",
        "join_end",
        "reduced",
    ]
    assert (key is None) == (name in placed)
    assert key is None or kinds.kind_at(key) is kind


def test_a_key_is_of_one_kind_at_the_most():
    about = [
        keys.join_record("dl-r-r1-a1", "0" * 64, name) for name in (keys.JOIN_TAKEN, keys.JOIN_LEASE, keys.JOIN_END)
    ]
    placed = [keys.START, keys.start_take("0" * 16), keys.claim(1, 1, "0" * 16), keys.claim(1, 1, ""), *about]
    takes = [keys.snapshot(3, keys.SNAPSHOT_RECORD, take) for take in (keys.SHARED_TAKE, "r1", "rebuilt", "123456789")]
    named = [key for each in OF_RUNS.values() if (key := kinds.kind_of(each).key(each)) is not None]
    for key in (*placed, *takes, *named, keys.join_offer("dl-r-r1-a1")):
        assert sum(kind.has(key) for kind in kinds.KINDS) == 1, key
    for key in (
        "legs/01/begin.json",
        keys.log_text(1, 1),
        keys.payload(1, 1, 1, 1),
        "snapshots/00000001.x/snapshot.json",
    ):
        assert kinds.kind_at(key) is None, key


def test_nothing_but_the_writer_writes_the_bytes_of_a_record():
    """A record that is written elsewhere would go round who may write it. An all-reduce used alone has no run."""
    found = []
    for package in ("diloco_orchestrator", "replica", "executors"):
        for path in (ROOT / package).rglob("*.py"):
            for call in nodes_of(path):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("create", "put"):
                    found += [
                        path.relative_to(ROOT).as_posix() for arg in call.args if "to_bytes()" in ast.unparse(arg)
                    ]
    alone = {"diloco_orchestrator/allreduce/object_store.py"}
    assert set(found) == {"diloco_orchestrator/run_log/writer.py", *alone}
