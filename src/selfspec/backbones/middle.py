"""States of middle layers beside the final one: what travels from the backbone to a head that reads both.

The idea is EAGLE-3's (arXiv 2503.01840): the final state has given up what only earlier layers need to
know, and a draft layer can use it. A *wide* state is ``[..., H * (1 + M)]``: the final-norm state, then
for each of M middle layers, in ascending order, the residual stream after it, over its root mean square.
Layers are counted from 1: layer n's is ``output_hidden_states[n]`` of transformers. Without middle layers
a wide state is the final one.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.backbones.load import BackboneError

_EPSILON = 1e-6  # keeps a zero state zero


def check(layers: Sequence[int], model: PreTrainedModel) -> None:
    """Hold ``head.middle_layers`` against the backbone. Its last layer is none of them: that is the final state.

    Raises:
        BackboneError: a layer that it does not have, or not in ascending order.
    """
    last = int(model.config.num_hidden_layers) - 1
    if list(layers) != sorted(set(layers)) or any(not 1 <= layer <= last for layer in layers):
        raise BackboneError(
            f"head.middle_layers: got {list(layers)}; allowed: ascending numbers from 1, below {last + 1}, the last "
            "layer of this backbone, after which comes the final state; choose others, or [] for none"
        )


def width(hidden_size: int, layers: Sized) -> int:
    """Columns of a wide state with ``layers``."""
    return hidden_size * (1 + len(layers))


def normalised(x: Tensor) -> Tensor:
    """The residual stream ``[..., H]`` over its root mean square, which is computed in float32."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return (x * scale.square_().div_(x.shape[-1]).add_(_EPSILON).rsqrt_()).to(x.dtype)


def split(state: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """A wide state's final one ``[..., H]`` and its middle ones ``[..., H * M]`` (views)."""
    return state[..., :hidden_size], state[..., hidden_size:]


def final(state: Tensor, hidden_size: int) -> Tensor:
    """A wide state's final one ``[..., H]``, which is what the backbone's output projection scores."""
    return state if state.shape[-1] == hidden_size else split(state, hidden_size)[0]
