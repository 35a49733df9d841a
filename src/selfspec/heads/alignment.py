"""Which state, embedding, label and teacher belong together: the contract between training and serving.

Tokens x[0..T), final-norm states h[0..T) with lm_head(h[i]) scoring x[i+1]. At anchor i and depth
d = 1..K a head reads its previous state (h[i] at depth 1) and the embedding of x[i+d]; its new state
scores x[i+d+1]. The teacher there is lm_head(h[i+d]). The loss covers *predicted* tokens that lie
inside the completion, so x[i+d+1] with prompt_length <= i+d+1 < T.

Documents are packed back to back without padding; nothing crosses a boundary because every index
below is computed inside one document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Indices of one packed batch; ``N`` tokens in all, ``A`` active anchors, ``P`` teacher positions, ``K`` depths.

    Attributes:
        tokens: ``[N]`` token ids.
        document: ``[N]`` number of the document each token belongs to.
        position: ``[N]`` position inside its document (what rotary embedding sees).
        next_token: ``[N]`` flat index of x[i+1]; the last token of a document points at itself.
        anchors: ``[A]`` flat indices of the anchors whose chain has at least one position with a loss.
        inputs: ``[K, A]`` flat index of x[i+d], clamped to the document's end.
        teachers: ``[P]`` flat indices t whose state h[t] scores a completion token.
        targets: ``[P]`` token id x[t+1].
        rows: ``[K, P]`` index into ``anchors`` of the chain whose depth d is taught by t (anchor t - d).
        mask: ``[K, P]`` whether that chain exists, i.e. anchor t - d lies inside the document.
    """

    tokens: Tensor
    document: Tensor
    position: Tensor
    next_token: Tensor
    anchors: Tensor
    inputs: Tensor
    teachers: Tensor
    targets: Tensor
    rows: Tensor
    mask: Tensor

    @property
    def depths(self) -> int:
        return self.inputs.shape[0]

    def to(self, device: torch.device) -> Packed:
        """The same indices on ``device``."""
        return Packed(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def pack(tokens: list[Tensor], prompt_lengths: list[int], depths: int) -> Packed:
    """Align packed documents.

    Args:
        tokens: one ``[T]`` tensor of token ids per document, prompt and completion together.
        prompt_lengths: where each document's completion starts; at least 1.
        depths: K.

    Raises:
        ValueError: a document without a prompt token or without a completion token.
    """
    anchors, inputs, teachers, rows, masks = [], [], [], [], []
    positions, next_tokens = [], []
    offset = anchor_offset = 0
    depth = torch.arange(1, depths + 1)[:, None]
    for document, (ids, prompt) in enumerate(zip(tokens, prompt_lengths, strict=True)):
        length = len(ids)
        if not 1 <= prompt < length:
            raise ValueError(f"document {document}: prompt of {prompt} tokens in {length}; need 1 <= prompt < length")
        local = torch.arange(length)
        positions.append(local)
        next_tokens.append((local + 1).clamp(max=length - 1) + offset)
        taught = torch.arange(prompt - 1, length - 1)  # t such that x[t+1] is a completion token
        teachers.append(taught + offset)
        first = max(prompt - 1 - depths, 0)  # the earliest anchor any of these t looks back to
        active = torch.arange(first, max(length - 2, first + 1))  # the last one is t - 1 with t = length - 2
        anchors.append(active + offset)
        inputs.append((active + depth).clamp(max=length - 1) + offset)
        anchor = taught - depth
        masks.append(anchor >= 0)
        rows.append((anchor - first).clamp(min=0, max=len(active) - 1) + anchor_offset)
        offset += length
        anchor_offset += len(active)
    flat = torch.cat(tokens)
    taught = torch.cat(teachers)
    return Packed(
        tokens=flat,
        document=torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor([len(ids) for ids in tokens])),
        position=torch.cat(positions),
        next_token=torch.cat(next_tokens),
        anchors=torch.cat(anchors),
        inputs=torch.cat(inputs, dim=1),
        teachers=taught,
        targets=flat[taught + 1],
        rows=torch.cat(rows, dim=1),
        mask=torch.cat(masks, dim=1),
    )
