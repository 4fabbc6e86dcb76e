"""Text for sets of replicas: "replica 2", "replicas 0-3 and 7"."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

What = TypeVar("What", bound=Hashable)


def replicas(ids: Iterable[int]) -> str:
    """The replica ids `ids` as text, such as "replicas 0-3 and 7"; three or more in a row become a range."""
    known = sorted(set(ids))
    spans: list[list[int]] = []
    for each in known:
        if spans and each == spans[-1][-1] + 1:
            spans[-1].append(each)
        else:
            spans.append([each])
    words = [w for span in spans for w in ([f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span))]
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
