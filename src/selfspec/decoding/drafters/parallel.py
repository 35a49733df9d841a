"""Drafting with parallel heads: one product per depth, nothing cached."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.linear import Linear
from selfspec.decoding.drafters import weights
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.parallel import ParallelHead


class NoCache:
    """What heads that read one state alone have to remember."""

    def select(self, rows: list[int]) -> NoCache:
        return self


class ParallelDrafter:
    """The heads' weights arranged for drafting on top of ``decoder``.

    The state passed on is the newest anchor's h for all depths; ``logits`` runs the depth's blocks.
    """

    def __init__(self, decoder: Decoder, head: TrainedHead) -> None:
        module = head.module
        assert isinstance(module, ParallelHead)
        self.decoder, self.vocab, self.facts = decoder, head.vocab, head.facts
        self.max_drafts: int | None = module.depths
        self.blocks = [
            [Linear(weight.detach().to(decoder.dtype)) for weight in block.parameters()] for block in module.blocks
        ]
        self.temperatures = module.log_temperatures.detach().to(decoder.dtype).exp()
        self._scorers = weights.scorers(decoder, head)
        self._nbytes = weights.nbytes(decoder, head)

    def nbytes(self) -> int:
        """Memory the heads add: their weights and their output rows, own or copied."""
        return self._nbytes

    def new_cache(self, rows: int, limit: int, num_drafts: int | None = None) -> NoCache:
        return NoCache()

    def observe(self, tokens: Tensor, states: Tensor, counts: list[int], cache: NoCache) -> Tensor:
        """``[rows, H]`` the true state of each row's newest anchor, of ``states [rows, time, H]``."""
        rows = torch.arange(len(counts), device=states.device)
        return states[rows, torch.tensor(counts, device=states.device) - 1]

    def deepen(self, token: Tensor, state: Tensor, depth: int, cache: NoCache) -> Tensor:
        """``state`` as it is: no depth reads another's draft."""
        return state

    @torch.inference_mode()
    def state(self, state: Tensor, depth: int) -> Tensor:
        """What depth ``depth`` (from 1) makes of the backbone's ``state [rows, H]``, over its temperature."""
        for layer in self.blocks[depth - 1]:
            state = state + torch.nn.functional.silu(layer(state))
        return state / self.temperatures[depth - 1]

    @torch.inference_mode()
    def logits(self, state: Tensor, depth: int = 1) -> Tensor:
        """Scores over the draft vocabulary, ``[rows, draft_vocab]``."""
        return self._scorers[depth - 1](self.state(state, depth))
