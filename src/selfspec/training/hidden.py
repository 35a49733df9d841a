"""Final hidden states of the frozen backbone over stored completions, computed once for all epochs.

Beside the states, the log-normaliser of the backbone's next-token distribution is kept for every
position that teaches: with it, the teacher's probabilities at the draft vocabulary cost a matrix
product with that vocabulary only, while staying normalised over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from selfspec.backbones.decoder import Decoder
from selfspec.distill.records import Completion

# Tokens of one backbone forward; beyond this a CPU gains nothing and memory grows.
_TOKENS_PER_FORWARD = 4096
_LOGIT_ROWS = 512
_NUMPY = {torch.bfloat16: np.dtype("<u2"), torch.float16: np.dtype("<f2"), torch.float32: np.dtype("<f4")}


def compute(decoder: Decoder, completions: Sequence[Completion], directory: Path, split: str) -> None:
    """Write ``<split>.npy`` ``[tokens, hidden]`` and ``<split>_lse.npy`` ``[tokens]`` (0 where nothing is taught)."""
    directory.mkdir(parents=True, exist_ok=True)
    lengths = [completion.length for completion in completions]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    width = decoder.lm_head.shape[1]
    states = np.lib.format.open_memmap(
        directory / f"{split}.npy", mode="w+", dtype=_NUMPY[decoder.dtype], shape=(int(offsets[-1]), width)
    )
    lse = np.zeros(int(offsets[-1]), dtype=np.float32)
    order = sorted(range(len(completions)), key=lengths.__getitem__)
    with tqdm(total=int(offsets[-1]), desc=f"hidden states, {split}", unit="tok", mininterval=2) as progress:
        while order:
            rows = max(1, _TOKENS_PER_FORWARD // lengths[order[0]])
            chosen, order = order[:rows], order[rows:]
            _, hidden = decoder.prefill([completions[i].tokens for i in chosen], max(lengths[i] for i in chosen))
            for index, state in zip(chosen, hidden, strict=True):
                start, end = offsets[index], offsets[index + 1]
                states[start:end] = _to_numpy(state)
                prompt = len(completions[index].prompt_ids)
                lse[start + prompt - 1 : end - 1] = _normalisers(decoder, state[prompt - 1 : -1])
                progress.update(int(end - start))
    states.flush()
    np.save(directory / f"{split}_lse.npy", lse)


def _normalisers(decoder: Decoder, states: Tensor) -> np.ndarray:
    parts = [decoder.logits(part).float().logsumexp(-1) for part in states.split(_LOGIT_ROWS)]
    return torch.cat(parts).cpu().numpy()


def _to_numpy(state: Tensor) -> np.ndarray:
    state = state.cpu()
    # numpy has no bfloat16: store the 16-bit patterns.
    return state.view(torch.uint16).numpy() if state.dtype == torch.bfloat16 else state.numpy()


@dataclass(frozen=True)
class CachedStates:
    """Memory-mapped states of one split.

    Attributes:
        states: ``[tokens, hidden]`` array on disk.
        lse: ``[tokens]`` float32.
        dtype: what the stored patterns mean.
    """

    states: np.ndarray
    lse: Tensor
    dtype: torch.dtype

    @classmethod
    def open(cls, directory: Path, split: str, dtype: torch.dtype) -> CachedStates:
        states = np.load(directory / f"{split}.npy", mmap_mode="r")
        if states.dtype != _NUMPY[dtype]:
            raise ValueError(f"{directory}: hidden states are {states.dtype}, backbone.dtype asks for {dtype}")
        return cls(states, torch.from_numpy(np.load(directory / f"{split}_lse.npy")), dtype)

    def rows(self, start: int, end: int) -> Tensor:
        """``[end - start, hidden]`` in the backbone's dtype."""
        block = torch.from_numpy(np.array(self.states[start:end]))
        return block.view(torch.bfloat16) if self.dtype == torch.bfloat16 else block
