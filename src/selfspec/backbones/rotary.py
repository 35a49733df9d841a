"""Rotary position tables, from the backbone's own rotary module (so that every scaling is its own)."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.backbones.load import input_embeddings


class RotaryTable:
    """cos and sin for positions 0..capacity-1, each ``[capacity, head_dim]``, in ``dtype``."""

    def __init__(self, model: PreTrainedModel, capacity: int, dtype: torch.dtype) -> None:
        weight = input_embeddings(model)
        probe = torch.zeros(1, dtype=torch.float32, device=weight.device)  # its dtype is the table's before the cast
        positions = torch.arange(capacity, device=weight.device)[None]
        with torch.no_grad():
            cos, sin = model.get_decoder().rotary_emb(probe, positions)
        self.cos: Tensor = cos[0].to(dtype)
        # The sign of (-second, first) goes into the table: rotating is then a roll and no negation.
        half = sin.shape[-1] // 2
        self.sin: Tensor = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin ``[..., 1, head_dim]`` at ``positions [...]``, ready to broadcast over heads."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to ``x [..., heads, head_dim]`` (half-split layout, as Llama and Qwen).

    ``cos`` and ``sin`` come from ``RotaryTable.at``.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)
