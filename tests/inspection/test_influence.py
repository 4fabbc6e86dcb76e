"""The influence of each contribution: the numbers of `whatif`, from one pass; as rows, as CSV and in the report."""

import csv
import json
from pathlib import Path

import pytest
import torch
from cli_support import diloco_here
from decided_runs import (
    ReadOnly,
    asked,
    buffer_score,
    claimed,
    collect,
    contribution,
    filled,
    normalised,
    played,
    train_adapters,
    train_normalised,
    trained,
)
from in_one_process import SmallRun
from tiny_workloads import heldout, mlp

from diloco_orchestrator.inspection.report import Influence, InfluenceRow
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.inspection.verify.loading import OwnCode
from diloco_orchestrator.inspection.whatif.influence import influence_of
from diloco_orchestrator.inspection.whatif.models import BaseScorer, ModelWriter
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from replica.context import ReplicaContext

pytestmark = pytest.mark.usefixtures("one_thread")


def found_in(store: Store, scored: bool = False) -> Influence:
    log = RunLog(ReadOnly(store))
    scorer = BaseScorer(log, ModelWriter(log), OwnCode(mlp, heldout, list(range(16)))) if scored else None
    return influence_of(log, scorer)


def by_key(influence: Influence) -> dict[tuple[int, int], InfluenceRow]:
    return {(row.round, row.replica_id): row for row in influence.rows}


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_shifts_are_those_of_whatif_and_cosines_those_of_the_pseudo_gradients(codec):
    fleet = played(2, {(2, 1)}, codec=codec)
    rows = by_key(found_in(fleet.store))
    assert list(rows) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 2), (2, 3)]
    for (round_, replica_id), row in rows.items():
        other = asked(fleet.store, round_, without=[replica_id])
        assert row.shift == pytest.approx(other.difference / other.moved, rel=1e-12)
        present = [i for r, i in rows if r == round_ and i != replica_id]
        mine, *others = (contribution(round_, i).read(0, 12).double() for i in (replica_id, *present))
        mean = torch.stack(others).mean(0)
        cosine = torch.nn.functional.cosine_similarity(mine, mean, dim=0)
        assert row.cosine == pytest.approx(float(cosine), abs=1e-6 if codec == "fp32" else 1e-2)


def test_with_another_aggregate_shifts_are_those_of_its_steps():
    fleet = played(1, loud=2, aggregate="median")
    for row in found_in(fleet.store).rows:
        other = asked(fleet.store, 1, without=[row.replica_id])
        assert row.shift == pytest.approx(other.difference / other.moved, rel=1e-12)


def test_a_contribution_that_is_alone_made_the_whole_step():
    fleet = played(1, {(1, 0), (1, 1), (1, 3)}, quorum=1)
    assert found_in(fleet.store).rows == [InfluenceRow(1, 2, shift=1.0, cosine=None)]


def test_scores_are_compared_for_the_same_bases():
    run = trained()
    scored, plain = by_key(found_in(run.store, scored=True)), by_key(found_in(run.store))
    for key, row in scored.items():
        assert (row.shift, row.cosine) == (pytest.approx(plain[key].shift, rel=1e-12), plain[key].cosine)
    more = {"code": OwnCode(mlp, heldout, list(range(16)))}
    other = asked(run.store, 2, more, without=[1])
    assert other.heldout is not None and other.heldout_as_it_was is not None
    assert scored[2, 1].heldout_change == pytest.approx(other.heldout - other.heldout_as_it_was, abs=1e-9)
    assert plain[2, 1].heldout_change is None


def test_without_a_contribution_that_is_alone_the_base_and_the_buffers_before_it_are_scored():
    run = SmallRun(1, rounds=2, sync_every=3, guard="off")
    run.train(lambda ctx: train_normalised(ctx, heldout=buffer_score, heldout_items=[1, 2, 3]))
    log, reader = RunLog(ReadOnly(run.store)), RunReader(run.store)
    scorer = BaseScorer(log, ModelWriter(log), OwnCode(normalised, buffer_score, [1, 2, 3]))
    scores = [reader.heldout_of_base(round_) for round_ in (0, 1, 2)]
    assert None not in scores and len(set(scores)) == 3
    changes = [row.heldout_change for row in influence_of(log, scorer).rows]
    assert changes == pytest.approx([scores[0] - scores[1], scores[1] - scores[2]], abs=1e-6)
    more = {"code": OwnCode(normalised, buffer_score, [1, 2, 3])}
    assert asked(run.store, 2, more, without=[0]).heldout == pytest.approx(scores[1], abs=1e-6)


@pytest.mark.slow
def test_exact_adapters_move_with_their_residuals():
    run = SmallRun(2, guard="off", adapters="exact")
    run.train(train_adapters)
    for row in found_in(run.store).rows:
        other = asked(run.store, row.round, without=[row.replica_id])
        assert row.shift == pytest.approx(other.difference / other.moved, rel=1e-12)


def test_rounds_whose_payloads_are_gone_are_named_and_the_others_are_there():
    fleet = played(7)
    whole = by_key(found_in(fleet.store))
    collect(fleet)
    left = found_in(fleet.store)
    assert left.gone == [1, 2, 3, 4, 5]
    assert left.gone_words() == "Without rounds 1 to 5: payloads were deleted by retention."
    assert left.rows == [row for (round_, _), row in whole.items() if round_ in (6, 7)]


def test_csv_has_a_line_for_each_row_and_nothing_where_nothing_is_known():
    rows = [InfluenceRow(1, 0, 0.25, -0.5, 0.125), InfluenceRow(1, 1, None, None)]
    text = Influence(rows).to_csv()
    assert text == "round,replica_id,shift,cosine,heldout_change\n1,0,0.25,-0.5,0.125\n1,1,,,\n"
    assert Influence(gone=[3]).gone_words().startswith("Without round 3: ")
    assert Influence(gone=[3, 5]).gone_words().startswith("Without rounds 3, 5: ")


def test_the_report_shows_it_and_the_command_writes_json_and_csv(tmp_path: Path):
    fleet = played(2, store=open_store(str(tmp_path / "run")))
    given = ["report", "run", "page.html"]
    done = diloco_here(*given, "--influence", "--csv", "rows.csv", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)["influence"]
    assert len(found["rows"]) == 8 and found["gone"] == []
    with (tmp_path / "rows.csv").open() as lines:
        shifts = [float(row["shift"]) for row in csv.DictReader(lines)]
    assert shifts == pytest.approx([row["shift"] for row in found["rows"]], rel=1e-5)
    html = (tmp_path / "page.html").read_text()
    section = html.partition('<section id="influence"')[2].partition("</section>")[0]
    assert section.count("<polyline") == 8 and "mean cosine" in section and "held-out" not in section
    assert diloco_here(*given, "--csv", "rows.csv", cwd=tmp_path).returncode == 2
    assert diloco_here(*given, cwd=tmp_path).returncode == 0
    assert 'id="influence"' not in (tmp_path / "page.html").read_text()
    assert claimed(fleet, 1)


@pytest.mark.slow
def test_a_fragment_of_several_shards_is_gone_through_shard_by_shard():
    def workload(ctx: ReplicaContext) -> None:
        model = filled(torch.nn.Linear(600, 600))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with ctx.attach(model, optimizer) as replica:
            for seed in replica.batches([10 * ctx.replica_id + i for i in range(10)]):
                optimizer.zero_grad()
                x = torch.randn(4, 600, generator=torch.Generator().manual_seed(seed))
                (model(x) - x.flip(1)).square().sum().backward()
                optimizer.step()

    run = SmallRun(3, rounds=1, sync_every=2, quorum=2, guard="off", shard_mib=1)
    run.train(workload)
    payload = run.manifest(1).payload
    assert payload is not None and len(payload.shards) == 2
    for row in found_in(run.store).rows:
        other = asked(run.store, 1, without=[row.replica_id])
        assert row.shift == pytest.approx(other.difference / other.moved, rel=1e-9)
