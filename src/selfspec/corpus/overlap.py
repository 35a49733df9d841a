"""n-grams of words that training text shares with held-out prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from selfspec.corpus.records import content, stable_hash
from selfspec.corpus.shards import iter_split

_WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)
# A prompt shorter than an n-gram is looked for whole; below this many words ("Tell me a joke") it
# would match by chance, and only an equal record counts.
MIN_WHOLE_WORDS = 8
Hashes = npt.NDArray[np.uint64]


class HeldoutIndex:
    """Which n-grams the held-out prompts hold, by hash.

    Words are case-folded runs of letters, digits and underscores; an n-gram's hash is a polynomial in
    the 64-bit hashes of its words, modulo 2^64.
    """

    def __init__(self, prompts: Iterable[tuple[str, str]], ngram: int) -> None:
        """``prompts``: pairs of id and text."""
        self.ngram = ngram
        self.ids: list[str] = []
        self.grams_of: list[frozenset[int]] = []
        self._words: dict[str, int] = {}
        by_length: dict[int, list[int]] = {}
        for identifier, text in prompts:
            hashes = self._hashes(text)
            length = min(len(hashes), ngram)
            grams: frozenset[int] = frozenset()
            if length == ngram or length >= MIN_WHOLE_WORDS:
                grams = frozenset(_rolling(hashes, length).tolist())
                by_length.setdefault(length, []).extend(grams)
            self.ids.append(identifier)
            self.grams_of.append(grams)
        self._sorted = {length: np.unique(np.array(found, np.uint64)) for length, found in by_length.items()}

    @classmethod
    def from_shards(cls, folder: Path, ngram: int) -> HeldoutIndex:
        """The index of the held-out split in a shard folder; CorpusError when there is none."""
        rows = iter_split(folder, "heldout")
        return cls(((row["id"], content(row["text"], row["messages"])) for row in rows), ngram)

    def matches(self, text: str) -> Hashes:
        """The distinct held-out n-grams that occur in ``text``, as hashes."""
        hashes = self._hashes(text)
        found = []
        for length, known in self._sorted.items():
            grams = np.unique(_rolling(hashes, length))
            places = np.minimum(np.searchsorted(known, grams), len(known) - 1)
            found.append(grams[known[places] == grams])
        return np.concatenate(found) if found else np.empty(0, np.uint64)

    def _hashes(self, text: str) -> Hashes:
        known = self._words
        found = []
        for word in _WORD.findall(text.lower()):
            value = known.get(word)
            if value is None:
                value = known[word] = stable_hash(word)
            found.append(value)
        return np.array(found, np.uint64)


def shared_ngrams(text: str, index: HeldoutIndex) -> int:
    """How many distinct n-grams of held-out prompts occur in ``text``."""
    return len(index.matches(text))


def _rolling(words: Hashes, length: int) -> Hashes:
    """Hashes of all ``length``-grams of ``words`` (one a position)."""
    count = len(words) - length + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    total = np.zeros(count, np.uint64)
    for offset in range(length):
        total = total * _BASE + words[offset : offset + count]
    return total
