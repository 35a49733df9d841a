"""The shared recursive head: one block, applied again at every depth.

The form of FastMTP (arXiv 2509.18362), of vLLM's single-layer MTP and of DeepSeek-V3's modules with
tied depths: norm both inputs, project their concatenation ``[embedding, hidden]``, run the backbone's
own decoder-layer class, norm. The state passed on is the normed one, scored by the backbone's lm_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.backbones import middle
from selfspec.backbones.block import Block, attention_scale, check_supported, embedding_scale
from selfspec.backbones.decoder import embed
from selfspec.backbones.rotary import RotaryTable
from selfspec.heads import parts
from selfspec.heads.alignment import Packed
from selfspec.heads.attention import Document, attend_causal, attend_chains, layout
from selfspec.heads.protocol import Drafts, Head


class SharedHead(Head):
    """Parameters and the training forward pass.

    Args:
        model: the backbone; gives the layer class, sizes and norms, and weights only where ``init`` says so.
        depths: K the head is trained for (it can be run deeper).
        norms: ``inputs``: a norm on each input, then the projection (``enorm``, ``hnorm``);
            ``joint``: the projection, then one norm (``pre_norm``).
        layers: decoder layers in the block; the first is ``mtp_block``.
        init: ``random``; ``last_layer``: the block starts as the backbone's last layers; ``native`` and
            ``checkpoint``: random too, until ``build.build`` puts the weights of ``heads/start.py`` there.
        middle_layers: of the backbone; at depth 1 a projection of their states, ``middle_proj``, joins the
            block's input. It starts at zero: as a head without. Deeper, where the backbone has no state yet,
            nothing stands for it.
    """

    kind = "shared"

    def __init__(
        self,
        model: PreTrainedModel,
        depths: int,
        *,
        norms: Literal["inputs", "joint"] = "inputs",
        layers: int = 1,
        init: Literal["random", "last_layer", "native", "checkpoint"] = "random",
        middle_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_supported(model.config)
        middle.check(middle_layers, model)
        self.depths, self.hidden_size = depths, model.config.hidden_size
        self.middle_layers = tuple(middle_layers)
        self.options = {"norms": norms, "layers": layers, "init": init, "middle_layers": list(middle_layers)}
        self.joint = norms == "joint"
        if self.joint:
            self.pre_norm, self.post_norm = (parts.new_norm(model) for _ in range(2))
        else:
            self.enorm, self.hnorm, self.post_norm = (parts.new_norm(model) for _ in range(3))
        self.eh_proj = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False)
        self.mtp_block = parts.new_layer(model)
        self.later_blocks = nn.ModuleList(parts.new_layer(model) for _ in range(layers - 1))
        self.head_dim = parts.head_dim(model)
        self.embedding_scale = embedding_scale(model)
        self.scale = attention_scale(model)
        parts.initialise(self, model.config.initializer_range)
        if init == "last_layer":
            parts.copy_last_layers(model, self.blocks)
        self.middle_proj: nn.Linear | None = None
        if self.middle_layers:
            self.middle_proj = nn.Linear(len(self.middle_layers) * self.hidden_size, self.hidden_size, bias=False)
            nn.init.zeros_(self.middle_proj.weight)

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers in their order."""
        return [self.mtp_block, *self.later_blocks]

    def combine(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The block's input ``[..., hidden]`` from a token embedding and the previous state."""
        if self.joint:
            joined: Tensor = self.pre_norm(self.eh_proj(torch.cat([embedding, state], dim=-1)))
            return joined
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], dim=-1))

    def first_input(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """The block's input ``[..., hidden]`` at depth 1, from the backbone's state ``[..., W]``."""
        final, beside = middle.split(hidden, self.hidden_size)
        x = self.combine(embedding, final)
        return x if self.middle_proj is None else x + self.middle_proj(beside)

    def forward(
        self, packed: Packed, hidden: Tensor, embedding: Tensor, rotary: RotaryTable, drafts: Drafts | None = None
    ) -> list[Tensor]:
        blocks = [Block(layer, self.head_dim) for layer in self.blocks]
        documents = layout(packed)
        x, keys, values = self._first_depth(packed, hidden, embedding, rotary, blocks, documents)
        states: list[Tensor] = [self.post_norm(x)]
        position = packed.position[packed.anchors]
        for depth in range(2, packed.depths + 1):
            tokens = packed.tokens[packed.inputs[depth - 1]]
            if drafts is not None:
                tokens = drafts(depth, states[-1], tokens)
            x = self.combine(embed(tokens, embedding, self.embedding_scale), states[-1])
            cos, sin = rotary.at(position + depth - 1)
            for block, seen_keys, seen_values in zip(blocks, keys, values, strict=True):
                q, k, v, gate = block.qkv(x, cos, sin)
                seen_keys.append(k)
                seen_values.append(v)
                x = block.finish(x, attend_chains(q, seen_keys, seen_values, documents, self.scale), gate)
            states.append(self.post_norm(x))
        return states

    def _first_depth(
        self,
        packed: Packed,
        hidden: Tensor,
        embedding: Tensor,
        rotary: RotaryTable,
        blocks: list[Block],
        documents: list[Document],
    ) -> tuple[Tensor, list[list[Tensor]], list[list[Tensor]]]:
        """The last layer's output ``[A, H]`` at anchors; by layer, lists that start with all tokens' keys, values."""
        first = embed(packed.tokens[packed.next_token], embedding, self.embedding_scale)
        first = first.masked_fill((packed.position == 0)[:, None], 0)  # as vLLM serves position 0
        x = self.first_input(first, hidden)
        cos, sin = rotary.at(packed.position)
        keys, values = [], []
        for block in blocks[:-1]:  # the next layer's keys need this one's output at every token
            q, k, v, gate = block.qkv(x, cos, sin)
            x = block.finish(x, attend_causal(q, k, v, documents, self.scale), gate)
            keys.append([k])
            values.append([v])
        k, v = blocks[-1].kv(x, cos, sin)
        keys.append([k])
        values.append([v])
        x = x[packed.anchors]
        q, _, _, gate = blocks[-1].qkv(x, cos[packed.anchors], sin[packed.anchors])
        x = blocks[-1].finish(x, attend_chains(q, keys[-1], values[-1], documents, self.scale), gate)
        return x, keys, values
