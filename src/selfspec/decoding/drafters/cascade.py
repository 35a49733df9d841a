"""Drafting with cascaded heads: a cache per depth, all of them in step with the committed tokens.

The newest anchor is c-1 with x[c] known, c anchors being verified. Depth d at anchor j reads x[j+d],
which is committed for j <= c-d only; beyond, it is a draft. So depth d keeps true entries for anchors
0..c-d, and a chain adds anchors c-d+1..c-1 provisionally: d-1 of them, because the newest anchor
attends to those before it and their depth-d inputs are drafts as well. The next round overwrites them
from the committed tokens. In training every input is a true token, which is what a chain sees as long
as it is alive.

Slot s of depth d holds anchor s-d+1. Then every depth has c valid slots, slot s reads x[s+1] and the
depth d-1 state of slot s-1, its rotary position is s, and the first d-1 slots stand for no anchor:
they are hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.backbones.decoder import Decoder, RaggedCache, Slots, attend
from selfspec.backbones.linear import Linear
from selfspec.decoding.drafters import weights
from selfspec.heads.cascade import CascadeHead, CascadeLayer
from selfspec.heads.checkpoint import TrainedHead


class CascadeCache:
    """Keys of the verified slots, and the states that the next slots read.

    Attributes:
        keys: one layer per depth.
        newest: per depth, ``[rows, H]`` state of the last verified slot.
        drafts: ``[rows, d-1]`` drafts of the chain in progress.
        chain: ``[rows, d-1, H]`` depth-d states of its provisional slots.
    """

    def __init__(self, keys: RaggedCache, newest: list[Tensor]) -> None:
        self.keys, self.newest = keys, newest
        self.drafts = self.chain = newest[0][:, :0]

    @property
    def lengths(self) -> list[int]:
        """Valid slots of each row."""
        return self.keys.lengths

    def select(self, rows: list[int]) -> CascadeCache:
        """A cache of ``rows`` only (copies), between rounds."""
        index = torch.tensor(rows, device=self.newest[0].device)
        return CascadeCache(self.keys.select(rows), [state[index] for state in self.newest])


class _Layer:
    """One depth's weights in the decoder's dtype."""

    def __init__(self, layer: CascadeLayer, dtype: torch.dtype) -> None:
        self.enorm, self.hnorm, self.post_norm = (
            weights.norm(module, dtype) for module in (layer.enorm, layer.hnorm, layer.post_norm)
        )
        self.eh_proj = Linear(layer.eh_proj.weight.detach().to(dtype))
        self.block = weights.block(layer.mtp_block, layer.head_dim, dtype)


class CascadeDrafter:
    """The heads' weights arranged for drafting on top of ``decoder``; at most as many drafts as depths."""

    def __init__(self, decoder: Decoder, head: TrainedHead) -> None:
        module = head.module
        assert isinstance(module, CascadeHead)
        self.decoder, self.vocab, self.facts = decoder, head.vocab, head.facts
        self.max_drafts: int | None = module.depths
        layers = module.by_depth()
        self.layers = [_Layer(layer, decoder.dtype) for layer in layers]
        self.head_dim, self.scale = layers[0].head_dim, module.scale
        encoder = module.options["block"] == "encoder"
        self.kv_heads = module.hidden_size // self.head_dim if encoder else decoder.kv_heads
        self.group = 1 if encoder else decoder.group
        self._scorers = weights.scorers(decoder, head)
        self._nbytes = weights.nbytes(decoder, head)

    def nbytes(self) -> int:
        """Memory the heads add: their weights and their output rows, own or copied."""
        return self._nbytes

    def new_cache(self, rows: int, limit: int, num_drafts: int | None = None) -> CascadeCache:
        """An empty cache for up to ``num_drafts`` depths (default: all)."""
        depths, decoder = num_drafts or len(self.layers), self.decoder
        keys = RaggedCache(depths, rows, self.kv_heads, limit, self.head_dim, decoder.dtype, decoder.device)
        nothing = decoder.embedding.new_zeros(rows, decoder.embedding.shape[1])
        return CascadeCache(keys, [nothing] * depths)

    def _forward(self, tokens: Tensor, states: Tensor, depth: int, slots: Slots, keys: RaggedCache) -> Tensor:
        """Depth ``depth`` at ``slots``: ``[rows, time, H]`` of ``tokens [rows, time]`` and previous ``states``."""
        layer = self.layers[depth - 1]
        embedding = self.decoder.embed(tokens)
        x = layer.eh_proj(torch.cat([layer.enorm(embedding), layer.hnorm(states)], dim=-1))
        q, k, v, gate = layer.block.qkv(x, *self.decoder.rotary.at(slots.positions))
        attended = self._attend(q, *keys.write(depth - 1, k, v, slots), slots, depth - 1)
        return layer.post_norm(layer.block.finish(x, attended, gate))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, slots: Slots, skipped: int) -> Tensor:
        """Attention that leaves the first ``skipped`` slots out; what those themselves get is never read."""
        rows, time, heads, head_dim = q.shape
        if slots.end <= skipped:
            return q.new_zeros(rows, time, heads * head_dim)
        if slots.causal:
            keys, values = keys[:, :, skipped:], values[:, :, skipped:]
            seen = attend(q[:, skipped:], keys, values, None, causal=True, scale=self.scale)
            return F.pad(seen, (0, 0, skipped, 0))
        if slots.mask is None:
            keys, values = keys[:, :, skipped:], values[:, :, skipped:]
        else:
            slots.mask[..., :skipped] = torch.finfo(q.dtype).min
        return attend(q, keys, values, slots.mask, causal=False, scale=self.scale)

    @torch.inference_mode()
    def observe(self, tokens: Tensor, states: Tensor, counts: list[int], cache: CascadeCache) -> Tensor:
        """Take verified anchors in: true ``states [rows, time, H]`` with their next ``tokens [rows, time]``.

        Args:
            counts: how many of the ``time`` anchors are real in each row; at least 1.

        Returns:
            ``[rows, H]`` depth-1 state of each row's newest anchor.
        """
        slots = Slots(cache.keys, tokens.shape[1], self.group)
        rows = torch.arange(len(counts), device=tokens.device)
        last = torch.tensor(counts, device=tokens.device) - 1
        newest = []
        for depth, before in enumerate(cache.newest, start=1):
            out = self._forward(tokens, states, depth, slots, cache.keys)
            newest.append(out[rows, last])
            states = torch.cat([before[:, None], out[:, :-1]], dim=1)
        cache.keys.advance(counts)
        cache.newest = newest
        return newest[0]

    @torch.inference_mode()
    def deepen(self, token: Tensor, state: Tensor, depth: int, cache: CascadeCache) -> Tensor:
        """Depth ``depth >= 2`` of the newest anchor's chain: ``token [rows]`` is its previous draft; ``[rows, H]``.

        ``state``, the depth before at the newest anchor, is in the cache already, with those of older anchors.
        """
        first = cache.newest[depth - 2][:, None]
        if depth == 2:
            cache.drafts, states = token[:, None], first
        else:
            cache.drafts = torch.cat([cache.drafts, token[:, None]], dim=1)
            states = torch.cat([first, cache.chain], dim=1)
        slots = Slots(cache.keys, depth - 1, self.group)
        cache.chain = self._forward(cache.drafts, states, depth, slots, cache.keys)
        return cache.chain[:, -1]

    @torch.inference_mode()
    def logits(self, state: Tensor, depth: int = 1) -> Tensor:
        """Scores over the draft vocabulary, ``[rows, draft_vocab]``."""
        return self._scorers[depth - 1](state)
