"""A partly unfrozen backbone in training: its states with their graph, and its own next-token loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from selfspec.backbones import middle
from selfspec.backbones.load import output_projection
from selfspec.backbones.unfreeze import unfreeze
from selfspec.heads.alignment import Packed


class TrainableBackbone:
    """The backbone as ``transformers`` runs it, with its last layers, final norm and lm_head unfrozen.

    Attributes:
        parameters: what is trained, by name.
    """

    def __init__(self, model: PreTrainedModel, layers: int, middle_layers: Sequence[int] = ()) -> None:
        self.model, self.middle_layers = model, middle_layers
        self.parameters = unfreeze(model, layers)

    def hidden(self, packed: Packed) -> Tensor:
        """States ``[N, W]`` of packed documents, each on its own, with the graph of what is unfrozen."""
        lengths = torch.bincount(packed.document).tolist()
        padded = pad_sequence(list(packed.tokens.split(lengths)), batch_first=True)
        real = (
            torch.arange(padded.shape[1], device=padded.device) < torch.tensor(lengths, device=padded.device)[:, None]
        )
        inner: Any = self.model.get_decoder()
        # Right padding: no real token sees it, so the mask only spares a check of the padding's own rows.
        out = inner(
            input_ids=padded, attention_mask=real.long(), use_cache=False, output_hidden_states=bool(self.middle_layers)
        )
        beside = [middle.normalised(out.hidden_states[layer]) for layer in self.middle_layers]
        return torch.cat([out.last_hidden_state, *beside], dim=-1)[real]

    def main_loss(self, hidden: Tensor, packed: Packed, weight: float, chunk_rows: int, backward: bool) -> Tensor:
        """Next-token cross-entropy, summed over ``packed.teachers`` (the completion's tokens), float64 scalar.

        With ``backward``, ``weight`` times its gradient is added to ``hidden`` (a leaf) and to the lm_head. Logits
        exist for ``chunk_rows`` positions at a time.
        """
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for taught, targets in zip(packed.teachers.split(chunk_rows), packed.targets.split(chunk_rows), strict=True):
            with torch.set_grad_enabled(backward):
                loss = F.cross_entropy(self._logits(hidden[taught]), targets, reduction="sum")
            total += loss.detach()
            if backward:
                (loss * weight).backward()
        return total

    @torch.no_grad()
    def log_normalisers(self, hidden: Tensor, packed: Packed, chunk_rows: int) -> Tensor:
        """``[P]`` of the next-token distribution at ``packed.teachers``."""
        return torch.cat([self._logits(hidden[t]).logsumexp(-1) for t in packed.teachers.split(chunk_rows)])

    def _logits(self, states: Tensor) -> Tensor:
        rows = output_projection(self.model)
        return F.linear(middle.final(states, rows.shape[1]), rows).float()
