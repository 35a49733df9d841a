"""A decoder layer taken apart: what comes before attention, and what comes after.

Training a recursive head and verifying ragged drafts both need attention patterns that a stock
decoder layer does not offer. ``Block`` runs everything *around* attention with the layer's own
sub-modules; ``FusedBlock`` is the same arithmetic with fewer, larger kernels, for inference.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from selfspec.backbones.linear import Linear
from selfspec.backbones.load import BackboneError
from selfspec.backbones.rotary import rotate

# Families whose decoder layer is: norm, q/k/v (+ optional per-head norms), rotary, attention,
# o_proj, residual, norm, gated MLP, residual. Others fit once an adapter like Block exists.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def check_supported(config: PretrainedConfig) -> None:
    """Refuse families whose layers this module does not describe.

    Raises:
        BackboneError: naming the family and what is missing.
    """
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise BackboneError(
            f"backbone: model type {config.model_type!r} has no block adapter; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}. Add one in src/selfspec/backbones/block.py"
        )
    if getattr(config, "use_sliding_window", False) or (
        config.model_type == "mistral" and getattr(config, "sliding_window", None)
    ):
        raise BackboneError(
            "backbone: sliding-window attention is not supported; set sliding_window to null if prompts fit"
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, float32 inside, in the fewest passes torch has on a CPU."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype) * weight


class BlockLike(Protocol):
    """What attention code needs from a decoder layer."""

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries ``[..., heads, head_dim]`` and keys, and values ``[..., kv_heads, head_dim]``."""

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after attention output ``[..., heads * head_dim]`` and the MLP, ``[..., hidden]``."""


class Block:
    """The sub-modules of one ``transformers`` decoder layer; differentiable."""

    def __init__(self, layer: nn.Module, head_dim: int) -> None:
        self.layer: Any = layer
        self.head_dim = head_dim

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values alone: all that a position without a loss contributes."""
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(x)
        k, v = (p(normed).unflatten(-1, (-1, self.head_dim)) for p in (attention.k_proj, attention.v_proj))
        if hasattr(attention, "k_norm"):
            k = attention.k_norm(k)
        return rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.layer.self_attn.o_proj(attended)
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))


def _bias(linears: list[Any]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features, dtype=linear.weight.dtype, device=linear.weight.device)
            if linear.bias is None
            else linear.bias
            for linear in linears
        ]
    )


class FusedBlock:
    """The same layer with merged projections; a copy of the weights, no gradients."""

    def __init__(self, layer: Any, head_dim: int, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.head_dim = head_dim
        self.heads = [p.out_features // head_dim for p in projections]

        def cast(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).contiguous()

        def cast_optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else cast(tensor)

        def merged(linears: list[Any]) -> Linear:
            return Linear(cast(torch.cat([p.weight for p in linears])), cast_optional(_bias(linears)))

        self.qkv_proj, self.gate_up = merged(projections), merged([mlp.gate_proj, mlp.up_proj])
        self.o_proj, self.down_proj = merged([attention.o_proj]), merged([mlp.down_proj])
        self.activation = mlp.act_fn
        self.input_norm, self.post_norm = (
            cast(layer.input_layernorm.weight),
            cast(layer.post_attention_layernorm.weight),
        )
        self.eps = layer.input_layernorm.variance_epsilon
        self.q_norm = cast(attention.q_norm.weight) if hasattr(attention, "q_norm") else None
        self.k_norm = cast(attention.k_norm.weight) if hasattr(attention, "k_norm") else None

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = rms_norm(x, self.input_norm, self.eps)
        heads = self.qkv_proj(normed).unflatten(-1, (-1, self.head_dim))
        queries, keys, _ = self.heads
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(heads[..., :queries, :], self.q_norm, self.eps)
            k = rms_norm(heads[..., queries : queries + keys, :], self.k_norm, self.eps)
            rotated = rotate(torch.cat([q, k], dim=-2), cos, sin)
        else:  # queries and keys lie side by side: one rotation serves both
            rotated = rotate(heads[..., : queries + keys, :], cos, sin)
        return rotated[..., :queries, :], rotated[..., queries:, :], heads[..., queries + keys :, :]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.o_proj(attended)
        normed = rms_norm(x, self.post_norm, self.eps)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down_proj(self.activation(gate) * up)

    def nbytes(self) -> int:
        """Bytes of the weights, as stored unpacked."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor | Linear))
