"""Small trainings on a tiny random model: its own completions, their states, and a trainer over both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec import losses
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark.lossless import stock_greedy
from selfspec.config import SharedTrainConfig, TrainConfig
from selfspec.distill import states
from selfspec.distill.records import Completion
from selfspec.heads.build import construct
from selfspec.heads.vocab import DraftVocab
from selfspec.training.data import Dataset
from selfspec.training.loop import Trainer
from tests.unit import tiny_heads

DEPTHS = 3
WHOLE = DraftVocab(torch.arange(288), 288)


def completions(model: PreTrainedModel, shapes: list[tuple[int, int]]) -> list[Completion]:
    """The backbone's own greedy text; ``shapes``: (prompt length, new tokens)."""
    made = []
    for number, (length, new) in enumerate(shapes):
        prompt = tiny_heads.prompt(length, seed=number + 5)
        text = stock_greedy(model, [prompt], new)[0]
        made.append(Completion(f"r{number}", "s", "corpus", "chat", prompt, text, "length", 0.0))
    return made


def dataset(
    model: PreTrainedModel,
    texts: list[Completion],
    folder: Path,
    depths: int = DEPTHS,
    middle_layers: Sequence[int] = (),
) -> Dataset:
    """With stored states."""
    decoder = Decoder(model, middle_layers=middle_layers)
    with torch.inference_mode():
        parts = [states.recompute(decoder, completion) for completion in texts]
    tokens, width = sum(completion.length for completion in texts), decoder.state_width
    states.write(folder, "train", parts, tokens, width, torch.float32)
    return Dataset(texts, states.StoredStates.open(folder, "train", torch.float32, width), depths)


def options(**changes: Any) -> TrainConfig:
    """A stage's section."""
    plain = {
        "epochs": 1.0,
        "optimizer": "adamw",
        "learning_rate": 3e-3,
        "weight_decay": 0.0,
        "batch_sequences": 2,
        "warmup_fraction": 0.0,
        "schedule": "constant",
        "grad_clip": 1.0,
        "dtype": "float32",
        "eval_every": 1000.0,
        "chunk_rows": 64,
    }
    return TrainConfig.model_validate(plain | changes)


def trainer(
    model: PreTrainedModel,
    data: Dataset,
    *,
    kind: str = "shared",
    head_seed: int = 0,
    seed: int = 0,
    vocab: DraftVocab = WHOLE,
    objective: losses.Objective | None = None,
    shared: dict[str, Any] | None = None,
    resume: Path | None = None,
    exact: dict[str, torch.Tensor] | None = None,
    middle_layers: Sequence[int] = (),
    teacher: PreTrainedModel | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer of a fresh head; ``changes`` are of ``options``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(head_seed)
        head = construct(kind, model, data.depths, vocab, {"middle_layers": middle_layers} if kind == "shared" else {})
    return Trainer(
        model,
        head,
        vocab,
        objective or losses.Objective("ce"),
        options(**changes),
        0.8,
        data,
        data,
        seed,
        shared=SharedTrainConfig.model_validate(shared or {}),
        resume=resume,
        exact=exact,
        teacher=teacher,
    )
