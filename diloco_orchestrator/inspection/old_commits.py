"""`with_figures`: completes commits of package version 0.1, which hold no figures, from the manifests they name."""

from diloco_orchestrator.errors import ObjectMissing, RecordInvalid
from diloco_orchestrator.protocol.figures import figures_of
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.run_log.contributions import ContributionReader
from diloco_orchestrator.store.base import Store


def with_figures(store: Store, commit: Commit) -> Commit:
    """The commit with figures and train times. One GET per answer if the commit holds none, otherwise no request."""
    if commit.figures is not None or not commit.answers:
        return commit
    reader, manifests = ContributionReader(store), dict[int, Contribution]()
    for answer in commit.answers:
        try:
            manifests[answer.replica_id] = reader.named(commit.round, answer)
        except (ObjectMissing, RecordInvalid):
            continue  # such a response is averaged nowhere
    times = {replica_id: manifest.train_s for replica_id, manifest in manifests.items()}
    answers = (a.model_copy(update={"train_s": times.get(a.replica_id, 0.0)}) for a in commit.answers)
    averaged = [a.replica_id for a in commit.answers if a.averaged]
    return commit.model_copy(
        update={"answers": tuple(answers), "figures": figures_of(list(manifests.values()), averaged)}
    )
