"""Final hidden states of the backbone over completions, kept beside the completions for all epochs.

With a frozen backbone every epoch reads the same states. The writer has them at hand while it decodes;
completions that another engine wrote get theirs from one extra forward pass (``recompute``). Beside
the states, the log-normaliser of the backbone's next-token distribution is kept for every position
that teaches: with it, the teacher's probabilities at the draft vocabulary cost a matrix product with
that vocabulary only, while staying normalised over all tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfspec.backbones.decoder import Decoder
from selfspec.distill.records import Completion
from selfspec.errors import SelfspecError

_LOGIT_ROWS = 512  # rows of full-vocabulary logits alive at once
_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.bfloat16: np.dtype("<u2"),
    torch.float16: np.dtype("<f2"),
    torch.float32: np.dtype("<f4"),
}


class StatesError(SelfspecError, ValueError):
    """The states on disk are not what is asked for."""


@dataclass(frozen=True)
class States:
    """What the backbone thought over one completion, or over several back to back.

    Attributes:
        hidden: ``[tokens, W]`` final-norm states, those of the decoder's middle layers beside them
            (``backbones/middle.py``). The last row of a completion is zero: nothing follows the last token,
            so no draft starts there and no position is taught by it.
        lse: ``[tokens]`` float32 log-normalisers at the positions that score a completion token, else 0.
    """

    hidden: Tensor
    lse: Tensor


def recompute(decoder: Decoder, completion: Completion, store: torch.dtype | None = None) -> States:
    """The states by a plain forward pass over the stored tokens, rounded to ``store`` (else the decoder's dtype)."""
    prompt = len(completion.prompt_ids)
    _, (hidden,) = decoder.prefill([completion.tokens], completion.length)
    hidden = hidden.to(store or decoder.dtype)
    taught = hidden[prompt - 1 : -1].to(decoder.dtype)
    lse = torch.zeros(completion.length)
    lse[prompt - 1 : -1] = torch.cat([decoder.logits(part).float().logsumexp(-1) for part in taught.split(_LOGIT_ROWS)])
    hidden = hidden.clone()
    hidden[-1] = 0
    return States(hidden.cpu(), lse)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Numpy has no bfloat16: its 16-bit patterns are stored."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def write(directory: Path, split: str, parts: Iterable[States], tokens: int, width: int, dtype: torch.dtype) -> None:
    """Write ``<split>.npy`` ``[tokens, width]`` and ``<split>_lse.npy`` ``[tokens]``, one part at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{split}.npy"
    hidden = np.lib.format.open_memmap(path, mode="w+", dtype=_NUMPY[dtype], shape=(tokens, width))
    lse = np.zeros(tokens, dtype=np.float32)
    offset = 0
    for part in parts:
        end = offset + len(part.lse)
        hidden[offset:end] = to_numpy(part.hidden.to(dtype))
        lse[offset:end] = part.lse.numpy()
        offset = end
    if offset != tokens:
        raise ValueError(f"{path}: {offset} states for {tokens} tokens")
    hidden.flush()
    np.save(directory / f"{split}_lse.npy", lse)


@dataclass(frozen=True)
class StoredStates:
    """States on disk, read row by row through a memory map."""

    hidden: np.ndarray
    lse: Tensor
    dtype: torch.dtype

    @classmethod
    def open(cls, directory: Path, split: str, dtype: torch.dtype, width: int | None = None) -> StoredStates:
        """Open one split.

        Args:
            width: columns that whoever reads them needs (``Head.state_width``); default: any number.

        Raises:
            StatesError: stored in another dtype than the backbone's, or not so many columns.
        """
        path = directory / f"{split}.npy"
        hidden = np.load(path, mmap_mode="r")
        if hidden.dtype != _NUMPY[dtype]:
            raise StatesError(
                f"{directory}: hidden states are {hidden.dtype}, backbone.dtype asks for {dtype}; rerun distill"
            )
        if width is not None and hidden.shape[1] != width:
            raise StatesError(
                f"head.middle_layers: got states of {hidden.shape[1]} columns in {path}; allowed: {width}, the final "
                "state and those of the layers that the head reads; rerun distill"
            )
        return cls(hidden, torch.from_numpy(np.load(directory / f"{split}_lse.npy")), dtype)

    def __len__(self) -> int:
        return len(self.lse)

    def rows(self, start: int, end: int) -> States:
        """Rows ``start`` to ``end`` in the backbone's dtype."""
        block = torch.from_numpy(np.array(self.hidden[start:end]))
        return States(block.view(torch.bfloat16) if self.dtype == torch.bfloat16 else block, self.lse[start:end])


class LiveStates:
    """States computed when they are asked for, with the interface of stored ones.

    Args:
        store: what stored states would be rounded to; so are these, so that either teach the same.
    """

    def __init__(self, decoder: Decoder, completions: Sequence[Completion], store: torch.dtype) -> None:
        self.decoder, self.completions, self.store = decoder, completions, store
        self._starts = [0]
        for completion in completions:
            self._starts.append(self._starts[-1] + completion.length)

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, start: int, end: int) -> States:
        """States of one completion, which starts at token ``start`` and ends at ``end``.

        Raises:
            ValueError: no completion lies there.
        """
        number = bisect_right(self._starts, start) - 1
        if self._starts[number : number + 2] != [start, end]:
            raise ValueError(f"tokens {start} to {end} are not one completion")
        computed = recompute(self.decoder, self.completions[number], self.store)
        # Inference tensors cannot take part in a graph; copies can.
        return States(computed.hidden.clone(), computed.lse.clone())
