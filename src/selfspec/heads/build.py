"""From ``head.type`` and its options to a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from selfspec.config import HeadConfig
from selfspec.heads.cascade import CascadeHead
from selfspec.heads.parallel import ParallelHead
from selfspec.heads.protocol import Head
from selfspec.heads.shared import SharedHead
from selfspec.heads.vocab import DraftVocab

KINDS: tuple[type[Head], ...] = (SharedHead, CascadeHead, ParallelHead)


def build(config: HeadConfig, model: PreTrainedModel, vocab: DraftVocab) -> Head:
    """A fresh head on ``model``, as ``head:`` of params.yaml describes it."""
    return construct(config.type, model, config.depths, vocab, config.options)


def construct(kind: str, model: PreTrainedModel, depths: int, vocab: DraftVocab, options: Mapping[str, Any]) -> Head:
    """A fresh head of type ``kind``; ``options`` that are not given take their defaults.

    Raises:
        KeyError: no such type.
        TypeError: an option that this type does not have.
    """
    if kind == SharedHead.kind:
        return SharedHead(model, depths, **options)
    if kind == CascadeHead.kind:
        return CascadeHead(model, depths, vocab, **options)
    if kind == ParallelHead.kind:
        return ParallelHead(model, depths, vocab, **options)
    raise KeyError(kind)
