"""`fine_ranges`: which elements of a pseudo-gradient travel in a finer codec in runs of very few bits.

Embeddings, norms, biases and heads are few beside the matrices between them, and lose more by few bits (arXiv
2505.23725v2 leaves them uncompressed). The rule needs names and shapes only, so that whoever knows a run's layout
derives it; the header of a payload shard lists what its author derived.
"""

import math
from collections.abc import Mapping, Sequence

# Modules that hold an embedding or a head, as common model classes call them. Other embeddings have "emb" in the name.
_EMBEDDINGS_AND_HEADS = ("wte", "wpe", "shared", "head", "lm_head", "output", "classifier", "score")


def is_fine(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter travels in the finer codec.

    It does if it has fewer than two dimensions (norms and biases), if "emb" is in its name, or if the module that holds
    it is one of `_EMBEDDINGS_AND_HEADS`.
    """
    *modules, _ = name.split(".")
    return len(shape) < 2 or "emb" in name.lower() or "".join(modules[-1:]) in _EMBEDDINGS_AND_HEADS


def fine_ranges(shapes: Mapping[str, Sequence[int]]) -> list[tuple[int, int]]:
    """[start, stop) of the elements in the finer codec, ascending and apart from each other.

    `shapes`: of the parameters of a flat vector, by name, in the order in which the vector holds them.
    """
    found, stop = list[tuple[int, int]](), 0
    for name, shape in shapes.items():
        start, stop = stop, stop + math.prod(shape)
        if start < stop and is_fine(name, shape):
            joined = found.pop()[0] if found and found[-1][1] == start else start
            found.append((joined, stop))
    return found


def within(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of `ranges` in elements [start, stop) of a vector, counted from `start`."""
    return [(max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and start < b]
