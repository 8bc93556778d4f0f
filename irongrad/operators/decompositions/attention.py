"""`softmax`, `log_softmax` and `logsumexp`, and the gradients of the first two.

The largest element is subtracted before any exponential. The exponentials then cannot overflow, and their sum is at
least 1 (P. Blanchard, D. J. Higham and N. J. Higham, "Accurately computing the log-sum-exp and softmax functions", IMA
J. Numer. Anal. 41, 2021). As in eager, the softmax of a row with NaN, or of a row of infinities of one sign, is NaN.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import is_known

aten = torch.ops.aten


@decomposes(aten._safe_softmax.default)
def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The softmax, and zero for a row of minus infinities.

    PyTorch's own decomposition compares every element with minus infinity. The largest element of a row tells as much.
    For sizes that vary, IREE 3.13.0 miscompiles a kernel that compares before the exponential, by 0.1 in the prediction
    of a TransformerEncoderLayer of any batch (tests/pipeline/test_sizes_grid.py). So there the comparison comes last.
    """
    x = x if dtype is None else x.to(dtype)
    wide = _wide(x)
    if x.numel() == 0:
        return torch.empty_like(x)
    if not all(map(is_known, x.shape)):
        made = torch.softmax(wide, dim)
        return torch.where(wide.amax(dim, keepdim=True) == -math.inf, 0.0, made).to(x.dtype)
    largest = wide.amax(dim, keepdim=True)
    empty = largest == -math.inf
    exponential = (wide - torch.where(empty, 0.0, largest)).exp()
    total = exponential.sum(dim, keepdim=True)
    return (exponential / torch.where(empty, 1.0, total)).reshape(x.shape).to(x.dtype)


@decomposes(aten._softmax.default)
def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = _wide(x)
    if x.numel() == 0:
        return wide if half_to_float else torch.empty_like(x)
    exponential = (wide - wide.amax(dim, keepdim=True)).exp()
    result = (exponential / exponential.sum(dim, keepdim=True)).reshape(x.shape)
    return result if half_to_float else result.to(x.dtype)


@decomposes(aten._log_softmax.default)
def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = _wide(x)
    if x.numel() == 0:
        return wide if half_to_float else torch.empty_like(x)
    centred = wide - wide.amax(dim, keepdim=True)
    result = (centred - centred.exp().sum(dim, keepdim=True).log()).reshape(x.shape)
    return result if half_to_float else result.to(x.dtype)


@decomposes(aten._softmax_backward_data.default)
def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    """dx = y (dy - sum(dy y)), because dy[i] / dx[j] = y[i] ([i = j] - y[j])."""
    if output.numel() == 0:
        return torch.empty_like(output, dtype=input_dtype)
    dout, out = _wide(grad), _wide(output)
    # This form compiles to one kernel, as in ATen. If it is multiplied out, IREE 3.13.0 stores the products and reads
    # them twice.
    return (out * (dout - (dout * out).sum(dim, keepdim=True))).reshape(output.shape).to(input_dtype)


@decomposes(aten._log_softmax_backward_data.default)
def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    """dx = dy - exp(y) sum(dy), from y = x - log(sum(exp(x)))."""
    if output.numel() == 0:
        return torch.empty_like(output, dtype=input_dtype)
    dout = _wide(grad)
    return (dout - _wide(output).exp() * dout.sum(dim, keepdim=True)).reshape(output.shape).to(input_dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in at least float32, and with at least one dimension.

    torch-mlir 20261001 does not lower a reduction of a rank-0 tensor, and its own softmax of one never terminates.
    """
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    return wide if x.ndim else wide.reshape(1)


@decomposes(aten.logsumexp.default)
def _logsumexp(x: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """Subtract the largest element, unless it is infinite; the result then equals it."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    vector = x if x.ndim else x.reshape(1)
    if vector.numel() == 0:
        return vector.exp().sum(dim, keepdim=keepdim).log()
    largest = vector.amax(dim, keepdim=True)
    shift = torch.where(largest.abs() == math.inf, 0.0, largest)
    result = (vector - shift).exp().sum(dim, keepdim=True).log() + shift
    return result.reshape(torch.sum(torch.empty_like(x, device="meta"), dim, keepdim=keepdim).shape)
