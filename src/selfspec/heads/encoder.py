"""A causal transformer encoder layer with the interface of a taken-apart decoder layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class EncoderLayer(nn.Module):
    """The arithmetic of ``nn.TransformerEncoderLayer(norm_first=True, activation=gelu, dropout=0)``, for any attention.

    Pre-norm, because the head's ``post_norm`` follows it: behind a post-norm layer that would be a norm
    of a norm. No positions enter (``cos``, ``sin`` are ignored): order is seen through the causal mask
    and through the backbone's states, which carry it.

    Args:
        hidden: size of the residual stream; ``heads`` divides it.
        feedforward: inner size of the MLP.

    Raises:
        ValueError: heads that do not divide the hidden size.
    """

    def __init__(self, hidden: int, heads: int, feedforward: int) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"block: encoder needs a hidden size that its {heads} heads divide, got {hidden}")
        self.head_dim = hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.in_proj, self.out_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.linear1, self.linear2 = nn.Linear(hidden, feedforward), nn.Linear(feedforward, hidden)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = self.in_proj(self.norm1(x)).unflatten(-1, (3, -1, self.head_dim)).unbind(-3)
        return q, k, v, None

    def kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values alone: all that a position without a loss contributes."""
        hidden = x.shape[-1]
        projected = F.linear(self.norm1(x), self.in_proj.weight[hidden:], self.in_proj.bias[hidden:])
        k, v = projected.unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        return k, v

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        x = x + self.out_proj(attended)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))
