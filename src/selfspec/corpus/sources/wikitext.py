"""Wikitext to plain text: enough for running prose, not a parser."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

_DROPPED = re.compile(
    r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<(gallery|math|timeline|score|code|source|syntaxhighlight|pre)\b.*?</\1>",
    re.DOTALL | re.IGNORECASE,
)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
_FILE = re.compile(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]", re.IGNORECASE)
_INTERWIKI = re.compile(r"\[\[[a-z-]{2,12}:[^\[\]]*\]\]")
_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
_EXTERNAL = re.compile(r"\[https?://\S+ ?([^\]]*)\]")
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_QUOTES = re.compile(r"'{2,5}")
_HEADING = re.compile(r"^(={2,6})\s*(.+?)\s*\1\s*$", re.MULTILINE)
_EMPTY = re.compile(r"\(\s*[;,]*\s*\)")
_SPACES = re.compile(r"[ \t\u00a0]+")
_BACK_MATTER = {"references", "external links", "see also", "further reading", "notes", "bibliography", "sources"}
_BACK_MATTER |= {"footnotes", "citations", "works cited", "gallery", "notes and references"}


def sections(wikitext: str) -> Iterator[tuple[str, str]]:
    """Heading ("" for the lead) and plain text of each section; reference lists are left out."""
    parts = _HEADING.split(plain(wikitext))
    yield "", tidy(parts[0])
    for _, heading, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if heading.casefold() not in _BACK_MATTER:
            yield heading, tidy(body)


def plain(text: str) -> str:
    """Remove templates, tables, references, files and mark-up; links become their words."""
    text = _DROPPED.sub("", text)
    for pattern in (_TEMPLATE, _TABLE):
        while True:  # innermost first
            text, count = pattern.subn("", text)
            if not count:
                break
    text = _INTERWIKI.sub("", _FILE.sub("", text))
    text = _EXTERNAL.sub(r"\1", _LINK.sub(r"\1", text))
    return _QUOTES.sub("", html.unescape(_TAG.sub("", text)))


def tidy(text: str) -> str:
    """Paragraphs only: list markers go, and lines without a sentence (table leftovers, captions) too."""
    kept = []
    for line in text.splitlines():
        line = _SPACES.sub(" ", _EMPTY.sub("", line)).replace(" ,", ",").replace(" .", ".").strip()
        if line.startswith(("|", "!", "{", "}")):
            continue
        line = line.lstrip("*#:; ")
        if len(line) >= 40 and line[-1] in '.!?":;)':
            kept.append(line)
    return "\n\n".join(kept)
