"""Openings of the ChatterBot corpus's conversations."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from selfspec.corpus.records import Document, stable_hash, user
from selfspec.corpus.sources.base import Context, Loader


class Chatterbot(Loader):
    """One prompt for each different opening; the canned answers are not used."""

    language: str = "english"
    exclude: tuple[str, ...] = ()  # topics (file names without .yml)
    min_words: int = 1

    def documents(self, context: Context) -> Iterator[Document]:
        prompts: dict[str, str] = {}
        with context.open() as archive:
            for name in sorted(archive.names()):
                folder, _, topic = name.removesuffix(".yml").rpartition("/")
                if not (name.endswith(".yml") and folder.endswith(f"/{self.language}")) or topic in self.exclude:
                    continue
                for turns in yaml.load(archive.read(name), Loader=yaml.CSafeLoader)["conversations"]:
                    prompt = str(turns[0]).strip()
                    if len(prompt.split()) >= self.min_words:
                        prompts.setdefault(prompt.casefold().rstrip("?.! "), f"{topic}\0{prompt}")
        for key in sorted(prompts, key=stable_hash):
            topic, prompt = prompts[key].split("\0")
            identifier = f"{topic}/{stable_hash(key):016x}"
            yield Document(identifier, f"chatterbot/{identifier}", messages=user(prompt))
