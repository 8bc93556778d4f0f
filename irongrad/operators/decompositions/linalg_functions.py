"""Functions of whole matrices: the exponential, pseudoinverses and least squares."""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.linalg_eigen import eigh, svd
from irongrad.operators.decompositions.linalg_loops import repeat
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

# The degree of the Taylor polynomial. At norm 1 its remainder, about 1 / (degree + 1)!, is below rounding.
_DEGREE = {torch.float32: 10, torch.float64: 18}

# The largest number of squarings. At norm 1 / eps, no digit of the exponential is correct in general (Higham, lemma
# 10.15). The further squarings are for block triangular matrices such as the gradient's: a large block off the diagonal
# does no harm there.
_SQUARINGS = {torch.float32: 64, torch.float64: 128}


@decomposes(aten.linalg_matrix_exp.default)
def _matrix_exp(a: torch.Tensor) -> torch.Tensor:
    """Halve the matrix until its norm is at most 1, and square its Taylor polynomial equally often.

    Scaling and squaring: N. J. Higham, "Functions of Matrices", 2008, section 10.3. Unlike a Padé approximant, a Taylor
    polynomial needs no solve (P. Bader, S. Blanes and F. Casas, "Computing the matrix exponential with an optimized
    Taylor polynomial approximation", Mathematics 7, 2019). The number of squarings depends on the values. But the loop
    always has `_SQUARINGS` iterations, because IREE 3.13.0 fails on two loops of unknown length. Matrices that need
    more squarings give NaN.
    """
    if a.numel() == 0:
        return a.clone()
    exponents = torch.arange(_SQUARINGS[a.dtype] + 1, dtype=a.dtype)
    norm = a.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    halved = norm > exponents.exp2()
    scale = torch.where(halved, 0.5, 1.0).to(a.dtype).prod(-1, keepdim=True)  # exactly a power of two
    scale = torch.where(halved[..., -1:], torch.nan, scale)
    times = halved.to(torch.int64).sum(-1, keepdim=True)

    def square(step: torch.Tensor, result: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.where(step < times, result @ result, result),)

    return repeat(_SQUARINGS[a.dtype], square, (_taylor(a * scale),), (times,))[0]


def _taylor(a: torch.Tensor) -> torch.Tensor:
    """The sum of a^k / k! up to the degree, by Horner's rule: 1 + a (1 + a / 2 (1 + a / 3 ...))."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    result = identity + a / _DEGREE[a.dtype]
    for degree in range(_DEGREE[a.dtype] - 1, 0, -1):
        result = identity + a @ result / degree
    return result


@decomposes(aten.linalg_pinv.atol_rtol_tensor)
def _pinv(
    a: torch.Tensor, *, atol: torch.Tensor | None = None, rtol: torch.Tensor | None = None, hermitian: bool = False
) -> torch.Tensor:
    """Invert the singular values, or the eigenvalues, that are not negligible."""
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
    """The size below which a singular value is negligible.

    The default is a relative tolerance, which applies if no positive absolute tolerance is given.
    """
    if rtol is None:
        default = torch.finfo(a.dtype).eps * max(a.shape[-2:])
        if atol is None:
            return default * largest
        rtol = torch.where(atol > 0, torch.zeros_like(atol), default)
    relative = rtol.unsqueeze(-1) * largest
    return relative if atol is None else torch.maximum(atol.unsqueeze(-1), relative)


@decomposes(aten.linalg_lstsq.default)
def _lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution of minimum norm, from the singular values. The driver decides which other results are not empty.

    Residuals are returned as for matrices of full rank. ATen omits them if a matrix lacks full rank, but the rank is
    unknown at compile time.
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
    returned_values = values if driver in ("gelsd", "gelss") else none
    return (solution.squeeze(-1) if vector else solution), residuals, rank, returned_values


# PyTorch has no rule for its shapes, because the shape of the residuals depends on the values.
torch.library.register_fake("aten::linalg_lstsq")(_lstsq)
