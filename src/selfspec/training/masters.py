"""Float32 weights behind parameters that compute in a narrower dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class MasterWeights:
    """What an optimiser updates in place of a module's own parameters.

    Updates of a small learning rate vanish in bfloat16's 8 bits of mantissa; they are collected in
    float32 and rounded once a step.

    Args:
        working: parameters by name; they may be narrower, and are never replaced.
        exact: float32 values to start from where the working ones are rounded already.
    """

    def __init__(self, working: Mapping[str, nn.Parameter], exact: Mapping[str, Tensor] | None = None) -> None:
        self.working = dict(working)
        known = exact or {}
        self.masters = {name: known.get(name, part).detach().float().clone() for name, part in self.working.items()}

    def take_gradients(self) -> Tensor:
        """Move gradients to the masters; return their global norm. A parameter that got none has zeros."""
        for name, master in self.masters.items():
            gradient = self.working[name].grad
            master.grad = torch.zeros_like(master) if gradient is None else gradient.float()
            self.working[name].grad = None
        return self.norm()

    def norm(self) -> Tensor:
        """Of all gradients that the masters hold."""
        return torch.nn.utils.get_total_norm(self.gradients())

    def gradients(self) -> list[Tensor]:
        """In the masters' order."""
        return [master.grad for master in self.masters.values() if master.grad is not None]

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the working parameters."""
        for name, master in self.masters.items():
            self.working[name].copy_(master)
