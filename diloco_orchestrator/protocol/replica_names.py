"""Text for sets of replicas: "replica 2", "replicas 0-3 and 7"."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

What = TypeVar("What", bound=Hashable)


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last number of each unbroken row of numbers, in ascending order."""
    found: list[tuple[int, int]] = []
    for each in sorted(set(numbers)):
        if found and each == found[-1][1] + 1:
            found[-1] = (found[-1][0], each)
        else:
            found.append((each, each))
    return found


def replicas(ids: Iterable[int]) -> str:
    """The replica ids `ids` as text, such as "replicas 0-3 and 7"; three or more in a row become a range."""
    known = set(ids)
    words: list[str] = []
    for low, high in spans(known):
        words += [f"{low}-{high}"] if high - low > 1 else map(str, range(low, high + 1))
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"replica{'s' if len(known) > 1 else ''} {listed}"


def grouped(said: Iterable[tuple[int, What]]) -> list[tuple[Sequence[int], What]]:
    """Distinct statements with the ids of all replicas that they are about, in order of first mention.

    `said`: (replica id, statement).
    """
    found: dict[What, list[int]] = {}
    for replica_id, words in said:
        found.setdefault(words, []).append(replica_id)
    return [(ids, words) for words, ids in found.items()]
