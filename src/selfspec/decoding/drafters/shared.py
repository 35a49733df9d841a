"""Drafting with the shared recursive head: a cache of its own, kept to verified anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.backbones import middle
from selfspec.backbones.block import FusedBlock
from selfspec.backbones.decoder import Decoder, RaggedCache, Slots, attend
from selfspec.backbones.linear import Linear
from selfspec.decoding.drafters import weights
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.shared import SharedHead


class SharedDrafter:
    """The head's weights arranged for drafting on top of ``decoder``.

    Cache slot p holds anchor p's depth-1 key, computed from the backbone's true state h[p]. A chain
    writes its depth-2, 3, … keys behind the last verified anchor without counting them in: the next
    round overwrites them, whatever was accepted.
    """

    max_drafts: int | None = None  # the block recurses as deep as one likes

    def __init__(self, decoder: Decoder, head: TrainedHead) -> None:
        module = head.module
        assert isinstance(module, SharedHead)
        self.decoder, self.vocab, self.facts = decoder, head.vocab, head.facts
        dtype = decoder.dtype
        self.blocks = [FusedBlock(layer, module.head_dim, dtype) for layer in module.blocks]
        self.joint = module.joint
        if self.joint:
            self.pre_norm = weights.norm(module.pre_norm, dtype)
        else:
            self.enorm, self.hnorm = weights.norm(module.enorm, dtype), weights.norm(module.hnorm, dtype)
        self.post_norm = weights.norm(module.post_norm, dtype)
        self.eh_proj = Linear(module.eh_proj.weight.detach().to(dtype))
        self.middle_proj: Linear | None = None
        if module.middle_proj is not None:
            self.middle_proj = Linear(module.middle_proj.weight.detach().to(dtype))
        self._score = weights.scorers(decoder, head)[0]
        self._nbytes = weights.nbytes(decoder, head)

    def nbytes(self) -> int:
        """Memory the head adds: its weights and its copy of the draft vocabulary's output rows."""
        return self._nbytes

    def new_cache(self, rows: int, limit: int, num_drafts: int | None = None) -> RaggedCache:
        decoder = self.decoder
        shape = (rows, decoder.kv_heads, limit, decoder.head_dim)
        return RaggedCache(len(self.blocks), *shape, decoder.dtype, decoder.device)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, states: Tensor, cache: RaggedCache, ahead: int = 0, beside: Tensor | None = None
    ) -> Tensor:
        """Head states ``[rows, time, H]`` for embeddings of ``tokens [rows, time]`` and previous ``states``.

        Writes keys behind each row's valid length plus ``ahead``; the caller advances the cache. ``beside`` are
        the backbone's middle states ``[rows, time, H * M]``, at depth 1 of a head that reads them.
        """
        slots = Slots(cache, tokens.shape[1], self.decoder.group, ahead)
        embedding = self.decoder.embed(tokens)
        if min(cache.lengths) + ahead == 0:  # as vLLM serves position 0, and as the head was trained
            embedding = embedding.masked_fill((slots.positions == 0)[..., None], 0)
        x = self._combine(embedding, states)
        if beside is not None and self.middle_proj is not None:
            x = x + self.middle_proj(beside)
        cos, sin = self.decoder.rotary.at(slots.positions)
        for layer, block in enumerate(self.blocks):
            q, k, v, gate = block.qkv(x, cos, sin)
            keys, values = cache.write(layer, k, v, slots)
            x = block.finish(x, attend(q, keys, values, slots.mask, slots.causal, self.decoder.scale), gate)
        return self.post_norm(x)

    def _combine(self, embedding: Tensor, states: Tensor) -> Tensor:
        if self.joint:
            return self.pre_norm(self.eh_proj(torch.cat([embedding, states], dim=-1)))
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(states)], dim=-1))

    def observe(self, tokens: Tensor, states: Tensor, counts: list[int], cache: RaggedCache) -> Tensor:
        """Take verified anchors in: true ``states [rows, time, W]`` with their next ``tokens [rows, time]``.

        Args:
            counts: how many of the ``time`` anchors are real in each row; at least 1.

        Returns:
            ``[rows, H]`` depth-1 state of each row's newest anchor.
        """
        final, beside = middle.split(states, self.decoder.hidden_size)
        out = self.forward(tokens, final, cache, beside=beside)
        cache.advance(counts)
        rows = torch.arange(len(counts), device=out.device)
        return out[rows, torch.tensor(counts, device=out.device) - 1]

    def deepen(self, token: Tensor, state: Tensor, depth: int, cache: RaggedCache) -> Tensor:
        """Depth ``depth >= 2`` of the newest anchor's chain: ``token [rows]`` is its previous draft; ``[rows, H]``."""
        return self.forward(token[:, None], state[:, None], cache, ahead=depth - 2)[:, 0]

    @torch.inference_mode()
    def logits(self, state: Tensor, depth: int = 1) -> Tensor:
        """Scores over the draft vocabulary, ``[rows, draft_vocab]``; the same rows at every depth."""
        return self._score(state)
