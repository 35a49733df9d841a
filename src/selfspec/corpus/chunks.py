"""Documents to records of at most ``chunk_tokens`` tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from selfspec.config import SourceConfig
from selfspec.corpus.records import Document, Record

# `interleave_datasets` reads its sources in threads, and a fast tokenizer is not to be entered twice.
_TOKENIZER_LOCK = threading.Lock()
_BATCH = 16  # documents tokenised together; a streaming source is read ahead by as many


class Tokenizer(Protocol):
    """What is used of a fast `transformers` tokenizer."""

    def __call__(self, text: list[str], **options: Any) -> Any: ...


def records(
    documents: Iterable[Document], source: SourceConfig, tokenizer: Tokenizer, chunk_tokens: int
) -> Iterator[Record]:
    """Count tokens, and cut corpus documents. A prompt stays whole: half a question is no question."""
    stream = iter(documents)
    while batch := list(islice(stream, _BATCH)):
        texts = [document.text or "\n".join(m["content"] for m in document.messages) for document in batch]
        with _TOKENIZER_LOCK:
            encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for document, text, offsets in zip(batch, texts, encoded["offset_mapping"], strict=True):
            if source.kind == "prompt":
                messages = json.dumps(list(document.messages), ensure_ascii=False)
                yield _record(document, source, document.key, "", messages, len(offsets))
                continue
            for index, (piece, tokens) in enumerate(cut(text, offsets, chunk_tokens)):
                yield _record(document, source, f"{document.key}#{index}", piece, "", tokens)


def cut(text: str, offsets: list[tuple[int, int]], size: int) -> Iterator[tuple[str, int]]:
    """Pieces of ``text`` of at most ``size`` tokens, with their token counts.

    A piece ends after the last line break of its final quarter where there is one, else at the token;
    a token that holds line break and indentation counts on both sides. ``offsets[i]`` is the character
    span of token i. A last piece under an eighth of ``size`` is left out when there are others: it is
    a tail, not a text.
    """
    start, begin = 0, 0  # token, character
    while start < len(offsets):
        end = min(start + size, len(offsets))
        if begin and end - start < size // 8:
            return
        after, stop = end, offsets[end][0] if end < len(offsets) else len(text)
        if end < len(offsets):
            for index in range(end - 1, max(start, end - 1 - max(1, size // 4)), -1):
                first, last = offsets[index]
                newline = text.rfind("\n", first, last)
                if newline >= 0:
                    stop = newline + 1
                    end, after = index + 1, index + (stop == last)
                    break
        piece = text[begin:stop].strip("\n")
        if piece.strip():
            yield piece, end - start
        start, begin = after, stop


def _record(document: Document, source: SourceConfig, key: str, text: str, messages: str, tokens: int) -> Record:
    return Record(
        id=f"{source.name}/{key}",
        source=source.name,
        kind=source.kind,
        domain=source.domain,
        group=document.group,
        text=text,
        messages=messages,
        license=source.license,
        tokens=tokens,
    )
