"""From ``head.type`` and its options to a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from selfspec.config import FROM_FILES, HeadConfig
from selfspec.heads.cascade import CascadeHead
from selfspec.heads.parallel import ParallelHead
from selfspec.heads.protocol import Head, Start
from selfspec.heads.shared import SharedHead
from selfspec.heads.vocab import DraftVocab

KINDS: tuple[type[Head], ...] = (SharedHead, CascadeHead, ParallelHead)


def build(config: HeadConfig, model: PreTrainedModel, vocab: DraftVocab, start: Start | None = None) -> Head:
    """A fresh head on ``model``, as ``head:`` of params.yaml describes it.

    Args:
        start: what ``start.read`` found for ``head.init``.

    Raises:
        HeadError: ``start`` holds a head of another form or size.
        ValueError: ``start`` is there and ``head.init`` asks for none, or the other way round.
    """
    if (start is None) == (config.init in FROM_FILES):
        raise ValueError(f"head.init is {config.init}: start has to be what start.read returns for it, got {start}")
    head = construct(config.type, model, config.depths, vocab, config.options)
    if start is not None:
        start.load_into(head, vocab)
    return head


def construct(kind: str, model: PreTrainedModel, depths: int, vocab: DraftVocab, options: Mapping[str, Any]) -> Head:
    """A fresh head of type ``kind``; ``options`` that are not given take their defaults.

    Under an ``init`` of ``FROM_FILES`` its weights are random: they are about to be overwritten.

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
