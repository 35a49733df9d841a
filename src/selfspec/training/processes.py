"""Several processes that train on one batch: each takes a share of its sequences, and sums meet.

`torchrun` starts and numbers them and Accelerate connects them (gloo on CPUs, NCCL on GPUs). Every
process holds all weights and makes the same update, so nothing but gradients and tallies is exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from selfspec.backbones.load import device


class Processes:
    """This process among its fellows; alone where no launcher started it.

    Attributes:
        count: how many there are.
        index: the number of this one, from 0.
    """

    def __init__(self) -> None:
        self._accelerator: Accelerator | None = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._accelerator = Accelerator(cpu=device().type == "cpu")
        self.count = self._accelerator.num_processes if self._accelerator else 1
        self.index = self._accelerator.process_index if self._accelerator else 0

    @property
    def first(self) -> bool:
        """Whether this one writes and prints for all."""
        return self.index == 0

    def total(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over the processes, in place, in one exchange a dtype."""
        if self._accelerator is None:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in chosen])
            summed: Tensor = self._accelerator.reduce(flat, reduction="sum")
            for tensor, part in zip(chosen, summed.split([tensor.numel() for tensor in chosen]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Until all are here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()
