"""`ManifestListing`: which replicas have a manifest in which closed rounds, from listings of many rounds at once.

For readers that look far back for a manifest: a GET for every round would cost a hundred times as many requests.
"""

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.store.base import Store

_ROUNDS = 50  # of the first listing: with eight replicas about a page of 1,000 keys


class ManifestListing:
    """The authors of manifests in rounds up to `newest`, later rounds first.

    Every listing goes twice as far back as the one before, because a store lists to the end of the log. A manifest that
    appears after its round was listed is not found. Choose `newest` so that this cannot matter.
    """

    def __init__(self, store: Store, newest: int) -> None:
        self.newest = newest
        self._store = store
        self._listed_from = newest + 1
        self._reach = _ROUNDS
        self._authors: dict[int, set[int]] = {}

    def authors(self, round_: int) -> set[int]:
        """The replicas with a manifest in a round up to `newest`. Lists rounds back to it, if they were not listed."""
        assert round_ <= self.newest, f"round {round_} is after {self.newest}"
        while max(1, round_) < self._listed_from:
            self._list(max(1, self._listed_from - self._reach))
            self._reach *= 2
        return self._authors.get(round_, set())

    def _list(self, first: int) -> None:
        for info in self._store.list(keys.ROUNDS, start_after=keys.end_of_round(first - 1)):
            if info.key > keys.end_of_round(self._listed_from - 1):
                break
            parsed = keys.contribution.parse(info.key)
            if parsed is not None:
                self._authors.setdefault(parsed[0], set()).add(parsed[1])
        self._listed_from = first
