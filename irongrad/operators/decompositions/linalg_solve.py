"""Triangular and general solves, inverses and determinants, from factorisations.

All solves use substitution, because products with explicit inverses are not backward stable (N. J. Higham, "Accuracy
and Stability of Numerical Algorithms", 2nd edition, 2002, chapters 8, 9 and 14).
"""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.linalg_factor import inverse_of, lu, order_of
from irongrad.operators.decompositions.linalg_loops import column, repeat, row, row_numbers
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.linalg_solve_triangular.default)
def solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """Solve `a @ x = b`, or `x @ a = b` if not `left`, by substitution.

    Only one triangle of `a` is read, and not its diagonal if `unitriangular`.
    """
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    a, b = _same_batch(a, b)
    last = a.shape[-1] - 1

    def substitute(step: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = last - step if upper else step
        rows, factors, found = row_numbers(x), column(a, number), row(x, number)
        if not unitriangular:
            found = found / row(factors, number)
        remaining = rows < number if upper else rows > number
        return (torch.where(remaining, x - factors * found, torch.where(rows == number, found, x)),)

    return repeat(a.shape[-1], substitute, (b,), (a,))[0]


@decomposes(aten.triangular_solve.default)
def _triangular_solve(
    b: torch.Tensor, a: torch.Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    read = a.mT if transpose else a
    solution = solve_triangular(read, b, upper=upper != transpose, unitriangular=unitriangular)
    return solution, _same_batch(a, b)[0].clone()


def _same_batch(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])


def solve_factored(factors: torch.Tensor, order: torch.Tensor, b: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """Solve `a @ x = b`, or `a.mT @ x = b` if `transposed`, from the LU factors of `a[order]`."""
    factors, b = _same_batch(factors, b)
    if transposed:
        inner = solve_triangular(factors.mT, b, upper=False)
        return _take_rows(solve_triangular(factors.mT, inner, upper=True, unitriangular=True), inverse_of(order))
    inner = solve_triangular(factors, _take_rows(b, order), upper=False, unitriangular=True)
    return solve_triangular(factors, inner, upper=True)


def _take_rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(-2, order.unsqueeze(-1).expand(x.shape))


@decomposes(aten.linalg_lu_solve.default)
def _lu_solve(
    factors: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, *, left: bool = True, adjoint: bool = False
) -> torch.Tensor:
    order = order_of(pivots, factors.shape[-2])
    if left:
        return solve_factored(factors, order, b, transposed=adjoint)
    return solve_factored(factors, order, b.mT, transposed=not adjoint).mT


@decomposes(aten._linalg_solve_ex.default)
def _solve_ex(
    a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`b` is a vector if it has one dimension, or the shape of `a` without the last dimension (ATen's rule)."""
    found = lu(a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b.unsqueeze(-1) if vector else b if left else b.mT
    solution = solve_factored(found.factors, found.order, right, transposed=not left)
    solution = solution.squeeze(-1) if vector else solution if left else solution.mT
    return solution, found.factors, found.pivots, found.info


@decomposes(aten.linalg_inv_ex.default)
def _inv_ex(a: torch.Tensor, *, check_errors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    found = lu(a)
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    return solve_factored(found.factors, found.order, identity, transposed=False), found.info


@decomposes(aten.cholesky_solve.default)
def _cholesky_solve(b: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    lower = factor.mT if upper else factor
    return solve_triangular(lower.mT, solve_triangular(lower, b, upper=False), upper=True)


@decomposes(aten.cholesky_inverse.default)
def _cholesky_inverse(factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return _cholesky_solve(torch.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@decomposes(aten._linalg_det.default)
def _det(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The determinant, and the LU factors of the transpose, which the backward needs.

    ATen too factors the transpose of a contiguous matrix. It factors any other matrix itself:
    `irongrad.operators.legalize.retrace.Portable` transposes such a matrix.
    """
    found = lu(_transposed(a))
    return found.sign * found.factors.diagonal(0, -2, -1).prod(-1), found.factors, found.pivots


@decomposes(aten._linalg_slogdet.default)
def _slogdet(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The determinant's sign, the logarithm of its absolute value, and the LU factors of the transpose as in `_det`."""
    found = lu(_transposed(a))
    diagonal = found.factors.diagonal(0, -2, -1)
    return found.sign * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), found.factors, found.pivots


def _transposed(a: torch.Tensor) -> torch.Tensor:
    """`a.mT` of square matrices, as a gather.

    iree-compile 3.13.0 with --iree-opt-data-tiling crashes (MaterializeEncoding) on a transpose that it fuses with a
    product and an addition, if the other addend is computed from indices. The identity matrix is an example:
    `logdet(x @ x.mT + eye(n))`.
    """
    numbers = torch.arange(a.shape[-1])
    places = numbers * a.shape[-1] + numbers.unsqueeze(1)
    return a.flatten(-2).index_select(-1, places.flatten()).reshape(a.shape)
