"""Rotary position tables, from the backbone's own rotary class (so that every scaling is its own)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from selfspec.backbones.load import BackboneError, input_embeddings

# Scalings whose angle at a position depends on the position alone; `dynamic` up to the length it was trained for.
STATIC_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")


def rope_types(config: PretrainedConfig) -> list[str]:
    """The scalings in use: one, or where layers have bases of their own (Gemma) one for each kind of layer."""
    rope: dict[str, Any] = config.rope_parameters
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)]
    return sorted({kind.get("rope_type", "default") for kind in kinds or [rope]})


class RotaryTable:
    """cos and sin for positions 0..capacity-1, each ``[capacity, rotated]``, in ``dtype``.

    ``rotated`` is the head's size, or less where a family turns the first part of a head only (Qwen3.5).

    Args:
        layer: where kinds of layers have rotary bases of their own (Gemma), the backbone's layer whose it is;
            default: one with full attention, whose kind a head's layers are of.

    Raises:
        BackboneError: dynamic scaling, and a capacity beyond the length from which it changes the frequencies.
    """

    def __init__(self, model: PreTrainedModel, capacity: int, dtype: torch.dtype, layer: int | None = None) -> None:
        config, weight = model.config, input_embeddings(model)
        trained = config.max_position_embeddings
        if "dynamic" in rope_types(config) and capacity > trained:
            raise BackboneError(
                f"backbone: rope_type 'dynamic' changes all positions of a text longer than max_position_embeddings = "
                f"{trained}, {capacity} asked; shorten the texts, or set rope_type to yarn or linear"
            )
        probe = torch.zeros(1, dtype=torch.float32, device=weight.device)  # its dtype is the table's before the cast
        positions = torch.arange(capacity, device=weight.device)[None]
        # A fresh instance: the model's own one forgets its frequencies' precision in a cast of the model, and
        # under dynamic scaling with every long text.
        rotary: Any = type(model.get_decoder().rotary_emb)(config)
        kind = _layer_type(config, layer) if isinstance(rotary.rope_type, dict) else None
        with torch.no_grad():
            cos, sin = rotary(probe, positions) if kind is None else rotary(probe, positions, kind)
        self.cos: Tensor = cos[0].to(dtype)
        # The sign of (-second, first) goes into the table: rotating is then a roll and no negation.
        half = sin.shape[-1] // 2
        self.sin: Tensor = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin ``[..., 1, rotated]`` at ``positions [...]``, ready to broadcast over heads."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def _layer_type(config: Any, layer: int | None) -> str:
    kinds: list[str] = config.layer_types
    if layer is not None:
        return kinds[layer]
    return "full_attention" if "full_attention" in kinds else kinds[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to ``x [..., heads, head_dim]`` (half-split layout, as Llama and Qwen).

    ``cos`` and ``sin`` come from ``RotaryTable.at``; what they are too narrow for stays as it is.
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)
