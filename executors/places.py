"""`Places`: several executors as one, of which a run's supervision chooses one for each attempt by price and speed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from diloco_orchestrator.executors.contract import (
    LaunchRequest,
    ReplicaHandle,
    ServerlessExecutor,
    price_of,
)
from diloco_orchestrator.executors.mixed import SeveralExecutors
from diloco_orchestrator.executors.prices import Price


class Places(SeveralExecutors):
    """Launches each attempt at the place that its request names: `LaunchRequest.place`, which supervision chooses.

    Supervision (`launch`, `diloco attach`) keeps `replicas` of a run training at the places with the most tokens per
    dollar, opens further ones up to `max_replicas` while `usd_per_hour` allows it, and moves a replica once another
    place costs a fifth less per token: docs/recipes/places.md. The `executor` of a handle is the name of its place.

    Args:
        places: The executors; or executors by the name of the place, which two of one kind need.
        usd_per_hour: The most that all machines of the run together may cost in US dollars an hour. None: no limit,
            and no more than `replicas` machines are paid for.

    Raises ValueError for no places, two places with one name, and a limit that is no positive number.
    """

    def __init__(
        self,
        places: Sequence[ServerlessExecutor] | Mapping[str, ServerlessExecutor],
        *,
        usd_per_hour: float | None = None,
    ) -> None:
        named = list(places.items()) if isinstance(places, Mapping) else [(each.name, each) for each in places]
        if not named:
            raise ValueError("Places([]) has no place: give at least one executor.")
        names = [name for name, _ in named]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            first, second = f"{twice[0]}-1", f"{twice[0]}-2"
            raise ValueError(
                f"two places are called {twice[0]!r}: name them, Places({{{first!r}: …, {second!r}: …}}), so that "
                "records can tell them apart."
            )
        if usd_per_hour is not None and not (isinstance(usd_per_hour, int | float) and 0 < usd_per_hour < math.inf):
            raise ValueError(f"usd_per_hour={usd_per_hour!r} is no number of US dollars above 0.")
        super().__init__([executor for _, executor in named])
        self.places = dict(named)
        self.usd_per_hour = usd_per_hour
        self.name = "+".join(self.places)

    def part(self, attempt: LaunchRequest | ReplicaHandle) -> ServerlessExecutor:
        """The executor of the attempt's place; the first place's for a request that names none of them.

        Raises ValueError for a handle of another place.
        """
        if isinstance(attempt, LaunchRequest):
            return self.places.get(attempt.place) or next(iter(self.places.values()))
        if attempt.executor not in self.places:
            raise ValueError(f"{attempt.executor!r} is none of this run's places: {', '.join(self.places)}.")
        return self.places[attempt.executor]

    def has(self, handle: ReplicaHandle) -> bool:
        return handle.executor in self.places

    def price(self, request: LaunchRequest) -> Price | None:
        """The price of a machine at the request's place; None if it is not known.

        0 for machines that join (`diloco join`) unless a price was given.
        """
        part = self.part(request)
        free = Price(0.0, "machines that join") if part.free_until_taken else None
        return price_of(part, request) or free

    def offers(self, place: str) -> bool:
        """Whether a launch at `place` costs nothing until somebody's machine takes the attempt (`diloco join`)."""
        return self.places[place].free_until_taken

    def _ours(self, handle: ReplicaHandle, executor: ServerlessExecutor) -> ReplicaHandle:
        place = next(name for name, each in self.places.items() if each is executor)
        return replace(handle, executor=place)

    def _theirs(self, handle: ReplicaHandle) -> ReplicaHandle:
        return replace(handle, executor=self.part(handle).name)
