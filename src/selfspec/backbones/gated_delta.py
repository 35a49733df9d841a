"""Linear-attention layers (Gated DeltaNet) for decoding: a state of fixed size instead of keys and values.

The layers of Qwen3.5 and Qwen3-Next, after arXiv 2412.06464. By head, the state is a matrix S ``[key_dim,
value_dim]``; token t decays it by exp(g_t), g_t <= 0, and corrects what it holds under the key k_t:

    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)    S_t = exp(g_t) S_{t-1} + k_t u_t^T    out_t = S_t^T q_t

Keys of a rejected draft can be left out afterwards; a state cannot give up what was written into it. So a
forward pass reads the states as they are and keeps what its tokens would write (``Steps``); committing c of
them is one product a layer,

    S_c = exp(g_1 + .. + g_c) S_0 + sum_{i <= c} exp(g_{i+1} + .. + g_c) k_i u_i^T,

with a c of its own in every row: no u_i depends on later tokens, be they rejected or padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from selfspec.backbones.block import FusedMlp, Rows, merged, norm_function

_CHUNK = 64  # tokens that one triangular system is solved for
_EPS = 1e-6  # of the norms of queries and keys, in the models' code rather than in their configs


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Read and correct ``state [rows, heads, key_dim, value_dim]`` token by token; it stays as it is.

    Args:
        q, k: ``[rows, heads, time, key_dim]``, normed, the queries scaled.
        v: ``[rows, heads, time, value_dim]``.
        g, beta: ``[rows, heads, time]``, log decay and writing strength.

    Returns:
        What the tokens read and what they write (out and u above), each ``[rows, heads, time, value_dim]``.
    """
    if q.shape[2] <= _CHUNK:
        return _chunk(q, k, v, g, beta, state)
    outs, writes = [], []
    for start in range(0, q.shape[2], _CHUNK):
        here = slice(start, start + _CHUNK)
        out, u = _chunk(q[:, :, here], k[:, :, here], v[:, :, here], g[:, :, here], beta[:, :, here], state)
        state = written(state, k[:, :, here], u, g[:, :, here])
        outs.append(out)
        writes.append(u)
    return torch.cat(outs, dim=2), torch.cat(writes, dim=2)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """``gated_delta`` with all tokens at once: their writes solve a unit lower-triangular system."""
    time = q.shape[2]
    total = g.cumsum(-1)
    decay, strength = total.exp()[..., None], beta[..., None]
    held, read = (torch.cat([k, q], dim=2) @ state).split(time, dim=2)  # the state is read once for both
    u = strength * (v - decay * held)
    if time == 1:
        return decay * read + (q * k).sum(-1, keepdim=True) * u, u
    between = total[..., :, None] - total[..., None, :]  # log decay from token j (columns) to i (rows)
    later = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()
    u = torch.linalg.solve_triangular(strength * (k @ k.mT) * between, u, upper=False, unitriangular=True)
    return decay * read + ((q @ k.mT) * between) @ u, u


def written(state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """``state`` after all tokens have written; shapes as in ``gated_delta``."""
    # Summed from the end: near it, where the decay is far from 0, the sums are short and exact.
    after = F.pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    whole = (after[..., :1] + g[..., :1]).exp()[..., None]
    return state * whole + (k * after.exp()[..., None]).mT @ u


@dataclass(frozen=True)
class Steps:
    """What the tokens of one forward pass would write into a layer's states.

    Attributes:
        k, u, g: as in ``gated_delta``.
        inputs: ``[rows, kernel - 1 + time, channels]`` of the convolution: its window, then the tokens'.
    """

    k: Tensor
    u: Tensor
    g: Tensor
    inputs: Tensor


class DeltaStates:
    """One layer's states, each row's at its committed length.

    Attributes:
        memory: ``[rows, heads, key_dim, value_dim]`` S, float32 as in the stock model.
        window: ``[rows, kernel - 1, channels]`` the last inputs of the convolution; zeros where there are fewer.
        pending: what the last forward pass left to commit.
    """

    def __init__(self, memory: Tensor, window: Tensor) -> None:
        self.memory, self.window = memory, window
        self.pending: Steps | None = None

    def commit(self, counts: Tensor) -> None:
        """Write the first ``counts [rows]`` of the pending tokens in; the others are forgotten."""
        steps, self.pending = self.pending, None
        if steps is None:
            return
        device = counts.device
        kept = (torch.arange(steps.g.shape[-1], device=device) < counts[:, None])[:, None]
        self.memory = written(self.memory, steps.k * kept[..., None], steps.u, steps.g * kept)
        window = counts[:, None] + torch.arange(self.window.shape[1], device=device)
        self.window = steps.inputs[torch.arange(len(counts), device=device)[:, None], window]

    def copy_rows(self, source: DeltaStates, rows: Tensor) -> None:
        """Overwrite ``rows`` with all rows of ``source``."""
        self.memory[rows], self.window[rows] = source.memory, source.window

    def clear(self, row: int) -> None:
        """Back to length 0."""
        self.memory[row], self.window[row] = 0, 0

    def select(self, rows: Tensor) -> DeltaStates:
        """States of ``rows`` only (copies)."""
        return DeltaStates(self.memory[rows], self.window[rows])


class DeltaBlock:
    """A linear-attention decoder layer with merged projections; a copy of the weights, no gradients."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        delta = layer.linear_attn
        self.key_heads, self.heads = delta.num_k_heads, delta.num_v_heads
        self.key_dim, self.value_dim = delta.head_k_dim, delta.head_v_dim
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self.mixed = [keys, keys, values]
        self.projected = [sum(self.mixed), values, self.heads, self.heads]
        self.dtype = dtype
        self.norm = norm_function(layer.input_layernorm, dtype)
        self.in_proj = merged(_projections(delta), dtype)
        # One row a tap, for products with whole tokens: [kernel, channels].
        self.taps: Tensor = delta.conv1d.weight.detach().to(dtype).float()[:, 0].T.contiguous()
        self.activation: Callable[[Tensor], Tensor] = ACT2FN[delta.activation]
        self.rate: Tensor = -delta.A_log.detach().float().exp()
        self.dt_bias: Tensor = delta.dt_bias.detach().to(dtype).float()
        self.read_norm = norm_function(delta.norm, dtype)
        self.out_proj = merged([Rows.of(delta.out_proj)], dtype)
        self.mlp = FusedMlp(layer, dtype)

    def new_states(self, rows: int) -> DeltaStates:
        """Of ``rows`` texts without a token."""
        taps, device = self.taps, self.taps.device
        memory = torch.zeros(rows, self.heads, self.key_dim, self.value_dim, device=device)
        return DeltaStates(memory, torch.zeros(rows, len(taps) - 1, taps.shape[1], dtype=self.dtype, device=device))

    def __call__(self, x: Tensor, states: DeltaStates) -> Tensor:
        """The residual stream ``[rows, time, hidden]`` behind the layer; leaves its steps pending in ``states``."""
        mixed, z, b, a = self.in_proj(self.norm(x)).split(self.projected, dim=-1)
        inputs = torch.cat([states.window, mixed], dim=1)
        q, k, v = self.activation(self._convolve(inputs)).float().split(self.mixed, dim=-1)
        group = self.heads // self.key_heads
        q, k = (_normed(part.unflatten(-1, (self.key_heads, -1)).transpose(1, 2)) for part in (q, k))
        if group > 1:
            q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
        v = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        g = (self.rate * F.softplus(a.float() + self.dt_bias)).transpose(1, 2)
        beta = b.sigmoid().float().transpose(1, 2)
        out, u = gated_delta(q * self.key_dim**-0.5, k, v, g, beta, states.memory)
        states.pending = Steps(k, u, g, inputs)
        gate = F.silu(z.unflatten(-1, (self.heads, -1)).float())
        out = (self.read_norm(out.transpose(1, 2).to(self.dtype)) * gate).to(self.dtype)
        return self.mlp(x + self.out_proj(out.flatten(-2)))

    def _convolve(self, inputs: Tensor) -> Tensor:
        """The causal convolution by channel, summed in float32: ``[rows, time, channels]`` in the layer's dtype."""
        time = inputs.shape[1] - len(self.taps) + 1
        out = inputs[:, :time] * self.taps[0]
        for number, tap in enumerate(self.taps[1:], start=1):
            out = torch.addcmul(out, inputs[:, number : number + time], tap)
        return out.to(self.dtype)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _projections(delta: Any) -> list[Rows]:
    """Rows for queries, keys, values, output gates, writing strengths and decays, each over all heads.

    Qwen3-Next keeps them by key head: its query, key, values and gates, and in another layer its strengths
    and decays.
    """
    if not hasattr(delta, "in_proj_qkvz"):
        return [Rows.of(p) for p in (delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a)]
    group = delta.num_v_heads // delta.num_k_heads
    values = group * delta.head_v_dim
    rows = []
    for linear, sizes in (
        (delta.in_proj_qkvz, [delta.head_k_dim, delta.head_k_dim, values, values]),
        (delta.in_proj_ba, [group, group]),
    ):
        by_head = torch.arange(linear.out_features, device=linear.weight.device).view(delta.num_k_heads, -1)
        rows += [Rows.of(linear).take(part.flatten()) for part in by_head.split(sizes, dim=1)]
    return rows
