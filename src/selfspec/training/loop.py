"""The training loop of a head on a frozen backbone."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from selfspec.backbones.load import DTYPES, input_embeddings, output_projection
from selfspec.backbones.rotary import RotaryTable
from selfspec.config import TrainConfig
from selfspec.errors import SelfspecError
from selfspec.heads.protocol import Head
from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective, depth_weights
from selfspec.training.chunked import Scorer, Tally, loss_and_gradient
from selfspec.training.data import Batch, Dataset

_LOG_EVERY = 20  # steps averaged into one row of the training curve


class TrainingError(SelfspecError):
    """Training cannot go on."""


def schedule(config: TrainConfig, steps: int) -> Callable[[int], float]:
    """Learning-rate factor by step: linear warm-up, then cosine, linear (both to 0) or constant."""
    warmup = max(1, round(config.warmup_fraction * steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        if config.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return 1 - progress if config.schedule == "linear" else 1.0

    return factor


class MasterWeights:
    """Float32 weights behind a module that computes in a narrower dtype.

    Updates of a small learning rate vanish in bfloat16's 8 bits of mantissa; they are collected in
    float32 and rounded once a step.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.masters = [parameter.detach().float().clone() for parameter in module.parameters()]
        module.to(dtype)
        self.working = list(module.parameters())

    def take_gradients(self) -> Tensor:
        """Move gradients to the masters; return their global norm."""
        for master, working in zip(self.masters, self.working, strict=True):
            assert working.grad is not None
            master.grad = working.grad.float()
            working.grad = None
        return torch.nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None])

    @torch.no_grad()
    def give_weights(self) -> None:
        for master, working in zip(self.masters, self.working, strict=True):
            working.copy_(master)


def build_optimizers(masters: list[Tensor], config: TrainConfig) -> list[torch.optim.Optimizer]:
    """``adamw`` for all weights, or ``muon`` for the matrices and AdamW for the rest.

    Muon (Jordan et al. 2024; scaled to AdamW's update size as in Liu et al. 2025, arXiv 2502.16982)
    orthogonalises each matrix's momentum. At equal data it brought depth-1 match from 0.23 to 0.28 here.
    """
    matrices = [master for master in masters if master.ndim == 2] if config.optimizer == "muon" else []
    others = [master for master in masters if not any(master is matrix for matrix in matrices)]
    rate, decay = config.learning_rate, config.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, weight_decay=decay, betas=(0.9, 0.95), fused=True))
    return optimizers


@dataclass
class Curve:
    """Rows of the training history (schema: docs/metrics.md)."""

    rows: list[dict[str, float | int | str]]

    def add(self, step: int, epoch: float, split: str, tally: Tally, learning_rate: float, norm: float | None) -> None:
        for depth in range(len(tally.count)):
            count = float(tally.count[depth])
            measured = split == "validation"
            self.rows.append(
                {
                    "step": step,
                    "epoch": round(epoch, 4),
                    "split": split,
                    "depth": depth + 1,
                    "loss": float(tally.loss[depth]) / count,
                    "match": float(tally.match[depth]) / count if measured else math.nan,
                    "alpha": float(tally.alpha[depth]) / count if measured else math.nan,
                    "learning_rate": learning_rate,
                    "grad_norm": math.nan if norm is None else norm,
                }
            )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(self.rows).to_csv(path, index=False, float_format="%.6g")


class Trainer:
    """One stage: an objective, a head, completions.

    Args:
        head: trained in place; its weights are ``config.dtype`` afterwards, read ``float32`` ones
            through ``finish``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: Head,
        vocab: DraftVocab,
        objective: Objective,
        config: TrainConfig,
        depth_decay: float,
        train: Dataset,
        validation: Dataset,
        seed: int,
    ) -> None:
        self.dtype = DTYPES[config.dtype]
        self.head, self.objective, self.config, self.seed = head, objective, config, seed
        self.train, self.validation = train, validation
        self.embedding = input_embeddings(model).detach().to(self.dtype)
        self.scorer = Scorer.of(output_projection(model).detach(), vocab, self.dtype)
        longest = max(c.length for c in [*train.completions, *validation.completions])
        self.rotary = RotaryTable(model, longest + head.depths, self.dtype)
        self.weights = depth_weights(head.depths, depth_decay)
        self.masters = MasterWeights(head, self.dtype)
        self.curve = Curve([])
        self.threads = min(torch.get_num_threads(), 2)
        self.pool = ThreadPoolExecutor(self.threads)

    def run(self) -> Curve:
        """Train; return the history. The head then carries the final float32 weights.

        Raises:
            TrainingError: the loss became NaN or infinite; names the records of the batch.
        """
        config = self.config
        per_epoch = self.train.batches_per_epoch(config.batch_sequences)
        steps = max(1, round(config.epochs * per_epoch))
        factor = schedule(config, steps)
        optimizers = build_optimizers(self.masters.masters, config)
        batches = self.train.epochs(config.batch_sequences, self.seed)
        validate_every = max(1, round(config.eval_every * per_epoch))
        recent, norms = Tally.zeros(self.head.depths), 0.0
        anchors = 0
        with tqdm(total=steps, desc="training", unit="step", mininterval=2) as progress:
            for step in range(1, steps + 1):
                rate = config.learning_rate * factor(step - 1)
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["lr"] = rate
                parts = self.train.parts(next(batches), self.threads)
                tally = self._step(parts)
                norm = float(self.masters.take_gradients())
                if not math.isfinite(norm) or not bool(tally.loss.isfinite().all()):
                    records = ", ".join(name for part in parts for name in part.ids)
                    raise TrainingError(
                        f"loss or gradient is not finite at step {step} (learning_rate {rate:.3g}); "
                        f"lower learning_rate or look at these records: {records}"
                    )
                torch.nn.utils.clip_grads_with_norm_(self.masters.masters, config.grad_clip, torch.tensor(norm))
                for optimizer in optimizers:
                    optimizer.step()
                self.masters.give_weights()
                recent.add(tally)
                norms += norm
                anchors += sum(len(part.packed.anchors) for part in parts)
                if step % _LOG_EVERY == 0 or step == steps:
                    done = _LOG_EVERY if step % _LOG_EVERY == 0 else step % _LOG_EVERY
                    self.curve.add(step, step / per_epoch, "train", recent, rate, norms / done)
                    mean = float((recent.loss / recent.count) @ self.weights.double())
                    speed = anchors / max(progress.format_dict["elapsed"], 1e-9)
                    progress.set_postfix_str(f"loss {mean:.3f}, {speed:,.0f} anchors/s")
                    recent, norms = Tally.zeros(self.head.depths), 0.0
                progress.update()
                if step % validate_every == 0 or step == steps:
                    self._validate(step, step / per_epoch, rate, progress)
        self._restore_float32()
        return self.curve

    def _step(self, parts: list[Batch]) -> Tally:
        """Gradients of one batch, its parts on one thread each: no kernel waits for another core.

        Two summands give the same sum in either order, so up to two threads are deterministic.
        """
        counts = torch.stack([part.packed.mask.sum(1) for part in parts]).sum(0)
        total = Tally.zeros(self.head.depths)
        if len(parts) == 1:
            return self._loss(parts[0], backward=True, counts=counts)

        def work(part: Batch) -> Tally:
            torch.set_num_threads(1)  # of this thread
            return self._loss(part, backward=True, counts=counts)

        try:
            for tally in self.pool.map(work, parts):
                total.add(tally)
        finally:
            torch.set_num_threads(self.threads)
        return total

    def _loss(self, batch: Batch, *, backward: bool, measure: bool = False, counts: Tensor | None = None) -> Tally:
        with torch.set_grad_enabled(backward):
            states = self.head(batch.packed, batch.hidden.to(self.dtype), self.embedding, self.rotary)
        return loss_and_gradient(
            states,
            batch,
            self.scorer,
            self.objective,
            self.weights,
            self.config.chunk_rows,
            counts=counts,
            backward=backward,
            measure=measure,
        )

    def _validate(self, step: int, epoch: float, rate: float, progress: tqdm[Any]) -> None:
        total = Tally.zeros(self.head.depths)
        for batch in self.validation.once(self.config.batch_sequences):
            total.add(self._loss(batch, backward=False, measure=True))
        self.curve.add(step, epoch, "validation", total, rate, None)
        match = (total.match / total.count).tolist()
        progress.write(f"epoch {epoch:.2f}: validation match " + " / ".join(f"{m:.3f}" for m in match))
        if match[0] > 0.97:
            progress.write(
                "warning: depth-1 match above 0.97 is implausible on natural text; is the label leaking into the input?"
            )

    def _restore_float32(self) -> None:
        self.head.to(torch.float32)
        with torch.no_grad():
            for master, parameter in zip(self.masters.masters, self.head.parameters(), strict=True):
                parameter.copy_(master)
