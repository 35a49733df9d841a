"""Attention over packed documents, as serving has it, for the training passes of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.backbones.decoder import attend, fold_mask
from selfspec.heads.alignment import Packed, chain_mask

# Per document: slice of its tokens, slice of its active anchors, positions of those anchors.
Layout = list[tuple[slice, slice, Tensor]]


def layout(packed: Packed) -> Layout:
    """Where each document's tokens and anchors lie."""
    documents = int(packed.document[-1]) + 1
    token_ends = torch.bincount(packed.document, minlength=documents).cumsum(0).tolist()
    anchor_ends = torch.bincount(packed.document[packed.anchors], minlength=documents).cumsum(0).tolist()
    slices, token, anchor = [], 0, 0
    for token_end, anchor_end in zip(token_ends, anchor_ends, strict=True):
        anchors = slice(anchor, anchor_end)
        slices.append((slice(token, token_end), anchors, packed.position[packed.anchors[anchors]]))
        token, anchor = token_end, anchor_end
    return slices


def attend_chains(
    q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Layout, depth: int, scale: float
) -> Tensor:
    """Chain attention of every active anchor (see ``chain_mask``), document by document.

    Args:
        q: ``[A, heads, head_dim]``.
        keys, values: depth 1 of all tokens ``[N, kv_heads, head_dim]``, then depth 2.. of the anchors ``[A, …]``.

    Returns:
        ``[A, heads * head_dim]``.
    """
    outputs = []
    for tokens, anchors, positions in documents:
        k = torch.cat([keys[0][tokens]] + [later[anchors] for later in keys[1:]]).transpose(0, 1)[None]
        v = torch.cat([values[0][tokens]] + [later[anchors] for later in values[1:]]).transpose(0, 1)[None]
        allowed = chain_mask(positions, tokens.stop - tokens.start, depth)
        bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
        bias = fold_mask(bias.masked_fill_(~allowed, torch.finfo(q.dtype).min)[None, None], q.shape[1] // k.shape[1])
        outputs.append(attend(q[anchors][None], k, v, bias, causal=False, scale=scale)[0])
    return torch.cat(outputs)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, documents: Layout, scale: float) -> Tensor:
    """Every token ``[N, …]`` over itself and what precedes it in its document; ``[N, heads * head_dim]``."""
    outputs = []
    for tokens, _, _ in documents:
        keys, values = (part[tokens].transpose(0, 1)[None] for part in (k, v))
        outputs.append(attend(q[tokens][None], keys, values, None, causal=True, scale=scale)[0])
    return torch.cat(outputs)
