"""Near-duplicate texts: MinHash over 13-grams of words, by `datasketch`.

GPT-3's training data was decontaminated by 13-grams of words (arXiv 2005.14165, appendix C); MinHash estimates the
Jaccard similarity of two sets of them (Broder 1997).
"""

import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from diloco_orchestrator.errors import ConfigError

GRAM = 13  # words
_PERMUTATIONS = 128
_SEED = 1  # seed of the permutations, fixed so that all machines agree
_WORD = re.compile(r"\w+")


def grams(text: str) -> set[bytes]:
    """The 13-grams of the lower-case words of a text; the whole text if it has fewer words; empty without words."""
    words = _WORD.findall(text.lower())
    if not words:
        return set()
    return {" ".join(words[at : at + GRAM]).encode() for at in range(max(1, len(words) - GRAM + 1))}


class NearDuplicates:
    """Finds the text among those added that is most similar to another one. `threshold`: Jaccard similarity, 0 to 1."""

    def __init__(self, threshold: float) -> None:
        try:
            self._datasketch: Any = import_module("datasketch")
        except ImportError:
            raise ConfigError(
                "near-duplicates cannot be searched, because the package datasketch is not installed: pip install "
                "'diloco-orchestrator[data]', or give near_duplicates=None (--near-duplicates off) to find equal items "
                "only."
            ) from None
        self._threshold = threshold
        self._index = self._datasketch.MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS)
        self._added: dict[str, Any] = {}

    def add(self, texts: Iterable[tuple[str, str]]) -> None:
        """Add (id, text) pairs; every id must be unique."""
        for name, text in texts:
            if (signature := self._signature(text)) is not None:
                self._index.insert(name, signature)
                self._added[name] = signature

    def nearest(self, text: str) -> tuple[str, float] | None:
        """(id, estimated similarity) of the most similar text from the threshold on, smallest id first; or None."""
        signature = self._signature(text)
        if signature is None:
            return None
        found = [(float(signature.jaccard(self._added[name])), name) for name in self._index.query(signature)]
        near = [(-similarity, name) for similarity, name in found if similarity >= self._threshold]
        return (min(near)[1], -min(near)[0]) if near else None

    def _signature(self, text: str) -> Any:
        """The MinHash of a text; None if it has no words."""
        found = grams(text)
        if not found:
            return None
        signature = self._datasketch.MinHash(num_perm=_PERMUTATIONS, seed=_SEED, scheme="affine32")
        signature.update_batch(sorted(found))
        return signature
