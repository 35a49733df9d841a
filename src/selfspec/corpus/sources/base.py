"""What a loader is: the validated options of a source, and a stream of its documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from selfspec.config import Resource, SourceConfig
from selfspec.corpus.records import CorpusError, Document
from selfspec.resources import Archive, open_archive


@dataclass(frozen=True)
class Context:
    """Where and how a source is read."""

    source: SourceConfig
    root: Path
    seed: int
    shuffle_buffer: int

    def open(self, index: int = 0) -> Archive:
        return open_archive(self.source.archives[index], self.root)

    def member(self, index: int = 0) -> bytes:
        """The one file that an archive of this source is read for."""
        resource: Resource = self.source.archives[index]
        if resource.member is None:
            raise CorpusError(
                f"shard.sources.{self.source.name}.archives.{index}.member: missing; "
                f"loader {self.source.loader} reads one file of {resource.uri}, name it"
            )
        with self.open(index) as archive:
            return archive.read(resource.member)


class Loader(BaseModel):
    """A loader's fields are the options it takes in ``shard.sources``; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def documents(self, context: Context) -> Iterator[Document]:
        """The source's documents in an order that depends on the parameters alone."""
        raise NotImplementedError
