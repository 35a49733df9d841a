"""What the drafting loop needs from a head's drafter, and the drafter of each head type."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from selfspec.backbones.decoder import Decoder
from selfspec.decoding.drafters.cascade import CascadeDrafter
from selfspec.decoding.drafters.parallel import ParallelDrafter
from selfspec.decoding.drafters.shared import SharedDrafter
from selfspec.heads.cascade import CascadeHead
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.parallel import ParallelHead
from selfspec.heads.vocab import DraftVocab


class DraftCache(Protocol):
    """What a drafter keeps of each row's verified anchors."""

    def select(self, rows: list[int]) -> Any:
        """A cache of ``rows`` only."""


class Drafter(Protocol):
    """A head's weights arranged for drafting. Each knows its own kind of cache alone, hence ``Any``.

    Attributes:
        vocab: the tokens it can draft.
        facts: the head's ``head.json``.
        max_drafts: drafts a round it can make; None: any number.
    """

    decoder: Decoder
    vocab: DraftVocab
    facts: dict[str, Any]
    max_drafts: int | None

    def nbytes(self) -> int:
        """Memory the head adds to the backbone."""

    def new_cache(self, rows: int, limit: int, num_drafts: int | None = None) -> Any:
        """An empty ``DraftCache`` for texts of up to ``limit`` tokens and ``num_drafts`` drafts a round."""

    def observe(self, tokens: Tensor, states: Tensor, counts: list[int], cache: Any) -> Tensor:
        """Take verified anchors in: the decoder's ``states [rows, time, W]`` with their next ``tokens [rows, time]``.

        Row r has ``counts[r]`` real ones, at least 1. Returns ``[rows, H]`` what ``logits`` scores at depth 1.
        """

    def deepen(self, token: Tensor, state: Tensor, depth: int, cache: Any) -> Tensor:
        """``[rows, H]`` what ``logits`` scores at ``depth >= 2``, from the depth before: its ``state``, its draft."""

    def logits(self, state: Tensor, depth: int = 1) -> Tensor:
        """Scores over the draft vocabulary, ``[rows, draft_vocab]``."""


def drafter_for(decoder: Decoder, head: TrainedHead) -> Drafter:
    """The drafter of the head's type.

    Raises:
        ValueError: the decoder gives the states of other middle layers than the head reads.
    """
    given, read = decoder.middle_layers, head.module.middle_layers
    if given != read:
        raise ValueError(f"middle_layers: got {given} of the decoder, allowed: {read}, which the head reads")
    if isinstance(head.module, CascadeHead):
        return CascadeDrafter(decoder, head)
    if isinstance(head.module, ParallelHead):
        return ParallelDrafter(decoder, head)
    return SharedDrafter(decoder, head)
