"""The docs build as a site without a warning: a link, a page or a docstring that does not fit is an error."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("sphinx"), reason="needs Sphinx: make .venv/docs")
def test_the_site_builds_and_can_be_searched_offline(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "url=docs/index.html" in (tmp_path / "index.html").read_text()
    start = (tmp_path / "docs/index.html").read_text()
    assert 'href="start/tutorial.html"' in start
    assert "straggler" in (tmp_path / "searchindex.js").read_text()
    loaded = [line for line in start.splitlines() if "<script" in line or "<link" in line]
    assert not [line for line in loaded if "http" in line], "a page loads something from elsewhere"
