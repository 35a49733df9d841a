"""Cascaded heads: a block of its own for every depth.

DeepSeek-V3's multi-token prediction (arXiv 2412.19437, section 2.2) and the layers that transformers
runs under ``use_mtp``: depth d takes depth d-1's state at the same anchor i and the embedding of
x[i+d], and attends to its own depth's keys of anchors <= i.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.backbones.block import Block, attention_scale, check_supported, embedding_scale
from selfspec.backbones.decoder import embed
from selfspec.backbones.rotary import RotaryTable
from selfspec.heads import parts
from selfspec.heads.alignment import Packed
from selfspec.heads.attention import attend_causal, attend_chains, layout
from selfspec.heads.encoder import EncoderLayer
from selfspec.heads.protocol import Drafts, Head
from selfspec.heads.vocab import DraftVocab


class CascadeLayer(nn.Module):
    """One depth, under the names of ``transformers``' ``MtpLayer``."""

    def __init__(self, model: PreTrainedModel, branch_norm: str, block: str) -> None:
        super().__init__()
        config = model.config
        hidden = config.hidden_size
        self.enorm, self.hnorm, self.post_norm = (
            nn.LayerNorm(hidden) if branch_norm == "layernorm" else parts.new_norm(model) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.mtp_block = (
            EncoderLayer(hidden, config.num_attention_heads, config.intermediate_size)
            if block == "encoder"
            else parts.new_layer(model)
        )
        if isinstance(self.mtp_block, EncoderLayer):
            self.head_dim, self.scale = self.mtp_block.head_dim, 1.0 / math.sqrt(self.mtp_block.head_dim)
        else:
            self.head_dim, self.scale = parts.head_dim(model), attention_scale(model)

    def combine(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The block's input ``[..., hidden]`` from a token embedding and the previous depth's state."""
        projected: Tensor = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], dim=-1))
        return projected

    def block(self) -> Block | EncoderLayer:
        """``mtp_block`` taken apart around its attention."""
        return self.mtp_block if isinstance(self.mtp_block, EncoderLayer) else Block(self.mtp_block, self.head_dim)


class CascadeHead(Head):
    """Parameters and the training forward pass.

    Args:
        model: the backbone.
        depths: K; each has a layer, so that it cannot be run deeper.
        vocab: the draft vocabulary that own output rows are for.
        branch_norm: class of the norms of both inputs and of the output: the backbone's RMSNorm, or LayerNorm.
        block: ``backbone``: its decoder-layer class; ``encoder``: a plain transformer encoder layer.
        init: ``last_layer``: every block starts as the backbone's last layer; ``checkpoint``: random, until
            ``build.build`` puts the weights of ``heads/start.py`` there.
        output: ``own``: every depth trains a copy of the backbone's output rows.
    """

    kind = "cascade"

    def __init__(
        self,
        model: PreTrainedModel,
        depths: int,
        vocab: DraftVocab,
        *,
        branch_norm: Literal["rmsnorm", "layernorm"] = "rmsnorm",
        block: Literal["backbone", "encoder"] = "backbone",
        init: Literal["random", "last_layer", "checkpoint"] = "random",
        output: Literal["shared", "own"] = "shared",
    ) -> None:
        super().__init__()
        check_supported(model.config)
        self.depths, self.hidden_size = depths, model.config.hidden_size
        self.options = {"branch_norm": branch_norm, "block": block, "init": init, "output": output}
        layers = [CascadeLayer(model, branch_norm, block) for _ in range(depths)]
        self.layers = nn.ModuleList(layers)
        self.embedding_scale, self.scale = embedding_scale(model), layers[0].scale
        parts.initialise(self, model.config.initializer_range)
        if init == "last_layer":
            for layer in layers:
                parts.copy_last_layers(model, [layer.mtp_block])
        self.lm_heads = parts.own_rows(model, vocab, depths) if output == "own" else None

    def output_rows(self, depth: int) -> Tensor | None:
        return None if self.lm_heads is None else self.lm_heads[depth]

    def by_depth(self) -> list[CascadeLayer]:
        """The layers, depth 1 first."""
        return [layer for layer in self.layers if isinstance(layer, CascadeLayer)]

    def forward(
        self, packed: Packed, hidden: Tensor, embedding: Tensor, rotary: RotaryTable, drafts: Drafts | None = None
    ) -> list[Tensor]:
        """As ``Head.forward``. A depth runs at every token, because its keys and the next depth need it there.

        Raises:
            ValueError: more depths packed than the head has.
        """
        self.check_depths(packed.depths)
        documents = layout(packed)
        anchors, state, states = packed.anchors, hidden, []
        index = torch.arange(len(packed.tokens), device=hidden.device)
        for depth, layer in enumerate(self.by_depth()[: packed.depths], start=1):
            # x[i+d]; clamped to the document's end, where the last d anchors give what no anchor with a loss sees.
            index = packed.next_token[index]
            tokens = packed.tokens[index]
            if drafts is not None and depth > 1:
                tokens = drafts(depth, state, tokens)
            x = layer.combine(embed(tokens, embedding, self.embedding_scale), state)
            cos, sin = rotary.at(packed.position[index] - 1)
            block = layer.block()
            if depth < packed.depths:
                q, k, v, gate = block.qkv(x, cos, sin)
                state = layer.post_norm(block.finish(x, attend_causal(q, k, v, documents, self.scale), gate))
                states.append(state[anchors])
            else:
                k, v = block.kv(x, cos, sin)
                x = x[anchors]
                q, _, _, gate = block.qkv(x, cos[anchors], sin[anchors])
                attended = attend_chains(q, [k], [v], documents, self.scale)
                states.append(layer.post_norm(block.finish(x, attended, gate)))
        return states
