"""The shard stage: two passes, so that held-out prompts are known before training text is written.

Pass one streams the mixture, assigns splits by group, drops exact duplicates and spools the records.
Pass two drops what shares n-grams with a held-out prompt, and writes shards and ledger.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from selfspec.config import ShardConfig
from selfspec.corpus.chunks import Tokenizer
from selfspec.corpus.ledger import Ledger
from selfspec.corpus.mixture import Mixture, source_records
from selfspec.corpus.records import CorpusError, Record, identity
from selfspec.corpus.shards import Spool, write_split
from selfspec.corpus.sources import loader_of
from selfspec.corpus.splits import split_of


def build(config: ShardConfig, tokenizer: Tokenizer, seed: int, out: Path, root: Path = Path(".")) -> dict[str, Any]:
    """Write the shards of all splits into the folder ``out`` (replaced whole) and return the ledger.

    Raises:
        CorpusError: an option is wrong, or a split came out empty.
        ResourceError: a source cannot be read.
    """
    for source in config.sources:  # before any download
        loader_of(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        spool = Spool(Path(scratch) / "spool.parquet", config.records_per_shard)
        pools = _collect(config, tokenizer, seed, root, spool)
        heldout = interleaved(pools.heldout, seed)
        ledger = Ledger(heldout, config)
        shards = Path(scratch) / "shards"
        written = {
            "heldout": write_split(shards, "heldout", heldout, config.records_per_shard),
            "validation": write_split(
                shards,
                "validation",
                ledger.clean(interleaved(pools.validation, seed), "validation"),
                config.records_per_shard,
            ),
            "train": write_split(shards, "train", ledger.clean(spool, "train"), config.records_per_shard),
        }
        if not written["train"]:
            raise CorpusError("shard.sources: no training record is left after the split and the overlap check")
        _replace(shards, out)
    return ledger.summary(pools.duplicates)


class _Pools:
    """Validation and held-out records by source, in stream order; at most ``limit`` of each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[str, set[int]] = {"heldout": set(), "training": set()}
        self.heldout: dict[str, list[Record]] = defaultdict(list)
        self.validation: dict[str, list[Record]] = defaultdict(list)
        self.duplicates = 0

    def is_new(self, record: Record, split: str) -> bool:
        """Whether no equal record went before it (held-out apart: the ledger compares it with the rest)."""
        seen = self._seen["heldout" if split == "heldout" else "training"]
        digest = identity(record.content)
        if digest in seen:
            self.duplicates += 1
            return False
        seen.add(digest)
        return True

    def add(self, record: Record, split: str) -> None:
        pool = (self.heldout if split == "heldout" else self.validation)[record.source]
        if len(pool) < self._limit:
            pool.append(record)


def _collect(config: ShardConfig, tokenizer: Tokenizer, seed: int, root: Path, spool: Spool) -> _Pools:
    pools = _Pools(config.max_eval_records)
    mixture = Mixture(config, tokenizer, seed, root)
    settings = {source.name: source for source in config.sources}
    tokens = 0
    with tqdm(total=config.max_train_tokens, desc="shard", unit="tok", unit_scale=True, delay=1, mininterval=1) as bar:
        for record in mixture:
            split = split_of(record.group, settings[record.source], config)
            if split is None or not pools.is_new(record, split):
                continue
            if split != "train":
                pools.add(record, split)
                continue
            spool.add(record)
            tokens += record.tokens
            bar.update(record.tokens)
            if tokens >= config.max_train_tokens:
                break
    spool.close()
    for source in config.sources:
        if source.split == "heldout":
            for record in islice(source_records(source, config, tokenizer, seed, root), config.max_eval_records):
                if pools.is_new(record, "heldout"):
                    pools.add(record, "heldout")
    return pools


def interleaved(pools: dict[str, list[Record]], seed: int) -> list[Record]:
    """Rounds of one record from each source that has any left, records and rounds in seeded order.

    Any first N of a domain thus come from all its sources alike, however unequal their sizes.
    """
    draw = Random(seed)
    queues = []
    for name in sorted(pools):
        queue = list(pools[name])
        draw.shuffle(queue)
        queues.append(queue)
    found: list[Record] = []
    while queues := [queue for queue in queues if queue]:
        draw.shuffle(queues)
        found += [queue.pop() for queue in queues]
    return found


def _replace(new: Path, out: Path) -> None:
    """Put the folder ``new`` in the place of ``out``."""
    if out.exists():
        old = new.parent / "old"
        os.replace(out, old)
        shutil.rmtree(old)
    os.replace(new, out)


def domain_counts(ledger: dict[str, Any], config: ShardConfig) -> Iterator[tuple[str, str, str, int, int]]:
    """Rows (source, domain, split, records, tokens) of the ledger, for a table."""
    for source in config.sources:
        for split, count in ledger["records"][source.name].items():
            yield source.name, source.domain, split, count, ledger["tokens"][source.name][split]
