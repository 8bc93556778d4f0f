"""Softmax, its logarithm, and the logarithm of its denominator, with their gradients.

The largest element is taken out before any exponential, which then cannot overflow, and the sum is at least 1
(P. Blanchard, D. J. Higham and N. J. Higham, "Accurately computing the log-sum-exp and softmax functions", IMA J.
Numer. Anal. 41, 2021). NaN and a row of infinities of one sign give NaN, as in eager.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes, uses_pytorch

aten = torch.ops.aten

# Beyond torch-mlir 20261001's own table.
uses_pytorch(aten._safe_softmax)


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
    """dx = y (dy - sum(dy y)), as dy[i] / dx[j] is y[i] ([i = j] - y[j])."""
    if output.numel() == 0:
        return torch.empty_like(output, dtype=input_dtype)
    given, share = _wide(grad), _wide(output)
    # Multiplied out, IREE 3.13.0 writes the products and reads them twice; this is one kernel, and what ATen's does.
    return (share * (given - (given * share).sum(dim, keepdim=True))).reshape(output.shape).to(input_dtype)


@decomposes(aten._log_softmax_backward_data.default)
def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    """dx = dy - exp(y) sum(dy), from y = x - log(sum(exp(x)))."""
    if output.numel() == 0:
        return torch.empty_like(output, dtype=input_dtype)
    given = _wide(grad)
    return (given - _wide(output).exp() * given.sum(dim, keepdim=True)).reshape(output.shape).to(input_dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32 at least, and of rank 1 at least.

    torch-mlir 20261001 does not lower a reduction of rank 0, and its own softmax of one never ends.
    """
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    return wide if x.ndim else wide.reshape(1)


@decomposes(aten.logsumexp.default)
def _logsumexp(x: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """The largest element is taken out unless it is infinite, and so the result itself."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    vector = x if x.ndim else x.reshape(1)
    if vector.numel() == 0:
        return vector.exp().sum(dim, keepdim=keepdim).log()
    largest = vector.amax(dim, keepdim=True)
    taken = torch.where(largest.abs() == math.inf, 0.0, largest)
    result = (vector - taken).exp().sum(dim, keepdim=True).log() + taken
    return result.reshape(torch.sum(torch.empty_like(x, device="meta"), dim, keepdim=keepdim).shape)
