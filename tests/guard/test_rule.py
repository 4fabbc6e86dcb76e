"""A second rule, registered here alone: a whole run with it, and what happens where it is not known."""

import hashlib
import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.errors import RecordTooNew
from diloco_orchestrator.guard import Sample, Verdict, fold
from diloco_orchestrator.guard.fold import RULES, Evidence
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Begin, HeldoutSet, Metric, Score


class DropRule:
    """Fires once the held-out score lies further below its best than the gap that fires."""

    name: ClassVar[str] = "drop-v1"
    needs_in_loop: ClassVar[bool] = True

    def __init__(self, limit: float, best: float | None, verdict: Verdict) -> None:
        self._limit, self._best, self.verdict = limit, best, verdict

    @classmethod
    def restore(cls, config: GuardConfig, heldout: HeldoutSet, state: Mapping[str, Any] | None) -> "DropRule":
        limit = config.gap_that_fires(heldout.metric)
        if state is None:
            return cls(limit, None, Verdict(fire=False, reason="", proxy_real_gap=0.0, folds=0))
        return cls(limit, state["best"], Verdict(**state["verdict"]))

    def update(self, sample: Sample) -> Verdict:
        self._best = sample.heldout if self._best is None else max(self._best, sample.heldout)
        drop = self._best - sample.heldout
        fire = self.verdict.fire or drop > self._limit
        reason = f"fell by {drop:.2f}" if fire else ""
        self.verdict = replace(self.verdict, fire=fire, reason=reason, folds=self.verdict.folds + 1)
        return self.verdict

    def inconclusive(self, round_: int, why_not: str, vault: Any, closing: bool) -> Verdict:
        return self.verdict

    def state(self) -> dict[str, Any]:
        kept = {name: value for name, value in asdict(self.verdict).items() if name != "statistics"}
        return {"best": self._best, "verdict": kept}


@pytest.fixture
def run_with_the_second_rule(monkeypatch) -> Fleet:
    """A run whose first leg begins with the state of a rule that only this file knows; its score falls at the end."""
    monkeypatch.setitem(RULES, DropRule.name, DropRule)
    fleet = Fleet(replicas=2, rounds=9, guard={"max_proxy_real_gap": 0.25}, scored=True)
    begin = Begin.from_bytes(fleet.store.get(keys.begin(1)), keys.begin(1))
    begin = begin.model_copy(update={"guard": {"rule": DropRule.name}})
    fleet.store.put(keys.begin(1), begin.to_bytes())  # before any attempt: nothing names its bytes yet
    participants = fleet.join_all()
    for score in (1.0, 2.0, 2.5, 2.4, 2.0):
        play(participants, [1.0, 1.0], [report(i, score) for i in range(2)])
    assert all(p.open.stopped for p in participants)
    return fleet


def test_a_run_is_folded_stopped_shown_and_verified_by_another_rule(run_with_the_second_rule):
    store = run_with_the_second_rule.store
    commits = run_with_the_second_rule.commits()
    assert [c.guard["rule"] for c in commits] == [DropRule.name] * 5
    assert [c.fired for c in commits] == [False] * 4 + [True]
    assert (commits[-1].stop, commits[-1].applied) == ("halted", False)
    reader = RunReader(store)
    assert reader.status().verdict == commits[-1].verdict
    assert commits[-1].verdict == Verdict(True, "fell by 0.50", 0.0, folds=5, folded=True, value=2.0, in_loop=0.0)
    assert [row.heldout for row in reader.rows()] == [1.0, 2.0, 2.5, 2.4, 2.0]
    found = verify_run(store)
    assert found.agrees and found.checked["rounds"] == 5


def test_a_score_that_the_other_rule_did_not_see_is_found(run_with_the_second_rule, monkeypatch):
    monkeypatch.setattr(DropRule, "update", lambda self, sample: self.verdict)
    found = verify_run(run_with_the_second_rule.store).disagreement
    assert found is not None and found.words.startswith("guard is")


def test_a_rule_that_this_version_does_not_have_is_refused_with_the_version_that_has_it(run_with_the_second_rule):
    del RULES[DropRule.name]
    words = r"before round 1 .*unknown guard rule 'drop-v1'.*version of diloco-orchestrator that run\.json names"
    with pytest.raises(RecordTooNew, match=words):
        verify_run(run_with_the_second_rule.store)
    assert RunReader(run_with_the_second_rule.store).status().state == "halted"  # what commits say can still be read


@pytest.mark.parametrize("name", ["heldout-v2", 7, None, ["heldout-v1"]])
def test_the_nearest_rule_is_named(name):
    with pytest.raises(RecordTooNew, match=r"did you mean 'heldout-v1'|known: heldout-v1"):
        fold({"rule": name}, GuardConfig(), HELDOUT, Evidence(1, []))


# The states and verdicts of version 0.3.0 for the rounds below.
GOLDEN = "c2cf69adfba9742e9bd6a3d1ebb305e1b5818c39f3f27247fbdd91fa8587b351"


HELDOUT = HeldoutSet(metric="loss", shares=(10,) * 4, digest="0" * 64)


def test_the_first_rule_writes_the_bytes_it_always_wrote():
    rng = random.Random(5)
    config = GuardConfig(rule="heldout", min_steps=3)
    state, digest = None, hashlib.sha256()
    for round_ in range(1, 41):
        sums = {
            share: None if rng.random() < 0.03 else -20 - share + 0.1 * round_ + rng.random()
            for share in range(4)
            if rng.random() < 0.8
        }
        none = rng.random() < 0.05
        in_loop = None if none else Metric(sum=None if rng.random() < 0.05 else -60.0 + round_, count=30)
        result = fold(
            state,
            config,
            HELDOUT,
            Evidence(
                round_,
                scores=[Score(share=share, sum=total, count=10) for share, total in sums.items()],
                in_loop=[in_loop] if in_loop else [],
                kl_to_init=rng.choice([None, 0.01, math.nan]),
                entropy=rng.choice([None, 1.5]),
                reward_std=rng.choice([None, 0.2]),
            ),
        )
        said = asdict(result.verdict)
        assert [said.pop(name) for name in ("action", "rollback_to", "replica", "heldout_root")] == [None] * 4
        digest.update(json.dumps([result.state, said], sort_keys=True).encode())
        state = json.loads(json.dumps(result.state))
    assert "rule" not in state and result.verdict.fire and digest.hexdigest() == GOLDEN
