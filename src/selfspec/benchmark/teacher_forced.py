"""Teacher-forced match and overlap of a head on stored completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.backbones.decoder import Decoder
from selfspec.distill.records import Completion
from selfspec.heads.alignment import pack
from selfspec.heads.checkpoint import TrainedHead
from selfspec.losses import acceptance

_CHUNK = 128  # teacher positions whose full-vocabulary logits are alive at once


@dataclass(frozen=True)
class Forced:
    """Sums per completion and depth, ``[prompts, K]`` each: hits and overlap over ``positions``."""

    hits: np.ndarray
    overlap: np.ndarray
    positions: np.ndarray


@torch.inference_mode()
def measure(decoder: Decoder, head: TrainedHead, completions: Iterable[Completion], depths: int) -> Forced:
    """Run the head over each completion with the true embeddings, as in training."""
    rows = [_one(decoder, head, completion, depths) for completion in completions]
    hits, overlap, positions = (np.array(column) for column in zip(*rows, strict=True))
    return Forced(hits, overlap, positions)


def _one(decoder: Decoder, head: TrainedHead, completion: Completion, depths: int) -> tuple[Tensor, Tensor, Tensor]:
    _, (hidden,) = decoder.prefill([completion.tokens], completion.length)
    packed = pack([torch.tensor(completion.tokens)], [len(completion.prompt_ids)], depths).to(decoder.device)
    states = torch.stack(head.module(packed, hidden, decoder.embedding, decoder.rotary))
    draft_rows = head.vocab.rows(decoder.lm_head)
    hits, overlap = torch.zeros(depths), torch.zeros(depths)
    depth_index = torch.arange(depths, device=decoder.device)[:, None]
    for chunk in torch.arange(len(packed.teachers), device=decoder.device).split(_CHUNK):
        mask, rows = packed.mask[:, chunk], packed.rows[:, chunk]
        full = decoder.logits(hidden[packed.teachers[chunk]])
        p = torch.softmax(full.float(), dim=-1)[:, head.vocab.ids]
        logits = F.linear(states[depth_index, rows], draft_rows)
        hit = head.vocab.ids[logits.argmax(-1)] == full.argmax(-1)
        hits += (hit & mask).sum(1).cpu()
        overlap += (acceptance(logits, p) * mask).sum(1).cpu()
    return hits, overlap, packed.mask.sum(1).float().cpu()
