"""Drafting with the shared recursive head: its own one-layer cache, kept to verified anchors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.backbones.block import FusedBlock, rms_norm
from selfspec.backbones.decoder import Decoder, RaggedCache, Slots, attend
from selfspec.heads.checkpoint import TrainedHead


class SharedDrafter:
    """The head's weights arranged for drafting on top of ``decoder``.

    Cache slot p holds anchor p's depth-1 key, computed from the backbone's true state h[p]. A chain
    writes its depth-2, 3, … keys behind the last verified anchor without counting them in: the next
    round overwrites them, whatever was accepted.
    """

    def __init__(self, decoder: Decoder, head: TrainedHead) -> None:
        module = head.module
        self.decoder, self.vocab, self.facts = decoder, head.vocab, head.facts
        dtype = decoder.dtype
        self.block = FusedBlock(module.mtp_block, module.head_dim, dtype)
        self.enorm, self.hnorm, self.post_norm = (
            norm.weight.detach().to(dtype) for norm in (module.enorm, module.hnorm, module.post_norm)
        )
        self.eps: float = module.enorm.variance_epsilon
        self.eh_proj = module.eh_proj.weight.detach().to(dtype)
        self.draft_rows = head.vocab.rows(decoder.lm_head)

    def nbytes(self) -> int:
        """Memory the head adds: its weights and its copy of the draft vocabulary's output rows."""
        block = [value for value in vars(self.block).values() if isinstance(value, Tensor)]
        own = [self.enorm, self.hnorm, self.post_norm, self.eh_proj]
        shared = [] if self.vocab.whole else [self.draft_rows]
        return sum(tensor.nbytes for tensor in block + own + shared)

    def new_cache(self, rows: int, limit: int) -> RaggedCache:
        decoder = self.decoder
        return RaggedCache(1, rows, decoder.kv_heads, limit, decoder.head_dim, decoder.dtype, decoder.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, states: Tensor, cache: RaggedCache, ahead: int = 0) -> Tensor:
        """Head states ``[rows, time, H]`` for embeddings of ``tokens [rows, time]`` and previous ``states``.

        Writes keys behind each row's valid length plus ``ahead``; the caller advances the cache.
        """
        slots = Slots(cache, tokens.shape[1], self.decoder.group, ahead)
        embedding = F.embedding(tokens, self.decoder.embedding)
        if min(cache.lengths) + ahead == 0:  # as vLLM serves position 0, and as the head was trained
            embedding = embedding.masked_fill((slots.positions == 0)[..., None], 0)
        joined = torch.cat([rms_norm(embedding, self.enorm, self.eps), rms_norm(states, self.hnorm, self.eps)], dim=-1)
        x = F.linear(joined, self.eh_proj)
        q, k, v = self.block.qkv(x, *self.decoder.rotary.at(slots.positions))
        keys, values = cache.write(0, k, v, slots)
        attended = attend(q, keys, values, slots.mask, slots.causal, self.decoder.scale)
        return rms_norm(self.block.finish(x, attended), self.post_norm, self.eps)

    def observe(self, tokens: Tensor, states: Tensor, counts: list[int], cache: RaggedCache) -> Tensor:
        """Take verified anchors in: true ``states [rows, time, H]`` with their next ``tokens [rows, time]``.

        Args:
            counts: how many of the ``time`` anchors are real in each row; at least 1.

        Returns:
            ``[rows, H]`` depth-1 state of each row's newest anchor.
        """
        out = self.forward(tokens, states, cache)
        cache.advance(counts)
        rows = torch.arange(len(counts), device=out.device)
        return out[rows, torch.tensor(counts, device=out.device) - 1]

    def deepen(self, token: Tensor, state: Tensor, depth: int, cache: RaggedCache) -> Tensor:
        """Depth ``depth >= 2`` of the newest anchor's chain: ``token [rows]`` is its previous draft; ``[rows, H]``."""
        return self.forward(token[:, None], state[:, None], cache, ahead=depth - 2)[:, 0]

    @torch.inference_mode()
    def logits(self, state: Tensor) -> Tensor:
        """Scores over the draft vocabulary, ``[rows, draft_vocab]``."""
        return F.linear(state, self.draft_rows)
