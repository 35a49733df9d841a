"""Hub data sets, and local files of the same shape, through ``datasets`` in streaming mode."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from typing import Any

from selfspec.config import Resource
from selfspec.corpus.records import CorpusError, Document, stable_hash, user
from selfspec.corpus.sources.base import Context, Loader
from selfspec.resources import ResourceError

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}


class HubDataset(Loader):
    """``hf:OWNER/NAME`` at its revision, or ``file:PATTERN`` (parquet, json(l), csv, txt).

    Nothing is downloaded beyond what is read. Rows pass a shuffle buffer seeded by ``seed``.
    """

    config: str | None = None  # the data set's configuration (subset)
    data_files: str | None = None  # pattern inside the repository, instead of a configuration
    split: str = "train"
    text: str = "text"  # column with the text, or with the prompt of a `kind: prompt` source
    messages: str | None = None  # column with a conversation (kind: prompt); turns after the last user turn are dropped
    group: str | None = None  # column that must not straddle splits; default: each row is its own group

    def documents(self, context: Context) -> Iterator[Document]:
        for resource in context.source.archives:
            rows = iter(self._open(resource, context))
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    break
                except (OSError, ValueError, RuntimeError) as error:
                    raise _fault(resource, error) from None
                document = self._document(row, resource, context)
                if document is not None:
                    yield document

    def _open(self, resource: Resource, context: Context) -> Any:
        from datasets import load_dataset

        scheme, path = resource.uri.split(":", 1)
        options: dict[str, Any] = {"split": self.split, "streaming": True}
        if scheme == "hf":
            options |= {"path": path, "name": self.config, "data_files": self.data_files, "revision": resource.revision}
        elif scheme == "file":
            files = sorted(glob.glob(str(context.root / path)))
            suffix = "." + files[0].rsplit(".", 1)[-1] if files else ""
            if suffix not in _FORMATS:
                raise ResourceError(
                    f"{resource.uri}: {len(files)} files at {context.root / path}; "
                    f"allowed: a pattern that matches {', '.join(_FORMATS)} files"
                )
            options |= {"path": _FORMATS[suffix], "data_files": {self.split: files}}
        else:
            raise ResourceError(f"{resource.uri}: loader dataset reads hf: and file: only; correct uri or loader")
        try:
            return load_dataset(**options).shuffle(seed=context.seed, buffer_size=context.shuffle_buffer)
        except (OSError, ValueError, RuntimeError) as error:
            raise _fault(resource, error) from None

    def _document(self, row: Mapping[str, Any], resource: Resource, context: Context) -> Document | None:
        prompt = context.source.kind == "prompt"
        column = self.messages if prompt and self.messages else self.text
        for name in filter(None, (column, self.group)):
            if name not in row:
                raise CorpusError(
                    f"shard.sources.{context.source.name}.options: {resource.uri} has no column {name!r}; "
                    f"it has {', '.join(row)}"
                )
        value = row[column]
        messages = _to_last_user_turn(value) if column == self.messages else user(value or "")
        body = "" if prompt else (value or "")
        if not (body.strip() or (prompt and messages and messages[-1]["content"].strip())):
            return None
        key = f"{stable_hash(body or json.dumps(messages)):016x}"
        group = f"{self.group}/{row[self.group]}" if self.group else f"{context.source.name}/{key}"
        return Document(key, group, text=body, messages=messages if prompt else ())


def _to_last_user_turn(turns: Any) -> tuple[Mapping[str, str], ...]:
    kept = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in turns or ()]
    while kept and kept[-1]["role"] != "user":
        kept.pop()
    return tuple(kept)


def _fault(resource: Resource, error: Exception) -> ResourceError:
    why = " ".join(str(error).split())[:240]
    at = f" at revision {resource.revision}" if resource.revision else ""
    return ResourceError(
        f"{resource.uri}{at}: cannot be read ({type(error).__name__}: {why}); "
        "check the name, the revision, options.config and options.split, and your network"
    )
