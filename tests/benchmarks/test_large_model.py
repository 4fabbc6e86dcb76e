"""The benchmarks of large models and of single transfers, at a size that takes seconds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def said(program: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / program), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_a_model_above_the_limit_goes_from_start_to_verify_in_objects_below_it(tmp_path: Path):
    table = said("large_model.py", "--millions", "4", "--width", "256", "--limit-mib", "1", "--folder", str(tmp_path))
    steps = re.findall(r"^\| (start|commit|resume|pull|verify) \|(?: [\d.,-]+ \|){4} (.*) \|$", table, re.MULTILINE)
    assert [step for step, _ in steps] == ["start", "commit", "resume", "pull", "verify"]
    assert steps[-1][1] == "agrees" and "model-00001-of-" in dict(steps)["pull"]
    found = re.search(r"largest object ([\d.]+) MiB", table)
    assert found is not None and float(found[1]) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--tls"]], ids=["http", "https"])
def test_transfers_are_compared_with_obstores_own(options):
    table = said("transfer.py", "--mib", "5", "--repeats", "2", *options)
    assert re.findall(r"^(?:PUT|GET) \w+(?=.* x obstore)", table, re.MULTILINE) == [
        *("PUT obstore", "PUT open_store", "GET obstore", "GET open_store"),
        *(["PUT obstore"] if options else []),
    ]
