"""Where a killed training run left off, so that a restart goes on as if nothing had happened.

DVC deletes a stage's outs before it runs, so the file lives elsewhere. It carries a hash of everything that
decides the run; with another hash it is refused, never mixed in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.resources import atomic_path

_FORMAT = 1  # of the file, and of what a step does: raise it when either changes


def key_of(facts: Any, tensors: Mapping[str, Tensor]) -> str:
    """A hash of facts (JSON-able) and tensors."""
    digest = hashlib.sha256(json.dumps([_FORMAT, torch.__version__, facts], sort_keys=True, default=str).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class ResumePoint:
    """The file of one stage.

    Args:
        path: None: nothing is kept.
        key: of the run that asks (``key_of``).
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self.key = path, key

    def load(self) -> dict[str, Any] | None:
        """What ``save`` got last, or None; says so where a file is of another run."""
        if self.path is None or not self.path.is_file():
            return None
        saved: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        if saved.pop("key") != self.key:
            print(f"note: {self.path} is of a run with other parameters or data; not used, training starts afresh")
            return None
        return saved

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file, whole or not at all."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.path) as partial:
                torch.save({"key": self.key, **state}, partial)

    def discard(self) -> None:
        """The run is over and its outcome written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
