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

from selfspec.distill import records
from selfspec.distill.records import Completion, Prompt

_FLUSH_SECONDS = 20.0


def key_of(parameters: Any, prompts: Sequence[Prompt]) -> str:
    """A hash of parameters (JSON-able) and prompts."""
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode())
    for prompt in prompts:
        digest.update(prompt.id.encode())
        digest.update(json.dumps(prompt.prompt_ids).encode())
    return digest.hexdigest()[:20]


class Journal:
    """Parts of one run's completions, flushed every ``part_records`` completions or 20 seconds."""

    def __init__(self, root: Path, key: str, part_records: int) -> None:
        self.folder = root / key
        self.folder.mkdir(parents=True, exist_ok=True)
        self.part_records = part_records
        parts = sorted(self.folder.glob("*.parquet"))
        self.finished = {completion.id: completion for part in parts for completion in records.read_shard(part)}
        self._next_part = len(parts)
        self._pending: list[Completion] = []
        self._flushed = time.monotonic()

    def add(self, completion: Completion) -> None:
        self.finished[completion.id] = completion
        self._pending.append(completion)
        if len(self._pending) >= self.part_records or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            records.write(self.folder / f"{self._next_part:05d}.parquet", self._pending)
            self._next_part += 1
            self._pending = []
        self._flushed = time.monotonic()

    def remaining(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if prompt.id not in self.finished]

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
