"""A frozen linear layer in the layout that the CPU's matrix kernels read.

``F.linear`` hands its kernel a plain row-major weight. In bfloat16 oneDNN re-orders it into its blocked
layout on every call, which at 1 to 8 rows costs as much as the product itself; in float32 MKL reads it
as it is and needs 1.5 to 4 times as long as oneDNN on its own layout (AVX2, 1 to 128 rows). ``Linear``
re-orders once. Results are bit-identical in bfloat16 and equal up to the order of summation in
float32. The two operators it calls are private to torch (the compiler's CPU back end uses them), which
the exact torch pin makes safe; where they are missing, or on another device or dtype, it is ``F.linear``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ops: Any = torch.ops.mkldnn


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(_ops, "_reorder_linear_weight")
        and hasattr(_ops, "_linear_pointwise")
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _ops._is_mkldnn_bf16_supported()))
    )


class Linear:
    """``x @ weight.T + bias`` without gradients; ``weight`` is ``[out, in]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach().contiguous()
        self.nbytes: int = weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
        self._packed: Tensor | None = None
        if _can_pack(weight):
            self._packed = _ops._reorder_linear_weight(weight, None)  # None: for any number of rows
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self.bias)
        return _ops._linear_pointwise(x, self._packed, self.bias, "none", [], "")
