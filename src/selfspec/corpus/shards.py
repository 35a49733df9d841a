"""Parquet shards: tens of files, rows in the order of the mixture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from selfspec.config import Split
from selfspec.corpus.records import FIELDS, CorpusError, Record
from selfspec.resources import atomic_path

SCHEMA = pa.schema([(field, pa.string()) for field in FIELDS])
SPOOL_SCHEMA = SCHEMA.append(pa.field("tokens", pa.int32()))


def write_split(folder: Path, split: Split, records: Iterable[Record], records_per_shard: int) -> int:
    """Write ``<split>-00000.parquet``, … and return the number of rows. At least one file is written."""
    stream = iter(records)
    rows = 0
    index = 0
    while (batch := list(islice(stream, records_per_shard))) or index == 0:
        table = pa.Table.from_pylist([record.row() for record in batch], schema=SCHEMA)
        with atomic_path(folder / f"{split}-{index:05d}.parquet") as temporary:
            pq.write_table(table, temporary, compression="zstd")
        rows += len(batch)
        index += 1
    return rows


def shard_files(folder: Path, split: str) -> list[Path]:
    """The split's files in order.

    Raises:
        CorpusError: there are none.
    """
    files = sorted(Path(folder).glob(f"{split}-[0-9]*.parquet"))
    if not files:
        raise CorpusError(f"{folder}: no {split}-*.parquet; run `dvc repro shard` first")
    return files


def iter_split(folder: Path, split: str) -> Iterator[dict[str, str]]:
    """The rows of a split, one file in memory at a time."""
    for file in shard_files(folder, split):
        yield from pq.read_table(file, schema=SCHEMA).to_pylist()


def read_split(folder: Path, split: str) -> pd.DataFrame:
    """A whole split as a data frame, in order; the columns are `records.FIELDS`."""
    return pa.concat_tables([pq.read_table(file, schema=SCHEMA) for file in shard_files(folder, split)]).to_pandas()


class Spool:
    """Records on disk between the two passes: a mixture need not fit into memory."""

    def __init__(self, path: Path, batch: int) -> None:
        self._path = path
        self._batch = batch
        self._pending: list[Record] = []
        self._writer = pq.ParquetWriter(path, SPOOL_SCHEMA)

    def add(self, record: Record) -> None:
        self._pending.append(record)
        if len(self._pending) >= self._batch:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def __iter__(self) -> Iterator[Record]:
        with pq.ParquetFile(self._path) as file:
            for group in file.iter_batches(batch_size=self._batch):
                for row in group.to_pylist():
                    yield Record(**row)

    def _flush(self) -> None:
        if self._pending:
            rows = [{**record.row(), "tokens": record.tokens} for record in self._pending]
            self._writer.write_table(pa.Table.from_pylist(rows, schema=SPOOL_SCHEMA))
            self._pending = []
