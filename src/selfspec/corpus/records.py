"""The units of the corpus: what a source yields, and what a shard holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from selfspec.errors import SelfspecError

FIELDS = ("id", "source", "kind", "domain", "group", "text", "messages", "license")


class CorpusError(SelfspecError):
    """The sources, options or shards cannot be used; the message says which and what to do."""


@dataclass(frozen=True)
class Document:
    """One document or prompt of a source, before it is cut into records.

    ``group`` is what must not be torn apart by a split (document, template, repository): records of
    one group always land in the same split, whichever source they come from.
    """

    key: str
    group: str
    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Record:
    """One row of a shard, and its length in backbone tokens (of the text or the message contents)."""

    id: str
    source: str
    kind: str
    domain: str
    group: str
    text: str
    messages: str  # JSON list of {role, content}; "" for corpus records
    license: str
    tokens: int = 0

    def row(self) -> dict[str, str]:
        """The shard's columns."""
        return {field: getattr(self, field) for field in FIELDS}

    @property
    def content(self) -> str:
        return content(self.text, self.messages)


def content(text: str, messages: str) -> str:
    """All the words of a shard row: its text, or the contents of its messages."""
    if not messages:
        return text
    return "\n".join(message["content"] for message in json.loads(messages))


def user(prompt: str) -> tuple[Mapping[str, str], ...]:
    """A conversation of one user turn."""
    return ({"role": "user", "content": prompt},)


def stable_hash(text: str) -> int:
    """64 bits of BLAKE2b: the same on every machine and run, unlike ``hash``."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def identity(text: str) -> int:
    """A hash that is equal for exact duplicates: texts that differ at most in white space or case."""
    return stable_hash(" ".join(text.split()).casefold())
