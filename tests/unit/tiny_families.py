"""Tiny random models of every supported family, with every option that changes the forward pass.

Windows are of 8 positions, so that texts of a few dozen tokens leave them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM as AutoModel
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from selfspec.backbones.mimo import MiMoConfig

WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide enough for argmaxes that do not depend on rounding
    "pad_token_id": 2,
}
# head_dim is not hidden / heads, and the score scale not its root: taking one for the other would show.
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# A quarter of a head is turned, and its size is not hidden / heads; a gate doubles the queries.
QWEN3_5: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["full_attention"] * 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW}
ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def _rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **options}}


# Each with and without: tied embeddings, grouped queries, biases, per-head norms, windows, scalings.
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied-no-gqa": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-rope-linear": (LlamaConfig, _rope("linear")),
    "llama-rope-llama3": (LlamaConfig, _rope("llama3", **LLAMA3)),
    "llama-rope-yarn": (LlamaConfig, _rope("yarn", original_max_position_embeddings=64)),
    "llama-rope-dynamic": (LlamaConfig, _rope("dynamic")),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-windows": (MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-windows": (Qwen2Config, {**MIXED, "max_window_layers": 1}),
    "qwen2-rope-yarn": (Qwen2Config, _rope("yarn", original_max_position_embeddings=64)),
    "mimo": (MiMoConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-windows": (Qwen3Config, {"head_dim": 16, **MIXED, "layer_types": ALTERNATING, "attention_bias": True}),
    "gemma3": (Gemma3TextConfig, GEMMA),
    "gemma3-untied-rope-linear": (
        Gemma3TextConfig,
        {**GEMMA, "tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "qwen3_5-attention": (Qwen3_5TextConfig, QWEN3_5),
    "qwen3_5-attention-biases": (Qwen3_5TextConfig, {**QWEN3_5, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_5": (Qwen3_5TextConfig, {**QWEN3_5, **LINEAR}),
    "qwen3_5-tied-no-groups": (
        Qwen3_5TextConfig,
        {**QWEN3_5, **LINEAR, "tie_word_embeddings": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_next": (Qwen3NextConfig, {**QWEN3_5, **LINEAR, "num_experts": 0}),
}
# One of each class of layer, with windows where it can have them: for tests of everything above the decoder.
CLASSES = ("llama", "mistral-windows", "qwen2-windows", "qwen3-windows", "gemma3", "qwen3_5")


def norm_range(model: PreTrainedModel) -> tuple[float, float]:
    """What to draw norm weights from: around 1, or 0 where a family's (Gemma's, Qwen3.5's) are an offset to 1."""
    centre = type(model.get_decoder().norm)(1).weight.item()
    return centre - 0.5, centre + 0.5


def rounding(model: PreTrainedModel) -> float:
    """How far states of these models may be from the stock model's in float32.

    With linear attention the stock model's own steps differ from its one pass over the text by up to 3e-5: its norm of
    what a state gives enlarges what was rounded.
    """
    return 1e-4 if "linear_attention" in (getattr(model.config, "layer_types", None) or ()) else 2e-5


def family(name: str, *, ends: Any = None, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model ``name`` of `FAMILIES`: float32, eval mode, no gradients, no weight without an effect.

    The global random state is left as it was.

    Args:
        ends: its end tokens (default: none).
        changes: of its config.
    """
    config, options = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config(**{**SIZES, **options, **changes}), attn_implementation="sdpa")
        for part, weight in model.named_parameters():
            if "norm" in part:
                torch.nn.init.uniform_(weight, *norm_range(model))
            elif part.endswith("bias"):  # fresh biases are zeros: one left out would go unseen
                torch.nn.init.normal_(weight, std=0.5)
    model.generation_config.eos_token_id = ends
    return model.requires_grad_(False).eval()
