"""Parallel heads: every depth reads the backbone's state alone (Medusa, arXiv 2401.10774)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.backbones.rotary import RotaryTable
from selfspec.heads import parts
from selfspec.heads.alignment import Packed
from selfspec.heads.protocol import Drafts, Head
from selfspec.heads.vocab import DraftVocab


class ResidualBlocks(nn.Module):
    """``x + SiLU(W x)``, ``layers`` times; every W starts at zero, so that the state starts as the backbone's."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class ParallelHead(Head):
    """Depth d at anchor i scores x[i+d+1] from h[i], without any token between the two.

    Every depth has a learned temperature T_d, as in the heads of docs/systems.md, D (their form is not published): its
    state is divided by T_d, so that the draft logits are ``(state / T_d) @ rows``. The deeper a depth, the less it
    knows, and the flatter its distribution should be; rows shared by all depths cannot do that for one of them.
    The argmax, and with it greedy drafting, does not depend on T_d. Losses, overlap with the backbone and sampled
    acceptance do.

    Attributes:
        log_temperatures: ``[K]`` log T_d, from 0.

    Args:
        model: the backbone.
        depths: K; each has blocks of its own, so that it cannot be run deeper.
        vocab: the draft vocabulary that own output rows are for.
        layers: residual blocks a depth.
        output: ``own``: every depth trains a copy of the backbone's output rows.
    """

    kind = "parallel"

    def __init__(
        self,
        model: PreTrainedModel,
        depths: int,
        vocab: DraftVocab,
        *,
        layers: int = 1,
        output: Literal["shared", "own"] = "shared",
    ) -> None:
        super().__init__()
        self.depths, self.hidden_size = depths, model.config.hidden_size
        self.options = {"layers": layers, "output": output}
        self.blocks = nn.ModuleList(ResidualBlocks(self.hidden_size, layers) for _ in range(depths))
        self.log_temperatures = nn.Parameter(torch.zeros(depths))
        self.lm_heads = parts.own_rows(model, vocab, depths) if output == "own" else None

    def output_rows(self, depth: int) -> Tensor | None:
        return None if self.lm_heads is None else self.lm_heads[depth]

    def forward(
        self, packed: Packed, hidden: Tensor, embedding: Tensor, rotary: RotaryTable, drafts: Drafts | None = None
    ) -> list[Tensor]:
        """As ``Head.forward``; ``embedding``, ``rotary`` and ``drafts`` are not read.

        Raises:
            ValueError: more depths packed than the head has.
        """
        self.check_depths(packed.depths)
        anchored = hidden[packed.anchors]
        temperatures = self.log_temperatures.exp()
        return [block(anchored) / temperatures[depth] for depth, block in enumerate(list(self.blocks)[: packed.depths])]
