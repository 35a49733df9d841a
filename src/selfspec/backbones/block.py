"""A decoder layer taken apart: what comes before attention, and what comes after.

Training a recursive head and verifying ragged drafts both need attention patterns that a stock
decoder layer does not offer. ``Block`` runs everything *around* attention with the layer's own
sub-modules; ``FusedBlock`` is the same arithmetic with fewer, larger kernels, for inference.

A layer here is: norm, q/k/v (+ optional biases and per-head norms), rotary, attention over everything
before or over a window, o_proj, residual, norm, gated MLP, residual; with Gemma's two more norms, one
before each residual. ``check_supported`` refuses what is not of this form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from selfspec.backbones.linear import Linear
from selfspec.backbones.load import BackboneError
from selfspec.backbones.rotary import STATIC_ROPE_TYPES, rope_types, rotate

SUPPORTED_MODEL_TYPES = ("gemma3_text", "llama", "mimo", "mistral", "qwen2", "qwen3")

_UNGATED = "bloom codegen falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj mpt nemotron opt phi starcoder2".split()
Function = Callable[[Tensor], Tensor]


def _set(*names: str) -> Callable[[Any], bool]:
    """Whether a config has one of the options ``names``, and not as None, 0 or False."""
    return lambda config: any(getattr(config, name, None) for name in names)


# What other families are made of, or what an option of a supported one asks for, and how their configs show it.
_LACKING: dict[str, Callable[[Any], bool]] = {
    "linear-attention layers": lambda config: "linear_attention" in (getattr(config, "layer_types", None) or ()),
    "state-space layers": _set("ssm_state_size", "state_size", "mamba_d_state"),
    "mixture-of-experts MLPs": _set("num_experts", "num_local_experts", "n_routed_experts"),
    "latent attention (MLA)": _set("kv_lora_rank"),
    "MLPs without a gate": lambda config: config.model_type in _UNGATED,
    "alibi positions": lambda config: config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False),
    "soft-capped scores": _set("attn_logit_softcapping", "final_logit_softcapping"),
    "attention to later positions": _set("use_bidirectional_attention"),
}


def check_supported(config: PretrainedConfig) -> None:
    """Refuse families whose layers this module does not describe, in one line.

    Raises:
        BackboneError: naming the model type, what it has that is lacking here, and what is allowed.
    """
    text = config.get_text_config()
    lacking = [what for what, present in _LACKING.items() if present(text)]
    if text is not config:
        lacking.append(f"encoder of images or sounds around a text model of type {text.model_type!r}")
    if config.model_type not in SUPPORTED_MODEL_TYPES or lacking:
        raise BackboneError(
            f"backbone: model type {config.model_type!r} is not supported: this decoder has no "
            f"{' and no '.join(lacking or ['layer of its kind'])}; allowed: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    for name in rope_types(config):
        if name not in STATIC_ROPE_TYPES:
            raise BackboneError(
                f"backbone: rope_type {name!r} of model type {config.model_type!r} is not supported: it has no table "
                f"of positions that holds for texts of every length; allowed: {', '.join(STATIC_ROPE_TYPES)}"
            )


def windows(model: PreTrainedModel) -> list[int | None]:
    """By layer, how many positions it attends to, its own included; None: all before it."""
    layers: Any = model.get_decoder().layers
    if model.config.model_type == "mistral":  # one window for all layers, which do not carry it themselves
        return [model.config.sliding_window] * len(layers)
    return [getattr(layer.self_attn, "sliding_window", None) for layer in layers]


def full_attention_layers(model: PreTrainedModel) -> list[int]:
    """Indices of the layers whose kind a head's layers are of: those without a window.

    Where every layer has one (Mistral v0.1), all of them: a head then has their weights and rotary base
    and, as everywhere, no window.
    """
    of_layers = windows(model)
    return [index for index, window in enumerate(of_layers) if window is None] or list(range(len(of_layers)))


def embedding_scale(model: PreTrainedModel) -> float:
    """What the backbone multiplies its input embeddings by (Gemma: the root of the hidden size, in its dtype)."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))


def attention_scale(model: PreTrainedModel) -> float:
    """What queries times keys are multiplied by, the same in every layer."""
    layers: Any = model.get_decoder().layers
    scale: float = layers[0].self_attn.scaling
    return scale


def _rms_norm(weight: Tensor, eps: float) -> Function:
    """Root-mean-square norm over the last axis, float32 inside, in the fewest passes torch has on a CPU."""

    def norm(x: Tensor) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return (x * scale).to(x.dtype) * weight

    return norm


def norm_function(module: nn.Module, dtype: torch.dtype) -> Function:
    """A backbone's norm as a function of ``x`` in ``dtype``; a copy of the weight, no gradients.

    Gemma's multiplies by 1 + weight, in float32, before the result is rounded to ``dtype``.
    """
    layer: Any = module
    if isinstance(module, Gemma3RMSNorm):
        exact = _rms_norm(1.0 + layer.weight.detach().float(), layer.eps)
        return lambda x: exact(x.float()).to(dtype)
    return _rms_norm(layer.weight.detach().to(dtype).contiguous(), layer.variance_epsilon)


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
        layer = self.layer
        out = layer.self_attn.o_proj(attended)
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma: what joins the residual stream is normed
            x = x + layer.post_attention_layernorm(out)
            return x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
        x = x + out
        return x + layer.mlp(layer.post_attention_layernorm(x))


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

        def norm(module: nn.Module) -> Function:
            return norm_function(module, dtype)

        def normed(linear: Function, module: nn.Module) -> Function:
            after = norm(module)
            return lambda x: after(linear(x))

        self.qkv_proj, self.gate_up = merged(projections), merged([mlp.gate_proj, mlp.up_proj])
        self.attention_out: Function = merged([attention.o_proj])
        self.mlp_out: Function = merged([mlp.down_proj])
        self.activation = mlp.act_fn
        self.attention_norm, self.mlp_norm = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma: what joins the residual stream is normed
            self.attention_out = normed(self.attention_out, layer.post_attention_layernorm)
            self.mlp_norm = norm(layer.pre_feedforward_layernorm)
            self.mlp_out = normed(self.mlp_out, layer.post_feedforward_layernorm)
        per_head = hasattr(attention, "q_norm")
        self.q_norm = norm(attention.q_norm) if per_head else None
        self.k_norm = norm(attention.k_norm) if per_head else None

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        queries, keys, _ = self.heads
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(heads[..., :queries, :]), self.k_norm(heads[..., queries : queries + keys, :])
            rotated = rotate(torch.cat([q, k], dim=-2), cos, sin)
        else:  # queries and keys lie side by side: one rotation serves both
            rotated = rotate(heads[..., : queries + keys, :], cos, sin)
        return rotated[..., :queries, :], rotated[..., queries:, :], heads[..., queries + keys :, :]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attention_out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(self.activation(gate) * up)
