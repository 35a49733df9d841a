"""A partly unfrozen backbone in training: its states with their graph, and its own next-token loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from selfspec.backbones.load import output_projection
from selfspec.backbones.unfreeze import unfreeze
from selfspec.heads.alignment import Packed


class TrainableBackbone:
    """The backbone as ``transformers`` runs it, with its last layers, final norm and lm_head unfrozen.

    Attributes:
        parameters: what is trained, by name.
    """

    def __init__(self, model: PreTrainedModel, layers: int) -> None:
        self.model = model
        self.parameters = unfreeze(model, layers)

    def hidden(self, packed: Packed) -> Tensor:
        """Final-norm states ``[N, H]`` of packed documents, each on its own, with the graph of what is unfrozen."""
        lengths = torch.bincount(packed.document).tolist()
        padded = pad_sequence(list(packed.tokens.split(lengths)), batch_first=True)
        real = (
            torch.arange(padded.shape[1], device=padded.device) < torch.tensor(lengths, device=padded.device)[:, None]
        )
        inner: Any = self.model.get_decoder()
        # Right padding: no real token sees it, so the mask only spares a check of the padding's own rows.
        states: Tensor = inner(input_ids=padded, attention_mask=real.long(), use_cache=False).last_hidden_state
        return states[real]

    def main_loss(self, hidden: Tensor, packed: Packed, weight: float, chunk_rows: int, backward: bool) -> Tensor:
        """Next-token cross-entropy, summed over ``packed.teachers`` (the completion's tokens), float64 scalar.

        With ``backward``, ``weight`` times its gradient is added to ``hidden`` (a leaf) and to the lm_head. Logits
        exist for ``chunk_rows`` positions at a time.
        """
        rows = output_projection(self.model)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for taught, targets in zip(packed.teachers.split(chunk_rows), packed.targets.split(chunk_rows), strict=True):
            with torch.set_grad_enabled(backward):
                loss = F.cross_entropy(F.linear(hidden[taught], rows).float(), targets, reduction="sum")
            total += loss.detach()
            if backward:
                (loss * weight).backward()
        return total

    @torch.no_grad()
    def log_normalisers(self, hidden: Tensor, packed: Packed, chunk_rows: int) -> Tensor:
        """``[P]`` of the next-token distribution at ``packed.teachers``."""
        rows = output_projection(self.model)
        return torch.cat([F.linear(hidden[t], rows).float().logsumexp(-1) for t in packed.teachers.split(chunk_rows)])
