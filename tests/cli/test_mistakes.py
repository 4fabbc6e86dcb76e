"""What people get wrong at the command line: each mistake, and the words that say what to do, before a start."""

from pathlib import Path

import pytest
from cli_support import diloco, diloco_here

from diloco_orchestrator.cli.setting_options import read_toml
from diloco_orchestrator.code_archive.entrypoint import check_defined
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.supervision.launch_request import archive_for
from executors import HFJobsExecutor

WORKLOAD = """
import asyncio
VALUE = 3
def train(ctx):
    pass
def nothing():
    pass
def with_a_model(ctx, model):
    pass
def keyword(ctx, *, lr):
    pass
async def waits(ctx):
    await asyncio.sleep(0)
def yields(ctx):
    yield ctx
def fine(ctx, lr=0.1, *more, x=2):
    def inner():
        yield lr
@staticmethod
def decorated(a, b, c):
    pass
if VALUE:
    def either(ctx):
        pass
else:
    def either():
        pass
"""
RUN = ("run", "of_mistakes.py:train", "--store", "runs/a")
MISTAKES = {  # by what was done: the command, and a part of the answer that says what to do
    "a misspelt function": (("run", "of_mistakes.py:trian", *RUN[2:]), "defines no 'trian'. Did you mean 'train'?"),
    "a misspelt file": (("run", "mistake.py:train", *RUN[2:]), "there is no file"),
    "no function": (("run", "of_mistakes.py", *RUN[2:]), "Write 'of_mistakes.py:FUNCTION'"),
    "a value": (("run", "of_mistakes:VALUE", *RUN[2:]), "VALUE in of_mistakes.py is a value. Name a function"),
    "no argument": (("run", "of_mistakes.py:nothing", *RUN[2:]), "write def nothing(ctx)"),
    "a second argument": (("plan", "of_mistakes.py:with_a_model", *RUN[2:]), "takes ctx, model. It is called with one"),
    "a keyword without default": (("plan", "of_mistakes.py:keyword", *RUN[2:]), "arrives as ctx.args"),
    "a coroutine": (("run", "of_mistakes.py:waits", *RUN[2:]), "Write `def` instead of `async def`"),
    "a generator": (("run", "of_mistakes.py:yields", *RUN[2:]), "Move its `yield` into a function of its own"),
    "no store": (RUN[:2], "Missing option '--store'"),
    "no replica": ((*RUN, "--replicas", "0"), "'replicas' = '0': input should be greater than or equal to 1"),
    "a misspelt option": ((*RUN, "--replica", "2"), "'--replicas'"),
    "a misspelt codec": ((*RUN, "--codec", "int3"), "did you mean 'int8'?"),
    "a misspelt executor": ((*RUN, "--executor", "modall"), "did you mean 'modal'?"),
    "an option of the place misspelt": ((*RUN, "--executor", "modal", "--gpus", "A100"), "'--gpu'"),
    "an option of another place": ((*RUN, "--hardware", "t4-small"), "It goes with --executor hf-jobs"),
    "a quorum of more than all": (
        (*RUN, "--quorum", "5", "--replicas", "2"),
        'choose 1..2 (the number of replicas), or "all"',
    ),
    "another scheme": (("run", RUN[1], "--store", "s4://b/x"), "did you mean 's3'?"),
    "half a scheme": (("run", RUN[1], "--store", "s3:/b/x"), "write s3://"),
    "a scheme without its colon": (("run", RUN[1], "--store", "gcs//b/x"), "write gcs://"),
    "a file as a store": ((*RUN[:2], "--store", "of_mistakes.py/a"), "of_mistakes.py is a file. Choose a folder"),
    "no bucket": (("run", RUN[1], "--store", "s3://"), "Write s3://bucket/folder"),
    "a web address": (
        ("run", RUN[1], "--store", "https://b.s3.amazonaws.com/x"),
        "Use s3://, gs://, az:// or a folder",
    ),
    "a limit without a price": ((*RUN, "--max-cost-usd", "5"), "hourly_usd=… (--hourly-usd), or use max_hours"),
    "a limit of places without places": (("attach", "runs/none", "--usd-per-hour", "5"), "but no --executor"),
    "an odd number of parameters": (("plan", *RUN[1:], "--parameters", "10X"), "write a number such as 124M or 1.5B"),
    "settings that are not there": ((*RUN, "--config", "nope.toml"), "cannot read settings from nope.toml"),
    "a misspelt command": (("statu", "runs/a"), "did you mean 'status'?"),
    "a run that is not there": (("status", "runs/none"), "Check the address; a run is one folder"),
    "a folder without a run": (("verify", "."), "run.json is missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_what_to_do_and_starts_nothing(mistake: str, tmp_path: Path):
    (tmp_path / "of_mistakes.py").write_text(WORKLOAD)
    command, words = MISTAKES[mistake]
    done = diloco_here(*command, cwd=tmp_path)
    assert done.returncode in (1, 2) and words in done.stderr and not done.stdout, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 5
    assert [each.name for each in tmp_path.iterdir()] == ["of_mistakes.py"]


def test_an_argument_of_the_run_is_not_taken_for_a_parameter_that_no_call_sets(tmp_path: Path):
    (tmp_path / "of_mistakes.py").write_text(WORKLOAD)
    plan = ("plan", "of_mistakes.py:fine", "--store", "runs/a", "--arg")
    for name in ("lr", "x"):
        done = diloco_here(*plan, f"{name}=0.2", cwd=tmp_path)
        assert done.returncode == 2 and f"arrives as ctx.args['{name}']" in done.stderr, done.stderr
    for name in ("ctx", "more"):
        assert diloco_here(*plan, f"{name}=0.2", cwd=tmp_path).returncode == 0


def test_such_an_argument_is_refused_for_replicas_elsewhere_too(tmp_path: Path):
    (source := tmp_path / "of_mistakes.py").write_text(WORKLOAD)
    with pytest.raises(ConfigError, match=r"ctx\.args\['lr'\]"):
        archive_for(HFJobsExecutor(), source, "of_mistakes:fine", "s3://b/x", None, {"lr": 0.2})


def test_what_the_terminals_encoding_lacks_is_written_by_its_number(tmp_path: Path):
    (tmp_path / "of_mistakes.py").write_text(WORKLOAD)
    command = ("plan", "of_mistakes.py:fine", "--store", "日本")
    done = diloco(*command, cwd=tmp_path, environ={"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0 and r"\u65e5\u672c" in done.stdout, done.stderr


SAVED = {  # by how an editor saves a file: its first bytes, and its encoding
    "with a byte order mark": (b"\xef\xbb\xbf", "utf-8"),
    "in an encoding that it names": (b"# -*- coding: latin-1 -*-\n", "latin-1"),
}


@pytest.mark.parametrize("how", SAVED)
def test_a_file_is_read_as_python_reads_it(how: str, tmp_path: Path):
    first, encoding = SAVED[how]
    (source := tmp_path / "saved.py").write_bytes(first + "# größer\ndef train(ctx):\n    pass\n".encode(encoding))
    check_defined("saved:train", source)


def test_settings_with_a_byte_order_mark_are_read(tmp_path: Path):
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbfrounds = 7\r\n")
    assert read_toml(tmp_path / "windows.toml") == {"rounds": 7}


def test_a_file_that_is_not_python_is_named_with_the_line(tmp_path: Path):
    (source := tmp_path / "cut_off.py").write_text("def train(ctx):\n    x = (\n")
    with pytest.raises(ConfigError, match=r"never closed \(cut_off.py, line 2\)"):
        check_defined("cut_off:train", source)


@pytest.mark.parametrize("function", ["fine", "decorated", "either"])
def test_functions_that_may_be_called_with_the_context_are_taken(function: str, tmp_path: Path):
    (tmp_path / "of_mistakes.py").write_text(WORKLOAD)
    done = diloco_here("plan", f"of_mistakes.py:{function}", "--store", "runs/a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


LAUNCHING = {  # by how the file that is imported for its function launches: the program below the function
    "from": "from diloco_orchestrator import launch as go\ngo('launches:train')",
    "import": "import diloco_orchestrator\nfor x in (1,):\n    print(diloco_orchestrator.launch('launches:train'))",
    "below main": "from diloco_orchestrator import launch\nif __name__ == '__main__':\n    launch('launches:train')",
    "another": "from os import times as launch\nlaunch()",
}


@pytest.mark.parametrize("how", LAUNCHING)
def test_a_file_that_would_launch_in_every_replica_is_refused_before_a_start(how: str, tmp_path: Path):
    (source := tmp_path / "launches.py").write_text(f"def train(ctx):\n    pass\n{LAUNCHING[how]}\n")
    if how in ("from", "import"):
        with pytest.raises(ConfigError, match=r"line [45] of launches.py calls launch .*if __name__"):
            check_defined("launches:train", source)
    else:
        check_defined("launches:train", source)
