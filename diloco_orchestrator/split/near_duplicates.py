"""Near-duplicate texts: those that share most of their grams, weighted by how rare each gram is.

An inverted index over the grams of the held-out texts, in numpy. `find_near` defines grams, weights and threshold.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from diloco_orchestrator.split.content import normal_form

_Hashes = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int64]

# A token is a word, or a character of a script without spaces between words (Thai to Burmese, Khmer, Chinese and
# Japanese) or with long ones (Korean). Words longer than 16 characters are cut, so that one changed character of a long
# code changes one token.
_UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u2e80-\u31ff\u3400-\u9fff\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\W_]{{1,16}}")
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]")

_LONG_TEXT = 1024  # tokens: longer texts are compared in overlapping windows of so many
_POSTINGS = 64  # held-out texts that are kept of those with one gram
_LEAST_PART = 16  # grams that a text and a longer held-out one share, at least: about ten words
_LEAST_WHOLE = 5  # grams of a held-out text that another one contains, at least, unless it contains all
_SHORT = 12  # grams, about seven words; a held-out text with fewer is found in texts of up to three times its length

# Odd constants, by which hashes are combined modulo 2^64.
_FIRST, _SECOND, _THIRD, _FOURTH = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)


class Rule(StrEnum):
    """Reason for which a training item is too close to a held-out one."""

    EQUAL = "equal"  # they have one normal form
    SIMILAR = "similar"  # each holds most grams of the other
    CONTAINS = "contains"  # it holds most grams of the held-out text, and more
    PART = "part"  # most of its grams are those of a longer held-out text


@dataclass(frozen=True)
class Near:
    """The held-out text that a text is most similar to, and how similar it is."""

    rule: Rule
    index: int  # of the held-out text
    similarity: float  # 0 to 1


def find_near(held: Sequence[str], others: Sequence[str], threshold: float) -> dict[int, Near]:
    """The near-duplicates among `others` of texts in `held`, by their index.

    A text is near a held-out one if it holds `threshold` (0 to 1) of its grams, or if the held-out one holds as much of
    the text's. Grams are 2 and 3 words, or 3 and 4 characters in scripts without spaces and in Korean, of the normal
    form without punctuation. A gram that n of all texts share counts 1/sqrt(n): what all items have in common, such as
    a prompt's form, says little of two of them. The most similar text is returned, of equally similar ones the first.
    """
    index = _Index(held)
    found = [[index.find(each) for each in _windows(_tokens(text))] for text in others]
    index.weigh([window for windows in found for window in windows])
    near = {}
    for number, windows in enumerate(found):
        candidates = [each for each in (index.nearest(window, threshold) for window in windows) if each is not None]
        if candidates:
            near[number] = min(candidates, key=lambda each: (-each.similarity, each.index))
    return near


class _TokenHashes(dict[str, int]):
    """Cache of a hash for each token; its lowest bit says that the token is a character of a script without spaces."""

    def __missing__(self, token: str) -> int:
        number = int.from_bytes(blake2b(token.encode(), digest_size=8).digest(), "little") >> 1 << 1
        self[token] = number | bool(_IS_UNSPACED.match(token))
        return self[token]


_TOKEN_HASHES = _TokenHashes()


def _tokens(text: str) -> _Hashes:
    """The hashes of a text's tokens, in order. Shape (tokens,)."""
    found = _TOKEN.findall(normal_form(text))
    hashes: _Hashes = np.fromiter(map(_TOKEN_HASHES.__getitem__, found), np.uint64, len(found))
    return hashes


def _grams(tokens: _Hashes) -> _Hashes:
    """Hashes of a text's grams, sorted and distinct: 2 and 3 tokens, or 3 and 4 if the first is a single character."""
    if len(tokens) < 2:
        return tokens
    grams = []
    for lasts in (tokens[1:] * _SECOND, tokens[1:-1] * _SECOND + tokens[2:] * _THIRD):
        several = tokens[: len(lasts)] * _FIRST + lasts
        single = (tokens[: len(lasts)] & np.uint64(1)).astype(bool)[:-1]
        several[:-1] = np.where(single, several[:-1] * _FOURTH + several[1:], several[:-1])
        grams.append(several)
    return np.unique(np.concatenate(grams))


def _windows(tokens: _Hashes) -> Iterator[_Hashes]:
    """The grams of a text, or of overlapping windows of a long one, so that every held-out text fits one window."""
    last = max(0, len(tokens) - _LONG_TEXT // 2)
    for start in range(0, max(1, last), _LONG_TEXT // 2):
        yield _grams(tokens[start : start + _LONG_TEXT])


@dataclass(frozen=True)
class _Window:
    """The grams of a text that held-out texts have too, by their index, and the number of its other grams."""

    places: _Numbers
    others: int


class _Index:
    """The grams of the held-out texts, and for each gram the first `_POSTINGS` texts that have it.

    A gram counts only for the texts that are listed with it. So frequent grams cost no more than others, and of more
    than `_POSTINGS` texts that share most of their grams, only the first ones can be found.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        grams = [_grams(_tokens(text)) for text in texts]
        owners = np.repeat(np.arange(len(grams)), [len(each) for each in grams])
        together = np.concatenate([*grams, np.empty(0, np.uint64)])
        order = np.argsort(together, kind="stable")  # texts with one gram stay in their order
        self._grams, starts, self._texts_with = np.unique(together[order], return_index=True, return_counts=True)
        kept = np.arange(len(order)) - np.repeat(starts, self._texts_with) < _POSTINGS
        self._owners = owners[order][kept]
        self._counts = np.minimum(self._texts_with, _POSTINGS)
        self._starts = np.cumsum(self._counts) - self._counts
        self._sizes = np.bincount(self._owners, minlength=len(texts))  # grams that count, by text

    def find(self, grams: _Hashes) -> _Window:
        """The grams of a text that are in the index, and the number of those that are not."""
        places = np.searchsorted(self._grams, grams)
        places = places[places < len(self._grams)]
        places = places[self._grams[places] == grams[: len(places)]]
        return _Window(places, len(grams) - len(places))

    def weigh(self, windows: Sequence[_Window]) -> None:
        """Set the weight of every gram (2 to 4 tokens in a row) by how many held-out texts and `windows` have it."""
        texts_with = self._texts_with.copy()
        for window in windows:
            texts_with[window.places] += 1
        self._weights = texts_with**-0.5
        self._whole = np.bincount(self._owners, np.repeat(self._weights, self._counts), minlength=len(self._sizes))

    def nearest(self, window: _Window, threshold: float) -> Near | None:
        """The held-out text that is nearest to the window of a text; None if it is below `threshold`."""
        if not len(window.places):
            return None
        weights, counts = self._weights[window.places], self._counts[window.places]
        offsets = np.repeat(self._starts[window.places] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        texts, of_text, shared = np.unique(self._owners[offsets], return_inverse=True, return_counts=True)
        weight = np.bincount(of_text, np.repeat(weights, counts))
        of_held, of_window = weight / self._whole[texts], weight / (weights.sum() + window.others)
        sizes, size = self._sizes[texts], len(window.places) + window.others
        whole = (of_held >= threshold) & ((shared >= _LEAST_WHOLE) | (shared == sizes))
        whole &= (sizes >= _SHORT) | (size <= 3 * sizes)
        part = (of_window >= threshold) & (shared >= _LEAST_PART)
        similarity = np.maximum(np.where(whole, of_held, 0), np.where(part, of_window, 0))
        best = int(similarity.argmax())
        if not similarity[best]:
            return None
        rule = Rule.SIMILAR if min(of_held[best], of_window[best]) >= threshold else Rule.CONTAINS
        return Near(rule if whole[best] else Rule.PART, int(texts[best]), float(similarity[best]))
