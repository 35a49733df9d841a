"""A partly unfrozen backbone in training: its states with their graph, and its own next-token loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from selfspec.backbones import middle
from selfspec.backbones.load import BackboneError, output_projection
from selfspec.backbones.unfreeze import unfreeze
from selfspec.heads.alignment import Packed
from selfspec.losses import kl


@dataclass(frozen=True)
class MainLoss:
    """What an unfrozen backbone learns beside what its heads ask of it.

    Attributes:
        weight: of its next-token cross-entropy.
        teacher_weight: of KL(teacher || backbone), where there is a teacher.
    """

    weight: float = 1.0
    teacher_weight: float = 1.0


class TrainableBackbone:
    """The backbone as ``transformers`` runs it, with its last layers, final norm and lm_head unfrozen.

    Args:
        teacher: a backbone with the same vocabulary to learn from.

    Attributes:
        parameters: what is trained, by name.

    Raises:
        BackboneError: a teacher with another vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        middle_layers: Sequence[int] = (),
        teacher: PreTrainedModel | None = None,
    ) -> None:
        if teacher is not None and teacher.config.vocab_size != model.config.vocab_size:
            raise BackboneError(
                f"train.teacher: got one with a vocabulary of {teacher.config.vocab_size}; allowed: the backbone's "
                f"{model.config.vocab_size} tokens; choose a teacher of the same family"
            )
        self.model, self.middle_layers, self.teacher = model, middle_layers, teacher
        self.parameters = unfreeze(model, layers)

    def hidden(self, packed: Packed) -> Tensor:
        """States ``[N, W]`` of packed documents, each on its own, with the graph of what is unfrozen."""
        return self._run(self.model, packed, self.middle_layers)

    @staticmethod
    def _run(model: PreTrainedModel, packed: Packed, middle_layers: Sequence[int]) -> Tensor:
        lengths = torch.bincount(packed.document).tolist()
        padded = pad_sequence(list(packed.tokens.split(lengths)), batch_first=True)
        real = (
            torch.arange(padded.shape[1], device=padded.device) < torch.tensor(lengths, device=padded.device)[:, None]
        )
        inner: Any = model.get_decoder()
        # Right padding: no real token sees it, so the mask only spares a check of the padding's own rows.
        out = inner(
            input_ids=padded, attention_mask=real.long(), use_cache=False, output_hidden_states=bool(middle_layers)
        )
        beside = [middle.normalised(out.hidden_states[layer]) for layer in middle_layers]
        return torch.cat([out.last_hidden_state, *beside], dim=-1)[real]

    def learn(self, hidden: Tensor, packed: Packed, loss: MainLoss, count: int, chunk_rows: int) -> None:
        """Add the main loss's gradient to ``hidden`` (a leaf) and to the lm_head.

        The loss is a mean over ``count`` positions, of which ``packed.teachers`` (that score the completion's tokens)
        are some. Logits exist for ``chunk_rows`` positions at a time.
        """
        with torch.no_grad():
            taught_by = None if self.teacher is None else self._run(self.teacher, packed, ())
        for taught, targets in zip(packed.teachers.split(chunk_rows), packed.targets.split(chunk_rows), strict=True):
            logits = self._logits(hidden[taught])
            total = loss.weight * F.cross_entropy(logits, targets, reduction="sum")
            if self.teacher is not None and taught_by is not None:
                with torch.no_grad():
                    wanted = F.linear(taught_by[taught], output_projection(self.teacher)).float().softmax(-1)
                total = total + loss.teacher_weight * kl(logits, wanted).sum()
            (total / max(count, 1)).backward()

    @torch.no_grad()
    def log_normalisers(self, hidden: Tensor, packed: Packed, chunk_rows: int) -> Tensor:
        """``[P]`` of the next-token distribution at ``packed.teachers``."""
        return torch.cat([self._logits(hidden[t]).logsumexp(-1) for t in packed.teachers.split(chunk_rows)])

    def _logits(self, states: Tensor) -> Tensor:
        rows = output_projection(self.model)
        return F.linear(middle.final(states, rows.shape[1]), rows).float()
