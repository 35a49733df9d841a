"""Heads co-trained while a student is distilled, against the same heads trained on the finished student.

The teacher is params.yaml's backbone, the student is the teacher cut to some of its layers, and the texts are those
of the default run (``data/distill``). Two rows, each on the same texts in the same order:

- co-trained: student and heads together; the loss is that of distillation + lambda times that of the heads
- post-hoc: the student is distilled without heads; then heads with the same initial weights are trained on it, frozen

``make cotraining`` leaves the two in ``models/cotraining`` and writes ``reports/cotraining.csv``,
``reports/cotraining.md`` and ``reports/cotraining.png``. Head and optimiser are params.yaml's.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec import config
from selfspec.backbones import load, middle, unfreeze
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import heldout
from selfspec.config import Config, SharedTrainConfig
from selfspec.distill import records
from selfspec.distill.records import Completion
from selfspec.distill.states import LiveStates
from selfspec.errors import SelfspecError
from selfspec.heads import build, start, vocab
from selfspec.heads.protocol import Head
from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective
from selfspec.training.data import Dataset, StateSource
from selfspec.training.loop import Trainer
from tools import cotraining_report
from tools.cotraining_costs import Costs, Pass

TEXTS = Path("data/distill")
LEDGER = Path("reports/ledger.json")
MODELS = Path("models/cotraining")
REPORTS = Path("reports")


class CotrainingError(SelfspecError):
    """An option is out of range, or there are no texts to train on."""


@dataclass(frozen=True)
class Settings:
    """The command line.

    Attributes:
        student_layers: of the teacher's decoder layers, how many the student has.
        fraction: share of the training completions that both rows are trained on.
        epochs: passes over them, of every training.
        head_weight: lambda, the weight of the heads' losses.
        backbone_learning_rate: peak, of the student.
    """

    student_layers: int
    fraction: float
    epochs: float
    head_weight: float
    backbone_learning_rate: float
    seed: int

    def check(self) -> None:
        """Refuse what cannot be, by the option's name.

        Raises:
            CotrainingError: an option is out of range.
        """
        for name in ("epochs", "head_weight", "backbone_learning_rate"):
            value = getattr(self, name)
            self._require(name, 0 < value < math.inf, "a finite number above 0")
        self._require("fraction", 0 < self.fraction <= 1, "a number above 0, at most 1")
        self._require("student_layers", self.student_layers >= 1, "a whole number of at least 1")
        self._require("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 2^32 - 1")

    def _require(self, name: str, fine: bool, allowed: str) -> None:
        if not fine:
            option = f"--{name.replace('_', '-')}"
            raise CotrainingError(f"{option}: got {getattr(self, name)}, allowed: {allowed}; change it")


@dataclass(frozen=True)
class Texts:
    """Completions of the default run; held-out ones by domain."""

    train: list[Completion]
    validation: list[Completion]
    heldout: dict[str, list[Completion]]

    @classmethod
    def read(cls, prompts: int) -> Texts:
        """At most ``prompts`` held-out completions of a domain, as stage accept takes them.

        Raises:
            CotrainingError: a split is not there.
            LeakError: held-out prompts were trained on.
        """
        for path in (*(TEXTS / split for split in config.SPLITS), LEDGER):
            if not (path.is_file() or any(path.glob("*.parquet"))):
                raise CotrainingError(f"{path}: not there, and the default run makes it; run `make repro` first")
        train, validation, held = (records.read(TEXTS / split) for split in config.SPLITS)
        ledger = json.loads(LEDGER.read_text())
        heldout.refuse_leaks(ledger, (text.id for text in train), (text.id for text in held))
        return cls(train, validation, records.by_domain(held, prompts))

    def check(self, model: PreTrainedModel) -> None:
        """Refuse tokens that ``model`` does not have."""
        texts = (self.train, self.validation, *self.heldout.values())
        highest = max(max(text.tokens) for group in texts for text in group)
        if highest >= model.config.vocab_size:
            raise CotrainingError(
                f"{TEXTS}: holds token {highest}, allowed: below {model.config.vocab_size}, the backbone's vocabulary: "
                "another backbone wrote it; run `make repro` first"
            )


def kept_layers(total: int, count: int, attention: Sequence[int] = ()) -> list[int]:
    """Indices of ``count`` evenly spaced of ``total`` layers, first and last among them (of one, the first).

    Args:
        attention: of a backbone that has linear attention too, the layers without. A model needs one of them, so where
            none would be kept the nearest to a kept layer takes that one's place.
    """
    kept = [round(number * (total - 1) / max(count - 1, 1)) for number in range(count)]
    if attention and not set(attention) & set(kept):
        taken, left = min(((new, old) for new in attention for old in kept), key=lambda pair: abs(pair[0] - pair[1]))
        kept = sorted({*kept, taken} - {left})
    return kept


def _kept(model: PreTrainedModel, count: int) -> list[int]:
    kinds = getattr(model.config, "layer_types", None) or ()
    attention = [index for index, kind in enumerate(kinds) if kind != "linear_attention"]
    return kept_layers(len(_layers(model)), count, attention)


def cut(teacher: PreTrainedModel, count: int) -> PreTrainedModel:
    """A copy of ``teacher`` with ``count`` of its decoder layers; all else is the teacher's.

    Raises:
        CotrainingError: it does not have so many, or would be left whole.
    """
    total = len(_layers(teacher))
    if not 1 <= count < total:
        raise CotrainingError(
            f"--student-layers: got {count}, allowed: 1 to {total - 1}, fewer than the teacher's {total}; change it"
        )
    kept = _kept(teacher, count)
    student = copy.deepcopy(teacher)
    layers = nn.ModuleList(_layers(student)[index] for index in kept)
    for number, layer in enumerate(layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number
    inner: Any = student.get_decoder()
    inner.layers = layers
    kinds = getattr(student.config, "layer_types", None)
    student.config.num_hidden_layers = count
    if kinds:
        student.config.layer_types = [kinds[index] for index in kept]
    return student


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    inner: Any = model.get_decoder()
    layers: nn.ModuleList = inner.layers
    return layers


class Experiment:
    """What both rows share: texts, teacher, draft vocabulary, and the weights that heads start with.

    Attributes:
        initial: the head; rows train copies of it.

    Raises:
        SelfspecError: something that the parameters or options name does not fit.
    """

    def __init__(self, cfg: Config, settings: Settings, texts: Texts) -> None:
        config.require_checkpoint(cfg.head)
        given = start.read(cfg.head, load.model_dir(cfg.backbone))
        self.cfg, self.settings, self.texts = cfg, settings, texts
        self.teacher = load.load_model(cfg.backbone)
        texts.check(self.teacher)
        student = self.student()
        middle.check(cfg.head.middle_layers, student)
        taken = self.data(texts.train, None, settings.fraction)
        tokens = torch.tensor([token for i in taken.taken for token in taken.completions[i].completion_ids])
        self.vocab: DraftVocab = vocab.choose(tokens, student.config.vocab_size, cfg.head.draft_vocab_size)
        torch.manual_seed(settings.seed)
        self.initial: Head = build.build(cfg.head, student, self.vocab, given)
        self.start = None if given is None else given.facts
        self.training = cfg.train_ce.model_copy(update={"epochs": settings.epochs})

    def student(self) -> PreTrainedModel:
        """A fresh one, as it is before any training."""
        return cut(self.teacher, self.settings.student_layers)

    def data(self, texts: list[Completion], states: StateSource | None, fraction: float = 1.0) -> Dataset:
        return Dataset(texts, states, self.cfg.head.depths, fraction, self.settings.seed)

    def distil(self, student: PreTrainedModel, head_weight: float) -> Trainer:
        """Distil all of ``student`` but its embeddings, with a head beside it.

        Args:
            head_weight: 0: the head neither learns nor has a say.
        """
        changes = {
            "unfrozen_layers": self.settings.student_layers,
            "backbone_learning_rate": self.settings.backbone_learning_rate,
            "teacher_weight": 1.0,
            "head_weight": head_weight,
        }
        return self._train(student, changes, lambda texts: None, self.teacher)

    def train_heads(self, student: PreTrainedModel) -> Trainer:
        """Train a head on ``student``, which stays as it is."""
        student.requires_grad_(False)
        decoder = Decoder(student, middle_layers=self.cfg.head.middle_layers)
        changes = {"unfrozen_layers": 0, "head_weight": self.settings.head_weight}
        # Not rounded on the way, as stored states are: those of the co-trained row are not either.
        return self._train(student, changes, lambda texts: LiveStates(decoder, texts, decoder.dtype))

    def _train(
        self,
        student: PreTrainedModel,
        changes: dict[str, Any],
        states: Callable[[list[Completion]], StateSource | None],
        teacher: PreTrainedModel | None = None,
    ) -> Trainer:
        always = {"data_fraction": self.settings.fraction, "resume_steps": 0, "teacher": None}
        shared = SharedTrainConfig.model_validate(self.cfg.train.model_dump() | always | changes)
        texts = self.texts
        trainer = Trainer(
            student,
            copy.deepcopy(self.initial),
            self.vocab,
            Objective("ce"),
            self.training,
            self.cfg.head.depth_decay,
            self.data(texts.train, states(texts.train), self.settings.fraction),
            self.data(texts.validation, states(texts.validation)),
            self.settings.seed,
            shared=shared,
            teacher=teacher,
        )
        trainer.run()
        return trainer

    def passed(self, trainer: Trainer) -> Pass:
        """What ``trainer`` has read."""
        steps = int(trainer.curve.rows[-1]["step"])
        batches = itertools.islice(trainer.train.epochs(self.training.batch_sequences, self.settings.seed), steps)
        read = [trainer.train.completions[i] for batch in batches for i in batch]
        return Pass.of(steps, [(len(text.prompt_ids), len(text.completion_ids)) for text in read])

    def co_train(self, folder: Path) -> Costs:
        """Student and head together; both are left in ``folder``."""
        student = self.student()
        trainer = self.distil(student, self.settings.head_weight)
        trainer.save(folder, self.cfg.backbone.name, self.start)
        passed = self.passed(trainer)
        return Costs.of(self.teacher, student, self.initial, len(self.vocab), student_pass=passed, head_pass=passed)

    def post_hoc(self, folder: Path) -> Costs:
        """The student first, then a head on it; both are left in ``folder``."""
        student = self.student()
        distilled = self.distil(student, 0.0)
        trainer = self.train_heads(student)
        trainer.save(folder, self.cfg.backbone.name, self.start)
        unfreeze.save(folder, distilled.backbone_masters.masters)
        return Costs.of(
            self.teacher,
            student,
            self.initial,
            len(self.vocab),
            student_pass=self.passed(distilled),
            head_pass=self.passed(trainer),
            student_read_again=True,
        )


ROWS: dict[str, Callable[[Experiment, Path], Costs]] = {
    "co-trained": Experiment.co_train,
    "post-hoc": Experiment.post_hoc,
}
"""In the order of the table."""


def compare(experiment: Experiment) -> str:
    """Train and measure both rows and write the reports; returns the page."""
    costs = {}
    for name, train in ROWS.items():
        print(f"{name}:", flush=True)
        costs[name] = train(experiment, MODELS / name)
    measured = cotraining_report.measure(
        experiment.teacher,
        experiment.student,
        {name: MODELS / name for name in ROWS},
        experiment.texts.heldout,
        experiment.cfg.accept.bootstrap_samples,
        experiment.settings.seed,
    )
    return cotraining_report.write(measured, costs, _facts(experiment), REPORTS)


def _facts(experiment: Experiment) -> dict[str, str]:
    """All settings by name, for the page."""
    cfg, settings, training = experiment.cfg, experiment.settings, experiment.training
    total = len(_layers(experiment.teacher))
    layers = ", ".join(str(index + 1) for index in _kept(experiment.teacher, settings.student_layers))
    taken = experiment.data(experiment.texts.train, None, settings.fraction).taken
    source = "the teacher's own completions" if cfg.distill.text == "completions" else "documents of the corpus"
    head = {"type": cfg.head.type, "depths": cfg.head.depths, **cfg.head.options, "depth_decay": cfg.head.depth_decay}
    options = {name: value for name, value in training.model_dump().items() if name != "epochs"}
    facts: dict[str, object] = {
        "teacher": f"{cfg.backbone.name}, {total} layers",
        "student": f"its layers {layers} of {total}; embeddings frozen, all else trained",
        "arithmetic": load.arithmetic_name(cfg.backbone),
        "training texts": f"{len(taken)} of {len(experiment.texts.train)} in {TEXTS / 'train'} "
        f"(--fraction {settings.fraction:g}), {source}",
        "--epochs": f"{settings.epochs:g}, of each training",
        "--head-weight (lambda)": f"{settings.head_weight:g}, of the heads' losses, whose weights by depth sum to 1",
        "--backbone-learning-rate": f"{settings.backbone_learning_rate:g}",
        "--seed": settings.seed,
        "train.main_weight": f"{cfg.train.main_weight:g}, of the student's cross-entropy beside KL(teacher, student)",
        "head": ", ".join(f"{name}: {value}" for name, value in head.items()),
        "draft vocabulary": f"{len(experiment.vocab)} tokens",
        "train_ce": ", ".join(f"{name}: {value}" for name, value in options.items()),
        "train": f"on_policy: {cfg.train.on_policy:g}, micro_batch: {cfg.train.micro_batch}",
    }
    return {name: str(fact) for name, fact in facts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student-layers", type=int, default=15, help="of the teacher's layers (default: 15)")
    parser.add_argument("--fraction", type=float, default=0.25, help="share of the training texts (default: 0.25)")
    parser.add_argument("--epochs", type=float, help="passes over them, of each training (default: train_ce.epochs)")
    parser.add_argument("--head-weight", type=float, help="lambda (default: train.head_weight)")
    parser.add_argument("--backbone-learning-rate", type=float, default=3e-4, help="of the student (default: 3e-4)")
    parser.add_argument("--seed", type=int, help="default: seed of params.yaml")
    options = parser.parse_args(arguments)
    try:
        cfg = config.load()
        defaults = {"epochs": cfg.train_ce.epochs, "head_weight": cfg.train.head_weight, "seed": cfg.seed}
        given = {name: value for name, value in vars(options).items() if value is not None}
        settings = Settings(**(defaults | given))
        settings.check()
        print(compare(Experiment(cfg, settings, Texts.read(cfg.accept.prompts))))
    except SelfspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
