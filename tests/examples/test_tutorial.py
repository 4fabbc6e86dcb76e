"""docs/start/tutorial.md as a reader takes it, programs saved and commands typed; docs/recipes/boto3.md on its run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fast_s3 import running_fast_s3
from page_blocks import blocks, examples

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/start/tutorial.md"
(READER,) = blocks(ROOT / "docs/recipes/boto3.md", "python")
BLOCKS = [(str(each.region.lexemes["language"]), str(each.parsed)) for each in examples(PAGE, "python", "console")]
NAMED = re.findall(r"`(\w+\.py)`", PAGE.read_text())  # each program's name stands before its block


def typed(block: str) -> list[str]:
    return re.findall(r"^\$ (.+)$", block, re.MULTILINE)


def test_every_program_has_its_name_before_it_and_every_command_is_a_line():
    programs = [text for language, text in BLOCKS if language == "python"]
    names = list(dict.fromkeys(NAMED))
    assert names == ["plain.py", "train.py", "load.py"] and len(programs) == len(names)
    for name, program in zip(names, programs, strict=True):
        compile(program, name, "exec")
    for language, text in BLOCKS:
        assert language == "python" or len(typed(text)) == len(text.splitlines())


@pytest.mark.slow
def test_the_tutorial_can_be_typed_from_top_to_bottom(tmp_path):
    names, beside = iter(dict.fromkeys(NAMED)), list[subprocess.Popen[str]]()
    said = ""
    with running_fast_s3() as server:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, **server.environ(), "PATH": path, "OMP_NUM_THREADS": "1"}
        for language, text in BLOCKS:
            if language == "python":
                (tmp_path / next(names)).write_text(text)
                continue
            for command in typed(text):
                process = subprocess.Popen(
                    command.removesuffix(" &"),
                    shell=True,
                    cwd=tmp_path,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                beside.append(process)
                if not command.endswith("&"):
                    for each in beside:
                        output, _ = each.communicate(timeout=300)
                        assert each.returncode == 0, f"{each.args}: {output}"
                        said += output
                    beside.clear()
        (tmp_path / "read_run.py").write_text(READER)
        read = [sys.executable, "read_run.py", "bucket", "two"]
        told = subprocess.run(read, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout
    (head,) = re.findall(r"head (7:[0-9a-f]{64})$", told, re.MULTILINE)
    assert f"head:     {head}" in said
    assert said.count("everything agrees") == 2 and "loss on new data: 0.0" in said
