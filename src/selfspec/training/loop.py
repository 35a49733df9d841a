"""The training loop of a head, on a frozen backbone or beside its last layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from selfspec.backbones import unfreeze
from selfspec.backbones.load import DTYPES, arithmetic, input_embeddings, output_projection
from selfspec.backbones.rotary import RotaryTable
from selfspec.config import SharedTrainConfig, TrainConfig
from selfspec.errors import SelfspecError
from selfspec.heads import checkpoint
from selfspec.heads.protocol import Drafts, Head
from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective, depth_weights
from selfspec.training.backbone import MainLoss, TrainableBackbone
from selfspec.training.chunked import Scorer, Tally, loss_and_gradient
from selfspec.training.data import Batch, Dataset
from selfspec.training.masters import MasterWeights
from selfspec.training.processes import Processes
from selfspec.training.resume import ResumePoint, key_of
from selfspec.training.setup import build_optimizers

_LOG_EVERY = 20  # steps averaged into one row of the training curve
_IMPLAUSIBLE_MATCH = 0.97


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
    """One stage: an objective, a head, completions; the backbone is frozen or its last layers are trained too.

    Args:
        head: trained in place; it carries float32 weights when ``run`` ends.
        shared: what both stages share; default: a frozen backbone and nothing else.
        resume: the file that a killed run goes on from.
        exact: float32 weights of an unfrozen backbone from the stage before, by name.
        teacher: what an unfrozen backbone is distilled from.
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
        *,
        shared: SharedTrainConfig | None = None,
        resume: Path | None = None,
        exact: dict[str, Tensor] | None = None,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        self.dtype = arithmetic(DTYPES[config.dtype])
        self.shared = shared or SharedTrainConfig()
        self.head, self.objective, self.config, self.seed = head, objective, config, seed
        self.train, self.validation, self.vocab = train, validation, vocab
        self.model, self.processes = model, Processes()
        self.embedding = input_embeddings(model).detach().to(self.dtype)
        self.device = self.embedding.device
        layers = self.shared.unfrozen_layers
        self.backbone = TrainableBackbone(model, layers, head.middle_layers, teacher) if layers else None
        self.vocab = vocab.to(self.device)
        self.scorer = self._new_scorer()
        longest = max(c.length for c in [*train.completions, *validation.completions])
        self.rotary = RotaryTable(model, longest + head.depths, self.dtype)
        self.weights = self.shared.head_weight * depth_weights(head.depths, depth_decay).to(self.device)
        _refuse_empty(train, validation)
        head.to(self.device)
        exactly = {name: parameter.detach().float().clone() for name, parameter in head.named_parameters()}
        head.to(self.dtype)
        self.masters = MasterWeights(dict(head.named_parameters()), exactly)
        self.backbone_masters = MasterWeights(self.backbone.parameters if self.backbone else {}, exact)
        self.curve = Curve([])
        self.all_threads = torch.get_num_threads()
        self.threads = min(self.all_threads, 2) if self.device.type == "cpu" else 1
        self.pool = ThreadPoolExecutor(self.threads)
        self.resume = ResumePoint(resume if self.shared.resume_steps else None, self._key(depth_decay, resume))

    def _new_scorer(self) -> Scorer:
        return Scorer.of(output_projection(self.model).detach(), self.vocab, self.dtype)

    def _key(self, depth_decay: float, path: Path | None) -> str:
        """Of this run: whatever decides a weight, how the machine adds numbers up included."""
        if path is None:
            return ""
        facts = {
            "shared": self.shared.model_dump(exclude={"resume_steps"}),
            "config": self.config.model_dump(),
            "objective": vars(self.objective),
            "head": [self.head.kind, self.head.depths, self.head.options, depth_decay],
            "seed": self.seed,
            "work": [self.processes.count, self.threads, str(self.dtype), self.device.type],
            "records": [self.train.completions[i].id for i in self.train.usable],
        }
        tokens = [torch.tensor(completion.tokens) for completion in self.train.completions]
        first = {f"head.{name}": weight for name, weight in self.masters.masters.items()}
        first |= {f"backbone.{name}": weight for name, weight in self.backbone_masters.masters.items()}
        return key_of(facts, first | {"vocab": self.vocab.ids, "tokens": torch.cat(tokens)})

    def run(self) -> Curve:
        """Train; return the history. The head then carries the final float32 weights.

        Raises:
            TrainingError: the loss became NaN or infinite; names the records of the batch.
        """
        config = self.config
        per_epoch = self.train.batches_per_epoch(config.batch_sequences)
        steps = max(1, round(config.epochs * per_epoch))
        factor = schedule(config, steps)
        optimizers = build_optimizers(
            self.masters.masters, config, self.backbone_masters.masters, self.shared.backbone_learning_rate
        )
        batches = self.train.epochs(config.batch_sequences, self.seed)
        validate_every = max(1, round(config.eval_every * per_epoch))
        recent, norms = Tally.zeros(self.head.depths), 0.0
        done = 0
        if (saved := self.resume.load()) is not None:
            recent, norms, done = self._restore(saved, optimizers)
            for _ in range(done):
                next(batches)
            self._say(f"going on after an interrupted run: {done} of {steps} steps are done")
        if self.processes.count > 1:
            self._say(f"training on {self.processes.count} processes")
        anchors = 0
        with tqdm(
            total=steps, initial=done, desc="training", unit="step", mininterval=2, disable=not self.processes.first
        ) as progress:
            for step in range(done + 1, steps + 1):
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["lr"] = group["peak"] * factor(step - 1)
                rate = config.learning_rate * factor(step - 1)
                batch = next(batches)
                tally, norm, count = self.step(batch, optimizers, step)
                if not math.isfinite(norm):
                    records = ", ".join(self.train.completions[i].id for i in batch)
                    raise TrainingError(
                        f"loss or gradient is not finite at step {step} (learning_rate {rate:.3g}); "
                        f"lower learning_rate or look at these records: {records}"
                    )
                recent.add(tally)
                norms += norm
                anchors += count
                if step % _LOG_EVERY == 0 or step == steps:
                    averaged = _LOG_EVERY if step % _LOG_EVERY == 0 else step % _LOG_EVERY
                    self.curve.add(step, step / per_epoch, "train", recent, rate, norms / averaged)
                    mean = float((recent.loss / recent.count.clamp(min=1)) @ self.weights.double().cpu())
                    speed = anchors / max(progress.format_dict["elapsed"], 1e-9) if self.processes.first else 0.0
                    progress.set_postfix_str(f"loss {mean:.3f}, {speed:,.0f} anchors/s")
                    recent, norms = Tally.zeros(self.head.depths), 0.0
                progress.update()
                # Once early as well: a label that leaks into the input shows within a few steps.
                if step % validate_every == 0 or step in (_LOG_EVERY, steps):
                    self._validate(step, step / per_epoch, rate)
                if self.shared.resume_steps and step % self.shared.resume_steps == 0 and step < steps:
                    self._keep(step, recent, norms, optimizers)
        self._restore_float32()
        return self.curve

    def save(self, directory: Path, backbone: str, start: Mapping[str, Any] | None = None) -> None:
        """Write the trained head, and the weights of what was unfrozen beside it; nothing is left to go on from.

        Args:
            backbone: its name.
            start: as of ``checkpoint.save``.
        """
        checkpoint.save(directory, self.head, self.vocab.to(torch.device("cpu")), backbone, start)
        if self.backbone:
            unfreeze.save(directory, self.backbone_masters.masters)
        self.resume.discard()

    def _keep(self, step: int, recent: Tally, norms: float, optimizers: list[torch.optim.Optimizer]) -> None:
        if self.processes.first:
            self.resume.save(
                {
                    "step": step,
                    "head": self.masters.masters,
                    "backbone": self.backbone_masters.masters,
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "curve": self.curve.rows,
                    "recent": vars(recent),
                    "norms": norms,
                }
            )

    def _restore(self, saved: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> tuple[Tally, float, int]:
        """Take ``_keep``'s state over; returns tally and norms since the last row of the curve, and the step."""
        for masters, kept in ((self.masters, saved["head"]), (self.backbone_masters, saved["backbone"])):
            with torch.no_grad():
                for name, master in masters.masters.items():
                    master.copy_(kept[name])
            masters.give_weights()
        if self.backbone:
            self.scorer = self._new_scorer()
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.curve.rows[:] = saved["curve"]
        return Tally(**saved["recent"]), saved["norms"], saved["step"]

    def step(
        self, indices: Sequence[int], optimizers: list[torch.optim.Optimizer], number: int = 0
    ) -> tuple[Tally, float, int]:
        """One update from the batch of ``indices``, of which this process takes its share.

        Args:
            number: of the step; on-policy drafts are drawn with it.

        Returns:
            The whole batch's losses, the gradient's norm before clipping (NaN, and no update, where either is not
            finite), and its anchors.
        """
        own = self.train.shares(indices, self.processes.count)[self.processes.index]
        size = self.shared.micro_batch or len(own) or 1
        groups = [
            [part.to(self.device) for part in self.train.parts(own[start : start + size], self.threads)]
            for start in range(0, len(own), size)
        ]
        tally, anchors = self._gradients(groups, number)
        masters = [self.masters, self.backbone_masters]
        norms = [each.take_gradients() for each in masters]
        if self.processes.count > 1:
            self.processes.total([gradient for each in masters for gradient in each.gradients()])
            norms = [each.norm() for each in masters]
        norm = float(torch.stack(norms).norm())
        if not math.isfinite(norm) or not bool(tally.loss.isfinite().all()):
            return tally, math.nan, anchors
        weights = [weight for each in masters for weight in each.masters.values()]
        torch.nn.utils.clip_grads_with_norm_(weights, self.config.grad_clip, torch.tensor(norm))
        for optimizer in optimizers:
            optimizer.step()
        for each in masters:
            each.give_weights()
        if self.backbone:
            self.scorer = self._new_scorer()
        return tally, norm, anchors

    def _gradients(self, groups: list[list[Batch]], number: int) -> tuple[Tally, int]:
        """Gradients of this process's share, group after group, a group's parts on one thread each.

        No kernel waits for another core. Two summands give the same sum in either order, so up to two threads
        are deterministic. The losses are means over the *whole* batch, so neither groups nor processes change them.
        """
        counts = torch.zeros(self.head.depths, dtype=torch.long, device=self.device)
        main_count = torch.zeros(1, dtype=torch.long, device=self.device)
        anchors = torch.zeros(1, dtype=torch.long, device=self.device)
        for part in (part for group in groups for part in group):
            counts += part.packed.mask.sum(1)
            main_count += len(part.packed.teachers)
            anchors += len(part.packed.anchors)
        self.processes.total([counts, main_count, anchors])
        mean_alpha = self._mean_alpha(groups, counts, number) if self.objective.needs_mean_alpha else None
        total = Tally.zeros(self.head.depths)

        def work(part: Batch, order: int) -> Tally:
            hidden = self.backbone.hidden(part.packed) if self.backbone else None
            seen = self._seen(part, hidden)
            states = self._states(seen, self._drafts(number, order))
            own = self._loss(states, seen, counts=counts, mean_alpha=mean_alpha)
            if self.backbone and hidden is not None:
                main = MainLoss(self.shared.main_weight, self.shared.teacher_weight)
                self.backbone.learn(seen.hidden, part.packed, main, int(main_count), self.config.chunk_rows)
                hidden.backward(seen.hidden.grad)
            return own

        for order, group in enumerate(groups):
            for tally in self._on_threads(work, group, [order * self.threads + i for i in range(len(group))]):
                total.add(tally)
        self.processes.total([total.loss, total.match, total.alpha, total.count])
        return total, int(anchors)

    def _seen(self, batch: Batch, hidden: Tensor | None) -> Batch:
        """The batch with the backbone's states as a leaf and what they teach, where the backbone is trained too."""
        if self.backbone is None or hidden is None:
            return batch
        leaf = hidden.detach().requires_grad_()
        lse = self.backbone.log_normalisers(leaf.detach(), batch.packed, self.config.chunk_rows)
        return dataclasses.replace(batch, hidden=leaf, lse=lse)

    def _drafts(self, number: int, order: int) -> Drafts | None:
        """What gives deeper depths their input in place of the true tokens; None: nothing does."""
        chance = self.shared.on_policy
        if not chance:
            return None
        generator = torch.Generator().manual_seed(hash((self.seed, number, self.processes.index, order)) % 2**63)

        def drafts(depth: int, states: Tensor, true: Tensor) -> Tensor:
            """Of ``depth``'s input tokens ``[A]``: the true ones, or the argmax of the depth before, by chance."""
            drawn = (torch.rand(len(true), generator=generator) < chance).to(true.device)
            own = self.head.output_rows(depth - 2)
            best = []
            with torch.no_grad():
                for rows in states.detach().split(self.config.chunk_rows):
                    logits = self.scorer.project(rows) if own is None else rows @ own.detach().t()
                    best.append(logits.argmax(-1))
            return torch.where(drawn, self.vocab.ids[torch.cat(best)], true)

        return drafts

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

    def _states(self, batch: Batch, drafts: Drafts | None = None) -> list[Tensor]:
        return self.head(batch.packed, batch.hidden.to(self.dtype), self.embedding, self.rotary, drafts)

    def _mean_alpha(self, groups: list[list[Batch]], counts: Tensor, number: int) -> Tensor:
        """``[K]`` exact mean acceptance over the whole batch, by a forward pass of its own."""

        @torch.no_grad()
        def work(part: Batch, order: int) -> Tally:
            seen = self._seen(part, self.backbone.hidden(part.packed) if self.backbone else None)
            states = self._states(seen, self._drafts(number, order))
            return self._loss(states, seen, objective=Objective("tv"), backward=False)

        rejected = torch.zeros(self.head.depths, dtype=torch.float64, device=self.device)
        for order, group in enumerate(groups):
            for tally in self._on_threads(work, group, [order * self.threads + i for i in range(len(group))]):
                rejected += tally.loss
        self.processes.total([rejected])
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
        """Loss, match and alpha of a batch as a whole, by this process alone."""
        seen = self._seen(batch, self.backbone.hidden(batch.packed) if self.backbone else None)
        states = self._states(seen)
        mean_alpha = None
        if self.objective.needs_mean_alpha:
            rejected = self._loss(states, seen, objective=Objective("tv"), backward=False)
            mean_alpha = 1 - rejected.loss / rejected.count.clamp(min=1)
        return self._loss(states, seen, mean_alpha=mean_alpha, backward=False, measure=True)

    def _validate(self, step: int, epoch: float, rate: float) -> None:
        total = Tally.zeros(self.head.depths)
        for number, batch in enumerate(self.validation.once(self.config.batch_sequences)):
            if number % self.processes.count == self.processes.index:
                total.add(self.measure(batch.to(self.device)))
        self.processes.total([total.loss, total.match, total.alpha, total.count])
        self.curve.add(step, epoch, "validation", total, rate, None)
        match = (total.match / total.count.clamp(min=1)).tolist()
        self._say(f"epoch {epoch:.2f}: validation match " + " / ".join(f"{m:.3f}" for m in match))
        if match[0] > _IMPLAUSIBLE_MATCH:
            self._say(
                f"warning: depth-1 match above {_IMPLAUSIBLE_MATCH} is implausible on natural text; is the label "
                "leaking into the input?"
            )

    def _say(self, line: str) -> None:
        if self.processes.first:
            tqdm.write(line)

    def _restore_float32(self) -> None:
        self.head.to(torch.float32)
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(self.masters.masters[name])
