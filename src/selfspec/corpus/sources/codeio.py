"""Programming tasks of CODEI/O (arXiv:2502.07316), as reasoning-gym ships them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

from selfspec.corpus.records import Document, stable_hash, user
from selfspec.corpus.sources.base import Context, Loader

_SIGNATURE = re.compile(r"^def (main_solution\([^)]*\))", re.MULTILINE)
_ENGLISH = re.compile(r"\b(the|of|is|and|to|that)\b")


class CodeIo(Loader):
    """The task as an instruction to write its function. Rows with non-English text are left out.

    The data's own ``prompt`` field shows the solution; what is asked here is the solution itself, from
    the task's description, its input/output specification and the function's signature.
    """

    max_chars: int = 1200

    def documents(self, context: Context) -> Iterator[Document]:
        prompts: dict[str, str] = {}
        for index in range(len(context.source.archives)):
            for row in _rows(gzip.decompress(context.member(index)).decode("utf-8")):
                prompt = _prompt(row)
                if prompt is not None and len(prompt) <= self.max_chars:
                    prompts.setdefault(" ".join(row["task_description"].split()), prompt)
        for task in sorted(prompts, key=stable_hash):
            key = f"{stable_hash(task):016x}"
            yield Document(key, f"codeio/{key}", messages=user(prompts[task]))


def _rows(text: str) -> list[dict[str, Any]]:
    """A JSON array, or one object a line: the two files differ."""
    if text.lstrip().startswith("["):
        rows: list[dict[str, Any]] = json.loads(text)
        return rows
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _prompt(row: dict[str, Any]) -> str | None:
    task = row["task_description"].strip()
    signature = _SIGNATURE.search(row["code_sample"])
    if signature is None or not _english(task):
        return None
    call = " ".join(signature[1].split())
    return f"{task}\n\n{row['input_output_spec'].strip()}\n\nWrite the Python function `{call}`."


def _english(text: str) -> bool:
    letters = [character for character in text if character.isalpha()]
    foreign = sum(not character.isascii() for character in letters)
    return foreign <= 0.02 * len(letters) and len(_ENGLISH.findall(text)) >= 2
