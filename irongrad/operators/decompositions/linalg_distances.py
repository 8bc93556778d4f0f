"""Distances between rows in the p-norms, and their gradients, which follow ATen's definitions at the kinks.

Distances are always computed from differences. For many rows, ATen uses |x|^2 + |y|^2 - 2 x.y, which cancels if rows
are close.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.dist.default)
def _dist(x: torch.Tensor, y: torch.Tensor, p: float = 2) -> torch.Tensor:
    """The p-norm of all differences, taken as one vector."""
    return aten.linalg_vector_norm.default(x - y, p)


@decomposes(aten._cdist_forward.default)
def _cdist_forward(x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    """Distances between all rows of `x` and all rows of `y`."""
    return _length(x.unsqueeze(-2) - y.unsqueeze(-3), p)


@decomposes(aten._cdist_backward.default)
def _cdist_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """The gradient of `x`."""
    differences = x.unsqueeze(-2) - y.unsqueeze(-3)
    return _length_backward(grad.unsqueeze(-1), differences, p, distances.unsqueeze(-1)).sum(-2)


@decomposes(aten._pdist_forward.default)
def _pdist_forward(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Distances between each row and all later rows, row by row."""
    count = x.shape[0]
    if count < 2:
        return x.new_zeros([0])
    pairs = torch.arange(count * (count - 1) // 2)
    first = torch.arange(1, count)
    rows = (pairs.unsqueeze(1) >= _pairs_before(first, count)).to(torch.int64).sum(1)
    columns = pairs - _pairs_before(rows, count) + rows + 1
    return _length(x.index_select(0, rows) - x.index_select(0, columns), p)


@decomposes(aten._pdist_backward.default)
def _pdist_backward(grad: torch.Tensor, x: torch.Tensor, p: float, distances: torch.Tensor) -> torch.Tensor:
    """Both rows of a pair receive its gradient.

    The pairs are expanded to the square matrix of distances, where the gradient of each row sums over its own pairs.
    """
    if grad.numel() == 0:
        return torch.zeros_like(x)
    count = x.shape[0]
    one, other = torch.arange(count).unsqueeze(1), torch.arange(count)
    row, column = torch.minimum(one, other), torch.maximum(one, other)
    pair = _pairs_before(row, count) + column - row - 1
    place = torch.where(row == column, 0, pair).flatten()  # any pair serves on the diagonal: differences are zero
    grad, distances = (t.index_select(0, place).unflatten(0, (count, count)) for t in (grad, distances))
    return _cdist_backward(grad, x, x, p, distances)


def _pairs_before(row: torch.Tensor, count: int) -> torch.Tensor:
    """The number of pairs, among `count` rows, whose first row is before `row`."""
    return row * count - row * (row + 1) // 2


def _length(x: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm over the last dimension."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    if p == 0:
        return torch.where(x != x, x, (x != 0).to(x.dtype)).sum(-1)
    if p == 1:
        return x.abs().sum(-1)
    if p == 2:
        return (x * x).sum(-1).sqrt()
    if math.isinf(p):
        return x.abs().amax(-1)
    return x.abs().pow(p).sum(-1).pow(1 / p)


def _length_backward(grad: torch.Tensor, x: torch.Tensor, p: float, length: torch.Tensor) -> torch.Tensor:
    """The gradient of `_length`. It is zero if the length is zero, and for zero elements even if p < 1."""
    if p == 0:
        return torch.zeros_like(x) * grad
    if p == 1:
        return grad * x.sign()
    if math.isinf(p):
        return grad * x.sign() * (x.abs() == length)
    size = x.abs()
    smooth = (length != 0) & (size != 0)
    ratio = torch.where(smooth, size, 1.0) / torch.where(smooth, length, 1.0)
    slope = ratio if p == 2 else ratio.pow(p - 1)
    return grad * torch.where(smooth, x.sign() * slope, 0.0)
