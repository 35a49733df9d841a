"""The leakage ledger: what went into each split, and what training shares with the held-out prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from selfspec.config import Resource, ShardConfig, SourceConfig
from selfspec.corpus.overlap import HeldoutIndex
from selfspec.corpus.records import Record, identity
from selfspec.resources import atomic_path


class Ledger:
    """Filters training text against the held-out prompts, and counts what it saw.

    Schema: docs/metrics.md. ``shared_ngrams_before`` and ``_after`` of a held-out prompt count its
    distinct n-grams that occur in training and validation text before and after dropping.
    """

    def __init__(self, heldout: Iterable[Record], config: ShardConfig) -> None:
        self._config = config
        self._heldout = list(heldout)
        self._index = HeldoutIndex(((record.id, record.content) for record in self._heldout), config.ngram)
        self._texts = {identity(record.content): record.id for record in self._heldout}
        self._before: set[int] = set()
        self._after: set[int] = set()
        self._dropped: Counter[str] = Counter()
        self._records: dict[str, Counter[str]] = {}
        self._tokens: dict[str, Counter[str]] = {}
        self.count(self._heldout, "heldout")

    def clean(self, records: Iterable[Record], split: str) -> Iterator[Record]:
        """Pass on the records that share no more than ``max_shared_ngrams`` with the held-out prompts."""
        for record in records:
            found = self._index.matches(record.content).tolist()
            equal = self._texts.get(identity(record.content))
            self._before.update(found)
            if equal is not None or len(found) > self._config.max_shared_ngrams:
                self._dropped[record.source] += 1
                continue
            self._after.update(found)
            self.count([record], split)
            yield record

    def count(self, records: Iterable[Record], split: str) -> None:
        """Add records and tokens to the table."""
        for record in records:
            self._records.setdefault(record.source, Counter())[split] += 1
            self._tokens.setdefault(record.source, Counter())[split] += record.tokens

    def summary(self, exact_duplicates: int) -> dict[str, Any]:
        """The ledger as JSON values; call it when every split has been cleaned."""
        rows = []
        contained = []
        worst = 0
        for identifier, grams in zip(self._index.ids, self._index.grams_of, strict=True):
            before, after = len(grams & self._before), len(grams & self._after)
            worst = max(worst, after)
            if before:
                rows.append({"id": identifier, "shared_ngrams_before": before, "shared_ngrams_after": after})
            if grams and after == len(grams):
                contained.append(identifier)
        sources = self._config.sources
        return {
            "records": _table(self._records, sources),
            "tokens": _table(self._tokens, sources),
            "licenses": {source.name: source.license for source in sources},
            "revisions": {source.name: [pin(resource) for resource in source.archives] for source in sources},
            "exact_duplicates": exact_duplicates,
            "ngram": self._config.ngram,
            "threshold": self._config.max_shared_ngrams,
            "heldout_prompts": len(self._heldout),
            "dropped_overlap": dict(sorted(self._dropped.items())),
            "max_overlap_after": worst,
            "heldout": rows,
            "heldout_in_training": contained,
        }


def write(ledger: dict[str, Any], path: Path) -> None:
    """Write the ledger as indented JSON, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(ledger, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def pin(resource: Resource) -> str:
    """``uri@sha256`` or ``uri@revision``; the bare URI of an unpinned local file."""
    fixed = resource.revision or resource.sha256
    return f"{resource.uri}@{fixed}" if fixed else resource.uri


def _table(counts: dict[str, Counter[str]], sources: tuple[SourceConfig, ...]) -> dict[str, dict[str, int]]:
    splits = ("train", "validation", "heldout")
    return {
        source.name: {split: counts[source.name][split] for split in splits if counts[source.name][split]}
        if source.name in counts
        else {}
        for source in sources
    }
