"""Training losses for draft heads: pure functions from logits and a teacher to one loss per position.

All take draft logits over the draft vocabulary, ``[..., draft_vocab]``, and give ``[...]`` in
float32. A teacher is ``p``, the backbone's probabilities *at the draft vocabulary's tokens*, not
re-normalised: what the draft vocabulary lacks counts as never drafted, because verification rejects
with the full distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def ce(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy against ``target [...]``, indices into the draft vocabulary; -1 gives loss 0.

    Training on the backbone's own greedy completions makes this the cheapest proxy of acceptance.
    """
    flat = F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), ignore_index=-1, reduction="none")
    return flat.view(target.shape)


def kl(logits: Tensor, p: Tensor, temperature: float = 1.0) -> Tensor:
    """Forward KL(p || q) of softened distributions, times temperature squared (Hinton et al. 2015).

    ``p`` must already be softened by the same temperature. With a cut vocabulary the sum runs over
    the draft vocabulary only: the constant rest cannot be reached by q.
    """
    log_q = F.log_softmax(logits.float() / temperature, dim=-1)
    return temperature**2 * (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def acceptance(logits: Tensor, p: Tensor) -> Tensor:
    """alpha = sum_v min(p_v, q_v): the chance that a token drafted from q survives rejection sampling against p.

    Leviathan et al. 2023, corollary 3.6; q is zero outside the draft vocabulary.
    """
    return torch.minimum(p, F.softmax(logits.float(), dim=-1)).sum(-1)


def lk_hybrid(logits: Tensor, p: Tensor, eta: float) -> Tensor:
    """lambda * KL + (1 - lambda) * (1 - alpha), lambda = exp(-eta * stop_gradient(alpha)), per position.

    The LK losses train on acceptance itself (arXiv 2602.23881). Its gradient vanishes where p and q
    hardly overlap, so KL leads there and hands over as acceptance grows. eta = 0 is pure KL.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    divergence = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    weight = torch.exp(-eta * alpha.detach())
    return weight * divergence + (1 - weight) * (1 - alpha)


@dataclass(frozen=True)
class Objective:
    """A loss as the training loop calls it.

    Attributes:
        per_position: ``(logits [..., V], p [..., V] or None, target [...]) -> loss [...]``.
        needs_teacher: whether ``p`` must be computed.
        temperature: by which ``p`` is softened.
    """

    per_position: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    needs_teacher: bool
    temperature: float = 1.0


def objective(name: str, eta: float = 0.0, temperature: float = 1.0, ce_weight: float = 0.0) -> Objective:
    """The objective of a stage: ``ce``, ``kl`` or ``lk_hybrid``, the latter two plus ``ce_weight`` times ``ce``."""
    if name == "ce":
        return Objective(lambda logits, p, target: ce(logits, target), needs_teacher=False)

    def main(logits: Tensor, p: Tensor) -> Tensor:
        if name == "kl":
            return kl(logits, p, temperature)
        if name == "lk_hybrid":
            return lk_hybrid(logits, p, eta)
        raise ValueError(f"loss.name: got {name!r}, allowed: ce, kl, lk_hybrid")

    def mixed(logits: Tensor, p: Tensor | None, target: Tensor) -> Tensor:
        assert p is not None
        loss = main(logits, p)
        return loss + ce_weight * ce(logits, target) if ce_weight else loss

    return Objective(mixed, needs_teacher=True, temperature=temperature if name == "kl" else 1.0)


def depth_weights(depths: int, decay: float) -> Tensor:
    """``[depths]`` weights decay^(d-1), normalised to sum 1 (FastMTP, arXiv 2509.18362)."""
    weights = decay ** torch.arange(depths, dtype=torch.float32)
    return weights / weights.sum()
