"""A frozen linear layer in the layout that the CPU's matrix kernels read.

``F.linear`` hands its kernel a plain row-major weight, which suits no kernel with few rows. ``Linear``
packs the weight once:

- bfloat16 in oneDNN's blocked layout, where the CPU multiplies bfloat16: else oneDNN packs on every
  call, which at 1 to 8 rows costs as much as the product itself. Bit-identical.
- float32 values that fit 16 bits (those of a bfloat16 or float16 checkpoint) as float16 for FBGEMM,
  which widens them in registers: half the memory traffic of a decoding step, float32 arithmetic.
- other float32 values in oneDNN's layout.

The two float32 forms differ from ``F.linear`` in the order of summation only. Measured with AVX2 only,
two cores, 1 to 16 rows: 2 to 3 times as fast as ``F.linear``'s float32, and a product of 4 rows costs
what one of 1 row does.

The operators are private to torch (its compiler and its quantised modules use them), which the exact
torch pin makes safe; where they are missing, or on another device or dtype, it is ``F.linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_mkldnn: Any = torch.ops.mkldnn
_quantized: Any = torch.ops.quantized
Function = Callable[[Tensor], Tensor]

# FBGEMM keeps its output in cache up to this many values a row; beyond, oneDNN is faster from so many rows on.
_WIDE_OUTPUT = 8192
_MANY_ROWS = 24


def _onednn(weight: Tensor, bias: Tensor | None) -> Function | None:
    """bfloat16 or float32 in oneDNN's layout; None where that cannot be."""
    if not (torch.backends.mkldnn.is_available() and hasattr(_mkldnn, "_linear_pointwise")):
        return None
    if weight.dtype != torch.float32 and not (weight.dtype == torch.bfloat16 and _mkldnn._is_mkldnn_bf16_supported()):
        return None
    packed = _mkldnn._reorder_linear_weight(weight, None)  # None: for any number of rows
    return lambda x: _mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _fbgemm(weight: Tensor, bias: Tensor | None) -> Function | None:
    """float32 arithmetic on weights kept in 16 bits; None where that would round them."""
    if weight.dtype != torch.float32 or not hasattr(_quantized, "linear_prepack_fp16"):
        return None
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return None
    # What float16 lacks of bfloat16's range are values too small to show in a float32 sum.
    error = (weight.half().float() - weight).abs().amax(1)
    if not bool((error <= 2.0**-20 * weight.abs().amax(1)).all()):  # so put, NaN and infinity are refused too
        return None
    packed = _quantized.linear_prepack_fp16(weight, bias)
    return lambda x: _quantized.linear_dynamic_fp16(x, packed)


class Linear:
    """``x @ weight.T + bias`` without gradients; ``weight`` is ``[out, in]``.

    Attributes:
        nbytes: of weight and bias as given, whatever the layout takes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach().contiguous()
        bias = None if bias is None else bias.detach().contiguous()
        self.nbytes: int = weight.nbytes + (0 if bias is None else bias.nbytes)
        few: Function | None = None
        many: Function | None = None
        if weight.device.type == "cpu":
            few = _fbgemm(weight, bias)
            if few is None or weight.shape[0] > _WIDE_OUTPUT:
                many = _onednn(weight, bias)
        many = many or few or (lambda x: F.linear(x, weight, bias))
        self._few, self._many = few or many, many
        self._in = weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() < _MANY_ROWS * self._in:
            return self._few(x)
        return self._many(x)
