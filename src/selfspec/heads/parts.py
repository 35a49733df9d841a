"""What heads are assembled from: fresh norms and layers of the backbone's classes, and how they start."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.backbones.block import full_attention_layers
from selfspec.backbones.load import output_projection
from selfspec.heads.vocab import DraftVocab


def new_norm(model: PreTrainedModel) -> nn.Module:
    """A fresh norm of the backbone's class over its hidden size."""
    inner: Any = model.get_decoder()
    norm: nn.Module = type(inner.norm)(model.config.hidden_size, eps=model.config.rms_norm_eps)
    return norm


def new_layer(model: PreTrainedModel) -> nn.Module:
    """A fresh decoder layer of the backbone's class, of the kind that attends to all before it.

    Where a backbone has windows (Gemma 3, Qwen, Mistral), a head has none: its layer is made as the
    backbone's first layer with full attention is, and reads that kind's rotary table. See
    ``full_attention_layers`` for backbones where every layer has a window.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # never run; spares the check for fused kernels
    inner: Any = model.get_decoder()
    layer: nn.Module = type(inner.layers[0])(config, layer_idx=full_attention_layers(model)[0])
    return layer


def head_dim(model: PreTrainedModel) -> int:
    """Size of one attention head of the backbone."""
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def initialise(module: nn.Module, std: float) -> None:
    """Every linear layer normal with ``std``, biases zero; norms stay as their class makes them."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def copy_last_layers(model: PreTrainedModel, into: Sequence[nn.Module]) -> None:
    """Start ``into`` as the backbone's last layers with full attention, in their order.

    Raises:
        ValueError: the backbone has fewer of them.
    """
    inner: Any = model.get_decoder()
    sources = full_attention_layers(model)
    if len(sources) < len(into):
        raise ValueError(
            f"layers: got {len(into)}, allowed: at most {len(sources)}, the backbone's layers with full attention"
        )
    for target, source in zip(into, sources[-len(into) :], strict=True):
        target.load_state_dict(inner.layers[source].state_dict())


def own_rows(model: PreTrainedModel, vocab: DraftVocab, depths: int) -> nn.ParameterList:
    """Trainable float32 copies of the backbone's output rows ``[draft_vocab, H]``, one a depth."""
    rows = vocab.rows(output_projection(model).detach())
    return nn.ParameterList(nn.Parameter(rows.to(torch.float32, copy=True)) for _ in range(depths))
