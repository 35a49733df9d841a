"""Prompts that are only ever held out: MT-Bench, CHAMP, HumanEval."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

from selfspec.corpus.records import Document, user
from selfspec.corpus.sources.base import Context, Loader


class MtBench(Loader):
    """First turns of MT-Bench (arXiv:2306.05685). A second turn refers to an answer nobody has given yet."""

    def documents(self, context: Context) -> Iterator[Document]:
        for line in context.member().decode("utf-8").splitlines():
            row = json.loads(line)
            key = str(row["question_id"])
            yield Document(key, f"mt_bench/{key}", messages=user(row["turns"][0]))


class Champ(Loader):
    """Competition-level problems of CHAMP (arXiv:2401.06961): the field ``_text``, mark-up removed."""

    def documents(self, context: Context) -> Iterator[Document]:
        for key, problem in json.loads(context.member())["problems"].items():
            yield Document(key, f"champ/{key}", messages=user(problem["_text"]))


class HumanEval(Loader):
    """HumanEval (arXiv:2107.03374) as a chat message: the stub, and a request to complete it."""

    def documents(self, context: Context) -> Iterator[Document]:
        for line in gzip.decompress(context.member()).decode("utf-8").splitlines():
            row = json.loads(line)
            prompt = f"Complete the following Python function.\n\n```python\n{row['prompt'].strip()}\n```"
            yield Document(row["task_id"], f"human_eval/{row['task_id']}", messages=user(prompt))
