"""A frozen linear layer in the layout that the CPU's matrix kernels read.

In bfloat16 ``F.linear`` hands oneDNN a plain row-major weight, which oneDNN re-orders into its blocked
layout on every call: at 1 to 8 rows that costs as much as the product itself. ``Linear`` re-orders
once. The results are bit-identical. The two operators it calls are private to torch (the compiler's
CPU back end uses them), which the exact torch pin makes safe; where they are missing, or on another
device or dtype, it is ``F.linear``. In float32 it always is: the losslessness check compares with
stock kernels.
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
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(_ops, "_reorder_linear_weight")
        and hasattr(_ops, "_linear_pointwise")
        and bool(_ops._is_mkldnn_bf16_supported())
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
