"""The examples of docs/recipes/whatif.md are executed as they are, and print what the page says.

`python tests/inspection/test_whatif_docs.py` writes the output of this machine into the page.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cli_support import diloco
from page_blocks import blocks

PAGE = Path(__file__).parents[2] / "docs/recipes/whatif.md"
NUMBER = r"-?\d+(?:\.\d+)?"
TOLERANCE = 0.05  # of a figure: another CPU rounds otherwise, and 150 steps of training follow


def output(command: str, folder: Path) -> str:
    """What a command of the page prints; of those that write something else, nothing."""
    name, *args = shlex.split(command)
    if name != "diloco":
        return subprocess.run([name, *args], cwd=folder, capture_output=True, text=True, check=True).stdout
    done = diloco(*args, cwd=folder, environ={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(f"{folder}/", "") if args[0] in ("whatif", "snapshots") else ""


def executed(block: str, folder: Path) -> str:
    """A block of commands with the output of each."""
    commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    return "".join(f"$ {command}\n{output(command, folder)}" for command in commands)


def alike(ours: str, theirs: str) -> bool:
    """Whether two lines have the same words, and figures that differ by a little."""
    ours, theirs = (re.sub(r"b3:\w+", "b3", line) for line in (ours, theirs))
    figures = [[float(each) for each in re.findall(NUMBER, line)] for line in (ours, theirs)]
    words = [re.sub(NUMBER, "0", line.replace("+", "")) for line in (ours, theirs)]
    return words[0] == words[1] and all(
        a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE) for a, b in zip(*figures, strict=True)
    )


@pytest.mark.slow
def test_the_page_prints_what_it_says(tmp_path: Path):
    program, function = blocks(PAGE, "python")
    (tmp_path / "noisy.py").write_text(program)
    for block in blocks(PAGE, "console"):
        ours = executed(block, tmp_path).splitlines()
        for mine, theirs in zip(ours, block.splitlines(), strict=True):
            assert alike(mine, theirs), f"here: {mine}"
    script = function.replace("runs/noisy", str(tmp_path / "runs/noisy"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("b3:")


def test_lines_with_other_words_or_figures_are_told_apart():
    line = "base  b3:12ab  after round 4, held-out 1.039 (+0.19)"
    assert alike(line, "base  b3:ffff  after round 4, held-out 1.041 (+0.20)")
    assert not alike(line, line.replace("held-out", "logged"))
    assert not alike(line, line.replace("1.039", "1.2"))


def rewrite() -> None:
    """Write the output of this machine into the page."""
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "noisy.py").write_text(blocks(PAGE, "python")[0])
        for block in blocks(PAGE, "console"):
            text = text.replace(f"```console\n{block}```", f"```console\n{executed(block, folder)}```")
    PAGE.write_text(text)


if __name__ == "__main__":
    rewrite()
