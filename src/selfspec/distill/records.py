"""Completions on disk: token ids with the prompt boundary, never text to be tokenised again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from selfspec.errors import SelfspecError

_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("domain", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("stop", pa.string()),
        ("temperature", pa.float32()),
    ]
)


@dataclass(frozen=True)
class Prompt:
    """What the backbone is asked to complete; ``prompt_ids`` already went through the chat template."""

    id: str
    source: str
    kind: str
    domain: str
    prompt_ids: list[int]


@dataclass(frozen=True)
class Completion(Prompt):
    """A prompt and what the backbone wrote.

    Attributes:
        completion_ids: with the end-of-sequence token when it was written.
        stop: ``eos`` or ``length`` (cut at ``distill.max_new_tokens``).
    """

    completion_ids: list[int]
    stop: Literal["eos", "length"]
    temperature: float

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def write(path: Path, completions: Sequence[Completion]) -> None:
    """Write one shard, whole or not at all."""
    table = pa.Table.from_pylist([asdict(completion) for completion in completions], schema=_SCHEMA)
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(table, partial)
    partial.replace(path)


def read_shard(path: Path) -> list[Completion]:
    """The completions of one shard, in order."""
    return [Completion(**row) for row in pq.read_table(path).to_pylist()]


def read(directory: Path) -> list[Completion]:
    """All completions of a split, in shard order.

    Raises:
        SelfspecError: the directory holds no shard.
    """
    paths = sorted(directory.glob("*.parquet"))
    if not paths:
        raise SelfspecError(f"{directory}: no completions; run `dvc repro distill` first")
    return [completion for path in paths for completion in read_shard(path)]


def by_domain(completions: Iterable[Completion], limit: int | None = None) -> dict[str, list[Completion]]:
    """Completions grouped by domain, at most ``limit`` of each, order kept."""
    groups: dict[str, list[Completion]] = {}
    for completion in completions:
        group = groups.setdefault(completion.domain, [])
        if limit is None or len(group) < limit:
            group.append(completion)
    return groups
