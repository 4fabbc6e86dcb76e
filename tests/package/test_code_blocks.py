"""No block of code in a document is silently unrun: it is run, here or by a test named here, or its calls are checked.

sybil finds the blocks and runs those of Python, so that a traceback names the page and its line. Its own collection is
not used, because no block here is whole in a page's namespace: programs start processes that import them as files (the
tests in PROGRAMS save and run them as they stand), and fragments leave out what is the reader's, which they get here as
stand-ins: training functions train two rounds, launches are checked as far as the settings. Commands are parsed and
their files looked up; those of other programs are listed.
"""

import ast
import functools
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_one_process import SmallRun
from page_blocks import blocks, examples, run
from sybil import Example
from sybil.region import Lexeme

import diloco_orchestrator
from diloco_orchestrator.config import make_config
from diloco_orchestrator.replica.context import ReplicaContext

ROOT = Path(__file__).parents[2]
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md"),
                *(ROOT / "examples").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"} - set(
                    (ROOT / "docs/_build").rglob("*.md")))  # fmt: skip

# The Python blocks of a page that other tests run as they stand, by number; each test names its page.
PROGRAMS = {
    "README.md": ("tests/package/test_readme.py", (0, 1)),
    "docs/start/tutorial.md": ("tests/examples/test_tutorial.py", (0, 1, 2)),
    "docs/recipes/boto3.md": ("tests/examples/test_read_run.py", (0,)),
    "docs/recipes/heldout.md": ("tests/split/test_docs.py", (0, 1, 2)),
    "docs/recipes/islands.md": ("tests/run/test_torchrun.py", (1,)),
    "docs/recipes/whatif.md": ("tests/inspection/test_whatif_docs.py", (0, 1)),
    "docs/recipes/write_a_guard_rule.md": ("tests/guard/test_installed_rules.py", (0,)),
    "docs/recipes/trainers.md": ("tests/replica/test_trainers.py", (0,)),
}


def python_blocks() -> dict[tuple[str, int], Example]:
    named = ((page.relative_to(ROOT).as_posix(), page) for page in PAGES)
    return {(name, number): block for name, page in named for number, block in enumerate(examples(page, "python"))}


BLOCKS = python_blocks()


# -- stand-ins for what a fragment leaves to its reader ----------------------------------------------------------------


def checked_launch(entrypoint: Any, *, store: str = "runs/x", **options: Any) -> types.SimpleNamespace:
    """Refuses what `launch` would refuse before it starts anything, beside the place: unknown options, wrong values."""
    own = set(diloco_orchestrator.launching.run.LaunchOptions.__annotations__) - set(
        diloco_orchestrator.config.RunSettings.__annotations__
    )
    settings = {name: value for name, value in options.items() if name not in own}
    make_config({"entrypoint": "m:f", **settings})
    return types.SimpleNamespace()


class CheckedContext:
    """`ctx.attach` that accepts what the real one has parameters for."""

    def attach(self, *args: Any, **options: Any) -> None:
        inspect.signature(ReplicaContext.attach).bind(self, *args, **options)


class CheckedRun:
    """`run.resume` that accepts what the real one has parameters for."""

    def resume(self, **options: Any) -> None:
        inspect.signature(diloco_orchestrator.Run.resume).bind(self, **options)


def without(block: Example, pattern: str) -> Example:
    """The block without what the pattern matches within its lines."""
    text = re.sub(pattern, "", block.parsed, flags=re.MULTILINE)
    block.parsed = Lexeme(text, block.parsed.offset, block.parsed.line_offset)
    return block


def a_launch(block: Example, folder: Path) -> None:
    public = {name: getattr(diloco_orchestrator, name) for name in diloco_orchestrator.__all__}
    theirs = {name: object() for name in ("model", "optimizer", "score", "items", "more_items", "token", "train")}
    public |= {"launch": checked_launch, "ctx": CheckedContext(), "run": CheckedRun()}
    run(without(block, "(?<=[a-z]), launch$"), **public, **theirs)


def on_a_kept_run(block: Example, folder: Path) -> None:
    with tarfile.open(ROOT / "tests/fixtures/kept_runs/runs.tar.xz", "r:xz") as packed:
        packed.extractall(folder, filter="data")
    (folder / "runs").mkdir()
    shutil.move(folder / "voted", folder / "runs/first")
    run(block)


def a_training(block: Example, folder: Path, **settings: Any) -> None:
    """Two rounds of one replica with the block's training function, or with the block as the end of one."""
    import torch

    torch.manual_seed(0)
    rows = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]

    class MyModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functools.reduce(lambda value, block: block(value), self.blocks, x)

    def step(model: Any, batch: Any) -> Any:
        loss = (model(batch) ** 2).mean()
        loss.backward()
        return loss

    def build(args: Any) -> Any:
        model = MyModel()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), rows

    def score(model: Any, items: Any) -> list[float]:
        return [float((model(rows[item]) ** 2).mean()) for item in items]

    class Source(list[torch.Tensor]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    small = SmallRun(**settings)
    named = {"torch": torch, "MyModel": MyModel, "step": step, "build": build, "score": score, "items": [0, 1, 2, 3]}
    named |= {"my_batches": lambda part: rows, "fully_shard": lambda module: module}
    if block.parsed.startswith("with ctx.attach("):
        model, optimizer, _ = build({})
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        named |= {"model": model, "optimizer": optimizer, "schedule": schedule, "source": Source(rows * 9)}
        run(block, **named, ctx=small.context())
    else:
        run(block, **named)["train"](small.context())
    assert [commit.applied for commit in small.commits()[:2]] == [True, True]


def a_checkpoint(folder: Path) -> str:
    """A tiny model with its tokenizer, as `from_pretrained` reads them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *"0123456789"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes)).save_pretrained(
        folder
    )
    return str(folder)


def of_a_checkpoint(block: Example, folder: Path) -> None:
    a_training(block, folder, args={"model": a_checkpoint(folder / "checkpoint"), "revision": "main"})


def a_dealt_training(block: Example, folder: Path) -> None:
    a_training(block, folder, deal="open")


def of_trl(block: Example, folder: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra [trl]: make .venv/trainers")
    of_a_checkpoint(block, folder)


def classes_of_tests(block: Example, folder: Path) -> None:
    """Test classes for the reader's own package: they are defined, and the base classes have what they set."""
    sys.modules["my_train"] = types.ModuleType("my_train")
    try:
        left = run(
            without(block, r"^print\(check_replica.*$"), pytest=pytest, subprocess=subprocess, DockerExecutor=None
        )
    finally:
        del sys.modules["my_train"]  # tests that run in this process later have files of that name
    for name, made in left.items():
        bases = [base for base in getattr(made, "__mro__", ())[1:] if base is not object]
        for attribute in vars(made) if bases and name in block.parsed else ():
            known = any(re.search(rf"\b{attribute}\b", inspect.getsource(base)) for base in bases)
            assert attribute.startswith("__") or known, (name, attribute)


FRAGMENTS: dict[tuple[str, int], Callable[[Example, Path], None]] = {
    ("docs/places/clouds.md", 0): a_launch,
    ("docs/places/index.md", 0): a_launch,
    ("docs/places/ray.md", 0): a_launch,
    ("docs/places/slurm.md", 0): a_launch,
    ("docs/recipes/adapters.md", 0): a_launch,
    ("docs/recipes/places.md", 0): a_launch,
    ("docs/reference/kill-switch.md", 0): a_launch,
    ("docs/reference/kill-switch.md", 1): a_launch,
    ("docs/reference/kill-switch.md", 2): a_launch,
    ("infra/README.md", 0): a_launch,
    ("infra/modal/README.md", 0): a_launch,
    ("infra/modal/README.md", 1): a_launch,
    ("infra/hf-jobs/README.md", 0): a_launch,
    ("docs/reference/bucket.md", 0): on_a_kept_run,
    ("docs/recipes/training_loop.md", 0): a_training,
    ("docs/recipes/data.md", 0): a_dealt_training,
    ("docs/recipes/islands.md", 0): a_training,
    ("docs/recipes/trainers.md", 1): a_training,
    ("docs/recipes/trainers.md", 2): classes_of_tests,
    ("docs/recipes/write_an_executor.md", 0): classes_of_tests,
    ("docs/recipes/pretrained.md", 0): of_a_checkpoint,
    ("docs/recipes/grpo.md", 0): of_trl,
}


def test_every_python_block_is_run_by_a_test():
    elsewhere = {(page, number) for page, (_, numbers) in PROGRAMS.items() for number in numbers}
    assert not elsewhere & FRAGMENTS.keys()
    listed = elsewhere | FRAGMENTS.keys()
    assert not BLOCKS.keys() - listed, "run these by a test, and list them in PROGRAMS or FRAGMENTS"
    assert not listed - BLOCKS.keys(), "these are gone"
    for page, (test, _) in PROGRAMS.items():
        assert all(part in (ROOT / test).read_text() for part in Path(page).parts[-1:]), f"{test} does not read {page}"


def marked(which: tuple[str, int]) -> Any:
    """transformers and TRL take seconds to import."""
    return pytest.param(which, marks=pytest.mark.slow if FRAGMENTS[which] in (of_a_checkpoint, of_trl) else ())


@pytest.mark.parametrize("which", [marked(each) for each in FRAGMENTS], ids=lambda which: f"{which[0]}-{which[1]}")
def test_a_fragment_does_what_its_page_says(which, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLICA_KEY_ID", "id")
    monkeypatch.setenv("REPLICA_KEY", "key")
    BLOCKS[which].namespace = {}  # each without what the page's others left
    FRAGMENTS[which](BLOCKS[which], tmp_path)


# -- commands ----------------------------------------------------------------------------------------------------------

# Programs of others that pages tell people to type; what they do is theirs, and the places' pages say what was tried.
OTHERS = {
    "aws", "cat", "cd", "eksctl", "export", "for", "git", "grep", "hf", "kubectl", "mkdir", "modal", "pytest", "ray",
    "sed", "sh", "sinfo", "sky", "torchrun",
}  # fmt: skip
OURS = {"diloco", "make", "pip", "python", "python3"}


def command_lines() -> list[tuple[str, str]]:
    """Page and command for each line of the blocks that hold commands: those whose first line begins with one."""
    found = []
    for page in PAGES:
        for text in blocks(page, "", "console", "sh", "bash"):
            lines = re.sub(r"\\\n\s*", " ", text).splitlines()
            first = program_of(lines[0]) if lines else ""
            if first not in OURS | OTHERS:
                continue  # a drawing, a formula, a layout
            prompt = any(re.match(r"\w*\$ ", line) for line in lines)
            for line in lines:
                if line.strip() and not (prompt and not re.match(r"\w*\$ ", line)) and not line.startswith("#"):
                    found.append((page.relative_to(ROOT).as_posix(), command_of(line)))
    return found


def command_of(line: str) -> str:
    """A line without prompt, variables before the command, and comment."""
    line = re.sub(r"^\w*\$ +", "", line.strip())
    line = re.sub(r" +#.*$", "", line)
    return re.sub(r"^(?:[A-Z_]+=\S* +)+(?=\S)", "", line)


def program_of(line: str) -> str:
    word = (command_of(line).split() or [""])[0]
    return Path(word).name if "/" in word else word


@functools.cache
def targets() -> set[str]:
    text = "".join((ROOT / name).read_text() for name in ("Makefile", "benchmarks/benchmarks.mk"))
    return {name for names in re.findall(r"^([\w. /-]+):(?!=)", text, re.MULTILINE) for name in names.split()}


@pytest.mark.parametrize(("page", "line"), sorted(set(command_lines())))
def test_a_command_of_a_page_names_what_is_there(page, line):
    """`diloco` commands are parsed by tests/cli/test_commands_page.py; here the others' targets, files and extras."""
    words = shlex.split(line.replace("…", "x"), posix=True)
    program = program_of(line)
    if program == "make":
        named = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert not set(named) - targets(), f"{page}: no such target"
    elif program in ("python", "python3"):
        scripts = [word for word in words[1:] if word.endswith(".py")]
        saved = {name for text in [(ROOT / page).read_text()] for name in re.findall(r"`(\w+\.py)`", text)}
        for script in scripts[:1]:
            there = (ROOT / script.removeprefix("CHECKOUT/")).exists() or script in saved
            assert there, f"{page}: there is no {script}"
    elif program == "pip":
        import tomllib

        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        groups = re.findall(r"(?:\.|diloco-orchestrator)\[([\w,]+)\]", line)
        asked = {name for group in groups for name in group.split(",")}
        assert not asked - extras.keys(), f"{page}: no such extra"
    else:
        assert program in OTHERS | OURS, f"{page}: add {program} to OTHERS, or check what it runs"


def test_names_that_blocks_import_from_us_exist():
    for which, block in BLOCKS.items():
        for node in ast.walk(ast.parse(block.parsed, str(which))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.partition(".")[0] in ("diloco_orchestrator", "executors"):
                missing = [each.name for each in node.names if not hasattr(importlib.import_module(module), each.name)]
                assert not missing, (which, missing)
