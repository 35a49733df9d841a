"""Batches of completions with their hidden states, in a seeded order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.distill.records import Completion
from selfspec.distill.states import StoredStates
from selfspec.heads.alignment import Packed, pack


@dataclass(frozen=True)
class Batch:
    """Packed completions.

    Attributes:
        hidden: ``[N, W]`` final-norm states of the backbone, with those of the head's middle layers.
        lse: ``[P]`` log-normalisers of the teacher's distribution at ``packed.teachers``.
        ids: record ids, for error messages.
    """

    packed: Packed
    hidden: Tensor
    lse: Tensor
    ids: list[str]

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return Batch(self.packed.to(device), self.hidden.to(device), self.lse.to(device), self.ids)


class Dataset:
    """Completions and their cached states, addressable by batch."""

    def __init__(self, completions: Sequence[Completion], states: StoredStates, depths: int) -> None:
        self.completions = completions
        self.states = states
        self.depths = depths
        self.offsets = [0]
        for completion in completions:
            self.offsets.append(self.offsets[-1] + completion.length)
        if self.offsets[-1] != len(states):
            raise ValueError(f"{len(states)} hidden states for {self.offsets[-1]} tokens: rerun distill")
        # A completion of one token teaches nothing beyond the backbone's own next token.
        self.usable = [i for i, completion in enumerate(completions) if len(completion.completion_ids) > 1]

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = [self.completions[i] for i in indices]
        packed = pack([torch.tensor(c.tokens) for c in chosen], [len(c.prompt_ids) for c in chosen], self.depths)
        parts = [self.states.rows(self.offsets[i], self.offsets[i + 1]) for i in indices]
        hidden = torch.cat([part.hidden for part in parts])
        lse = torch.cat([part.lse for part in parts])[packed.teachers]
        return Batch(packed, hidden, lse, [c.id for c in chosen])

    def parts(self, indices: Sequence[int], number: int) -> list[Batch]:
        """The batch of ``indices`` in at most ``number`` parts of about equal tokens, without empty ones."""
        longest_first = sorted(indices, key=lambda i: -self.completions[i].length)
        groups: list[list[int]] = [[] for _ in range(min(number, len(indices)))]
        for i in longest_first:
            min(groups, key=lambda group: sum(self.completions[j].length for j in group)).append(i)
        return [self.batch(group) for group in groups if group]

    def batches_per_epoch(self, size: int) -> int:
        return -(-len(self.usable) // size)

    def epochs(self, size: int, seed: int) -> Iterator[list[int]]:
        """Indices of shuffled batches without end; every epoch visits every completion once."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = [self.usable[i] for i in torch.randperm(len(self.usable), generator=generator).tolist()]
            for start in range(0, len(order), size):
                yield order[start : start + size]

    def once(self, size: int) -> Iterator[Batch]:
        """Every completion once, in order."""
        for start in range(0, len(self.usable), size):
            yield self.batch(self.usable[start : start + size])
