"""Sources interleaved so that each gives its share of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from selfspec.config import ShardConfig, SourceConfig
from selfspec.corpus.chunks import Tokenizer, records
from selfspec.corpus.records import CorpusError, Record
from selfspec.corpus.sources import Context, loader_of


def source_records(
    source: SourceConfig, config: ShardConfig, tokenizer: Tokenizer, seed: int, root: Path
) -> Iterator[Record]:
    """All records of one source, in its own order."""
    context = Context(source, root, seed, config.shuffle_buffer)
    return records(loader_of(source).documents(context), source, tokenizer, config.chunk_tokens)


class Mixture:
    """The weighted sources as one stream.

    ``weight`` is a share of tokens. ``interleave_datasets`` draws records, so a source's probability is
    its weight over its mean tokens per record, which the first ``probe_records`` estimate. A source that
    runs out is left out from there on; none is repeated, none stops the others.
    """

    def __init__(self, config: ShardConfig, tokenizer: Tokenizer, seed: int, root: Path) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._root = root
        self.sources = [source for source in config.sources if source.weight]
        self.mean_tokens = [self._probe(source) for source in self.sources]

    @property
    def probabilities(self) -> list[float]:
        """The chance of each source to give the next record."""
        rates = [source.weight / mean for source, mean in zip(self.sources, self.mean_tokens, strict=True)]
        return [rate / sum(rates) for rate in rates]

    def __iter__(self) -> Iterator[Record]:
        from datasets import Features, IterableDataset, Value, interleave_datasets

        columns = {name: Value("int32" if name == "tokens" else "string") for name in Record.__dataclass_fields__}
        streams = [
            IterableDataset.from_generator(_Rows(self, index), features=Features(columns))
            for index in range(len(self.sources))
        ]
        mixed = interleave_datasets(
            streams,
            probabilities=self.probabilities,
            seed=self._seed,
            stopping_strategy="all_exhausted_without_replacement",
        )
        for row in mixed:
            yield Record(**row)

    def records_of(self, index: int) -> Iterator[Record]:
        return source_records(self.sources[index], self._config, self._tokenizer, self._seed, self._root)

    def _probe(self, source: SourceConfig) -> float:
        stream = source_records(source, self._config, self._tokenizer, self._seed, self._root)
        lengths = [record.tokens for record in islice(stream, self._config.probe_records)]
        if not sum(lengths):
            raise CorpusError(
                f"shard.sources.{source.name}: yields no text; check archives and options, or remove the source"
            )
        return sum(lengths) / len(lengths)


class _Rows:
    """The generator that `datasets` calls. It copies and hashes its generators: here, by source name alone."""

    def __init__(self, mixture: Mixture, index: int) -> None:
        self._mixture = mixture
        self._index = index

    def __call__(self) -> Iterator[dict[str, Any]]:
        for record in self._mixture.records_of(self._index):
            yield asdict(record)

    def __deepcopy__(self, memo: object) -> _Rows:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self._mixture.sources[self._index].name,))
