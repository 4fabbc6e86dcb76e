"""`executor=` of `launch`, `plan_launch` and `attach`: an object, or the name of an executor without options."""

from pathlib import Path
from typing import Any

import pytest

from diloco_orchestrator import LocalProcessExecutor, attach, plan_launch
from diloco_orchestrator.errors import ConfigError
from executors.registry import executor_of


def test_a_name_stands_for_an_executor_without_options(tmp_path: Path):
    assert isinstance(executor_of("local"), LocalProcessExecutor)
    assert plan_launch("tiny_workloads:train", str(tmp_path / "run"), executor="join", pin="given").executor == "join"


def test_an_object_stays_as_it_is():
    given = LocalProcessExecutor()
    assert executor_of(given) is given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("modl", "executor='modl': unknown executor 'modl': did you mean 'modal'?"),
        ("slurm:2", "unknown executor 'slurm:2': did you mean 'slurm'?"),
        (LocalProcessExecutor, r"executor=LocalProcessExecutor is no executor: .*executor=LocalProcessExecutor\(\)"),
        (7, "executor=int is no executor: pass an object"),
    ],
)
def test_anything_else_is_refused_in_words_that_say_what_to_write(given: Any, words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        plan_launch("tiny_workloads:train", str(tmp_path / "run"), executor=given)
    with pytest.raises(ConfigError, match=words):
        attach(str(tmp_path / "run"), executor=given)
