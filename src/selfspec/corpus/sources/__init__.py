"""The loaders that ``shard.sources[].loader`` may name."""

from __future__ import annotations

from pydantic import ValidationError

from selfspec import config_faults
from selfspec.config import SourceConfig
from selfspec.corpus.records import CorpusError
from selfspec.corpus.sources.base import Context, Loader
from selfspec.corpus.sources.benchmarks import Champ, HumanEval, MtBench
from selfspec.corpus.sources.chatterbot import Chatterbot
from selfspec.corpus.sources.codeio import CodeIo
from selfspec.corpus.sources.dataset import HubDataset
from selfspec.corpus.sources.gsm_symbolic import GsmSymbolic
from selfspec.corpus.sources.python_files import PythonFiles
from selfspec.corpus.sources.sphinx import SphinxDocs
from selfspec.corpus.sources.wikipedia import Wikipedia

__all__ = ["LOADERS", "Context", "Loader", "loader_of"]

LOADERS: dict[str, type[Loader]] = {
    "champ": Champ,
    "chatterbot": Chatterbot,
    "codeio": CodeIo,
    "dataset": HubDataset,
    "gsm_symbolic": GsmSymbolic,
    "human_eval": HumanEval,
    "mt_bench": MtBench,
    "python_files": PythonFiles,
    "sphinx": SphinxDocs,
    "wikipedia": Wikipedia,
}


def loader_of(source: SourceConfig) -> Loader:
    """The source's loader with its options.

    Raises:
        CorpusError: one line per fault, naming the parameter, its value and what is allowed.
    """
    where = f"shard.sources.{source.name}"
    if source.loader not in LOADERS:
        raise CorpusError(f"{where}.loader: got {source.loader!r}, allowed: {', '.join(sorted(LOADERS))}; change it")
    kind = LOADERS[source.loader]
    try:
        return kind.model_validate(dict(source.options))
    except ValidationError as error:
        faults = config_faults.lines(error, kind)
        raise CorpusError("\n".join(f"{where}.options.{fault}" for fault in faults)) from None
