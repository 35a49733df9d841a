"""The shared recursive head: one decoder layer, applied again at every depth.

The form of FastMTP (arXiv 2509.18362), of vLLM's single-layer MTP and of DeepSeek-V3's modules with
tied depths: norm both inputs, project their concatenation ``[embedding, hidden]``, run the backbone's
own decoder-layer class, norm. The state passed on is the normed one, scored by the backbone's lm_head.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from selfspec.backbones.block import Block, check_supported
from selfspec.backbones.decoder import attend, fold_mask
from selfspec.backbones.rotary import RotaryTable
from selfspec.heads.alignment import Packed, chain_mask


class SharedHead(nn.Module):
    """Parameters and the training forward pass.

    Args:
        model: the backbone; gives the layer class, sizes and norms, never weights.
        depths: K the head is trained for (it can be run deeper).
    """

    def __init__(self, model: PreTrainedModel, depths: int) -> None:
        super().__init__()
        config = model.config
        check_supported(config)
        layer_config = copy.deepcopy(config)
        layer_config._attn_implementation = "eager"  # never run; spares the check for fused kernels
        inner = model.get_decoder()
        hidden = config.hidden_size
        self.depths = depths
        norm = type(inner.norm)
        self.enorm, self.hnorm, self.post_norm = (norm(hidden, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.mtp_block = type(inner.layers[0])(layer_config, layer_idx=0)
        self.head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self._initialise(config)

    def _initialise(self, config: PretrainedConfig) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def combine(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The block's input ``[..., hidden]`` from a token embedding and the previous state."""
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], dim=-1))

    def forward(self, packed: Packed, hidden: Tensor, embedding: Tensor, rotary: RotaryTable) -> list[Tensor]:
        """Teacher-forced states of all active anchors.

        Args:
            hidden: ``[N, H]`` final-norm states of the backbone.
            embedding: ``[vocabulary, H]`` the backbone's input embeddings.

        Returns:
            K tensors ``[A, H]``, depth 1 first.
        """
        block = Block(self.mtp_block, self.head_dim)
        first = F.embedding(packed.tokens[packed.next_token], embedding)
        first = first.masked_fill((packed.position == 0)[:, None], 0)  # as vLLM serves position 0
        x = self.combine(first, hidden)
        layout = _layout(packed)
        position = packed.position[packed.anchors]
        keys, values = block.kv(x, *rotary.at(packed.position))
        all_keys, all_values = [keys], [values]
        x = x[packed.anchors]
        states: list[Tensor] = []
        for depth in range(1, packed.depths + 1):
            if depth > 1:
                x = self.combine(F.embedding(packed.tokens[packed.inputs[depth - 1]], embedding), states[-1])
            q, k, v = block.qkv(x, *rotary.at(position + depth - 1))
            if depth > 1:
                all_keys.append(k)
                all_values.append(v)
            attended = _attend_documents(q, all_keys, all_values, layout, depth, self.scale)
            states.append(self.post_norm(block.finish(x, attended)))
        return states


# Per document: slice of its tokens, slice of its active anchors, positions of those anchors.
_Layout = list[tuple[slice, slice, Tensor]]


def _layout(packed: Packed) -> _Layout:
    documents = int(packed.document[-1]) + 1
    token_ends = torch.bincount(packed.document, minlength=documents).cumsum(0).tolist()
    anchor_ends = torch.bincount(packed.document[packed.anchors], minlength=documents).cumsum(0).tolist()
    layout, token, anchor = [], 0, 0
    for token_end, anchor_end in zip(token_ends, anchor_ends, strict=True):
        anchors = slice(anchor, anchor_end)
        layout.append((slice(token, token_end), anchors, packed.position[packed.anchors[anchors]]))
        token, anchor = token_end, anchor_end
    return layout


def _attend_documents(
    q: Tensor, keys: list[Tensor], values: list[Tensor], layout: _Layout, depth: int, scale: float
) -> Tensor:
    """Chain attention of every active anchor, document by document; ``[A, heads * head_dim]``."""
    outputs = []
    for tokens, anchors, positions in layout:
        k = torch.cat([keys[0][tokens]] + [later[anchors] for later in keys[1:]]).transpose(0, 1)[None]
        v = torch.cat([values[0][tokens]] + [later[anchors] for later in values[1:]]).transpose(0, 1)[None]
        allowed = chain_mask(positions, tokens.stop - tokens.start, depth)
        bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
        bias = fold_mask(bias.masked_fill_(~allowed, torch.finfo(q.dtype).min)[None, None], q.shape[1] // k.shape[1])
        outputs.append(attend(q[anchors][None], k, v, bias, causal=False, scale=scale)[0])
    return torch.cat(outputs)
