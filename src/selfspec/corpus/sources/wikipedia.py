"""Sections of Wikipedia articles from a (shortened) pages-articles dump, as prose or as chat prompts."""

from __future__ import annotations

import bz2
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import lru_cache

from pydantic import Field

from selfspec.corpus.records import Document, stable_hash, user
from selfspec.corpus.sources.base import Context, Loader
from selfspec.corpus.sources.wikitext import sections

# Short wordings: what training and held-out prompts share must stay below an n-gram of the ledger.
_TASKS = (
    "Explain this passage in simple words:\n\n{passage}",
    "Summarise this text in two sentences:\n\n{passage}",
    "List the key points of this text:\n\n{passage}",
    "Ask a question about this text and answer it:\n\n{passage}",
    "What should I know about {heading} ({title})?",
)


class Wikipedia(Loader):
    """``prompts_per_section`` 0: each section is a corpus document. N: N different tasks on each section.

    The group is the article.
    """

    prompts_per_section: int = Field(default=0, ge=0, le=len(_TASKS))
    min_chars: int = 400  # of a section
    passage_chars: int = 700  # of the passage in a prompt

    def documents(self, context: Context) -> Iterator[Document]:
        found = [
            (f"{title}/{index}", title, heading, body)
            for title, parts in _articles(context.member())
            for index, (heading, body) in enumerate(parts)
            if len(body) >= self.min_chars
        ]
        for key, title, heading, body in sorted(found, key=lambda section: stable_hash(section[0])):
            group = f"wikipedia/{title}"
            if not self.prompts_per_section:
                yield Document(key, group, text=f"{heading or title}\n\n{body}")
            for turn in range(self.prompts_per_section):
                task = _TASKS[(stable_hash(f"task/{key}") + turn) % len(_TASKS)]
                passage = _passage(body, self.passage_chars)
                prompt = task.format(passage=passage, title=title, heading=heading or title)
                yield Document(f"{key}/{turn}", group, messages=user(prompt))


@lru_cache(maxsize=2)
def _articles(dump: bytes) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Title and sections of each article; two sources of a mixture read the same dump."""
    found = []
    for _, element in ElementTree.iterparse(io.BytesIO(bz2.decompress(dump))):
        if element.tag.rpartition("}")[2] != "page":
            continue
        fields = {child.tag.rpartition("}")[2]: child for child in element.iter()}
        text = fields["text"].text or ""
        if fields["ns"].text == "0" and not re.match(r"\s*#redirect", text, re.IGNORECASE):
            found.append((fields["title"].text or "", tuple(sections(text))))
        element.clear()
    return tuple(found)


def _passage(body: str, size: int) -> str:
    """The first whole sentences of ``body`` that fit into ``size`` characters (at least one, cut if need be)."""
    if len(body) <= size:
        return body
    head = body[:size]
    end = max(head.rfind(". "), head.rfind(".\n"))
    return head[: end + 1] if end > 0 else head
