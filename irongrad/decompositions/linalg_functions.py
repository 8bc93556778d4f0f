"""Functions of whole matrices: the exponential, pseudoinverses and least squares."""

from __future__ import annotations

import math

import torch

from irongrad.decompositions.linalg_eigen import eigh, svd
from irongrad.decompositions.linalg_loops import repeat_while
from irongrad.decompositions.linalg_solve import solve
from irongrad.decompositions.registry import decomposes

aten = torch.ops.aten

# The degree of the Padé approximant and the largest 1-norm at which it is exact to rounding: N. J. Higham, "The scaling
# and squaring method for the matrix exponential revisited", SIAM J. Matrix Anal. Appl. 26, 2005, table 2.3 and p. 1185.
_PADE = {torch.float32: (7, 3.925724783138660), torch.float64: (13, 5.371920351148152)}


@decomposes(aten.linalg_matrix_exp.default)
def _matrix_exp(a: torch.Tensor) -> torch.Tensor:
    """Halve the matrix until a Padé approximant is exact, and square that as often (Higham 2005)."""
    if a.numel() == 0:
        return a.clone()
    degree, bound = _PADE[a.dtype]
    limit = math.frexp(torch.finfo(a.dtype).max)[1]  # halvings of any finite matrix; infinity stays what it is

    def is_large(a: torch.Tensor) -> torch.Tensor:
        return a.abs().sum(-2, keepdim=True).amax(-1, keepdim=True) > bound

    def goes_on(step: torch.Tensor, a: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return (step < limit) & is_large(a).any()

    def halve(step: torch.Tensor, a: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, ...]:
        large = is_large(a)
        return step + 1, torch.where(large, 0.5 * a, a), times + large

    def is_smaller(step: torch.Tensor, result: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return step < times.amax()

    def square(step: torch.Tensor, result: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return step + 1, torch.where(step < times, result @ result, result)

    zero = torch.zeros((), dtype=torch.int64)
    none = torch.zeros([*a.shape[:-2], 1, 1], dtype=torch.int64)
    _, a, times = repeat_while(goes_on, halve, (zero, a, none))
    return repeat_while(is_smaller, square, (zero, _pade(a, degree)), (times,))[1]


def _pade(a: torch.Tensor, degree: int) -> torch.Tensor:
    """The diagonal approximant p(a) / p(-a), with even and odd powers apart, by Horner's rule (Higham 2005, 2.2)."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    square = a @ a
    coefficients = [
        math.comb(degree, j) * math.factorial(2 * degree - j) / math.factorial(degree) for j in range(degree + 1)
    ]
    even, odd = coefficients[degree - 1] * identity, coefficients[degree] * identity
    for j in range(degree - 3, -1, -2):
        even = even @ square + coefficients[j] * identity
        odd = odd @ square + coefficients[j + 1] * identity
    odd = a @ odd
    return solve(even - odd, even + odd)


@decomposes(aten.linalg_pinv.atol_rtol_tensor)
def _pinv(
    a: torch.Tensor, *, atol: torch.Tensor | None = None, rtol: torch.Tensor | None = None, hermitian: bool = False
) -> torch.Tensor:
    """Invert what is not negligible of the singular values, or of the eigenvalues."""
    if a.numel() == 0:
        return a.mT.clone()
    if hermitian:
        lower = a.tril()
        values, u = eigh(lower + lower.tril(-1).mT)
        v = u
    else:
        u, values, v = svd(a)
    size = values.abs()
    kept = size > _tolerance(a, size.amax(-1, keepdim=True), atol, rtol)
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    return (v * inverse.unsqueeze(-2)) @ u.mT


def _tolerance(
    a: torch.Tensor, largest: torch.Tensor, atol: torch.Tensor | None, rtol: torch.Tensor | None
) -> torch.Tensor:
    """Below what a singular value is negligible; a relative tolerance is the default where there is no absolute one."""
    absolute = torch.zeros((), dtype=a.dtype) if atol is None else atol
    if rtol is None:
        rtol = torch.where(absolute > 0, 0.0, torch.finfo(a.dtype).eps * max(a.shape[-2:]))
    return torch.maximum(absolute.unsqueeze(-1), rtol.unsqueeze(-1) * largest)


@decomposes(aten.linalg_lstsq.default)
def _lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The shortest solution, from singular values; which of the other results there are depends on the driver.

    Residuals are those of matrices of full rank: ATen leaves them out where one is not, which is not known here.
    """
    rows, columns = a.shape[-2:]
    vector = b.ndim == a.ndim - 1
    right = b.unsqueeze(-1) if vector else b
    u, values, v = svd(a)
    cut = torch.finfo(a.dtype).eps * max(rows, columns) if rcond is None else rcond
    kept = values > cut * values[..., :1]
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    solution = v @ (inverse.unsqueeze(-1) * (u.mT @ right))
    difference = a @ solution - right
    none = a.new_zeros([0])
    residuals = (difference * difference).sum(-2) if rows > columns and driver not in (None, "gelsy") else none
    rank = none.to(torch.int64) if driver == "gels" else kept.to(torch.int64).sum(-1)
    found = values if driver in ("gelsd", "gelss") else none
    return (solution.squeeze(-1) if vector else solution), residuals, rank, found


# PyTorch has no rule for its shapes, as the residuals' depend on the values.
torch.library.register_fake("aten::linalg_lstsq")(_lstsq)
