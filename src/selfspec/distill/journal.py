"""Finished completions of an interrupted run, so that a restart goes on where it was.

DVC deletes a stage's outs before it runs, so the journal lives elsewhere: in a folder named by a
hash of everything that decides the completions. Another configuration never finds it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec.distill import records, states
from selfspec.distill.records import Completion, Prompt
from selfspec.distill.states import States, StoredStates

_FLUSH_SECONDS = 20.0


def key_of(parameters: Any, prompts: Sequence[Prompt]) -> str:
    """A hash of parameters (JSON-able) and prompts."""
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode())
    for prompt in prompts:
        digest.update(prompt.id.encode())
        digest.update(json.dumps(prompt.prompt_ids).encode())
    return digest.hexdigest()[:20]


class Journal:
    """One run's completions and states in parts, each of ``part_records`` completions or 20 seconds.

    Args:
        keep_states: whether states are wanted later; else the completions alone are kept.
    """

    def __init__(self, root: Path, key: str, part_records: int, dtype: torch.dtype, keep_states: bool = True) -> None:
        self.folder = root / key
        self.folder.mkdir(parents=True, exist_ok=True)
        self.part_records, self.dtype, self.keep_states = part_records, dtype, keep_states
        self.finished: dict[str, Completion] = {}
        self._where: dict[str, tuple[str, int]] = {}  # id -> (part, first row)
        parts = sorted(self.folder.glob("*.parquet"))
        for path in parts:
            self._index(path.stem, records.read_shard(path))
        self._next_part = len(parts)
        self._pending: list[tuple[Completion, States]] = []
        self._flushed = time.monotonic()
        self._open: dict[str, StoredStates] = {}

    def add(self, completion: Completion, of: States) -> None:
        self._pending.append((completion, of))
        if len(self._pending) >= self.part_records or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Put what is pending on disk. The parquet file comes last: with it, the part counts as written."""
        if self._pending:
            part = f"{self._next_part:05d}"
            completions = [completion for completion, _ in self._pending]
            if self.keep_states:
                tokens, width = sum(c.length for c in completions), self._pending[0][1].hidden.shape[1]
                states.write(self.folder, part, (of for _, of in self._pending), tokens, width, self.dtype)
            records.write(self.folder / f"{part}.parquet", completions)
            self._index(part, completions)
            self._next_part += 1
            self._pending = []
        self._flushed = time.monotonic()

    def _index(self, part: str, completions: Sequence[Completion]) -> None:
        row = 0
        for completion in completions:
            self.finished[completion.id] = completion
            self._where[completion.id] = (part, row)
            row += completion.length

    def states(self, completion: Completion) -> States:
        """The states of a flushed completion."""
        part, row = self._where[completion.id]
        if part not in self._open:
            self._open[part] = StoredStates.open(self.folder, part, self.dtype)
        return self._open[part].rows(row, row + completion.length)

    def remaining(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if prompt.id not in self.finished]

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
