"""LU and Cholesky factorisations, without LAPACK, one column after the other.

G. H. Golub and C. F. Van Loan, "Matrix Computations", 4th edition, 2013: algorithms 3.4.1 (outer product Gaussian
elimination with partial pivoting) and 4.2.2 (outer product Cholesky).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from irongrad.operators.decompositions.linalg_loops import column, column_numbers, repeat, row, row_numbers
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


class LU(NamedTuple):
    """Factors of `a[order] = l @ u`.

    Attributes:
        factors: u, and l below the diagonal, without its unit diagonal; [..., rows, columns].
        pivots: LAPACK's row exchanges, int32 [..., min(rows, columns)]: the row, counted from one, that each row was
            exchanged with.
        order: the row of `a` in each row of the product, int64 [..., rows].
        info: the first column with a pivot of zero, counted from one, or 0 if there is none; int32 [...].
    """

    factors: torch.Tensor
    pivots: torch.Tensor
    order: torch.Tensor
    info: torch.Tensor

    @property
    def sign(self) -> torch.Tensor:
        """The determinant of the row permutation: 1 or -1."""
        exchanged = self.pivots != torch.arange(1, self.pivots.shape[-1] + 1)
        odd = exchanged.to(torch.int64).sum(-1) % 2
        return (1 - 2 * odd).to(self.factors.dtype)


def lu(a: torch.Tensor) -> LU:
    """Factor matrices [..., rows, columns] of any shape, with partial pivoting."""
    *batch, rows, columns = a.shape
    count = min(rows, columns)
    order = torch.arange(rows).expand(*batch, rows)
    pivots = torch.zeros(*batch, count, dtype=torch.int64)
    info = torch.zeros(batch, dtype=torch.int64)
    factors, order, pivots, info = repeat(count, _eliminate, (a, order, pivots, info))
    return LU(factors, pivots.to(torch.int32), order, info.to(torch.int32))


def _eliminate(
    step: torch.Tensor, a: torch.Tensor, order: torch.Tensor, pivots: torch.Tensor, info: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Column `step` of Gaussian elimination (Golub and Van Loan, 3.4.1).

    The row with the largest element at or below the diagonal is exchanged with the diagonal's row. The elements below
    the pivot, divided by it, are a column of l. The outer product `factor * upper` is subtracted from all elements
    below and to the right.
    """
    rows, columns = row_numbers(a), column_numbers(a)
    size = torch.where(rows >= step, column(a, step).abs(), -1.0).squeeze(-1)
    chosen = size.argmax(-1, keepdim=True)
    exchange = _exchange(a.shape[-2], step, chosen)
    a, order = _take_rows(a, exchange), order.gather(-1, exchange)
    upper = row(a, step)
    pivot = column(upper, step)
    missing = pivot == 0
    below, after = rows > step, columns > step
    factor = column(a, step) / torch.where(missing, 1.0, pivot)
    a = torch.where(below & after, a - factor * upper, torch.where(below & (columns == step), factor, a))
    pivots = torch.where(torch.arange(pivots.shape[-1]) == step, chosen + 1, pivots)
    info = torch.where((info == 0) & missing.reshape(info.shape), step + 1, info)
    return a, order, pivots, info


def _exchange(count: int, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The numbers from 0 to `count` - 1, with `one` and `other`, both [..., 1], exchanged."""
    numbers = torch.arange(count)
    return torch.where(numbers == one, other, torch.where(numbers == other, one, numbers))


def _take_rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(-2, order.unsqueeze(-1).expand(x.shape))


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """Invert the permutation `order` [..., rows]."""
    numbers = torch.arange(order.shape[-1])
    return torch.where(order.unsqueeze(-2) == numbers.unsqueeze(1), numbers, 0).sum(-1)


def order_of(pivots: torch.Tensor, rows: int) -> torch.Tensor:
    """Convert LAPACK's `pivots` to the order of the rows, as in `LU.order`; pivots of no row are clamped."""

    def exchange(step: torch.Tensor, order: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (order.gather(-1, _exchange(rows, step, column(chosen.unsqueeze(-2), step).squeeze(-2))),)

    order = torch.arange(rows).expand(*pivots.shape[:-1], rows)
    return repeat(pivots.shape[-1], exchange, (order,), ((pivots.to(torch.int64) - 1).clamp(0, rows - 1),))[0]


@decomposes(aten.linalg_lu_factor_ex.default)
def _lu_factor_ex(
    a: torch.Tensor, *, pivot: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = lu(a)
    return found.factors, found.pivots, found.info


@decomposes(aten.linalg_lu.default)
def _linalg_lu(a: torch.Tensor, *, pivot: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = lu(a)
    return _permutation(found.order, a.dtype), *_triangles(found.factors)


@decomposes(aten.lu_unpack.default)
def _lu_unpack(
    factors: torch.Tensor, pivots: torch.Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = factors.new_zeros([0])
    lower, upper = _triangles(factors) if unpack_data else (none, none)
    if not unpack_pivots:
        return none, lower, upper
    return _permutation(order_of(pivots, factors.shape[-2]), factors.dtype), lower, upper


def _permutation(order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix p of `a = p @ l @ u`, from `a[order] = l @ u`."""
    return (order.unsqueeze(-2) == torch.arange(order.shape[-1]).unsqueeze(1)).to(dtype)


def _triangles(factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = factors.shape[-2:]
    count = min(rows, columns)
    lower = factors[..., :count].tril(-1) + torch.eye(rows, count, dtype=factors.dtype)
    return lower, factors[..., :count, :].triu()


@decomposes(aten._linalg_check_errors.default)
def _check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Check nothing: a compiled step raises no exceptions, and a singular matrix gives infinities or NaN."""


@decomposes(aten.linalg_cholesky_ex.default)
def _cholesky_ex(
    a: torch.Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of symmetric matrices. Only one triangle is read."""
    lower = (a.mT if upper else a).tril()
    info = torch.zeros(a.shape[:-2], dtype=torch.int64)
    lower, info = repeat(a.shape[-1], _factor_column, (lower, info))
    return (lower.mT.contiguous() if upper else lower), info.to(torch.int32)


def _factor_column(step: torch.Tensor, a: torch.Tensor, info: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Column `step` of Cholesky's factor (Golub and Van Loan, 4.2.2).

    The column is divided by the square root of its diagonal element. The outer product of the result with itself is
    subtracted from the triangle to the right. `info` is LAPACK's (xPOTRF): the order of the first leading minor that is
    not positive.
    """
    rows, columns = row_numbers(a), column_numbers(a)
    square = column(row(a, step), step)
    factor = torch.where(rows > step, column(a, step) / square.sqrt(), 0.0)
    inside = (rows >= columns) & (columns > step)
    a = torch.where(inside, a - factor * factor.mT, torch.where((columns == step) & (rows > step), factor, a))
    a = torch.where((rows == step) & (columns == step), square.sqrt(), a)
    failed = ~(square > 0).reshape(info.shape)
    return a, torch.where((info == 0) & failed, step + 1, info)


@decomposes(aten.cholesky.default)
def _cholesky(a: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return _cholesky_ex(a, upper=upper)[0]
