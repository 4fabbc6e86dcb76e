"""`diloco compare`: runs side by side, from their buckets alone; what cannot be read is named."""

import json
import re
import shutil
import tarfile
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
from cli_support import ROOT, diloco_here
from guarded_legs import STAMP, fleet_of, scoring
from protocol_fleet import Fleet, play, report, tiny_model

from diloco_orchestrator import open_store
from diloco_orchestrator.cli.compare_command import html_of
from diloco_orchestrator.inspection.comparison import Comparison, compare
from diloco_orchestrator.inspection.costs import LegCost, Spent
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.records import Metric
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.supervision.next_leg import begin_next_leg

KEPT = ROOT / "tests/fixtures/kept_runs/runs.tar.xz"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kept runs that score a loss, "voted" and "joined", and one that scores a reward, "rewarded"."""
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(KEPT, "r:xz") as packed:
        packed.extractall(folder, filter="data")
    fleet = Fleet(replicas=2, rounds=3, store=open_store(str(folder / "rewarded")), scored=True)
    participants = fleet.join_all()
    for round_ in range(3):
        metrics = {"reward": Metric(sum=2.0 * round_, count=2), "tokens": Metric(sum=10.0, count=1)}
        play(participants, [1.0, 1.0], [replace(report(i, 0.1 * round_), metrics=metrics) for i in (0, 1)])
    return folder


def read(*urls: Path) -> Comparison:
    return compare([str(url) for url in urls], lambda url: RunReader(open_store(url)))


def test_a_run_that_was_resumed_after_a_halt_by_the_guard_says_so():
    fleet, _ = fleet_of([0.1, 0.5, 0.9, 0.3], last_drifts=True)
    log = RunLog(fleet.store)
    begin_next_leg(log, rounds=1, from_round=None, by="test", why="", stamp=STAMP, override_guard="it was wrong")
    scoring(fleet, fleet.join_all(), [0.8])
    (run,) = compare(["run"], lambda url: RunReader(fleet.store)).runs
    assert run.verdict == "stopped it in round 4; resumed since"


def test_the_table_has_figures_with_units_and_only_settings_that_differ(runs, tmp_path):
    told = diloco_here("compare", str(runs / "voted"), str(runs / "joined"), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    found = (re.split("[│┃]", line)[1:-1] for line in told.stdout.splitlines())
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in found if len(cells) == 3}
    assert rows[""] == ["voted", "joined"]
    assert rows["held-out, last"] == ["1.2879 (loss, nats per token)", "0.1476 (loss, nats per token)"]
    assert rows["held-out, best"] == ["1.1150, after round 3", "0.1476, after round 5"]  # as `pull --round`
    assert rows["outer steps"] == ["6", "6"]
    assert rows["tokens"] == ["496", "88"]
    assert rows["took"] == ["1 min 18 s", "16 s"]
    assert rows["payload moved"][0] == "7.2 kB"
    assert rows["guard"] == ["stopped it in round 6; resumed since", "did not stop it"]
    assert rows["machines"] == ["5 x AMD EPYC, 1 thread", "2 x AMD EPYC, 1 thread"]
    assert rows["codec"] == ["fp32", "bf16"]
    assert rows["args.odd"] == ["2", "-"]
    assert "sync_every" not in rows and "entrypoint" not in rows  # the same in both


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_shown(runs, tmp_path):
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "run.json").write_text("{")
    asked = [str(runs / "voted"), str(tmp_path / "none"), str(torn)]
    told = diloco_here("compare", *asked, "--html", "page.html", cwd=tmp_path)
    assert told.returncode == 1
    assert "1.2879" in told.stdout
    assert f"{tmp_path / 'none'} is not shown: NoSuchRun: " in told.stdout
    assert f"{torn} is not shown: RecordInvalid: " in told.stdout
    assert str(torn) in (tmp_path / "page.html").read_text()
    assert json.loads(diloco_here("compare", *asked, "--json", cwd=tmp_path).stdout)["missing"].keys() == set(asked[1:])


def test_runs_of_different_metrics_are_not_drawn_on_one_axis(runs):
    page = html_of(read(runs / "voted", runs / "rewarded", runs / "joined"))
    sections = dict(re.findall(r'<section id="([\w-]+)"[^>]*>(.*?)</section>', page, re.DOTALL))
    for metric, theirs in (("loss", {"voted", "joined"}), ("reward", {"rewarded"})):
        legends = re.findall(r'<div class="legend">(.*?)</div>', sections[f"held-out-{metric}"])
        assert legends and all(set(re.findall("</i>([^<]+)", legend)) == theirs for legend in legends)
    assert "each metric has curves of its own" in unescape(sections["not-comparable"])


def test_scores_over_other_items_are_called_not_comparable(runs):
    found = read(runs / "voted", runs / "joined")
    assert found.warnings() == []
    others = replace(found.runs[1], heldout_digest="0" * 64)
    (words,) = replace(found, runs=[found.runs[0], others]).warnings()
    assert words.startswith("These runs score 2 different sets of held-out items")


def test_curves_have_the_scores_of_status_where_a_share_was_missing_in_the_first_round(runs):
    (run,) = read(runs / "voted").runs
    rows = RunReader(open_store(str(runs / "voted"))).rows()
    scored = {row.round: row.heldout for row in rows if row.heldout is not None}
    assert {point.round: point.value for point in run.heldout} == scored


def test_curves_are_over_rounds_and_over_the_tokens_that_a_score_had_cost(runs):
    (run,) = read(runs / "rewarded").runs
    assert [(p.round, p.tokens, p.value) for p in run.training["reward"]] == [(1, 20, 0.0), (2, 40, 1.0), (3, 60, 2.0)]
    assert [(p.round, p.tokens) for p in run.heldout] == [(1, 0), (2, 20), (3, 40)]  # of the base before the round
    page = html_of(read(runs / "rewarded"))
    assert "rewarded by round" in page and "rewarded by tokens" in page
    assert "by dollars" not in page  # no price is known


def test_dollars_of_a_leg_are_spread_over_its_hours_and_added_to_those_before():
    legs = {1: LegCost(hours=2.0, usd=8.0, unpriced=0), 2: LegCost(hours=1.0, usd=3.0, unpriced=0)}
    spent = Spent({1: 0.0, 2: 90_000.0}, legs)
    assert [spent.by(1, at) for at in (0.0, 3600.0, 7200.0, 9999.0)] == [0.0, 4.0, 8.0, 8.0]
    assert spent.by(2, 90_000.0 + 1800.0) == 9.5
    unknown = Spent({1: 0.0, 2: 90_000.0}, legs | {1: replace(legs[1], usd=None)})
    assert (unknown.by(1, 3600.0), unknown.by(2, 90_000.0)) == (None, None)


def test_a_curve_over_dollars_is_drawn_where_prices_are_known(runs):
    found = read(runs / "rewarded")
    paid = [replace(point, usd=0.5 * point.round) for point in found.runs[0].heldout]
    page = html_of(replace(found, runs=[replace(found.runs[0], heldout=paid, training={})]))
    assert "rewarded by dollars" in page


def test_the_best_score_of_a_reward_is_the_highest(runs):
    (run,) = read(runs / "rewarded").runs
    assert run.best == run.final == max(point.value for point in run.heldout)


def test_runs_whose_addresses_end_alike_have_their_addresses_as_names(runs, tmp_path):
    for part in ("a", "b"):
        shutil.copytree(runs / "voted", tmp_path / part / "run")
    names = [run.name for run in read(tmp_path / "a/run", tmp_path / "b/run", tmp_path / "a/run").runs]
    assert names == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]


def test_text_from_a_bucket_is_shown_on_the_page_and_never_interpreted(runs):
    found = read(runs / "voted")
    nasty = "<script>alert(1)</script>"
    run = replace(found.runs[0], name=nasty, reason=nasty, settings={nasty: nasty})
    page = html_of(replace(found, runs=[run, found.runs[0]], missing={nasty: nasty}))
    assert "<script>alert" not in page and page.count("&lt;script&gt;alert") >= 6


def test_equal_models_are_called_so_and_others_with_the_round_from_which_they_differ(tmp_path):
    def played(name: str, *values: float, rounds: int = 3, model: torch.nn.Module | None = None) -> Path:
        fleet = Fleet(replicas=1, rounds=rounds, store=open_store(str(tmp_path / name)))
        participant = fleet.join(0, model=model)
        for value in [*values, *([0.0] if len(values) == rounds else [])]:  # the last round evaluates alone
            play([participant], [value])
        return tmp_path / name

    whole, longer = played("whole", 1.0, 2.0, 3.0), played("longer", 1.0, 2.0, 3.0, 4.0, rounds=4)
    others = [played("same", 1.0, 2.0, 3.0), played("apart", 1.0, 2.5, 3.0), played("late", 1.0, 2.0, 4.0)]
    others += [played("shorter", 1.0, 2.0), longer, played("foreign", 1.0, model=tiny_model(seed=5))]
    assert read(whole, *others).bits() == [
        "same and whole are equal bit for bit, in the base that each ends with and in all before.",
        "apart and whole are equal bit for bit up to the base after round 1, and differ from there on.",
        "late and whole are equal bit for bit up to the base after round 2, and differ from there on.",
        "shorter and whole are equal bit for bit as far as both are known: up to the base after round 1.",
        "longer and whole are equal bit for bit as far as both are known: up to the base after round 3.",
        "foreign and whole begin with different bases.",
    ]
