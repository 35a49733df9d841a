"""Loss and gradient over the draft vocabulary: in place, without keeping all logits.

``[anchors, depths, vocabulary]`` logits of one batch would take gigabytes at a large vocabulary, and
autograd would write each of them several times. Anchors are taken in chunks: the logits of a chunk's
chains are computed into buffers that the next chunk uses again, the gradient with respect to logits is
written down analytically beside them, and only its product with the output rows is kept. Depth d of
anchor a is taught by position a + d, so a teacher's distribution is computed once for all depths.

Memory: at most 6 float32 buffers of ``[chunk_rows, draft_vocab]`` beside states and weights (3 for
``ce``), whatever the batch; a softened ``kl`` has those of two distributions and ``[chunk_rows / depths,
vocabulary]`` teacher logits on top, own output rows one more buffer and their gradient. More rows a chunk
serve the matrix products, fewer the cache: at 8,192 tokens 96 to 512 are about equal on 2 AVX2 cores, at
49,152 tokens 96 are half again as fast as 512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.backbones import middle
from selfspec.backbones.linear import Linear
from selfspec.heads.alignment import Packed
from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective
from selfspec.training.data import Batch


@dataclass(frozen=True)
class Scorer:
    """What turns states into draft logits and teacher probabilities.

    Attributes:
        lm_head: ``[vocabulary, H]`` the backbone's output projection.
        draft_rows: ``[draft_vocab, H]`` its rows for the draft vocabulary.
        project: the product with ``draft_rows``, packed for the CPU.
    """

    lm_head: Tensor
    draft_rows: Tensor
    project: Linear
    vocab: DraftVocab

    @classmethod
    def of(cls, lm_head: Tensor, vocab: DraftVocab, dtype: torch.dtype) -> Scorer:
        lm_head = lm_head.detach().to(dtype)
        rows = vocab.rows(lm_head)
        return cls(lm_head, rows, Linear(rows), vocab)

    @torch.no_grad()
    def teacher(self, hidden: Tensor, lse: Tensor, temperature: float) -> Tensor:
        """Backbone probabilities at the draft vocabulary, ``[C, draft_vocab]``, normalised over all tokens.

        ``hidden [C, W]`` are the backbone's states, of which the final ones count. ``lse`` is the log-normaliser
        at temperature 1; another temperature needs the whole vocabulary.
        """
        hidden = middle.final(hidden, self.lm_head.shape[1]).to(self.lm_head.dtype)
        if temperature == 1:
            return _wide(self.project(hidden)).sub_(lse[:, None]).exp_()
        logits = _wide(hidden @ self.lm_head.t()).div_(temperature)
        probabilities = torch.softmax(logits, dim=-1, out=logits)
        return probabilities if self.vocab.whole else probabilities[:, self.vocab.ids]


def _wide(x: Tensor) -> Tensor:
    """Losses are computed in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass
class Tally:
    """Sums over positions by depth, ``[K]`` each; divide by ``count`` for means."""

    loss: Tensor
    match: Tensor
    alpha: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, depths: int, device: torch.device | None = None) -> Tally:
        return cls(*(torch.zeros(depths, dtype=torch.float64, device=device) for _ in range(4)))

    def add(self, other: Tally) -> None:
        for name, total in vars(self).items():
            total += getattr(other, name).to(total.device)


class _Buffers:
    """Named ``[rows, width]`` tensors that every chunk uses again; allocated when first asked for."""

    def __init__(self, rows: int, like: Tensor) -> None:
        self._rows, self._like = rows, like
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, rows: int) -> Tensor:
        if name not in self._kept:
            self._kept[name] = self._like.new_empty(self._rows, self._like.shape[1])
        return self._kept[name][:rows]


@dataclass(frozen=True)
class Teacher:
    """The backbone's distribution at the chunk's teacher positions.

    Attributes:
        p: ``[M, V]``.
        mass: ``[M]`` its sum over the draft vocabulary.
        negative_entropy: ``[M]`` sum of p log p over it.
    """

    p: Tensor
    mass: Tensor
    negative_entropy: Tensor

    @classmethod
    def of(cls, p: Tensor) -> Teacher:
        return cls(p, p.sum(-1), -torch.special.entr(p).sum(-1))


class Rows:
    """Drafts ``[R, V]`` of one chunk at one temperature, beside their teachers.

    Attributes:
        logits: over the temperature.
        q: their softmax.
        lse: ``[R]`` their log-normalisers.
        p, mass, negative_entropy: as ``Teacher``, a row each; where the objective has a teacher.
        target: ``[R]`` index into the draft vocabulary, -1 outside.
        scratch: ``[R, V]`` for whoever computes; where the objective has a teacher.
    """

    def __init__(
        self,
        logits: Tensor,
        temperature: float,
        target: Tensor,
        teacher: Teacher | None,
        taught_by: Tensor,
        buffers: _Buffers,
    ) -> None:
        """``taught_by``: ``[R]`` row of the teacher."""
        count, suffix = len(logits), f" at {temperature}"
        if temperature != 1:
            logits = torch.div(logits, temperature, out=buffers.take("logits" + suffix, count))
        self.logits, self.temperature, self.target = logits, temperature, target
        peak = logits.amax(-1, keepdim=True)
        self.q = torch.sub(logits, peak, out=buffers.take("q" + suffix, count)).exp_()
        total = self.q.sum(-1, keepdim=True)
        self.q.div_(total)
        self.lse = (peak + total.log())[:, 0]
        if teacher is not None:
            self.p = torch.index_select(teacher.p, 0, taught_by, out=buffers.take("p" + suffix, count))
            self.mass, self.negative_entropy = teacher.mass[taught_by], teacher.negative_entropy[taught_by]
            self.scratch = buffers.take("scratch", count)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """``[R]`` sum over the vocabulary of a * b."""
        return torch.mul(a, b, out=self.scratch).sum(-1)


class Quantity:
    """One of ``losses.QUANTITIES`` with its gradient, both without autograd.

    A quantity that is a function of q = softmax(z) alone has the gradient q_v (g_v - sum_u q_u g_u) with
    respect to z_v, where g is its gradient with respect to q.
    """

    def value(self, rows: Rows) -> Tensor:
        """``[R]``."""
        raise NotImplementedError

    def add_slope(self, rows: Rows, rate: Tensor, slope: Tensor) -> None:
        """Add ``rate [R]`` times the gradient with respect to the logits (before softening) to ``slope [R, V]``."""
        raise NotImplementedError


class CrossEntropy(Quantity):
    """-log q at the target; gradient q - onehot(target)."""

    def value(self, rows: Rows) -> Tensor:
        at_target = rows.logits.gather(1, rows.target.clamp(min=0)[:, None])[:, 0]
        return (rows.lse - at_target).where(rows.target >= 0, 0)

    def add_slope(self, rows: Rows, rate: Tensor, slope: Tensor) -> None:
        rate = rate.where(rows.target >= 0, 0)[:, None]
        slope.addcmul_(rows.q, rate).scatter_add_(1, rows.target.clamp(min=0)[:, None], -rate)


class ForwardKL(Quantity):
    """T^2 sum p (log p - log q); gradient T (P q - p), where P is p's mass on the draft vocabulary."""

    def value(self, rows: Rows) -> Tensor:
        cross = rows.mass * rows.lse - rows.dot(rows.p, rows.logits)
        return rows.temperature**2 * (rows.negative_entropy + cross)

    def add_slope(self, rows: Rows, rate: Tensor, slope: Tensor) -> None:
        rate = rate * rows.temperature
        slope.addcmul_(rows.q, (rate * rows.mass)[:, None]).addcmul_(rows.p, -rate[:, None])


class ReverseKL(Quantity):
    """sum q (log q - log p); gradient q (log q - log p - value)."""

    @staticmethod
    def _log_p(rows: Rows) -> Tensor:
        return torch.clamp(rows.p, min=torch.finfo(rows.p.dtype).tiny, out=rows.scratch).log_()

    def value(self, rows: Rows) -> Tensor:
        return -self._log_p(rows).sub_(rows.logits).mul_(rows.q).sum(-1) - rows.lse

    def add_slope(self, rows: Rows, rate: Tensor, slope: Tensor) -> None:
        against = self._log_p(rows).sub_(rows.logits).add_(rows.lse[:, None]).mul_(rows.q)  # q (log p - log q)
        value = -against.sum(-1)
        slope.addcmul_(against, -rate[:, None]).addcmul_(rows.q, -(rate * value)[:, None])


class JensenShannon(Quantity):
    """(KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2; its gradient with respect to q is (log q - log m) / 2."""

    @staticmethod
    def _middle(rows: Rows) -> Tensor:
        tiny = torch.finfo(rows.p.dtype).tiny
        return torch.add(rows.p, rows.q, out=rows.scratch).mul_(0.5).clamp_(min=tiny)

    def value(self, rows: Rows) -> Tensor:
        entropies = rows.negative_entropy + rows.dot(rows.q, rows.logits) - rows.lse
        middle = self._middle(rows)
        inside = entropies / 2 - torch.special.xlogy(middle, middle, out=middle).sum(-1)
        return inside + (1 - rows.mass) * (math.log(2) / 2)

    def add_slope(self, rows: Rows, rate: Tensor, slope: Tensor) -> None:
        against = self._middle(rows).log_().sub_(rows.logits).add_(rows.lse[:, None]).mul_(rows.q)  # q (log m - log q)
        half = rate[:, None] / 2
        slope.addcmul_(against, -half).addcmul_(rows.q, half * against.sum(-1, keepdim=True))


class Acceptance(Quantity):
    """alpha = sum min(p, q); gradient q_v (1[q_v < p_v] - sum of q where q < p)."""

    def value(self, rows: Rows) -> Tensor:
        return torch.minimum(rows.p, rows.q, out=rows.scratch).sum(-1)

    def add_slope(self, rows: Rows, rate: Tensor, slope: Tensor) -> None:
        below = rows.scratch.copy_(rows.q).masked_fill_(rows.q >= rows.p, 0)
        slope.addcmul_(below, rate[:, None]).addcmul_(rows.q, -(rate * below.sum(-1))[:, None])


QUANTITIES: Mapping[str, Quantity] = {
    "ce": CrossEntropy(),
    "kl": ForwardKL(),
    "reverse_kl": ReverseKL(),
    "js": JensenShannon(),
    "alpha": Acceptance(),
}


def loss_and_gradient(
    states: list[Tensor],
    batch: Batch,
    scorer: Scorer,
    objective: Objective,
    weights: Tensor,
    chunk_rows: int,
    *,
    output_rows: Callable[[int], Tensor | None] = lambda depth: None,
    counts: Tensor | None = None,
    mean_alpha: Tensor | None = None,
    backward: bool = True,
    measure: bool = False,
) -> Tally:
    """Run the objective over a batch; with ``backward``, back-propagate through ``states`` and own output rows.

    Args:
        states: K tensors ``[A, H]`` from a head.
        weights: ``[K]`` depth weights; the loss is sum_d weights[d] * mean over depth d's positions.
        chunk_rows: rows of logits alive at once.
        output_rows: ``Head.output_rows``, of the head that the states are from.
        counts: ``[K]`` positions of the whole batch, where ``batch`` is a part of one; default: its own.
        mean_alpha: ``[K]`` mean acceptance of the whole batch; needed where ``objective.needs_mean_alpha``.
        measure: also tally argmax match with the target and alpha (needs the teacher).

    Returns:
        Tally of unweighted losses by depth.
    """
    sweep = _Sweep(states, batch, scorer, objective, weights, chunk_rows, output_rows, counts, mean_alpha)
    for start in range(0, len(batch.packed.anchors), sweep.step):
        sweep.chunk(slice(start, start + sweep.step), backward, measure)
    if backward:
        own = [(rows, slope) for rows, slope in zip(sweep.own, sweep.own_gradient, strict=True) if rows is not None]
        torch.autograd.backward(
            [*states, *(rows for rows, _ in own)],
            [*sweep.gradient, *(slope.to(rows.dtype) for rows, slope in own)],
        )
    return sweep.tally


class _Sweep:
    """One pass over a batch: what the chunks share, and what they leave behind."""

    def __init__(
        self,
        states: list[Tensor],
        batch: Batch,
        scorer: Scorer,
        objective: Objective,
        weights: Tensor,
        chunk_rows: int,
        output_rows: Callable[[int], Tensor | None],
        counts: Tensor | None,
        mean_alpha: Tensor | None,
    ) -> None:
        packed = batch.packed
        self.batch, self.scorer, self.objective = batch, scorer, objective
        self.source = torch.stack([state.detach() for state in states])
        self.gradient = torch.zeros_like(self.source)
        self.own = [output_rows(depth) for depth in range(packed.depths)]
        self.own_gradient = [
            torch.zeros(0) if rows is None else torch.zeros_like(_wide(rows.detach())) for rows in self.own
        ]
        self.taught, self.taught_by = _by_anchor(packed)
        self.target = scorer.vocab.index[packed.targets]
        count = packed.mask.sum(1)
        self.scale = (weights / (count if counts is None else counts).clamp(min=1))[:, None]
        self.mean_alpha = None if mean_alpha is None else mean_alpha[:, None].to(_wide(self.source).dtype)
        self.step = max(1, chunk_rows // packed.depths)
        rows = min(self.step, len(packed.anchors)) * packed.depths
        like = torch.empty(0, len(scorer.vocab), dtype=_wide(self.source).dtype, device=self.source.device)
        self.buffers = _Buffers(rows, like)
        self.tally = Tally.zeros(packed.depths, self.source.device)
        self.tally.count = count.double()

    @torch.no_grad()
    def chunk(self, anchors: slice, backward: bool, measure: bool) -> None:
        """Loss, and with ``backward`` the gradient, of the chains of some anchors."""
        taught = self.taught[:, anchors]
        if not bool(taught.any()):
            return
        logits = self._logits(anchors)
        softened = {self.objective.softening(name) for name in self.objective.quantities if name != "ce"}
        softened |= {1.0} if measure else set()
        temperatures = softened | {self.objective.softening(name) for name in self.objective.quantities}
        rows = {t: self._rows(logits, t, anchors, has_teacher=t in softened) for t in temperatures}
        by_name = {name: rows[self.objective.softening(name)] for name in self.objective.quantities}
        values = {name: QUANTITIES[name].value(of).view(taught.shape) for name, of in by_name.items()}
        loss, rates = self._combine(values, taught, self.scale)
        self.tally.loss += loss.where(taught, 0).double().sum(1)
        if measure:
            hit = (logits.argmax(-1) == rows[1.0].target).view(taught.shape)
            self.tally.match += (hit & taught).sum(1)
            alpha = QUANTITIES["alpha"].value(rows[1.0]).view(taught.shape)
            self.tally.alpha += alpha.where(taught, 0).double().sum(1)
        if backward:
            slope = self.buffers.take("slope", len(logits)).zero_()
            for name, of in by_name.items():
                QUANTITIES[name].add_slope(of, rates[name].flatten(), slope)
            self._back_to_states(slope, anchors)

    def _logits(self, anchors: slice) -> Tensor:
        """``[R, V]``, R = depths * anchors, depth by depth."""
        source = self.source[:, anchors]
        if all(own is None for own in self.own):
            return _wide(self.scorer.project(source.flatten(0, 1)))
        logits = self.buffers.take("logits", source.shape[0] * source.shape[1])
        for state, own, out in zip(source, self.own, logits.chunk(len(source)), strict=True):
            out.copy_(self.scorer.project(state) if own is None else state @ own.detach().t())
        return logits

    def _rows(self, logits: Tensor, temperature: float, anchors: slice, has_teacher: bool) -> Rows:
        by = self.taught_by[:, anchors]
        target = self.target[by].where(self.taught[:, anchors], -1).flatten()
        if not has_teacher:
            return Rows(logits, temperature, target, None, by.flatten(), self.buffers)
        seen = by[self.taught[:, anchors]]
        first, last = int(seen.min()), int(seen.max())
        hidden = self.batch.hidden[self.batch.packed.teachers[first : last + 1]]
        teacher = Teacher.of(self.scorer.teacher(hidden, self.batch.lse[first : last + 1], temperature))
        # A depth without a loss gets any teacher: its rate is 0.
        return Rows(logits, temperature, target, teacher, (by - first).clamp(0, last - first).flatten(), self.buffers)

    def _combine(self, values: dict[str, Tensor], taught: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss ``[K, C]``, and by quantity the derivative of the batch's loss with respect to it.

        A few numbers a position, so autograd may do it.
        """
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            loss = self.objective.combine(leaves, taught, self.mean_alpha)
            slopes = torch.autograd.grad((loss * scale).where(taught, 0).sum(), list(leaves.values()))
        return loss.detach(), dict(zip(leaves, slopes, strict=True))

    def _back_to_states(self, slope: Tensor, anchors: slice) -> None:
        narrow = slope.to(self.source.dtype)
        source, gradient = self.source[:, anchors], self.gradient[:, anchors]
        if all(own is None for own in self.own):
            gradient.copy_((narrow @ self.scorer.draft_rows).view(gradient.shape))
            return
        for depth, part in enumerate(narrow.chunk(len(source))):
            own = self.own[depth]
            gradient[depth] = part @ (self.scorer.draft_rows if own is None else own.detach())
            if own is not None:
                self.own_gradient[depth].add_(part.t() @ source[depth])


def _by_anchor(packed: Packed) -> tuple[Tensor, Tensor]:
    """``mask`` and the teachers the other way round: by depth and anchor, ``[K, A]`` each.

    Returns:
        Whether depth d of the anchor has a loss, and the index into ``teachers`` of what teaches it (0 where none).
    """
    shape = packed.depths, len(packed.anchors)
    taught = torch.zeros(shape, dtype=torch.bool, device=packed.mask.device)
    by = torch.zeros(shape, dtype=torch.long, device=packed.mask.device)
    depth, position = packed.mask.nonzero(as_tuple=True)
    anchor = packed.rows[depth, position]
    taught[depth, anchor] = True
    by[depth, anchor] = position
    return taught, by
