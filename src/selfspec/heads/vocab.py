"""The draft vocabulary: the subset of tokens that a head scores."""

from __future__ import annotations

import torch
from torch import Tensor


class DraftVocab:
    """Token ids a head can draft, and the maps both ways.

    Attributes:
        ids: ``[size]`` ascending token ids; draft index -> token id ("d2t").
        index: ``[vocab_size]`` token id -> draft index, -1 outside ("t2d").
    """

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        if not torch.equal(ids, ids.unique()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            raise ValueError(f"draft vocabulary must be ascending unique ids below {vocab_size}")
        self.ids = ids
        self.index = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
        self.index[ids] = torch.arange(len(ids), device=ids.device)

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> DraftVocab:
        """The same vocabulary on ``device``."""
        return self if self.ids.device == device else DraftVocab(self.ids.to(device), len(self.index))

    @property
    def whole(self) -> bool:
        """Whether every token can be drafted."""
        return len(self.ids) == len(self.index)

    def rows(self, weight: Tensor) -> Tensor:
        """The rows of an output projection ``[vocab_size, hidden]`` that score the draft vocabulary."""
        return weight if self.whole else weight[self.ids].contiguous()

    def coverage(self, tokens: Tensor) -> float:
        """Share of ``tokens`` that can be drafted."""
        return float((self.index[tokens] >= 0).float().mean())


def choose(tokens: Tensor, vocab_size: int, size: int) -> DraftVocab:
    """The ``size`` most frequent of ``tokens`` (ties: lower id first); 0 or >= vocab_size keeps all."""
    if size == 0 or size >= vocab_size:
        return DraftVocab(torch.arange(vocab_size), vocab_size)
    counts = torch.bincount(tokens, minlength=vocab_size)
    kept = torch.sort(counts, descending=True, stable=True).indices[:size]
    return DraftVocab(kept.sort().values, vocab_size)
