"""Guard rules of other packages, found by their entry points: the docs' example in a whole run, and without it."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_blocks import blocks
from protocol_fleet import Fleet, play, report

from diloco_orchestrator import plan_launch
from diloco_orchestrator.config import GuardConfig, make_config
from diloco_orchestrator.errors import ConfigError, RecordTooNew
from diloco_orchestrator.guard import RoundReports, fold, registry
from diloco_orchestrator.guard.registry import rule_of
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol.start_records import HeldoutSet
from diloco_orchestrator.store.open_store import open_store

ROOT = Path(__file__).parents[2]
HELDOUT = HeldoutSet(metric="loss", shares=(10,) * 4, digest="0" * 64)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution with guard rules into a folder of its own, as pip would lay it out."""

    def install(package: str, entry_points: str, **modules: str) -> None:
        folder = tmp_path / f"site-{package}"
        metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[diloco_orchestrator.guard_rules]\n{entry_points}\n")
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))

    return install


@pytest.fixture
def example(install: Install) -> None:
    """The example of docs/recipes/write_a_guard_rule.md, installed."""
    page = ROOT / "docs/recipes/write_a_guard_rule.md"
    (code,) = blocks(page, "python")
    (entry,) = re.findall(r"^drop-v1 = .*$", page.read_text(), re.MULTILINE)
    install("drop-rule", entry.replace('"', ""), drop_rule=code)


def fallen_run(folder: Path) -> Fleet:
    """A run that the example judges; its held-out score falls at the end."""
    fleet = Fleet(replicas=2, rounds=20, store=open_store(str(folder)), guard={"rule": "drop-v1"}, scored=True)
    participants = fleet.join_all()
    for score in (1.0, 2.0, 2.5, 2.4, 2.0, 1.9, 1.9):
        play(participants, [1.0, 1.0], [report(i, score) for i in range(2)])
    assert all(p.open.stopped for p in participants)
    return fleet


def test_a_run_is_folded_stopped_shown_and_verified_by_an_installed_rule(example: None, tmp_path: Path):
    fleet = fallen_run(tmp_path / "run")
    commits = fleet.commits()
    assert [c.guard["rule"] for c in commits if c.guard] == ["drop-v1"] * 7
    assert [c.fired for c in commits] == [False] * 6 + [True]
    assert (commits[-1].stop, commits[-1].applied) == ("halted", False)
    reader = RunReader(fleet.store)
    verdict = reader.status().verdict
    assert verdict == commits[-1].verdict and verdict is not None
    assert verdict.reason == "the held-out score has been 0.2 below its best for 3 rounds"
    assert (verdict.folds, verdict.value, verdict.in_loop) == (7, 1.9, 0.0)
    assert [row.heldout for row in reader.rows()] == [1.0, 2.0, 2.5, 2.4, 2.0, 1.9, 1.9]
    found = verify_run(fleet.store)
    assert found.agrees and found.checked["rounds"] == 7


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes this process one that has not imported the example: without it, or with it as it lies in its folder now."""

    def elsewhere(installed: bool) -> None:
        monkeypatch.delitem(sys.modules, "drop_rule")
        registry._installed.cache_clear()
        importlib.invalidate_caches()
        if not installed:
            monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path / "site-drop-rule")])

    yield elsewhere
    registry._installed.cache_clear()


def test_where_the_rule_is_not_installed_a_run_can_be_read_and_not_verified(example: None, elsewhere, tmp_path: Path):
    store = fallen_run(tmp_path / "run").store
    elsewhere(installed=False)
    assert RunReader(store).status().state == "halted"
    words = "the guard before round 1 needs the guard rule 'drop-v1', which is not installed here. `pip"
    with pytest.raises(RecordTooNew, match=re.escape(words)):
        verify_run(store)


def test_a_package_that_judges_otherwise_under_the_same_name_disagrees(example: None, elsewhere, tmp_path: Path):
    store = fallen_run(tmp_path / "run").store
    module = tmp_path / "site-drop-rule" / "drop_rule.py"
    module.write_text(module.read_text().replace("DROP, ROUNDS = 0.2, 3", "DROP, ROUNDS = 9.0, 3"))
    elsewhere(installed=True)
    found = verify_run(store)
    assert found.disagreement and found.disagreement.words.startswith("is void: its guard is not what")


def test_a_misspelt_rule_is_refused_with_the_nearest_installed_one(example: None):
    with pytest.raises(ConfigError, match=r"unknown guard rule 'drop-v2': did you mean 'drop-v1'\?"):
        plan_launch("m:f", store="bucket", guard={"rule": "drop-v2"})
    chosen = make_config({"entrypoint": "m:f", "guard": {"rule": "drop-v1", "min_steps": 3}}).guard
    assert GuardConfig.model_validate_json(chosen.model_dump_json()) == chosen
    with pytest.raises(ConfigError, match=r"guard\.threshold is a setting of the guard rule 'sequential'"):
        make_config({"entrypoint": "m:f", "guard": {"rule": "drop-v1", "threshold": 9.0}})


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("absent-v1 = no_such_module:X", "does not load: ModuleNotFoundError: No module named 'no_such_module'"),
        ("crash-v1 = crashing_rule:X", "does not load: RuntimeError: no licence"),
        ("number-v1 = odd_rules:X", "is no class derived from `GuardRule`"),
        ("other-v1 = odd_rules:Other", "calls itself 'another-v1', and records hold that name"),
        ("half-v1 = odd_rules:Half", "lacks what `GuardRule` asks for: fold, of."),
    ],
)
def test_a_rule_that_its_package_does_not_provide_is_refused_in_the_words_of_what_is_wrong(
    install: Install, entry: str, words: str
):
    odd = "from diloco_orchestrator.guard import GuardRule\nX = 3\nclass Other(GuardRule):\n    name = 'another-v1'\n"
    odd += "class Half(GuardRule):\n    name = 'half-v1'\n"
    install("broken-package", entry, crashing_rule="raise RuntimeError('no licence')", odd_rules=odd)
    name = entry.partition(" ")[0]
    with pytest.raises(ConfigError, match=f"guard rule '{name}' of package broken-package .*{re.escape(words)}"):
        rule_of(name)
    with pytest.raises(RecordTooNew, match=rf"before round 1 .*{re.escape(words)}"):
        fold({"rule": name}, GuardConfig(), HELDOUT, RoundReports(1, []))


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("none", "None", r"returned None: fold returns \(state, Verdict\)"),
        ("three", "{}, verdict, 1", r"returned \({}, Verdict.*fold returns"),
        ("set", "{'seen': {1, 2}}, verdict", "returned a state that is not JSON: Object of type set"),
    ],
)
def test_a_rule_that_returns_something_else_is_named(install: Install, name: str, body: str, words: str):
    odd = (
        "from diloco_orchestrator.guard import GuardRule, Verdict, VerdictKind\n"
        "verdict = Verdict(fire=False, reason='', proxy_real_gap=0.0, folds=1, action=VerdictKind.CONTINUE)\n"
        "class Odd(GuardRule):\n"
        f"    name = '{name}-v1'\n"
        "    @classmethod\n"
        "    def of(cls, config, heldout):\n"
        "        return cls()\n"
        "    def fold(self, state, evidence):\n"
        f"        return {body}\n"
    )
    install("odd-package", f"{name}-v1 = odd_rule_{name}:Odd", **{f"odd_rule_{name}": odd})
    with pytest.raises(ConfigError, match=f"the guard rule '{name}-v1' {words}"):
        fold({"rule": f"{name}-v1"}, GuardConfig(), HELDOUT, RoundReports(1, []))


def test_a_rule_of_two_packages_is_refused_and_ours_are_not_replaced(install: Install):
    install("first-package", "twice-v1 = a:B\nsequential = a:B")
    install("second-package", "twice-v1 = c:D\nsequential-v5 = a:B")
    with pytest.raises(ConfigError, match="'twice-v1' is registered by first-package and second-package"):
        rule_of("twice-v1")
    assert rule_of("sequential").name == "sequential-v5" and rule_of("sequential").__module__.endswith("sequential")


@pytest.mark.parametrize("name", ["heldout-v2", 7, None, ["heldout-v1"]])
def test_a_state_of_an_unknown_rule_is_refused_with_what_to_install(name):
    words = rf"needs the guard rule {str(name)!r}, which is not installed here\. `pip install` .*run\.json names"
    with pytest.raises(RecordTooNew, match=words.replace("[", r"\[").replace("]", r"\]")):
        fold({"rule": name}, GuardConfig(), HELDOUT, RoundReports(1, []))
