"""Prose from a project's reStructuredText documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from selfspec.corpus.records import Document, stable_hash
from selfspec.corpus.sources.base import Context, Loader

_DIRECTIVE = re.compile(r"^\s*\.\. (?:[\w:-]+::.*|_[^:]+:.*)\n(?:\s+:[\w-]+:.*\n)*", re.MULTILINE)
_ROLE = re.compile(r":[\w:+-]+:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}")
_BLANK = re.compile(r"\n{3,}")


_HEADING = re.compile(r"^(?=\S.*\n([=\-~])\1{3,}$)", re.MULTILINE)


class SphinxDocs(Loader):
    """Sections of the files under ``folder``; mark-up is thinned, not parsed. The group is the file."""

    folder: str
    suffix: str = ".txt"
    exclude: tuple[str, ...] = ()  # name parts
    min_chars: int = 400

    def documents(self, context: Context) -> Iterator[Document]:
        found = []
        with context.open() as archive:
            for name in archive.names():
                if self._wanted(name):
                    text = thin(archive.read(name).decode("utf-8"))
                    found += [(f"{name}:{index}", name, part) for index, part in enumerate(sections(text))]
        for key, name, part in sorted(found, key=lambda section: stable_hash(section[0])):
            if len(part) >= self.min_chars:
                yield Document(key, name, text=part)

    def _wanted(self, name: str) -> bool:
        inside = f"/{self.folder}/" in f"/{name}" and name.endswith(self.suffix)
        return inside and not any(part in name for part in self.exclude)


def sections(text: str) -> list[str]:
    """Split before each underlined heading."""
    starts = [match.start() for match in _HEADING.finditer(text)]
    bounds = sorted({0, *starts, len(text)})
    return [text[start:end].strip() for start, end in pairwise(bounds)]


def thin(text: str) -> str:
    """Drop directives and link targets; keep what they enclose, and the words of roles and links."""
    text = _DIRECTIVE.sub("", text)
    text = _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
    return _BLANK.sub("\n\n", text).strip()
