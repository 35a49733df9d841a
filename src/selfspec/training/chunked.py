"""Loss and gradient over the draft vocabulary without keeping all logits.

``[positions, depths, vocabulary]`` logits of one batch would take gigabytes at a large vocabulary.
Positions are taken in chunks of the *teacher's* position t: depth d of anchor t - d shares its teacher
with every other depth taught by t, so the teacher's distribution is computed once for all depths. Each
chunk's gradient with respect to the states is kept, its logits are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective, acceptance
from selfspec.training.data import Batch


@dataclass(frozen=True)
class Scorer:
    """What turns states into draft logits and teacher probabilities.

    Attributes:
        lm_head: ``[vocabulary, H]`` the backbone's output projection.
        draft_rows: ``[draft_vocab, H]`` its rows for the draft vocabulary.
    """

    lm_head: Tensor
    draft_rows: Tensor
    vocab: DraftVocab

    @classmethod
    def of(cls, lm_head: Tensor, vocab: DraftVocab, dtype: torch.dtype) -> Scorer:
        lm_head = lm_head.to(dtype)
        return cls(lm_head, vocab.rows(lm_head), vocab)

    def teacher(self, hidden: Tensor, lse: Tensor, temperature: float) -> Tensor:
        """Backbone probabilities at the draft vocabulary, ``[C, draft_vocab]``, normalised over all tokens.

        ``lse`` is the log-normaliser at temperature 1; another temperature needs the whole vocabulary.
        """
        hidden = hidden.to(self.lm_head.dtype)
        if temperature == 1:
            return F.linear(hidden, self.draft_rows).float().sub_(lse[:, None]).exp_()
        probabilities = torch.softmax(F.linear(hidden, self.lm_head).float() / temperature, dim=-1)
        return probabilities if self.vocab.whole else probabilities[:, self.vocab.ids]


@dataclass
class Tally:
    """Sums over positions by depth, ``[K]`` each; divide by ``count`` for means."""

    loss: Tensor
    match: Tensor
    alpha: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, depths: int) -> Tally:
        return cls(*(torch.zeros(depths, dtype=torch.float64) for _ in range(4)))

    def add(self, other: Tally) -> None:
        self.loss += other.loss
        self.match += other.match
        self.alpha += other.alpha
        self.count += other.count


def loss_and_gradient(
    states: list[Tensor],
    batch: Batch,
    scorer: Scorer,
    objective: Objective,
    weights: Tensor,
    chunk_rows: int,
    *,
    counts: Tensor | None = None,
    backward: bool = True,
    measure: bool = False,
) -> Tally:
    """Run the objective over a batch; with ``backward``, back-propagate through ``states``.

    Args:
        states: K tensors ``[A, H]`` from a head.
        weights: ``[K]`` depth weights; the loss is sum_d weights[d] * mean over depth d's positions.
        chunk_rows: rows of logits alive at once.
        counts: ``[K]`` positions of the whole batch, where ``batch`` is a part of one; default: its own.
        measure: also tally argmax match with the target and alpha (needs the teacher).

    Returns:
        Tally of unweighted losses by depth.
    """
    packed = batch.packed
    depths = packed.depths
    stacked = torch.stack(states)
    source = stacked.detach()
    gradient = torch.zeros_like(source)
    tally = Tally.zeros(depths)
    tally.count = packed.mask.sum(1).double()
    scale = (weights / (packed.mask.sum(1) if counts is None else counts).clamp(min=1))[:, None]
    target = scorer.vocab.index[packed.targets]
    depth_index = torch.arange(depths)[:, None]
    for chunk in torch.arange(len(packed.teachers)).split(max(1, chunk_rows // depths)):
        mask, rows = packed.mask[:, chunk], packed.rows[:, chunk]
        p = None
        if objective.needs_teacher or measure:
            p = scorer.teacher(batch.hidden[packed.teachers[chunk]], batch.lse[chunk], objective.temperature)
        state = source[depth_index, rows].requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            logits = F.linear(state, scorer.draft_rows)
            loss = objective.per_position(logits, p, target[chunk].expand(depths, -1))
            if backward:
                (slope,) = torch.autograd.grad((loss * (scale * mask)).sum(), state)
                gradient.index_put_((depth_index, rows), slope, accumulate=True)
        tally.loss += (loss.detach() * mask).sum(1)
        if measure:
            assert p is not None
            hit = scorer.vocab.ids[logits.detach().argmax(-1)] == packed.targets[chunk]
            tally.match += (hit & mask).sum(1)
            tally.alpha += (acceptance(logits.detach(), p) * mask).sum(1)
    if backward:
        stacked.backward(gradient)
    return tally
