"""Weights that a head starts with where ``head.init`` takes them from files: the backbone's own, or a checkpoint's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.config import HeadConfig
from selfspec.heads import checkpoint, native
from selfspec.heads.protocol import Head, HeadError, Start
from selfspec.heads.vocab import DraftVocab

_ROWS = "lm_heads."


def read(config: HeadConfig, model: Path) -> Start | None:
    """What ``config.init`` starts from, None where that is no file; to be called before any work.

    Args:
        model: the backbone's directory.

    Raises:
        HeadError: it is not there, is damaged, or is of another form than ``config`` describes.
    """
    if config.init == "native":
        return native.read(model)
    if config.init == "checkpoint":
        assert config.checkpoint is not None
        return _stored(config, Path(config.checkpoint))
    return None


@dataclass(frozen=True)
class Stored:
    """A trained head's weights, for another run.

    Attributes:
        directory: where it lies.
        described: its ``head.json``.
        tensors: by name, float32.
        ids: of its draft vocabulary.
        facts: as ``Start.facts``.
    """

    directory: Path
    described: dict[str, Any]
    tensors: dict[str, Tensor]
    ids: Tensor
    facts: dict[str, Any]

    def load_into(self, head: Head, vocab: DraftVocab) -> None:
        """As ``Start.load_into``. Own output rows go by token; a token new to the vocabulary keeps the backbone's row.

        Raises:
            HeadError: it was trained for a backbone of other sizes.
        """
        checkpoint.fits(self.directory, self.described, head.hidden_size, len(vocab.index))
        fresh, old = head.state_dict(), DraftVocab(self.ids, len(vocab.index))
        tensors = dict(self.tensors)
        index = old.index[vocab.ids.cpu()]
        for name in tensors:
            if name.startswith(_ROWS) and name in fresh:
                known = (index >= 0).to(fresh[name].device)
                rows = tensors[name][index.clamp(min=0)].to(fresh[name].device)
                tensors[name] = torch.where(known[:, None], rows, fresh[name])
        checkpoint.fill(self.directory, head, tensors)


def _stored(config: HeadConfig, directory: Path) -> Stored:
    described, tensors, ids = checkpoint.read(directory)
    asked = {"type": config.type, **{name: value for name, value in config.options.items() if name != "init"}}
    if config.type != "shared":  # which has the same weights whatever the depths it is trained for
        asked["depths"] = config.depths
    given = {"type": described["type"], "depths": described["depths"], **described.get("options", {})}
    for name, value in asked.items():
        # Files from before types had options name none: the defaults are theirs.
        default = HeadConfig.model_fields[name].default
        has = given.get(name, list(default) if isinstance(default, tuple) else default)
        if has != value:
            raise HeadError(
                f"head.{name}: got {value!r}; allowed: {has!r}, which the head in head.checkpoint {directory} has; "
                "change it, or name another checkpoint"
            )
    digests = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in checkpoint.FILES}
    facts = {"init": "checkpoint", "directory": str(directory), "sha256": digests}
    if "start" in described:
        facts["start"] = described["start"]
    return Stored(directory, described, tensors, ids, facts)
