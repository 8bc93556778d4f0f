"""Householder QR and products with its reflections, without LAPACK.

G. H. Golub and C. F. Van Loan, "Matrix Computations", 4th edition, 2013, algorithms 5.1.1 and 5.2.1. The signs, and the
storage of the reflections below the diagonal, follow LAPACK (xGEQRF, xLARFG).
"""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.linalg_loops import column, column_numbers, repeat, row, row_numbers
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.geqrf.default)
def reflections(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute R and the Householder reflections 1 - tau v v^T of matrices [..., rows, columns].

    Returns:
        R, with the vectors v stored below its diagonal without their leading ones, and tau [..., min(rows, columns)].
    """
    count = min(a.shape[-2:])
    taus = a.new_zeros([*a.shape[:-2], count])
    if a.numel() == 0:
        return a.clone(), taus
    scale = _scale(a)
    factors, taus = repeat(count, _reflect_column, (a * scale, taus))
    return torch.where(row_numbers(a) > column_numbers(a), factors, factors / scale), taus


def _scale(a: torch.Tensor) -> torch.Tensor:
    """A power of two for each column, so that the squares of its largest elements neither overflow nor underflow.

    Scaling a column of the matrix scales the same column of R. The reflections depend on the directions alone.
    """
    unit = 2.0**10 if a.dtype == torch.float32 else 2.0**80
    largest = a.abs().amax(-2, keepdim=True)
    up = torch.where(largest < unit**-5, unit**10, torch.ones_like(largest))
    return torch.where(largest > unit**5, unit**-8, up)


def _reflect_column(step: torch.Tensor, a: torch.Tensor, taus: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reflect the elements below the diagonal of column `step` to zero (LAPACK, xLARFG).

    The reflection 1 - tau v v^T turns a column [first, rest] into [diagonal, 0], where |diagonal| is the column's
    length. It has v = [1, rest / (first - diagonal)] and tau = (diagonal - first) / diagonal.
    """
    rows, columns = row_numbers(a), column_numbers(a)
    below = rows > step
    current = column(a, step)
    first, rest = row(current, step), torch.where(below, current, 0.0)
    square = (rest * rest).sum(-2, keepdim=True)
    length = (first * first + square).sqrt()
    already_zero = square == 0
    # This sign avoids cancellation in first - diagonal.
    diagonal = torch.where(already_zero, first, torch.where(first >= 0, -length, length))
    tau = torch.where(already_zero, 0.0, (diagonal - first) / torch.where(already_zero, 1.0, diagonal))
    vector = torch.where(below, rest / torch.where(already_zero, 1.0, first - diagonal), (rows == step).to(a.dtype))
    reflected = a - tau * vector * (vector * a).sum(-2, keepdim=True)
    stored = torch.where(below, vector, torch.where(rows == step, diagonal, current))
    a = torch.where(columns > step, reflected, torch.where(columns == step, stored, a))
    return a, torch.where(torch.arange(taus.shape[-1]) == step, tau.squeeze(-1), taus)


def reflect(
    vectors: torch.Tensor, taus: torch.Tensor, x: torch.Tensor, *, left: bool = True, transposed: bool = False
) -> torch.Tensor:
    """Multiply `x` by the product of all reflections, or by its transpose.

    Args:
        vectors: the vectors of the reflections, stored as by `reflections`.
        taus: the factor of each reflection, [..., count].
        x: matrices.
        left: whether the product of reflections is the left operand.
        transposed: whether the product of reflections is transposed.
    """
    count = taus.shape[-1]
    side = -2 if left else -1  # the dimension of `x` that is reflected

    def apply(step: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor, taus: torch.Tensor) -> tuple[torch.Tensor]:
        number = step if transposed == left else count - 1 - step
        rows = row_numbers(vectors)
        vector = torch.where(rows > number, column(vectors, number), (rows == number).to(x.dtype))
        vector = vector if left else vector.mT
        tau = column(taus.unsqueeze(-2), number)
        return (x - tau * vector * (vector * x).sum(side, keepdim=True),)

    return repeat(count, apply, (x,), (vectors, taus))[0]


@decomposes(aten.linalg_householder_product.default, aten.orgqr.default)
def orthogonal(vectors: torch.Tensor, taus: torch.Tensor) -> torch.Tensor:
    """Compute the first columns of the product of reflections, as many as `vectors` has."""
    identity = torch.eye(*vectors.shape[-2:], dtype=vectors.dtype)
    return reflect(vectors, taus, identity.expand(vectors.shape))


@decomposes(aten.ormqr.default)
def _ormqr(
    vectors: torch.Tensor, taus: torch.Tensor, x: torch.Tensor, left: bool = True, transpose: bool = False
) -> torch.Tensor:
    return reflect(vectors, taus, x, left=left, transposed=transpose)


@decomposes(aten.linalg_qr.default)
def qr(a: torch.Tensor, mode: str = "reduced") -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Q and R with the signs that LAPACK chooses; Q is empty in the mode "r"."""
    rows, columns = a.shape[-2:]
    factors, taus = reflections(a)
    size = rows if mode == "complete" else min(rows, columns)
    upper = factors[..., :size, :].triu()
    if mode == "r":
        return a.new_zeros([0]), upper
    identity = torch.eye(rows, size, dtype=a.dtype)
    return reflect(factors, taus, identity.expand(*a.shape[:-2], rows, size)), upper
