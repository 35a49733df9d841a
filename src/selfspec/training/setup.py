"""Datasets of a training stage, from the files of the stages before it."""

from __future__ import annotations

from pathlib import Path

from selfspec.backbones.load import DTYPES
from selfspec.config import BackboneConfig
from selfspec.distill import records
from selfspec.distill.states import StoredStates
from selfspec.training.data import Dataset


def datasets(backbone: BackboneConfig, depths: int, data: Path = Path("data")) -> tuple[Dataset, Dataset]:
    """Training and validation completions with their hidden states."""
    train, validation = (
        Dataset(
            records.read(data / "distill" / split),
            StoredStates.open(data / "hidden", split, DTYPES[backbone.dtype]),
            depths,
        )
        for split in ("train", "validation")
    )
    return train, validation
