"""`DealtBatches`: the batches that this replica trains on where the run's commit log deals a finite data set.

`protocol.deal` has the rule. The next batch depends only on the log and the inner step, so that no position in the data
has to be saved.
"""

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.deal import OpenDeal, dealt_by
from diloco_orchestrator.protocol.records import Contribution
from diloco_orchestrator.replica.attempt.attempt import Attempt

log = logging.getLogger(__name__)

DEAL = "deal"  # in `Progress.cursor`: what all replicas must have in common
_SKIPPED = 8  # batches without an optimizer step in an attempt; a loss scale that begins too high skips several


class DealtBatches:
    """Takes batches out of `data`, which has a length and an index, as the log deals them.

    Raises `ConfigError` if it has no length, no index, or no batch.
    """

    def __init__(self, attempt: Attempt, data: Any) -> None:
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise ConfigError(
                f'deal="open" with data of the type {type(data).__name__}: a data set that is dealt has len(data) and '
                "data[i], which gives batch i. Pass such a sequence of batches, the same and whole in every replica; "
                'a stream of each replica\'s own is deal="ids".'
            )
        if not len(data):
            raise ConfigError('deal="open" with an empty data set: it has no batch that could be dealt.')
        self._attempt, self._data, self._size = attempt, data, len(data)
        self._deal: OpenDeal | None = None
        self._at = (0, 0)  # round and inner step of the batch that was taken last
        self._steps = -1  # inner steps of this replica before that batch; negative: not comparable with later counts
        self._others: dict[int, Any] = {}  # by replica: batches of its data set, as its newest manifest says
        self._taken = self._skipped = 0  # batches, and those on which no step was taken

    def take(self, round_: int, inner_step: int, steps: int) -> Any:
        """The batch for an inner step of the open round. `steps`: inner steps that this replica has taken in all.

        The same batch is given again if no optimizer step was taken on it. Raises `ConfigError` where a loop takes
        several steps on one batch, or a step on several batches as a rule.
        """
        self._check(round_, inner_step, steps)
        return self._data[self._of(round_).of(self._attempt.replica_id).index(inner_step)]

    def forget_steps(self) -> None:
        """Forget the count of steps at the last batch: the replica goes on with the count of another attempt."""
        self._steps = -1

    def items_beside(
        self, contribution: Contribution, roster: Sequence[int], items_of: Callable[[Any], Iterable[Any]], most: int
    ) -> tuple[list[Any], list[Any]]:
        """Items of batches that the open round deals to a contribution's author, and as many that it deals to others.

        At most `most` of each, drawn by the digest of the payload and this replica's id, so that they cannot be
        foreseen before the payload is published. The author's are those of steps that it says it took. `roster`: who
        was dealt the round.
        """
        assert contribution.payload is not None
        deal, author = self._of(contribution.round), contribution.replica_id
        steps = self._attempt.config.round_steps
        own = [deal.of(author).index(step) for step in range(min(contribution.own_steps, steps))]
        others = {deal.of(each).index(step) for each in roster if each != author for step in range(steps)} - set(own)
        draw = random.Random(f"{contribution.payload.digest} {self._attempt.replica_id}")
        found = []
        for batches in (own, sorted(others)):
            items = list[Any]()
            for index in draw.sample(batches, len(batches)):
                if len(items) >= most:
                    break
                items += items_of(self._data[index])
            found.append(draw.sample(items, min(most, len(items))))
        count = min(map(len, found))
        return found[0][:count], found[1][:count]

    def position(self) -> dict[str, Any]:
        """The manifest's entry about the data, as JSON: the number of batches of the data set."""
        return {DEAL: {"batches": self._size}}

    def compare(self, manifests: Iterable[Contribution]) -> None:
        """Compare the number of batches of this replica's data set with what others' manifests say of theirs.

        Raises `ConfigError` if half of the replicas or more have another number, by the newest manifest of each; those
        of which none was read count as having this one. Fewer are logged, once for each.
        """
        own, config, told = self._attempt.replica_id, self._attempt.config, set(self._others)
        for manifest in manifests:
            theirs = manifest.progress.cursor.get(DEAL) if manifest.progress else None
            if manifest.replica_id != own and isinstance(theirs, dict):
                self._others[manifest.replica_id] = theirs.get("batches")
        differ = {each: size for each, size in sorted(self._others.items()) if size != self._size}
        if not differ:
            return
        other, size = next(iter(differ.items()))
        words = (
            f'deal="open": replica {own} was given {self._size} batches, replica {other} {str(size)[:20]}. Every '
            "replica has to pass the same whole data set, not a part of its own."
        )
        launched = config.launched
        if 2 * len(differ) >= len(launched | {own} | self._others.keys()):
            raise ConfigError(words)
        if not differ.keys() <= told:
            log.warning("%s Most others were given as many as this one.", words)

    def _check(self, round_: int, inner_step: int, steps: int) -> None:
        taken = steps - self._steps if self._steps >= 0 else 1
        if taken > 1:
            raise ConfigError(
                f'deal="open": {taken} optimizer steps were taken on one batch. Each batch is one inner step, by which '
                "the log knows what was trained on."
            )
        self._taken += 1
        self._skipped += taken == 0 and (round_, inner_step) == self._at
        if self._skipped > _SKIPPED + self._taken // 4:
            raise ConfigError(
                f'deal="open": {self._skipped} of {self._taken} batches had no optimizer step, and were given again. '
                "Each batch is one inner step: where gradients are accumulated, data[i] has to hold all of its parts."
            )
        self._at, self._steps = (round_, inner_step), steps

    def _of(self, round_: int) -> OpenDeal:
        """The deal (assignment of batches to replicas) of a round, after all commits before it."""
        log, config = self._attempt.log, self._attempt.config
        if self._deal is None:
            self._deal = OpenDeal(self._size, config.round_steps, config.most_replicas, config.fragments)
            begins = log.begins()[: self._attempt.begin.leg]
            replicas = [log.configs.of(each.leg).replicas for each in begins]
            before = (commit for commit in log.each_commit() if commit.round < round_)
            dealt_by(before, begins, replicas, self._deal)
        while self._deal.round < round_ - 1:
            entry = log.commit(self._deal.round + 1)
            assert entry is not None, f"round {round_} is open"
            self._deal.add(entry.commit)
        return self._deal
