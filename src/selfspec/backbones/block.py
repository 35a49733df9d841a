"""A decoder layer taken apart: what comes before attention, and what comes after.

Training a recursive head and verifying ragged drafts both need attention patterns that a stock
decoder layer does not offer. ``Block`` runs everything *around* attention with the layer's own
sub-modules; ``FusedBlock`` is the same arithmetic with fewer, larger kernels, for inference.

A layer here is: norm, q/k/v (+ optional biases and per-head norms), rotary of all or the first part of
a head, attention over everything before or over a window, o_proj, residual, norm, gated MLP, residual;
with Gemma's two more norms, one before each residual, or with Qwen3.5's gate on what attention gives,
which comes out of q_proj. ``check_supported`` refuses what is not of this form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from selfspec.backbones.linear import Linear
from selfspec.backbones.load import BackboneError
from selfspec.backbones.rotary import STATIC_ROPE_TYPES, rope_types, rotate

SUPPORTED_MODEL_TYPES = ("gemma3_text", "llama", "mimo", "mistral", "qwen2", "qwen3", "qwen3_5_text", "qwen3_next")

_UNGATED = "bloom codegen falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj mpt nemotron opt phi starcoder2".split()
# Norms that multiply by 1 + weight, in float32, before the result is rounded to the input's dtype.
_OFFSET_NORMS = (Gemma3RMSNorm, Qwen3_5RMSNorm, Qwen3NextRMSNorm)
Function = Callable[[Tensor], Tensor]


def _set(*names: str) -> Callable[[Any], bool]:
    """Whether a config has one of the options ``names``, and not as None, 0 or False."""
    return lambda config: any(getattr(config, name, None) for name in names)


# What other families are made of, or what an option of a supported one asks for, and how their configs show it.
_LACKING: dict[str, Callable[[Any], bool]] = {
    "linear attention without a layer of full attention": lambda config: (
        set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}
    ),
    "state-space layers": _set("ssm_state_size", "state_size", "mamba_d_state"),
    "mixture-of-experts MLPs": lambda config: (
        _set("num_experts", "num_local_experts", "n_routed_experts")(config)
        and len(set(getattr(config, "mlp_only_layers", None) or ())) < config.num_hidden_layers
    ),
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


def windows(model: PreTrainedModel) -> dict[int, int | None]:
    """By layer with attention, how many positions it attends to, its own included; None: all before it."""
    layers: Any = model.get_decoder().layers
    attending = {index: layer.self_attn for index, layer in enumerate(layers) if hasattr(layer, "self_attn")}
    if model.config.model_type == "mistral":  # one window for all layers, which do not carry it themselves
        return dict.fromkeys(attending, model.config.sliding_window)
    return {index: getattr(attention, "sliding_window", None) for index, attention in attending.items()}


def full_attention_layers(model: PreTrainedModel) -> list[int]:
    """Indices of the layers whose kind a head's layers are of: those with attention and without a window.

    Where every layer has one (Mistral v0.1), all of them: a head then has their weights and rotary base
    and, as everywhere, no window.
    """
    of_layers = windows(model)
    return [index for index, window in of_layers.items() if window is None] or list(of_layers)


def embedding_scale(model: PreTrainedModel) -> float:
    """What the backbone multiplies its input embeddings by (Gemma: the root of the hidden size, in its dtype)."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))


def attention_scale(model: PreTrainedModel) -> float:
    """What queries times keys are multiplied by, the same in every layer with attention."""
    layers: Any = model.get_decoder().layers
    scale: float = layers[full_attention_layers(model)[0]].self_attn.scaling
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

    Gemma's, Qwen3.5's and Qwen3-Next's multiply by 1 + weight, in float32, before the result is rounded to ``dtype``.
    """
    layer: Any = module
    if isinstance(module, _OFFSET_NORMS):
        exact = _rms_norm(1.0 + layer.weight.detach().float(), layer.eps)
        return lambda x: exact(x.float()).to(dtype)
    return _rms_norm(layer.weight.detach().to(dtype).contiguous(), layer.variance_epsilon)


class BlockLike(Protocol):
    """What attention code needs from a decoder layer: ``finish(x, attend(q, k, v), gate)`` is its output."""

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotated queries ``[..., heads, head_dim]`` and keys, values ``[..., kv_heads, head_dim]``, and the gate.

        The gate ``[..., heads * head_dim]`` is for ``finish`` alone; None where a layer has none.
        """

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Residual stream after attention output ``[..., heads * head_dim]`` and the MLP, ``[..., hidden]``."""


def _gated(attention: Any) -> bool:
    """Whether q_proj gives a gate beside the queries (Qwen3.5): by head, first its query, then its gate."""
    return bool(attention.q_proj.out_features == 2 * attention.o_proj.in_features)


class Block:
    """The sub-modules of one ``transformers`` decoder layer; differentiable."""

    def __init__(self, layer: nn.Module, head_dim: int) -> None:
        self.layer: Any = layer
        self.head_dim = head_dim
        self.gated = _gated(self.layer.self_attn)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(x)
        q, gate = attention.q_proj(normed), None
        if self.gated:
            q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
            gate = gate.flatten(-2)
        else:
            q = q.unflatten(-1, (-1, self.head_dim))
        k, v = self._kv(normed)
        if hasattr(attention, "q_norm"):
            q = attention.q_norm(q)
        return rotate(q, cos, sin), rotate(k, cos, sin), v, gate

    def kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values alone: all that a position without a loss contributes."""
        k, v = self._kv(self.layer.input_layernorm(x))
        return rotate(k, cos, sin), v

    def _kv(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not yet rotated, and values."""
        attention = self.layer.self_attn
        k, v = (p(normed).unflatten(-1, (-1, self.head_dim)) for p in (attention.k_proj, attention.v_proj))
        return (attention.k_norm(k) if hasattr(attention, "k_norm") else k), v

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        layer = self.layer
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        out = layer.self_attn.o_proj(attended)
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma: what joins the residual stream is normed
            x = x + layer.post_attention_layernorm(out)
            return x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
        x = x + out
        return x + layer.mlp(layer.post_attention_layernorm(x))


@dataclass(frozen=True)
class Rows:
    """Some output rows of a linear layer, or of several: ``weight [out, in]`` and ``bias [out]`` or None."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, linear: Any) -> Rows:
        return cls(linear.weight, linear.bias)

    def take(self, index: Tensor) -> Rows:
        """Rows ``index``, in its order."""
        return Rows(self.weight[index], None if self.bias is None else self.bias[index])


def merged(parts: list[Rows], dtype: torch.dtype) -> Linear:
    """One product for several: ``parts`` side by side in ``dtype``, a copy of the weights, no gradients."""
    bias = None
    if any(part.bias is not None for part in parts):
        filled = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
        bias = torch.cat(filled).detach().to(dtype)
    return Linear(torch.cat([part.weight for part in parts]).detach().to(dtype), bias)


class FusedMlp:
    """The second half of a layer: the MLP behind its norm, and the residual stream; no gradients."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        mlp = layer.mlp
        self.gate_up = merged([Rows.of(mlp.gate_proj), Rows.of(mlp.up_proj)], dtype)
        self.down: Function = merged([Rows.of(mlp.down_proj)], dtype)
        self.activation = mlp.act_fn
        self.norm = norm_function(layer.post_attention_layernorm, dtype)
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma: what joins the residual stream is normed
            self.norm = norm_function(layer.pre_feedforward_layernorm, dtype)
            self.down = _normed(self.down, layer.post_feedforward_layernorm, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(self.activation(gate) * up)


def _normed(linear: Function, module: nn.Module, dtype: torch.dtype) -> Function:
    after = norm_function(module, dtype)
    return lambda x: after(linear(x))


class FusedBlock:
    """The same layer with merged projections; a copy of the weights, no gradients."""

    def __init__(self, layer: Any, head_dim: int, dtype: torch.dtype) -> None:
        attention = layer.self_attn
        self.head_dim = head_dim
        self.heads: int = attention.o_proj.in_features // head_dim
        self.kv_heads: int = attention.k_proj.out_features // head_dim
        self.gated = _gated(attention)
        q, k, v = (Rows.of(projection) for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
        parts = [q, k, v]
        if self.gated:  # queries together, gates together, so that neither is copied on every call
            by_head = torch.arange(len(q.weight), device=q.weight.device).view(self.heads, 2, head_dim)
            parts = [q.take(by_head[:, 0].flatten()), k, v, q.take(by_head[:, 1].flatten())]
        self.qkv_proj = merged(parts, dtype)
        self.attention_out: Function = merged([Rows.of(attention.o_proj)], dtype)
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma: what joins the residual stream is normed
            self.attention_out = _normed(self.attention_out, layer.post_attention_layernorm, dtype)
        self.attention_norm, self.mlp = norm_function(layer.input_layernorm, dtype), FusedMlp(layer, dtype)
        per_head = hasattr(attention, "q_norm")
        self.q_norm = norm_function(attention.q_norm, dtype) if per_head else None
        self.k_norm = norm_function(attention.k_norm, dtype) if per_head else None

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        heads = self.qkv_proj(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        queries, keys = self.heads, self.heads + self.kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(heads[..., :queries, :]), self.k_norm(heads[..., queries:keys, :])
            rotated = rotate(torch.cat([q, k], dim=-2), cos, sin)
        else:  # queries and keys lie side by side: one rotation serves both
            rotated = rotate(heads[..., :keys, :], cos, sin)
        values = keys + self.kv_heads
        gate = heads[..., values:, :].flatten(-2) if self.gated else None
        return rotated[..., :queries, :], rotated[..., queries:, :], heads[..., keys:values, :], gate

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return self.mlp(x + self.attention_out(attended))
