"""Attention over packed documents, as serving has it, for the training passes of heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.backbones.decoder import attend
from selfspec.heads.alignment import Packed


@dataclass(frozen=True)
class Document:
    """Where one document of a pack lies.

    Attributes:
        tokens: its rows among the pack's tokens.
        anchors: its rows among the pack's active anchors.
        unseen: ``[anchors, tokens]``, True where an anchor precedes the token.
    """

    tokens: slice
    anchors: slice
    unseen: Tensor


def layout(packed: Packed) -> list[Document]:
    """Where each document's tokens and anchors lie."""
    documents = int(packed.document[-1]) + 1
    token_ends = torch.bincount(packed.document, minlength=documents).cumsum(0).tolist()
    anchor_ends = torch.bincount(packed.document[packed.anchors], minlength=documents).cumsum(0).tolist()
    laid: list[Document] = []
    token, anchor = 0, 0
    for token_end, anchor_end in zip(token_ends, anchor_ends, strict=True):
        positions = packed.position[packed.anchors[anchor:anchor_end]]
        unseen = positions[:, None] < torch.arange(token_end - token, device=positions.device)
        laid.append(Document(slice(token, token_end), slice(anchor, anchor_end), unseen))
        token, anchor = token_end, anchor_end
    return laid


def attend_chains(
    q: Tensor, keys: list[Tensor], values: list[Tensor], documents: list[Document], scale: float
) -> Tensor:
    """Chain attention of every active anchor, as serving has it.

    An anchor sees the depth-1 keys up to itself: products with all of its document's, of which those behind
    it are masked. Of each later depth it sees one key, its own chain's: a product a row, for all documents at
    once. One softmax goes over both.

    Args:
        q: ``[A, heads, head_dim]``.
        keys, values: depth 1 of all tokens ``[N, kv_heads, head_dim]``, then depth 2.. of the anchors ``[A, …]``.

    Returns:
        ``[A, heads * head_dim]``.
    """
    kv_heads = keys[0].shape[1]
    grouped = (q * scale).unflatten(1, (kv_heads, -1))  # [A, kv_heads, group, head_dim]
    group = grouped.shape[2]
    own = [(grouped * key[:, :, None]).sum(-1) for key in keys[1:]]
    own_scores = torch.stack(own, -1) if own else grouped.new_zeros(*grouped.shape[:3], 0)
    first, own_weights = [], []
    for document in documents:
        tokens, anchors = document.tokens, document.anchors
        # Query heads of a group are folded into the time axis: one pass over the keys serves them all.
        folded = grouped[anchors].permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(folded, keys[0][tokens].permute(1, 2, 0)).unflatten(1, (group, -1))
        scores = scores.masked_fill(document.unseen, -torch.inf)
        # Depth 1 has seen itself at least, so no row is all -inf.
        both = torch.cat([scores, own_scores[anchors].permute(1, 2, 0, 3)], dim=-1)
        weights = torch.softmax(both, dim=-1, dtype=torch.float32).to(q.dtype)
        seen, chain = weights.split([scores.shape[-1], len(own)], dim=-1)
        out = torch.bmm(seen.flatten(1, 2), values[0][tokens].transpose(0, 1))
        first.append(out.unflatten(1, (group, -1)).permute(2, 0, 1, 3))
        own_weights.append(chain.permute(2, 0, 1, 3))
    attended = torch.cat(first)
    if own:
        chains = torch.cat(own_weights)
        for depth, value in enumerate(values[1:]):
            attended = attended + chains[..., depth, None] * value[:, :, None]
    return attended.reshape(len(q), -1)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, documents: list[Document], scale: float) -> Tensor:
    """Every token ``[N, …]`` over itself and what precedes it in its document; ``[N, heads * head_dim]``."""
    outputs = []
    for document in documents:
        keys, values = (part[document.tokens].transpose(0, 1)[None] for part in (k, v))
        outputs.append(attend(q[document.tokens][None], keys, values, None, causal=True, scale=scale)[0])
    return torch.cat(outputs)
