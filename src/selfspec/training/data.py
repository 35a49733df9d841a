"""Batches of completions with their hidden states, in a seeded order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from selfspec.distill.records import Completion
from selfspec.distill.states import States
from selfspec.heads.alignment import Packed, pack


@dataclass(frozen=True)
class Batch:
    """Packed completions.

    Attributes:
        hidden: ``[N, W]`` final-norm states of the backbone, with those of the head's middle layers; empty where
            the trainer computes them itself.
        lse: ``[P]`` log-normalisers of the teacher's distribution at ``packed.teachers``; likewise.
        ids: record ids, for error messages.
    """

    packed: Packed
    hidden: Tensor
    lse: Tensor
    ids: list[str]

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return Batch(self.packed.to(device), self.hidden.to(device), self.lse.to(device), self.ids)


class StateSource(Protocol):
    """States of all completions back to back: stored ones (``StoredStates``) or computed ones (``LiveStates``)."""

    def __len__(self) -> int:
        """Tokens."""

    def rows(self, start: int, end: int) -> States:
        """States of the tokens ``start`` to ``end``."""


class Dataset:
    """Completions and the backbone's states over them, addressable by batch.

    Args:
        states: None where the backbone is trained too, so that only the trainer can tell them.
        fraction: share of the completions that is taken, drawn with ``seed``.

    Attributes:
        taken: indices of the completions that are taken.
        usable: those of them that teach.
    """

    def __init__(
        self,
        completions: Sequence[Completion],
        states: StateSource | None,
        depths: int,
        fraction: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.completions = completions
        self.states = states
        self.depths = depths
        self.offsets = [0]
        for completion in completions:
            self.offsets.append(self.offsets[-1] + completion.length)
        if states is not None and self.offsets[-1] != len(states):
            raise ValueError(f"{len(states)} hidden states for {self.offsets[-1]} tokens: rerun distill")
        count = max(1, round(fraction * len(completions)))
        drawn = torch.randperm(len(completions), generator=torch.Generator().manual_seed(seed))
        self.taken = sorted(drawn[:count].tolist())
        # A completion of one token teaches nothing beyond the backbone's own next token.
        self.usable = [i for i in self.taken if len(completions[i].completion_ids) > 1]

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = [self.completions[i] for i in indices]
        packed = pack([torch.tensor(c.tokens) for c in chosen], [len(c.prompt_ids) for c in chosen], self.depths)
        if self.states is None:
            return Batch(packed, torch.empty(0), torch.empty(0), [c.id for c in chosen])
        parts = [self.states.rows(self.offsets[i], self.offsets[i + 1]) for i in indices]
        hidden = torch.cat([part.hidden for part in parts])
        lse = torch.cat([part.lse for part in parts])[packed.teachers]
        return Batch(packed, hidden, lse, [c.id for c in chosen])

    def parts(self, indices: Sequence[int], number: int) -> list[Batch]:
        """The batch of ``indices`` in at most ``number`` parts of about equal tokens, without empty ones."""
        return [self.batch(group) for group in self.shares(indices, number) if group]

    def shares(self, indices: Sequence[int], number: int) -> list[list[int]]:
        """``indices`` dealt out into ``number`` groups of about equal tokens; some are empty if there are too few."""
        longest_first = sorted(indices, key=lambda i: -self.completions[i].length)
        groups: list[list[int]] = [[] for _ in range(number)]
        for i in longest_first:
            min(groups, key=lambda group: sum(self.completions[j].length for j in group)).append(i)
        return groups

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
