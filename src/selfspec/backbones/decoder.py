"""The backbone's forward pass for decoding: preallocated ragged cache, several tokens a row at once.

Each row of a batch has its own length, so rows may accept different numbers of drafts. ``forward``
writes its tokens' keys behind each row's valid part without counting them in; ``advance`` then says
how many to keep. A rejection therefore needs no cropping: the next forward overwrites. The states of linear-attention
layers follow the same calls: ``forward`` reads them, ``advance`` brings them to the new lengths.

The tokens of one forward may also be the branches of a tree (``Branches``); ``compact`` then moves the ones to keep
to the front, where ``advance`` counts them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.backbones import middle
from selfspec.backbones.block import (
    FusedBlock,
    attention_scale,
    check_supported,
    embedding_scale,
    norm_function,
    windows,
)
from selfspec.backbones.gated_delta import DeltaBlock, DeltaStates
from selfspec.backbones.linear import Linear
from selfspec.backbones.load import end_tokens, input_embeddings, output_projection
from selfspec.backbones.rotary import RotaryTable

_CAPACITY_STEP = 64  # slots by which the cache of several rows grows
_FEW_QUERIES = 32  # folded queries a row up to which batched products win


@dataclass(frozen=True)
class Branches:
    """The new tokens of a forward as branches: which of the slots behind a row's valid length each of them sees.

    Attributes:
        seen: bool ``[rows or 1, time, ahead + time]``, a token's own slot included.
        depths: ``[rows or 1, time]`` position of each token, counted from the row's valid length.
    """

    seen: Tensor
    depths: Tensor


class RaggedCache:
    """Keys and values ``[rows, kv_heads, capacity, head_dim]`` per layer with attention, and each row's valid length.

    Several rows together read all ``capacity`` slots, because batched products want contiguous keys;
    so the capacity follows the longest row in steps of 64. One row alone reads exactly what it needs,
    and its capacity is allocated once.

    Args:
        limit: slots a row may use at most.
        recurrent: the states of linear-attention layers.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        limit: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        recurrent: Sequence[DeltaStates] = (),
    ) -> None:
        self.limit = limit
        self.lengths = [0] * rows
        self.capacity = limit if rows == 1 else 0
        shape = (rows, kv_heads, self.capacity, head_dim)
        # One row's cache is never resized, so all its layers can lie in one tensor, which `compact` moves at once.
        # Zeros, not empty: masked positions enter the softmax with weight 0, and 0 * NaN is NaN.
        self._stack = torch.zeros(2, layers, *shape, dtype=dtype, device=device) if rows == 1 else None
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers if rows > 1 else 0)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers if rows > 1 else 0)]
        if self._stack is not None:
            self.keys, self.values = (list(half.unbind(0)) for half in self._stack.unbind(0))
        self.recurrent = list(recurrent)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def advance(self, counts: list[int]) -> None:
        """Keep the first ``counts[row]`` of the tokens that the last forward wrote."""
        if self.recurrent:
            kept = torch.tensor(counts, device=self.keys[0].device)
            for states in self.recurrent:
                states.commit(kept)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    @torch.inference_mode()
    def compact(self, chosen: Tensor) -> None:
        """Move the tokens ``chosen [rows, count]`` of the last forward, by their number in it, to its first slots.

        Rows that keep fewer may name any tokens behind those they keep.

        Raises:
            ValueError: linear-attention layers, whose states follow one branch only.
        """
        if self.recurrent:
            raise ValueError("branches: the states of linear-attention layers follow one branch only")
        count = chosen.shape[1]
        if self._stack is not None:
            start = self.lengths[0]
            self._stack[:, :, :, :, start : start + count] = self._stack[:, :, :, :, start + chosen[0]]
            return
        rows = torch.arange(self.rows, device=chosen.device)[:, None]
        starts = torch.tensor(self.lengths, device=chosen.device)[:, None]
        target = starts + torch.arange(count, device=chosen.device)
        for layers in (self.keys, self.values):
            for layer in layers:
                layer[rows, :, target] = layer[rows, :, starts + chosen]

    def reserve(self, end: int) -> None:
        """Make slots up to ``end`` usable.

        Raises:
            ValueError: beyond ``limit``.
        """
        if end > self.limit:
            raise ValueError(f"cache holds {self.limit} tokens a row, {end} needed")
        wanted = self.limit if self.rows == 1 else min(-(-end // _CAPACITY_STEP) * _CAPACITY_STEP, self.limit)
        if self.capacity < end or self.capacity > wanted + _CAPACITY_STEP:
            self._resize(wanted)

    def _resize(self, capacity: int) -> None:
        self._stack = None
        kept = min(self.capacity, capacity)
        for layers in (self.keys, self.values):
            for index, old in enumerate(layers):
                layers[index] = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                layers[index][:, :, :kept] = old[:, :, :kept]
        self.capacity = capacity

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Store ``k, v [rows, time, kv_heads, head_dim]``; return the keys and values to attend to."""
        keys, values = self.keys[layer], self.values[layer]
        if slots.uniform is not None:
            keys[:, :, slots.uniform : slots.end] = k.transpose(1, 2)
            values[:, :, slots.uniform : slots.end] = v.transpose(1, 2)
        else:
            keys[slots.rows, :, slots.places] = k
            values[slots.rows, :, slots.places] = v
        return keys[:, :, : slots.read], values[:, :, : slots.read]

    def copy_rows(self, source: RaggedCache, rows: list[int]) -> None:
        """Overwrite ``rows`` of this cache with all rows of ``source``."""
        index = torch.tensor(rows, device=self.keys[0].device)
        end = max(source.lengths)
        self.reserve(max(end, *self.lengths))  # never below what the other rows hold
        for layer in range(len(self.keys)):
            self.keys[layer][index, :, :end] = source.keys[layer][:, :, :end]
            self.values[layer][index, :, :end] = source.values[layer][:, :, :end]
        for states, others in zip(self.recurrent, source.recurrent, strict=True):
            states.copy_rows(others, index)
        for row, length in zip(rows, source.lengths, strict=True):
            self.lengths[row] = length

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Back to length 0, so that the capacity can shrink to what the other rows need."""
        self.lengths[row] = 0
        for states in self.recurrent:
            states.clear(row)

    def select(self, rows: list[int]) -> RaggedCache:
        """A cache of ``rows`` only (copies)."""
        chosen = object.__new__(RaggedCache)
        chosen._stack = None
        index = torch.tensor(rows, device=self.keys[0].device)
        chosen.keys = [keys[index] for keys in self.keys]
        chosen.values = [values[index] for values in self.values]
        chosen.recurrent = [states.select(index) for states in self.recurrent]
        chosen.capacity, chosen.limit = self.capacity, self.limit
        chosen.lengths = [self.lengths[row] for row in rows]
        return chosen


class Slots:
    """Where the ``time`` new tokens of each row go, and which earlier ones they may see.

    Attributes:
        places: ``[rows, time]`` cache slot of each new token.
        positions: ``[rows, time]`` its rotary position: the slot, but for branches.
        uniform: the common first slot when all rows have one length, else None (ragged writes).
        end: one past the last slot of any row.
        read: slots attended over.
        causal: the cache was empty: plain causal attention.
        mask: additive, folded for ``group`` heads a key head; None when every new token sees all slots, or ``causal``.
    """

    def __init__(
        self, cache: RaggedCache, time: int, group: int, ahead: int = 0, branches: Branches | None = None
    ) -> None:
        """``ahead``: slots behind each row's valid length to leave as they are (a draft chain's or tree's own)."""
        lengths = [length + ahead for length in cache.lengths]
        self.end = max(lengths) + time
        cache.reserve(self.end)
        self.dtype, self.group, self.ahead, self.branches = cache.keys[0].dtype, group, ahead, branches
        device = cache.keys[0].device
        self.uniform = lengths[0] if len(set(lengths)) == 1 else None
        self.valid = torch.tensor(cache.lengths, device=device)[:, None]
        self.places = self.valid + torch.arange(ahead, ahead + time, device=device)
        self.positions = self.places if branches is None else self.valid + branches.depths
        self.rows = torch.arange(len(lengths), device=device)[:, None]
        self.causal = self.uniform == 0 and time > 1 and branches is None
        self.read = self.end if self.causal or cache.rows == 1 else cache.capacity
        self.mask: Tensor | None = None
        if not self.causal and not (cache.rows == 1 and time == 1 and branches is None):
            self.mask = self._additive(self._hidden())

    def _hidden(self) -> Tensor:
        """Bool ``[rows, time, read]``: slots that a new token does not see."""
        slots = torch.arange(self.read, device=self.places.device)
        if self.branches is None:
            return slots > self.places[..., None]
        seen = self.branches.seen.expand(len(self.places), -1, -1)
        own = self.valid + torch.arange(seen.shape[2], device=slots.device)
        hidden = (slots >= self.valid).unsqueeze(1).repeat(1, seen.shape[1], 1)
        return hidden.scatter_(2, own[:, None].expand_as(seen), ~seen)

    def _slot_positions(self) -> Tensor:
        """Rotary positions of the slots read, ``[rows, 1, read]``; of branches those of this forward's tokens."""
        slots = torch.arange(self.read, device=self.places.device).expand(len(self.places), -1)
        return slots.scatter(1, self.places, self.positions)[:, None]

    def within(self, window: int | None) -> Tensor | None:
        """``mask`` for a layer that sees the last ``window`` positions, the token's own included; None: all.

        Under ``causal`` it is not folded, and is the same for all rows: ``[1, 1, time, slots]``.
        """
        if window is None or self.end <= window:
            return self.mask
        if self.branches is not None:
            far = self._slot_positions() <= self.positions[..., None] - window
            return self._additive(self._hidden() | far)
        positions = self.positions[:1, :, None] if self.causal else self.positions[..., None]
        slots = torch.arange(self.read, device=positions.device)
        return self._additive((slots > positions) | (slots <= positions - window))

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, torch.finfo(self.dtype).min)[:, None]
        return mask if self.causal else fold_mask(mask, self.group)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Grouped-query attention of ``q [rows, time, heads, head_dim]`` over ``k, v [rows, kv_heads, slots, head_dim]``.

    Query heads of a group are folded into the time axis: one pass over the keys serves them all,
    which on a CPU is 2 to 5 times faster than repeating or broadcasting the keys. Few queries over
    contiguous keys of many rows go through batched products, which again halves the time of the fused
    kernel there.

    Args:
        mask: additive, ``fold_mask``-ed to ``[rows, 1, group * time, slots]``; None: all slots are seen.
        causal: queries and keys are the same positions, in order; the mask, if any, says so and is not folded.

    Returns:
        ``[rows, time, heads * head_dim]``.
    """
    rows, time, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if causal:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(rows, time, heads * head_dim)
    group = heads // kv_heads
    folded = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)
    if rows > 1 and mask is not None and folded.shape[2] <= _FEW_QUERIES and k.is_contiguous():
        out = _attend_products(folded * scale, k, v, mask)
    else:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    return out.view(rows, kv_heads, group, time, head_dim).permute(0, 3, 1, 2, 4).reshape(rows, time, heads * head_dim)


def _attend_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], -1)
    weights = torch.softmax(scores + mask, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(q.shape)


def fold_mask(mask: Tensor, group: int) -> Tensor:
    """``[rows, 1, time, slots]`` repeated for the ``group`` query heads of a key head, in ``attend``'s order."""
    return mask.repeat(1, 1, group, 1) if group > 1 else mask


def embed(tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Input embeddings ``[..., hidden]`` of ``tokens [...]`` as the backbone's layers and heads read them.

    ``scale`` (``embedding_scale``) is rounded to the weight's dtype, as Gemma does.
    """
    rows = F.embedding(tokens, weight)
    return rows if scale == 1.0 else rows * rows.new_tensor(scale)


class Decoder:
    """Backbone weights arranged for decoding. ``forward`` gives final hidden states, ``logits`` scores them.

    Args:
        middle_layers: those whose states go beside the final one (``middle``): what its head's ``middle_layers`` say.

    Attributes:
        rotary: the positions of heads, which are of the kind of the backbone's full-attention layers.
        state_width: W, columns of a state: the hidden size, times 1 + the number of middle layers.

    Raises:
        BackboneError: an unsupported family, or middle layers that it does not have.
    """

    def __init__(self, model: PreTrainedModel, max_positions: int = 4096, middle_layers: Sequence[int] = ()) -> None:
        config = model.config
        check_supported(config)
        middle.check(middle_layers, model)
        self.middle_layers = tuple(middle_layers)
        self.hidden_size: int = config.hidden_size
        self.state_width = middle.width(self.hidden_size, self.middle_layers)
        inner = model.get_decoder()
        weight = input_embeddings(model)
        self.dtype, self.device = weight.dtype, weight.device
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // self.kv_heads
        self.scale = attention_scale(model)
        self.max_positions = min(max_positions, config.max_position_embeddings)
        self.rotary = RotaryTable(model, self.max_positions, self.dtype)
        self._views, kinds = self._kinds(model)
        self.blocks = [
            FusedBlock(layer, self.head_dim, self.dtype) if index in kinds else DeltaBlock(layer, self.dtype)
            for index, layer in enumerate(inner.layers)
        ]
        # With its number among the cache's layers of its sort, and the number of its view (unused without attention).
        self._layers: list[tuple[int, FusedBlock | DeltaBlock, int]] = [
            (sum((before in kinds) == (index in kinds) for before in range(index)), block, kinds.get(index, 0))
            for index, block in enumerate(self.blocks)
        ]
        self.embedding: Tensor = weight.detach()
        self.embedding_scale = embedding_scale(model)
        self.lm_head: Tensor = output_projection(model).detach()
        self._score = Linear(self.lm_head)
        self.norm = norm_function(inner.norm, self.dtype)
        self.end_tokens = end_tokens(model)

    def _kinds(self, model: PreTrainedModel) -> tuple[list[tuple[RotaryTable, int | None]], dict[int, int]]:
        """Rotary table and window of each kind of attention, and by layer with attention the number of its kind."""
        views: dict[int | None, tuple[RotaryTable, int | None]] = {None: (self.rotary, None)}
        of_layers = windows(model)
        for layer, window in of_layers.items():
            if window not in views:
                views[window] = RotaryTable(model, self.max_positions, self.dtype, layer), window
        used = [window for window in views if window in of_layers.values()]
        return [views[window] for window in used], {layer: used.index(of_layers[layer]) for layer in of_layers}

    @property
    def recurrent(self) -> bool:
        """Whether it has linear-attention layers, which cannot follow branches."""
        return any(isinstance(block, DeltaBlock) for block in self.blocks)

    def new_cache(self, rows: int, limit: int, spare: int = 0) -> RaggedCache:
        """An empty cache for ``limit`` positions a row, and ``spare`` slots for branches that share positions.

        Raises:
            ValueError: beyond the backbone's context.
        """
        if limit > self.max_positions:
            raise ValueError(f"{limit} positions asked of a backbone that has {self.max_positions}")
        recurrent = [block.new_states(rows) for block in self.blocks if isinstance(block, DeltaBlock)]
        attending = len(self.blocks) - len(recurrent)
        shape = (rows, self.kv_heads, limit + spare, self.head_dim)
        return RaggedCache(attending, *shape, self.dtype, self.device, recurrent)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        cache: RaggedCache,
        counts: list[int] | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """Final-norm hidden states ``[rows, time, W]`` of ``tokens [rows, time]``, appended to ``cache``.

        The cache's lengths stay as they are until ``cache.advance``.

        Args:
            counts: how many of a row's tokens to keep, where that is known beforehand: the cache is advanced, and
                what linear-attention layers need for that is freed layer by layer.
            branches: the tokens are not one text but a tree; not with linear-attention layers.

        Raises:
            ValueError: branches in a backbone with linear-attention layers.
        """
        if branches is not None and cache.recurrent:
            raise ValueError("branches: the states of linear-attention layers follow one branch only")
        kept = None if counts is None else torch.tensor(counts, device=self.device)
        slots = Slots(cache, tokens.shape[1], self.group, branches=branches)
        views = [(*table.at(slots.positions), slots.within(window)) for table, window in self._views]
        causal, scale = slots.causal, self.scale
        x = self.embed(tokens)
        beside: list[Tensor] = []
        for number, (index, block, kind) in enumerate(self._layers, start=1):
            if isinstance(block, DeltaBlock):
                states = cache.recurrent[index]
                x = block(x, states)
                if kept is not None:
                    states.commit(kept)
            else:
                cos, sin, mask = views[kind]
                q, k, v, gate = block.qkv(x, cos, sin)
                keys, values = cache.write(index, k, v, slots)
                x = block.finish(x, attend(q, keys, values, mask, causal, scale), gate)
            if number in self.middle_layers:
                beside.append(middle.normalised(x))
        if counts is not None:
            cache.advance(counts)
        return torch.cat([self.norm(x), *beside], dim=-1) if beside else self.norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings ``[..., hidden]`` of ``tokens [...]``."""
        return embed(tokens, self.embedding, self.embedding_scale)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, ``[..., vocabulary]``, from states with middle layers or without."""
        return self._score(middle.final(hidden, self.hidden_size))

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], limit: int, spare: int = 0) -> tuple[RaggedCache, list[Tensor]]:
        """Run prompts of any lengths (right-padded); return the cache and each row's states ``[time, W]``.

        ``limit`` and ``spare`` as in ``new_cache``.
        """
        cache = self.new_cache(len(prompts), limit, spare)
        longest = max(map(len, prompts))
        padded = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        hidden = self.forward(padded.to(self.device), cache, [len(prompt) for prompt in prompts])
        return cache, [hidden[row, : len(prompt)] for row, prompt in enumerate(prompts)]
