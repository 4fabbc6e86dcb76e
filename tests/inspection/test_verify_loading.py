"""`verify` loads snapshots as their users do, and scores them as the replicas did."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from protocol_fleet import Fleet
from sessions import Counted, context_of

from diloco_orchestrator.cli.main import diloco
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.inspection.verify.findings import Verification
from diloco_orchestrator.inspection.verify.loading import OwnCode, check_loading
from diloco_orchestrator.store.open_store import open_store

ITEMS = [[float(i), 1.0, -0.5 * i] for i in range(8)]


pytestmark = pytest.mark.usefixtures("one_thread")


def normalised() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


def score(model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
    """Depends on the running statistics: BatchNorm is in evaluation mode."""
    return [float(model(torch.tensor([item])).square().mean()) for item in items]


def other_score(model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
    return [1.001 * each for each in score(model, items)]


def trained(**settings: Any) -> Fleet:
    """A run of BatchNorm that was scored."""
    fleet = Fleet(replicas=1, rounds=2, sync_every=3, snapshot_every=1, **settings)
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach = context_of(fleet, 0).attach
    with attach(model, optimizer, heldout=score, heldout_items=ITEMS, in_loop="loss") as session:
        for batch in session.batches(Counted()):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(batch))).square().sum().backward()
            optimizer.step()
            session.observe(loss=1.0, tokens=4)
    return fleet


def test_every_snapshot_of_a_plain_module_is_built_loaded_and_scored():
    fleet = trained()
    done = verify_run(fleet.store)
    check_loading(fleet.store, done, OwnCode(normalised, score, ITEMS))
    assert done.agrees and done.unchecked == []
    assert (done.checked["snapshots loaded"], done.checked["snapshots scored"]) == (3, 3)


def test_another_score_than_the_logged_one_and_a_model_that_does_not_fit_are_disagreements():
    fleet, done = trained(), Verification("x")
    check_loading(fleet.store, done, OwnCode(normalised, other_score, ITEMS))
    assert done.disagreement is not None and "the replicas logged" in done.disagreement.words
    tolerant = Verification("x")
    check_loading(fleet.store, tolerant, OwnCode(normalised, other_score, ITEMS), tolerance=1e9)
    assert tolerant.disagreement is None and tolerant.checked["snapshots scored"] == 3
    builds: list[Callable[[], torch.nn.Module]] = [
        lambda: torch.nn.Linear(3, 3),
        lambda: torch.nn.Sequential(*normalised(), torch.nn.Linear(3, 3)),
    ]
    for build, word in zip(builds, ("unexpected", "2.weight"), strict=True):
        done = Verification("x")
        check_loading(fleet.store, done, OwnCode(build))
        assert done.disagreement is not None and "does not load: " in done.disagreement.words
        assert word in done.disagreement.words


def test_what_cannot_be_loaded_here_is_said_and_other_items_are_refused():
    fleet, done = trained(), Verification("x")
    check_loading(fleet.store, done)
    assert done.agrees and "pass `build`" in done.unchecked[0]
    with pytest.raises(ConfigError, match="are not those that the replicas"):
        check_loading(fleet.store, done, OwnCode(normalised, score, ITEMS[1:]))


@pytest.mark.parametrize(
    "error",
    [ModuleNotFoundError("No module named 'flash_attn'"), MemoryError("4 GiB"), OSError("no connection to the Hub")],
)
def test_what_this_machine_lacks_for_a_model_is_no_disagreement(error: Exception):
    def build() -> torch.nn.Module:
        raise error

    fleet, done = trained(), Verification("x")
    check_loading(fleet.store, done, OwnCode(build))
    assert done.disagreement is None and done.checked["snapshots loaded"] == 0
    assert done.unchecked == [f"whether snapshot 0 loads: `build` raised {type(error).__name__}: {error}"]


def test_a_model_for_which_this_machine_lacks_memory_is_no_disagreement():
    class Large(torch.nn.Sequential):
        def load_state_dict(self, *args, **kwargs):
            torch.empty(2**50)

    fleet, done = trained(), Verification("x")
    check_loading(fleet.store, done, OwnCode(lambda: Large(*normalised())))
    assert done.disagreement is None and "can't allocate memory" in done.unchecked[0]


def test_the_command_loads_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained(store=open_store(str(tmp_path / "run")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(Path(__file__).read_text())
    names = [f"--{option}=my_model:{name}" for option, name in (("build", "normalised"), ("score", "score"))]
    run = CliRunner().invoke(diloco, ["verify", str(tmp_path / "run"), *names, "--items=my_model:ITEMS", "--json"])
    found = json.loads(run.output)
    assert found["agrees"] and found["checked"]["snapshots scored"] == 3
    files = [name.replace("my_model:", "my_model.py:") for name in [*names, "--items=my_model:ITEMS"]]
    assert json.loads(CliRunner().invoke(diloco, ["verify", str(tmp_path / "run"), *files, "--json"]).output) == found
    with pytest.raises(ConfigError, match="no held-out items are given, which are not those that the replicas"):
        CliRunner().invoke(diloco, ["verify", str(tmp_path / "run"), *names], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"my_model has no 'scor'. Did you mean 'score'\?"):
        CliRunner().invoke(diloco, ["verify", "run", "--score=my_model:scor"], catch_exceptions=False)
