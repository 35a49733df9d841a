"""Teacher-forced match, overlap and chains of a head on stored completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.backbones.decoder import Decoder
from selfspec.distill.records import Completion
from selfspec.heads.alignment import Packed, pack
from selfspec.heads.checkpoint import TrainedHead
from selfspec.losses import acceptance

_CHUNK = 128  # teacher positions whose full-vocabulary logits are alive at once


@dataclass(frozen=True)
class Forced:
    """Sums per completion.

    Attributes:
        hits, overlap: by depth, ``[prompts, K]``, over ``positions``, ``[prompts, K]``.
        chains: ``[prompts, K + 1]`` whole chains by the number of drafts right before the first wrong one.
    """

    hits: np.ndarray
    overlap: np.ndarray
    positions: np.ndarray
    chains: np.ndarray


@torch.inference_mode()
def measure(decoder: Decoder, head: TrainedHead, completions: Iterable[Completion], depths: int) -> Forced:
    """Run the head over each completion with the true embeddings, as in training."""
    rows = [_one(decoder, head, completion, depths) for completion in completions]
    return Forced(*(np.array(column) for column in zip(*rows, strict=True)))


def chain_counts(hits: Tensor, packed: Packed, prompt_length: int) -> Tensor:
    """Join one document's hits, which are indexed by teacher, along the anchors that they belong to.

    An anchor counts when it is the prompt's last token or a later one, and all its K teachers score
    tokens of the completion.

    Args:
        hits: ``[K, P]``, whether depth d is right at teacher t, so for anchor t - d.

    Returns:
        ``[K + 1]`` anchors by the number of depths right before the first wrong one.
    """
    depths, mask = packed.depths, packed.mask
    depth = torch.arange(depths, device=hits.device)[:, None].expand_as(mask)[mask]
    right, known = (hits.new_zeros(depths, len(packed.anchors), dtype=torch.bool) for _ in range(2))
    right[depth, packed.rows[mask]] = hits[mask]
    known[depth, packed.rows[mask]] = True
    whole = known.all(0) & (packed.anchors >= prompt_length - 1)
    lengths = right[:, whole].long().cumprod(0).sum(0)
    return torch.bincount(lengths, minlength=depths + 1)


def _one(decoder: Decoder, head: TrainedHead, completion: Completion, depths: int) -> tuple[Tensor, ...]:
    _, (hidden,) = decoder.prefill([completion.tokens], completion.length)
    packed = pack([torch.tensor(completion.tokens)], [len(completion.prompt_ids)], depths).to(decoder.device)
    states = torch.stack(head.module(packed, hidden, decoder.embedding, decoder.rotary))
    draft_rows = head.output_rows(decoder.lm_head, depths)
    overlap = torch.zeros(depths)
    hits = []
    depth_index = torch.arange(depths, device=decoder.device)[:, None]
    for chunk in torch.arange(len(packed.teachers), device=decoder.device).split(_CHUNK):
        mask, rows = packed.mask[:, chunk], packed.rows[:, chunk]
        full = decoder.logits(hidden[packed.teachers[chunk]]).float()
        p = torch.softmax(full, dim=-1)[:, head.vocab.ids]
        logits = torch.stack(list(map(F.linear, states[depth_index, rows], draft_rows))).float()
        hits.append((head.vocab.ids[logits.argmax(-1)] == full.argmax(-1)) & mask)
        overlap += (acceptance(logits, p) * mask).sum(1).cpu()
    hit = torch.cat(hits, dim=1)
    chains = chain_counts(hit, packed, len(completion.prompt_ids))
    return hit.sum(1).float().cpu(), overlap, packed.mask.sum(1).float().cpu(), chains.double().cpu()
