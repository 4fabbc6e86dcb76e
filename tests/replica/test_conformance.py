"""The check of training functions: a sound one passes every row, and every row has a fault that fails it alone."""

import json
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_loops
import pytest
import torch
from cli_support import diloco
from safetensors.torch import save_file

from diloco_orchestrator.errors import ConfigError, error_line
from diloco_orchestrator.replica.context import ReplicaSession
from diloco_orchestrator.replica.testing import ConformanceReport, Finding, ReplicaUnsound, check_replica
from diloco_orchestrator.replica.testing.jobs import Seen
from diloco_orchestrator.replica.testing.rows import NAMES, CheckResults, findings
from diloco_orchestrator.replica.testing.watched import Notes, PlainSession, read_tensors

ROOT = Path(__file__).parent.parent.parent
WORKLOAD = "conformance_workloads:train"
# Rows that a fault makes meaningless: they say so instead of failing too.
NOTHING_ENDED = {*NAMES[2:]}
MOOT = {
    "steps": {"completes", *NOTHING_ENDED},
    "completes": {"steps", *NOTHING_ENDED},
    "repeatable": {"plain", "kept", "resumed", "evaluation"},
    "saved": {"resumed"},
}


# -- rows, judged from what processes left ----------------------------------------------------------------------------

PARAMETERS = {"w": torch.ones(3)}
HALF = {"w": torch.full((3,), 0.5)}
FIRST = Seen(
    Notes(scores=True, compares=True, steps=12, trainable=1, frozen=1, state_tensors=2, last_item="00"),
    code=0,
    digests=("a", "b", "c", "d"),
    base=PARAMETERS,
)
PLAIN = replace(FIRST, digests=(), model=PARAMETERS, next=PARAMETERS)
FLEET = replace(FIRST, notes=Notes(at_round=["x", "y", "z"]))
KILLED = replace(FIRST, code=None, digests=("a", "b"))


def checked(**changed: Seen) -> CheckResults:
    """What a sound function leaves, but for some processes; a name's spaces are underscores here."""
    seen = {
        "first": FIRST,
        "again": FIRST,
        "unscored": FIRST,
        "plain": PLAIN,
        "disturbed": replace(PLAIN, next={"w": torch.full((3,), 1.1)}, moved={"w": torch.tensor(0.1)}),
        "fleet-0": FLEET,
        "fleet-1": FLEET,
        "planted": replace(FIRST, code=7, reason="held-out item 'planted' in training"),
        **{f"killed {place}": KILLED for place in ("inside a round", "at a round's end")},
        **{f"resumed {place}": FIRST for place in ("inside a round", "at a round's end")},
    }
    return CheckResults(
        rounds=3, sync_every=4, replicas=2, seen=seen | {n.replace("_", " "): s for n, s in changed.items()}
    )


def outcomes(checked: CheckResults) -> dict[str, str]:
    return {found.name: found.outcome for found in findings(checked) if found.outcome != "passed"}


def test_a_sound_function_passes_every_row():
    assert outcomes(checked()) == {} and [found.name for found in findings(checked())] == list(NAMES)


@pytest.mark.parametrize(
    ("row", "left"),
    [
        ("plain", {"plain": replace(PLAIN, model={"w": torch.ones(3) + 2e-6})}),
        ("plain", {"plain": replace(PLAIN, model={"w": torch.ones(3) * float("nan")})}),
        ("plain", {"plain": replace(PLAIN, model={"v": torch.ones(3)})}),
        ("plain", {"plain": replace(PLAIN, code=1, error="AttributeError: no such method")}),
        ("kept", {"disturbed": replace(PLAIN, moved={"w": torch.tensor(0.1)})}),
        ("digests", {"fleet-1": replace(FLEET, notes=Notes(at_round=["x", "q", "z"]))}),
        ("digests", {"fleet-1": replace(FLEET, code=1, error="ModelMismatch: another shape")}),
        ("resumed", {"resumed inside a round": replace(FIRST, digests=("a", "b", "q", "r"))}),
        ("resumed", {"resumed at a round's end": replace(FIRST, code=1)}),
        ("resumed", {"killed inside a round": FIRST}),
        ("evaluation", {"unscored": replace(FIRST, digests=("a", "b", "c", "q"))}),
        ("planted", {"planted": replace(FIRST, reason="the run ended")}),
        ("frozen", {"first": replace(FIRST, notes=replace(FIRST.notes, frozen_moved=["teacher"]))}),
        ("steps", {"first": replace(FIRST, notes=replace(FIRST.notes, unmoved=["w"]))}),
    ],
)
def test_what_a_faulty_function_leaves_fails_its_row_alone(row: str, left: dict[str, Seen]):
    assert outcomes(checked(**left)) == {row: "failed"}


def test_differences_within_rounding_pass_and_those_of_an_on_round_function_do_not_apply():
    near = replace(PLAIN, model={"w": torch.ones(3) + 5e-7})
    assert outcomes(checked(plain=near)) == {}
    hooked = replace(FIRST, notes=replace(FIRST.notes, hooked=True))
    assert outcomes(checked(first=hooked, plain=replace(PLAIN, model=HALF))) == {"plain": "not applicable"}


def test_where_training_is_not_repeatable_rows_that_compare_bits_do_not_apply():
    found = outcomes(checked(again=replace(FIRST, digests=("a", "q", "r", "s"))))
    assert found == {"repeatable": "failed", **dict.fromkeys(MOOT["repeatable"], "not applicable")}


def test_a_function_that_has_nothing_to_check_is_not_failed_for_it():
    bare = replace(FIRST, notes=Notes(steps=12, trainable=1))
    without = checked(first=bare)
    assert outcomes(without) == dict.fromkeys(("saved", "evaluation", "planted", "frozen"), "not applicable")


def test_what_a_function_raised_is_shown_without_advice_about_its_loop():
    try:
        raise ConfigError("held-out items 3 and 5 are the same.\nGive each once.")
    except ConfigError as error:
        raised = error_line("".join(traceback.format_exception(error)))
    assert raised == "diloco_orchestrator.errors.ConfigError: held-out items 3 and 5 are the same. Give each once."
    for error, advised in ((raised, False), ("WorkloadEndedEarly: it returned", True), ("", True)):
        row = next(found for found in findings(checked(first=replace(FIRST, code=1, error=error))) if found.remedy)
        assert row.name == "completes" and error in row.detail
        assert ("call ctx.attach once" in row.remedy) is advised and "prints the traceback" in row.remedy


def test_a_state_that_is_lost_fails_its_row_and_leaves_nothing_to_resume():
    found = outcomes(checked(first=replace(FIRST, notes=replace(FIRST.notes, state_lost=["[0]['exp_avg']"]))))
    assert found == {"saved": "failed", "resumed": "not applicable"}


def test_tensors_that_rank_1_alone_has_left_are_its_part(tmp_path: Path):
    """It has seen rank 0 die, and wrote them before it was killed too."""
    (tmp_path / "1").mkdir()
    save_file(PARAMETERS, tmp_path / "1" / "model.safetensors")
    assert list(read_tensors(tmp_path, "model") or {}) == ["w (rank 1)"] and read_tensors(tmp_path, "base") is None


def test_a_report_is_a_table_with_what_to_do():
    report = ConformanceReport("m:f", (Finding("steps", "passed", "12 steps"), Finding("kept", "failed", "lost", "do")))
    shown = str(report).splitlines()
    assert shown[0] == "passed          steps          12 steps" and shown[1].split() == ["FAILED", "kept", "lost"]
    assert shown[2].strip() == "-> do" and shown[3] == "m:f is not a sound replica: kept"
    assert not report.sound and report["kept"].remedy == "do" and report.to_json()["rows"][1]["outcome"] == "failed"
    with pytest.raises(ReplicaUnsound, match="not a sound replica: kept"):
        report.raise_if_unsound()


def test_plain_training_offers_what_a_session_offers():
    offered = {name for name in vars(ReplicaSession) if not name.startswith("_")} | {"__enter__", "__exit__"}
    assert offered <= set(vars(PlainSession))


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ConfigError, match="needs 2 of each"):
        check_replica(WORKLOAD, rounds=1)
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        check_replica("conformance_workloads:trian")


# -- real checks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sound_function_passes():
    report = check_replica(WORKLOAD)
    assert {found.outcome for found in report.findings} == {"passed"}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("row", NAMES)
def test_every_row_has_a_fault_that_fails_it_alone(row: str):
    report = check_replica(WORKLOAD, args={"fault": row})
    assert report.failed == [row], str(report)
    assert {found.name for found in report.findings if found.outcome == "not applicable"} == MOOT.get(row, set())
    assert report[row].remedy


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "row"), [("another model", "steps"), ("nothing declared", "planted")])
def test_other_faults(fault: str, row: str):
    assert check_replica(WORKLOAD, args={"fault": fault}).failed == [row]


@pytest.mark.slow
def test_a_process_that_does_not_end_fails_and_is_killed():
    report = check_replica("tiny_workloads:train", args={"pause_s": 3600}, limit_s=10)
    assert report.failed == ["completes"] and "took longer than the limit" in report["completes"].detail


@pytest.mark.slow
@pytest.mark.parametrize("kind", own_loops.KINDS)
def test_loops_as_people_write_them_are_sound(kind: str):
    report = check_replica("own_loops:train", args={"kind": kind})
    report.raise_if_unsound()
    assert report["saved"].outcome == report["resumed"].outcome == "passed", str(report)


CORPUS = "corpus"  # as an argument: the folder that `corpus` makes

EXAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "plain_loop": ({"lr": 3e-3}, "torch"),
    "nanochat_like_loop": ({}, "torch"),
    "accelerate_loop": ({}, "accelerate"),
    "lightning_loop": ({}, "lightning"),
    "composer.train": ({"rounds": 3}, "torch"),
    "composer.grpo": ({"warm_steps": 5}, "trl"),
    "data_sets": ({"data": CORPUS}, "fsspec"),
    "diloco_orchestrator.demo.workload": ({}, "torch"),
}
# Those with tests of their own: they need more than one process (a mesh of Monarch, ranks) or a text of their own.
ELSEWHERE = {"composer.monarch_replica", "island_fsdp", "speedrun.speedrun"}


def corpus(folder: Path) -> str:
    """A data set for every replica of a check, and its held-out items."""
    for name in ("train-0", "train-1", "heldout"):
        lines = [json.dumps({"text": f"{name}, line {number}: abcabc"}) for number in range(64)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("module", EXAMPLES)
def test_every_example_is_sound(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    args, needs = EXAMPLES[module]
    args = {name: corpus(tmp_path) if value == CORPUS else value for name, value in args.items()}
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    check_replica(f"{module}:train", args=args).raise_if_unsound()


@pytest.mark.slow
def test_a_schedule_that_follows_the_training_metric_is_the_same_with_and_without_scoring(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    report = check_replica("composer.train:train", args={"rounds": 3, "wrapper": "taid"})
    report.raise_if_unsound()
    assert report["evaluation"].outcome == "passed"


HALF_AND_OFFLOADED = {"bf16": True, "offload": True}
RANKED = {  # functions of several ranks, by what each shows
    "fully_shard": ("island_fsdp:train", {}),
    "DDP": ("island_workloads:train", {"model": "ddp", "hidden": 31}),
    "accelerate": ("accelerate_loop:train", {}),
    "Lightning, DDP": ("lightning_loop:train", {}),
    "Lightning, fully_shard": ("lightning_loop:train", {"sharded": True}),
    "fully_shard, bf16, offload": ("island_workloads:train", {"model": "fsdp", "hidden": 31, **HALF_AND_OFFLOADED}),
    "tensor-parallel": ("island_workloads:train", {"model": "tp", "hidden": 32}),
    "Trainer, DDP": ("tiny_trainers:train", {"kind": "trainer"}),
    "Trainer, fully_shard": ("tiny_trainers:train", {"kind": "trainer", "sharded": True}),
    "SFT, DDP": ("tiny_trainers:train", {"kind": "sft"}),
    "SFT, fully_shard": ("tiny_trainers:train", {"kind": "sft", "sharded": True}),
    "DPO, DDP": ("tiny_trainers:train", {"kind": "dpo"}),
    "DPO, fully_shard": ("tiny_trainers:train", {"kind": "dpo", "sharded": True}),
    "GRPO, DDP": ("tiny_trainers:train", {"kind": "grpo"}),
    "LoRA, DDP": ("tiny_trainers:train_lora", {}),
    "LoRA, fully_shard": ("tiny_trainers:train_lora", {"sharded": True}),
}
# Rows that do not apply: the data of a loop are compared with held-out items only where it has any.
ABSENT = {"accelerate_loop": {"evaluation", "planted", "frozen"}, "lightning_loop": {"evaluation", "planted", "frozen"}}
NEEDED = {"accelerate_loop": "accelerate", "lightning_loop": "lightning", "tiny_trainers": "peft"}


@pytest.mark.slow
@pytest.mark.parametrize("shown", RANKED)
def test_functions_of_several_ranks_are_sound(shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    train, args = RANKED[shown]
    module = train.partition(":")[0]
    pytest.importorskip(NEEDED.get(module, "torch"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    args = {**args, "folder": str(tmp_path)} if module == "tiny_trainers" else args
    report = check_replica(train, args=args, ranks=2, limit_s=600)
    report.raise_if_unsound()
    absent = {found.name for found in report.findings if found.outcome != "passed"}
    assert absent <= ABSENT.get(module, {"planted", "frozen"}), str(report)


@pytest.mark.slow
def test_what_one_rank_of_several_does_fails_its_row(tmp_path: Path):
    fault = {"what": "raise", "replica": 0, "rank": 1, "step": 5, "once": str(tmp_path / "once")}
    args = {"model": "ddp", "hidden": 31, "fault": fault}
    report = check_replica("island_workloads:train", args=args, ranks=2)
    assert report.failed == ["completes"] and "planted" in report["completes"].detail, str(report)
    report = check_replica("island_workloads:train", args={"model": "ddp", "hidden": 31, "noise": 1}, ranks=2)
    assert report.failed == ["resumed"], str(report)


def test_every_example_that_trains_is_tried():
    paths = [path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*.py")]
    trained = {".".join(p.with_suffix("").parts) for p in paths if "def train(" in (ROOT / "examples" / p).read_text()}
    assert trained - ELSEWHERE == set(EXAMPLES) - {"diloco_orchestrator.demo.workload"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["trainer", "sft", "dpo", "grpo", "kto", "orpo", "gkd", "online_dpo", "whisper", "streamed"]
)
def test_trainers_of_others_are_sound(kind: str, tmp_path: Path):
    pytest.importorskip("trl", reason="TRL is not installed")
    check_replica("tiny_trainers:train", args={"kind": kind, "folder": str(tmp_path)}).raise_if_unsound()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_adapters_are_sound(adapter: dict[str, Any], tmp_path: Path):
    pytest.importorskip("peft", reason="PEFT is not installed")
    report = check_replica("tiny_trainers:train_lora", args={"folder": str(tmp_path), "adapter": adapter})
    report.raise_if_unsound()
    assert report["frozen"].outcome == "passed"


@pytest.mark.slow
def test_the_command_line_prints_the_table(tmp_path: Path):
    example = str(ROOT / "examples" / "plain_loop.py")
    done = diloco("check", f"{example}:train", "--arg", "lr=0.003", cwd=tmp_path)
    assert done.returncode == 0 and "plain_loop:train is a sound replica" in done.stdout, done.stderr
    workload = f"{ROOT / 'tests/support/conformance_workloads.py'}:train"
    done = diloco("check", workload, "--arg", "fault=observed", "--json", cwd=tmp_path)
    assert done.returncode == 1
    rows = {row["name"]: row["outcome"] for row in json.loads(done.stdout)["rows"]}
    assert rows.pop("observed") == "failed" and set(rows.values()) == {"passed"}


@pytest.mark.slow
def test_the_contract_is_a_test_per_row(tmp_path: Path):
    (tmp_path / "test_mine.py").write_text(
        "from diloco_orchestrator.replica.testing import ReplicaContract\n\n\n"
        "class TestMine(ReplicaContract):\n"
        "    train = 'conformance_workloads:train'\n"
        "    settings = {'args': {'fault': 'frozen'}}\n"
    )
    command = [sys.executable, "-m", "pytest", str(tmp_path), "-p", "no:cacheprovider", "-q"]
    command += ["-o", f"pythonpath={ROOT / 'tests/support'} {ROOT}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"1 failed, {len(NAMES) - 1} passed" in done.stdout, done.stdout
    assert "test_row[frozen]" in done.stdout and "frozen parameters changed: teacher" in done.stdout
