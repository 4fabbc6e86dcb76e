"""A simulated run that really trains, with AdamW and a schedule, and its ranges trained again in this process."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from simulation import Batches, Simulation
from simulation_gradients import gradient
from simulation_plan import Plan
from tiny_workloads import batch_of

from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.inspection.audit.findings import AuditOutcome, TrainingRange, bound_of, judged, ranges_of
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.run_log.run_log import RunLog
from replica.context import ReplicaContext
from replica.process.rerun_range import Repetition, rerun
from replica.process.rerun_result import RerunResult
from replica.process.run_attempt import train

# Of the process, in which the replicas of a simulation take turns: it is the author's own only in real processes.
SHARED = frozenset(("random state",))


class TrainedSimulation(Simulation):
    """A simulation whose payloads depend on model, optimizer, schedule and data. `pace_s` of a re-run is 0."""

    def _train(self, ctx: ReplicaContext) -> None:
        clock, replica_id = ctx._attempt.clock, ctx.replica_id
        simulated = (replica_id, ctx._attempt.number) in self.replicas and hasattr(clock, "world")
        model = torch.nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.fill_(1.0), model.bias.fill_(2.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        attached: dict[str, Any] = {"heldout": self._score, "heldout_items": list(range(8))}
        with ctx.attach(model, optimizer, stateful={"schedule": schedule}, **attached) as replica:
            for batch in replica.batches(Batches()):
                if simulated:
                    clock.sleep(self.plan.paces[replica_id])
                x, y = batch_of(100 * replica_id + batch)
                if (batch, replica_id) in self.plan.nan:
                    x = x * float("nan")
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                replica.observe(loss=gradient(replica_id, batch), tokens=1)

    def _score(self, model: torch.nn.Module, items: Sequence[Any]) -> list[float]:
        return [float(model.weight.sum()) + 0.001 * float(item) for item in items]


def played(plan: Plan) -> TrainedSimulation:
    simulation = TrainedSimulation(plan)
    simulation.play()
    return simulation


def rerun_of(simulation: Simulation, manifest: Contribution, folder: Path) -> RerunResult:
    """What training again, in this process, finds about the training from which a manifest came."""
    store = simulation.bucket
    repetition = Repetition.of(store, manifest, NoBackground())
    return rerun(store, manifest, repetition, lambda attempt: train(attempt, lambda _: simulation._train), folder)


def audited(simulation: TrainedSimulation, folder: Path) -> dict[TrainingRange, tuple[AuditOutcome, str, RerunResult]]:
    """AuditOutcome of every range that can be drawn, and what its re-run found."""
    store, found = simulation.bucket, {}
    run_log, reader = RunLog(store), ContributionReader(store)
    for range_ in ranges_of(run_log.commits()):
        manifest = reader.exact(range_.round, range_.replica_id, range_.manifest_sha256)
        again = rerun_of(simulation, manifest, folder)
        kept = tuple(name for name in again.differing if name not in SHARED)
        again = RerunResult(**{**vars(again), "differing": kept})
        whole = run_log.configs.of(manifest.leg).round_steps
        outcome, words = judged(again, bound_of(whole), partial=manifest.own_steps < whole)
        found[range_] = outcome, words, again
    return found


def counts(found: dict[TrainingRange, tuple[AuditOutcome, str, RerunResult]]) -> Counter[str]:
    return Counter(outcome for outcome, _, _ in found.values())
