"""What a training stage starts with: datasets, from the files of the stages before it, and optimisers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.backbones import middle
from selfspec.backbones.decoder import Decoder
from selfspec.backbones.load import DTYPES, arithmetic
from selfspec.config import BackboneConfig, SharedTrainConfig, TrainConfig
from selfspec.distill import records
from selfspec.distill.states import LiveStates, StoredStates
from selfspec.training.data import Dataset, StateSource


def datasets(
    backbone: BackboneConfig,
    shared: SharedTrainConfig,
    states: str,
    seed: int,
    model: PreTrainedModel,
    depths: int,
    middle_layers: tuple[int, ...] = (),
    data: Path = Path("data"),
) -> list[Dataset]:
    """Training and validation completions with the backbone's states and those of ``middle_layers``.

    Args:
        states: ``distill.states``: cached ones are read, live ones computed; by the training step itself where the
            backbone is trained too.

    Raises:
        StatesError: other states are stored.
    """
    store = DTYPES[backbone.dtype]
    frozen = not shared.unfrozen_layers
    decoder = Decoder(model, middle_layers=middle_layers) if states == "live" and frozen else None
    width = middle.width(model.config.hidden_size, middle_layers)
    made = []
    for split, fraction in (("train", shared.data_fraction), ("validation", 1.0)):
        completions = records.read(data / "distill" / split)
        source: StateSource | None = None
        if decoder is not None:
            source = LiveStates(decoder, completions, store)
        elif states == "cached":
            source = StoredStates.open(data / "hidden", split, store, width)
        made.append(Dataset(completions, source, depths, fraction, seed))
    return made


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, in the arithmetic that the machine has.

    Torch orthogonalises in bfloat16 whatever the machine: on a CPU without bfloat16 instructions that took
    24 s of a 28 s step (AVX2, 2 threads). There it is float32, which only rounds less.
    """

    MOMENTUM = 0.95
    COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, Jordan et al. 2024
    STEPS = 5

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(list(params), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; ``closure`` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state: dict[str, Any] = self.state[weight]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - self.MOMENTUM)
                update = orthogonalised(weight.grad.lerp(momentum, self.MOMENTUM))  # Nesterov
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * math.sqrt(max(weight.shape)) * group["lr"])


def orthogonalised(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix with all singular values brought to about 1, by ``Muon.STEPS`` Newton-Schulz iterations.

    Args:
        dtype: of the iterations; default: bfloat16, or float32 where the CPU has no instructions for it.
    """
    x = matrix.to(arithmetic(torch.bfloat16) if dtype is None else dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)  # the largest singular value is then at most 1
    a, b, c = Muon.COEFFICIENTS
    for _ in range(Muon.STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def build_optimizers(
    masters: Mapping[str, Tensor], config: TrainConfig, backbone: Mapping[str, Tensor] | None = None, rate: float = 0.0
) -> list[torch.optim.Optimizer]:
    """``adamw`` for all weights of a head, or ``muon`` for the matrices and AdamW for the rest.

    Muon (Jordan et al. 2024; scaled to AdamW's update size as in Liu et al. 2025, arXiv 2502.16982)
    orthogonalises each matrix's momentum. Own output rows (``lm_heads``) go to AdamW as both papers have it
    for embeddings and output layers: a row is a token, and most rows see little gradient.

    Depth-1 match was 0.28 with it against 0.23 with AdamW, measured on 600 completions, one seed, AdamW at
    one learning rate; no claim beyond that.

    Every parameter group carries its ``peak`` learning rate, which the schedule scales.

    Args:
        masters: of the head, by parameter name.
        backbone: of what is unfrozen; AdamW with ``rate``.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in masters.items():
        for_muon = config.optimizer == "muon" and weight.ndim == 2 and "lm_heads" not in name
        (matrices if for_muon else others).append(weight)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay))
    for weights, peak in ((others, config.learning_rate), (list((backbone or {}).values()), rate)):
        if weights:
            optimizers.append(
                torch.optim.AdamW(weights, lr=peak, weight_decay=config.weight_decay, betas=(0.9, 0.95), fused=True)
            )
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    return optimizers
