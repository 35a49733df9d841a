"""A trained head on disk: ``head.json`` (what it is) and ``head.safetensors`` (its weights and draft vocabulary)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.backbones import unfreeze
from selfspec.backbones.load import arithmetic, input_embeddings
from selfspec.heads.build import KINDS, construct
from selfspec.heads.protocol import Head, HeadError
from selfspec.heads.vocab import DraftVocab

FILES = ("head.json", "head.safetensors")
_VOCAB_KEY = "draft_vocab"
_ALWAYS = ("type", "depths", "backbone", "hidden_size", "vocab_size")  # what every head.json says


@dataclass(frozen=True)
class TrainedHead:
    """A head with what it needs to draft.

    Attributes:
        backbone: float32 weights of the backbone that were trained together with the head, by name.
    """

    module: Head
    vocab: DraftVocab
    facts: dict[str, Any]
    backbone: dict[str, Tensor] = field(default_factory=dict)

    def output_rows(self, lm_head: Tensor, depths: int) -> list[Tensor]:
        """By depth, the rows ``[draft_vocab, H]`` that score its states: the head's own, or those of ``lm_head``."""
        shared = self.vocab.rows(lm_head)
        own = [self.module.output_rows(depth) for depth in range(depths)]
        return [shared if rows is None else rows for rows in own]


def save(directory: Path, head: Head, vocab: DraftVocab, backbone: str, start: Mapping[str, Any] | None = None) -> None:
    """Write the head with its float32 weights; the directory is created.

    Args:
        start: where it started from, if from files: ``Start.facts``, or those of the head that it continues.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in head.state_dict().items()}
    tensors[_VOCAB_KEY] = vocab.ids
    save_file(tensors, directory / "head.safetensors")
    facts = {
        "type": head.kind,
        "depths": head.depths,
        "options": head.options,
        "backbone": backbone,
        "hidden_size": head.hidden_size,
        "vocab_size": len(vocab.index),
        "draft_vocab_size": len(vocab),
        "parameters": sum(p.numel() for p in head.parameters()),
    }
    if start is not None:
        facts["start"] = start
    (directory / "head.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def check(directory: Path) -> None:
    """Raise HeadError unless ``directory`` holds a trained head."""
    if not (directory / "head.json").is_file():
        raise HeadError(f"{directory}: no trained head here; run `make repro` first, or name another directory")


def load(directory: Path, model: PreTrainedModel, dtype: torch.dtype | None = None) -> TrainedHead:
    """Read a head for ``model`` with weights of ``dtype`` (default: as the model computes).

    Where the backbone was trained too, the model takes its trained weights over: arrange it for decoding afterwards.

    As with a backbone, the tensors' own dtype is the one to compute in (``backbones.load.arithmetic``).

    Raises:
        HeadError: no head there, sizes that do not fit the backbone, or files that contradict each other.
    """
    facts, tensors, ids = read(directory)
    fits(directory, facts, model.config.hidden_size, model.config.vocab_size)
    exact = unfreeze.apply(model, directory)
    weight = input_embeddings(model)
    vocab = DraftVocab(ids.to(weight.device), model.config.vocab_size)
    head = _built(directory, facts, model, vocab)
    fill(directory, head, tensors)
    dtype = dtype or weight.dtype
    return TrainedHead(head.to(device=weight.device, dtype=dtype).to(arithmetic(dtype)), vocab, facts, exact)


def read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """What ``head.json`` says, the float32 weights by name, and the ids of the draft vocabulary; on the CPU.

    Raises:
        HeadError: no head there, or files that are damaged.
    """
    check(directory)
    try:
        facts = json.loads((directory / "head.json").read_text())
        lacking = [name for name in _ALWAYS if name not in facts]
        tensors = load_file(directory / "head.safetensors")
        ids = tensors.pop(_VOCAB_KEY, None)
    except (ValueError, OSError, SafetensorError) as error:
        raise HeadError(f"{directory}: a damaged head ({error}); copy it again, or train it again") from None
    if lacking or ids is None:
        what = f"head.json lacks {', '.join(lacking)}" if lacking else f"head.safetensors lacks {_VOCAB_KEY}"
        raise HeadError(f"{directory}: a damaged head ({what}); copy it again, or train it again")
    return facts, tensors, ids


def fits(directory: Path, facts: Mapping[str, Any], hidden: int, vocab_size: int) -> None:
    """Raise HeadError unless the head that ``facts`` describe is of a backbone with these sizes."""
    if (facts["hidden_size"], facts["vocab_size"]) != (hidden, vocab_size):
        raise HeadError(
            f"{directory}: head of {facts['backbone']} (hidden {facts['hidden_size']}, "
            f"vocabulary {facts['vocab_size']}) does not fit this backbone "
            f"(hidden {hidden}, vocabulary {vocab_size}); train one for it"
        )


def fill(directory: Path, head: Head, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors``, read in ``directory``, into ``head``; HeadError unless they are its own in name and shape."""
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise HeadError(
            f"{directory}: head.safetensors does not hold what head.json says ({detail}); train it again"
        ) from None


def _built(directory: Path, facts: dict[str, Any], model: PreTrainedModel, vocab: DraftVocab) -> Head:
    """A head as ``facts`` describe it. Files from before types had options name none: the defaults are theirs."""
    kind, options = facts["type"], facts.get("options", {})
    try:
        return construct(kind, model, facts["depths"], vocab, options)
    except KeyError:
        allowed = ", ".join(known.kind for known in KINDS)
        raise HeadError(f"{directory}: head.json has type {kind!r}; allowed: {allowed}; train one of these") from None
    except (TypeError, ValueError) as error:
        raise HeadError(f"{directory}: head.json has type {kind} with {options}: {error}; train it again") from None
