"""How drafts are proposed and accepted: greedy matching, and rejection sampling that keeps the distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from selfspec.heads.vocab import DraftVocab


@dataclass(frozen=True)
class Verdict:
    """Per row: how many drafts are accepted ``[rows]`` and the token the backbone adds after them ``[rows]``."""

    accepted: Tensor
    added: Tensor


class Rule(Protocol):
    """One decoding mode. ``propose`` is called once a depth, then ``verify`` once a round."""

    def first(self, logits: Tensor) -> Tensor:
        """The backbone's own next token ``[rows]`` from ``logits [rows, vocabulary]``."""

    def propose(self, logits: Tensor, vocab: DraftVocab) -> Tensor:
        """A draft ``[rows]`` (token ids) from ``logits [rows, draft_vocab]``."""

    def verify(self, logits: Tensor, drafts: Tensor, vocab: DraftVocab | None) -> Verdict:
        """Judge ``drafts [rows, K]`` by the backbone's ``logits [rows, K + 1, vocabulary]``."""


def leading(hits: Tensor) -> Tensor:
    """How many of ``hits [rows, K]`` are true before the first false one, ``[rows]``."""
    return hits.long().cumprod(dim=1).sum(dim=1)


def likeliest(logits: Tensor) -> Tensor:
    """Argmax over the last axis. Torch's argmax of bfloat16 takes four times as long on a CPU as that of float32."""
    return logits.float().argmax(-1)


class Greedy:
    """Accept a draft when it is the backbone's argmax: the output is the backbone's own greedy text."""

    def first(self, logits: Tensor) -> Tensor:
        return likeliest(logits)

    def propose(self, logits: Tensor, vocab: DraftVocab) -> Tensor:
        return vocab.ids[likeliest(logits)]

    def verify(self, logits: Tensor, drafts: Tensor, vocab: DraftVocab | None) -> Verdict:
        best = likeliest(logits)
        accepted = leading(best[:, :-1] == drafts)
        return Verdict(accepted, best.gather(1, accepted[:, None])[:, 0])


class Sampling:
    """Rejection sampling (Leviathan et al. 2023; Chen et al. 2023): committed tokens follow the backbone.

    Draft x from q, accept with probability min(1, p(x) / q(x)); at the first rejection sample from the
    residual max(0, p - q), normalised; after full acceptance sample the bonus token from p.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}, allowed: above 0 (greedy decoding is its own rule)")
        self.temperature = temperature
        self.generator = generator
        self._proposed: list[Tensor] = []

    def _distribution(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def _sample(self, probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def first(self, logits: Tensor) -> Tensor:
        return self._sample(self._distribution(logits))

    def propose(self, logits: Tensor, vocab: DraftVocab) -> Tensor:
        q = self._distribution(logits)
        self._proposed.append(q)
        return vocab.ids[self._sample(q)]

    def verify(self, logits: Tensor, drafts: Tensor, vocab: DraftVocab | None) -> Verdict:
        rows, count = drafts.shape
        if count == 0:
            return Verdict(torch.zeros(rows, dtype=torch.long, device=logits.device), self.first(logits[:, 0]))
        assert vocab is not None
        p = self._distribution(logits)
        q = torch.stack(self._proposed, dim=1)  # [rows, K, draft_vocab]
        self._proposed = []
        p_draft = p[:, :-1].gather(2, drafts[..., None])[..., 0]
        q_draft = q.gather(2, vocab.index[drafts][..., None])[..., 0]
        chance = torch.rand(drafts.shape, generator=self.generator, device=logits.device)
        accepted = leading(chance * q_draft < p_draft)
        row = torch.arange(rows, device=logits.device)
        final = p[row, accepted]
        rejected = accepted < count
        if bool(rejected.any()):
            residual = final.clone()
            residual[:, vocab.ids] -= q[row, accepted.clamp(max=count - 1)]
            residual.clamp_(min=0)
            # p = q up to rounding leaves nothing: then p itself is the right distribution.
            usable = rejected & (residual.sum(-1) > 0)
            final = torch.where(usable[:, None], residual, final)
        return Verdict(accepted, self._sample(final))


def rule_for(temperature: float, generator: torch.Generator) -> Rule:
    """Greedy at temperature 0 (``generator`` is then left alone), rejection sampling above.

    Raises:
        ValueError: a negative temperature.
    """
    return Sampling(temperature, generator) if temperature else Greedy()
