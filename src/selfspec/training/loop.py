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

from selfspec.backbones.load import DTYPES, arithmetic, input_embeddings, output_projection
from selfspec.backbones.rotary import RotaryTable
from selfspec.config import TrainConfig
from selfspec.errors import SelfspecError
from selfspec.heads.protocol import Head
from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective, depth_weights
from selfspec.training.chunked import Scorer, Tally, loss_and_gradient
from selfspec.training.data import Batch, Dataset
from selfspec.training.setup import build_optimizers

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
        self.names = [name for name, _ in module.named_parameters()]
        self.masters = [parameter.detach().float().clone() for parameter in module.parameters()]
        module.to(dtype)
        self.working = list(module.parameters())

    def named(self) -> dict[str, Tensor]:
        """The masters by the names of the parameters they stand for."""
        return dict(zip(self.names, self.masters, strict=True))

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


def _refuse_empty(train: Dataset, validation: Dataset) -> None:
    for name, data in (("train", train), ("validation", validation)):
        if not data.usable:
            raise TrainingError(
                f"distill.prompts.{name}: no completion of more than one token to train or validate on; "
                f"ask for more prompts or other domains, or raise distill.max_new_tokens"
            )


@dataclass
class Curve:
    """Rows of the training history (schema: docs/metrics.md)."""

    rows: list[dict[str, float | int | str]]

    def add(self, step: int, epoch: float, split: str, tally: Tally, learning_rate: float, norm: float | None) -> None:
        for depth in range(len(tally.count)):
            count = max(float(tally.count[depth]), 1.0)  # a depth that no completion reaches has sums of 0
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
        self.dtype = arithmetic(DTYPES[config.dtype])
        self.head, self.objective, self.config, self.seed = head, objective, config, seed
        self.train, self.validation = train, validation
        self.embedding = input_embeddings(model).detach().to(self.dtype)
        self.device = self.embedding.device
        head.to(self.device)
        self.scorer = Scorer.of(output_projection(model).detach(), vocab.to(self.device), self.dtype)
        longest = max(c.length for c in [*train.completions, *validation.completions])
        self.rotary = RotaryTable(model, longest + head.depths, self.dtype)
        self.weights = depth_weights(head.depths, depth_decay).to(self.device)
        _refuse_empty(train, validation)
        self.masters = MasterWeights(head, self.dtype)
        self.curve = Curve([])
        self.all_threads = torch.get_num_threads()
        self.threads = min(self.all_threads, 2) if self.device.type == "cpu" else 1
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
        optimizers = build_optimizers(self.masters.named(), config)
        batches = self.train.epochs(config.batch_sequences, self.seed)
        validate_every = max(1, round(config.eval_every * per_epoch))
        recent, norms = Tally.zeros(self.head.depths), 0.0
        anchors = 0
        with tqdm(total=steps, desc="training", unit="step", mininterval=2) as progress:
            for step in range(1, steps + 1):
                rate = config.learning_rate * factor(step - 1)
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["lr"] = rate
                parts = [part.to(self.device) for part in self.train.parts(next(batches), self.threads)]
                tally, norm = self.step(parts, optimizers)
                if not math.isfinite(norm):
                    records = ", ".join(name for part in parts for name in part.ids)
                    raise TrainingError(
                        f"loss or gradient is not finite at step {step} (learning_rate {rate:.3g}); "
                        f"lower learning_rate or look at these records: {records}"
                    )
                recent.add(tally)
                norms += norm
                anchors += sum(len(part.packed.anchors) for part in parts)
                if step % _LOG_EVERY == 0 or step == steps:
                    done = _LOG_EVERY if step % _LOG_EVERY == 0 else step % _LOG_EVERY
                    self.curve.add(step, step / per_epoch, "train", recent, rate, norms / done)
                    mean = float((recent.loss / recent.count.clamp(min=1)) @ self.weights.double().cpu())
                    speed = anchors / max(progress.format_dict["elapsed"], 1e-9)
                    progress.set_postfix_str(f"loss {mean:.3f}, {speed:,.0f} anchors/s")
                    recent, norms = Tally.zeros(self.head.depths), 0.0
                progress.update()
                if step % validate_every == 0 or step == steps:
                    self._validate(step, step / per_epoch, rate, progress)
        self._restore_float32()
        return self.curve

    def step(self, parts: list[Batch], optimizers: list[torch.optim.Optimizer]) -> tuple[Tally, float]:
        """One update from one batch, given in parts (``Dataset.parts``).

        Returns:
            The batch's losses and the gradient's norm before clipping; NaN, and no update, where either is not finite.
        """
        tally = self._gradients(parts)
        norm = float(self.masters.take_gradients())
        if not math.isfinite(norm) or not bool(tally.loss.isfinite().all()):
            return tally, math.nan
        torch.nn.utils.clip_grads_with_norm_(self.masters.masters, self.config.grad_clip, torch.tensor(norm))
        for optimizer in optimizers:
            optimizer.step()
        self.masters.give_weights()
        return tally, norm

    def _gradients(self, parts: list[Batch]) -> Tally:
        """Gradients of one batch, its parts on one thread each: no kernel waits for another core.

        Two summands give the same sum in either order, so up to two threads are deterministic.
        """
        counts = torch.stack([part.packed.mask.sum(1) for part in parts]).sum(0)
        states = self._on_threads(self._states, parts)
        mean_alpha = self._mean_alpha(states, parts, counts)

        def work(part_states: list[Tensor], part: Batch) -> Tally:
            return self._loss(part_states, part, counts=counts, mean_alpha=mean_alpha)

        total = Tally.zeros(self.head.depths)
        for tally in self._on_threads(work, states, parts):
            total.add(tally)
        return total

    def _on_threads(self, work: Callable[..., Any], *arguments: list[Any]) -> list[Any]:
        """``work`` over the parts of a batch, each on one thread of its own."""
        if len(arguments[0]) == 1:
            return [work(*(each[0] for each in arguments))]

        def alone(*own: Any) -> Any:
            torch.set_num_threads(1)  # of this thread
            return work(*own)

        try:
            return list(self.pool.map(alone, *arguments))
        finally:
            torch.set_num_threads(self.all_threads)

    def _states(self, batch: Batch) -> list[Tensor]:
        return self.head(batch.packed, batch.hidden.to(self.dtype), self.embedding, self.rotary)

    def _mean_alpha(self, states: list[list[Tensor]], parts: list[Batch], counts: Tensor) -> Tensor | None:
        """``[K]`` exact mean acceptance over all parts, by a pass of its own; None where the objective needs none."""
        if not self.objective.needs_mean_alpha:
            return None

        def work(part_states: list[Tensor], part: Batch) -> Tally:
            return self._loss(part_states, part, objective=Objective("tv"), backward=False)

        rejected = sum(tally.loss for tally in self._on_threads(work, states, parts))
        return 1 - rejected / counts.clamp(min=1)

    def _loss(self, states: list[Tensor], batch: Batch, *, objective: Objective | None = None, **options: Any) -> Tally:
        return loss_and_gradient(
            states,
            batch,
            self.scorer,
            objective or self.objective,
            self.weights,
            self.config.chunk_rows,
            output_rows=self.head.output_rows,
            **options,
        )

    @torch.no_grad()
    def measure(self, batch: Batch) -> Tally:
        """Loss, match and alpha of a batch as a whole."""
        states = self._states(batch)
        mean_alpha = self._mean_alpha([states], [batch], batch.packed.mask.sum(1))
        return self._loss(states, batch, mean_alpha=mean_alpha, backward=False, measure=True)

    def _validate(self, step: int, epoch: float, rate: float, progress: tqdm[Any]) -> None:
        total = Tally.zeros(self.head.depths)
        for batch in self.validation.once(self.config.batch_sequences):
            total.add(self.measure(batch.to(self.device)))
        self.curve.add(step, epoch, "validation", total, rate, None)
        match = (total.match / total.count.clamp(min=1)).tolist()
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
