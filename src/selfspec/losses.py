"""Training losses for draft heads: what they are, from logits and a teacher to one loss per position.

All take draft logits over the draft vocabulary, ``[..., draft_vocab]``, and give ``[...]`` in float32
(float64 stays). A teacher is ``p``, the backbone's probabilities *at the draft vocabulary's tokens*,
not re-normalised: what the draft vocabulary lacks counts as never drafted, because verification
rejects with the full distribution.

Every loss is a function of a few quantities per position (``ce``, ``kl``, ``reverse_kl``, ``js``,
``alpha``). Here they are plain and differentiable; training computes the same quantities and their
gradients in place (``training/chunked.py``), and tests hold the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this acceptance lk_nll is flat. The gradient of log alpha stays bounded, so it only keeps log 0 away.
ALPHA_FLOOR = 1e-12


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def ce(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy against ``target [...]``, indices into the draft vocabulary; -1 gives loss 0.

    Training on the backbone's own greedy completions makes this the cheapest proxy of acceptance.
    """
    flat = F.cross_entropy(_wide(logits).flatten(0, -2), target.flatten(), ignore_index=-1, reduction="none")
    return flat.view(target.shape)


def kl(logits: Tensor, p: Tensor, temperature: float = 1.0) -> Tensor:
    """Forward KL(p || q) of softened distributions, times temperature squared (Hinton et al. 2015).

    ``p`` must already be softened by the same temperature. With a cut vocabulary the sum runs over
    the draft vocabulary only: the constant rest cannot be reached by q.
    """
    log_q = F.log_softmax(_wide(logits) / temperature, dim=-1)
    return temperature**2 * (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def reverse_kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(q || p): mode-seeking (MiniLLM, arXiv 2306.08543). The sum is whole: q is zero outside the draft vocabulary.

    ``p`` is clamped to the smallest normal number of its dtype: a token that the backbone rules out costs much,
    not infinity.
    """
    log_q = F.log_softmax(_wide(logits), dim=-1)
    return (log_q.exp() * (log_q - p.clamp(min=torch.finfo(p.dtype).tiny).log())).sum(-1)


def js(logits: Tensor, p: Tensor) -> Tensor:
    """Jensen-Shannon divergence, (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2; between 0 and log 2.

    The backbone's mass outside the draft vocabulary, where m = p / 2, counts with log 2 / 2 each.
    """
    log_q = F.log_softmax(_wide(logits), dim=-1)
    q = log_q.exp()
    m = ((p + q) / 2).clamp(min=torch.finfo(p.dtype).tiny)
    inside = ((torch.special.xlogy(p, p) + q * log_q) / 2 - m * m.log()).sum(-1)
    return inside + (1 - p.sum(-1)) * math.log(2) / 2


def acceptance(logits: Tensor, p: Tensor) -> Tensor:
    """alpha = sum_v min(p_v, q_v): the chance that a token drafted from q survives rejection sampling against p.

    Leviathan et al. 2023, corollary 3.6; q is zero outside the draft vocabulary.
    """
    return torch.minimum(p, F.softmax(_wide(logits), dim=-1)).sum(-1)


def tv(logits: Tensor, p: Tensor) -> Tensor:
    """Total variation, 1 - alpha: the chance of a rejection (DistillSpec, arXiv 2310.08461)."""
    return 1 - acceptance(logits, p)


def lk_nll(logits: Tensor, p: Tensor) -> Tensor:
    """-log alpha, the likelihood of acceptance (arXiv 2602.23881); alpha at least ``ALPHA_FLOOR``."""
    return -acceptance(logits, p).clamp(min=ALPHA_FLOOR).log()


def lk_hybrid(logits: Tensor, p: Tensor, eta: float, mean_alpha: Tensor | None = None) -> Tensor:
    """lambda * KL + (1 - lambda) * (1 - alpha), lambda = exp(-eta * stop_gradient(alpha)).

    The LK losses train on acceptance itself (arXiv 2602.23881). Its gradient vanishes where p and q
    hardly overlap, so KL leads there and hands over as acceptance grows. eta = 0 is pure KL. The alpha
    in lambda is the position's own, or ``mean_alpha`` (broadcast) where given.
    """
    return _hybrid(kl(logits, p), acceptance(logits, p), eta, mean_alpha)


def _hybrid(divergence: Tensor, alpha: Tensor, eta: float, mean_alpha: Tensor | None) -> Tensor:
    weight = torch.exp(-eta * (alpha.detach() if mean_alpha is None else mean_alpha))
    return weight * divergence + (1 - weight) * (1 - alpha)


def chain(alpha: Tensor, taught: Tensor | None = None) -> Tensor:
    """End-to-end acceptance: 1 - prod_{i <= d} alpha_i, ``[K, A]`` from acceptance by depth and anchor.

    Its mean over depths is 1 - (accepted drafts per round) / K: a depth matters as often as verification reaches it
    (``depth_decay`` 1 weighs depths so; less stresses the early ones further).

    Args:
        taught: ``[K, A]`` where the anchor's depth has a loss. A depth that has none *ends* the chain at the end
            of the text: no term stands there. In front of an anchor's first taught depth lie tokens of the prompt,
            which are given, so it counts as accepted (1). A term thus stands exactly where the other losses have one.
    """
    return 1 - (alpha if taught is None else alpha.where(taught, 1)).cumprod(0)


Reference = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# Quantity -> (logits, p, target, temperature) -> [...]. Only kl is softened.
QUANTITIES: Mapping[str, Reference] = {
    "ce": lambda logits, p, target, temperature: ce(logits, target),
    "kl": lambda logits, p, target, temperature: kl(logits, p, temperature),
    "reverse_kl": lambda logits, p, target, temperature: reverse_kl(logits, p),
    "js": lambda logits, p, target, temperature: js(logits, p),
    "alpha": lambda logits, p, target, temperature: acceptance(logits, p),
}
# Loss -> the quantities it is a function of.
LOSSES: Mapping[str, tuple[str, ...]] = {
    "ce": ("ce",),
    "kl": ("kl",),
    "reverse_kl": ("reverse_kl",),
    "js": ("js",),
    "tv": ("alpha",),
    "lk_hybrid": ("kl", "alpha"),
    "lk_nll": ("alpha",),
    "chain": ("alpha",),
}


@dataclass(frozen=True)
class Objective:
    """A loss by name, plus ``ce_weight`` times ``ce``.

    Attributes:
        eta: of ``lk_hybrid``.
        temperature: of ``kl``; the added ``ce`` stays at temperature 1.
        lambda_scope: of ``lk_hybrid``: lambda from the position's own alpha, or from the mean over the batch's
            positions of that depth.

    Raises:
        ValueError: an unknown name.
    """

    name: str
    eta: float = 0.0
    temperature: float = 1.0
    ce_weight: float = 0.0
    lambda_scope: Literal["position", "batch"] = "position"

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise ValueError(f"loss.name: got {self.name!r}, allowed: {', '.join(LOSSES)}")

    @property
    def quantities(self) -> tuple[str, ...]:
        """What must be known of a position."""
        return tuple(dict.fromkeys(LOSSES[self.name] + (("ce",) if self.ce_weight else ())))

    @property
    def needs_mean_alpha(self) -> bool:
        """Whether the batch's mean acceptance must be known before the loss of any position."""
        return self.name == "lk_hybrid" and self.lambda_scope == "batch"

    def softening(self, quantity: str) -> float:
        """The temperature that p and q of ``quantity`` are softened by."""
        return self.temperature if quantity == "kl" and self.name == "kl" else 1.0

    def combine(
        self, values: Mapping[str, Tensor], taught: Tensor | None = None, mean_alpha: Tensor | None = None
    ) -> Tensor:
        """The loss ``[K, A]`` from the quantities ``[K, A]``, by depth and anchor.

        Args:
            taught: ``[K, A]`` where there is a loss (``chain`` alone asks).
            mean_alpha: ``[K, 1]``, where ``needs_mean_alpha``.
        """
        if self.name == "lk_hybrid":
            loss = _hybrid(values["kl"], values["alpha"], self.eta, mean_alpha if self.needs_mean_alpha else None)
        elif self.name == "tv":
            loss = 1 - values["alpha"]
        elif self.name == "lk_nll":
            loss = -values["alpha"].clamp(min=ALPHA_FLOOR).log()
        elif self.name == "chain":
            loss = chain(values["alpha"], taught)
        else:
            loss = values[self.name]
        return loss + self.ce_weight * values["ce"] if self.ce_weight and self.name != "ce" else loss

    def reference(
        self,
        logits: Tensor,
        p: Tensor | None,
        target: Tensor,
        taught: Tensor | None = None,
        mean_alpha: Tensor | None = None,
    ) -> Tensor:
        """The loss ``[K, A]`` from all logits ``[K, A, V]`` at once, differentiable: what training must equal."""
        p = torch.zeros_like(logits) if p is None else p
        values = {name: QUANTITIES[name](logits, p, target, self.softening(name)) for name in self.quantities}
        return self.combine(values, taught, mean_alpha)


def depth_weights(depths: int, decay: float) -> Tensor:
    """``[depths]`` weights decay^(d-1), normalised to sum 1 (FastMTP, arXiv 2509.18362)."""
    weights = decay ** torch.arange(depths, dtype=torch.float32)
    return weights / weights.sum()
