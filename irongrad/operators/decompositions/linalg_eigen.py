"""Singular values and symmetric eigenvalues, without LAPACK, by rotations of pairs of columns.

One-sided Jacobi, in the order of a tournament: G. H. Golub and C. F. Van Loan, "Matrix Computations", 4th edition,
2013, sections 8.5.5 (parallel orders) and 8.6.3 (one-sided). It works on the transposed triangle of a QR
factorisation, whose columns are almost orthogonal: Z. Drmač and K. Veselić, "New fast and accurate Jacobi SVD
algorithm", SIAM J. Matrix Anal. Appl. 29, 2008.
"""

from __future__ import annotations

from functools import partial

import torch

from irongrad.operators.decompositions.linalg_loops import repeat
from irongrad.operators.decompositions.linalg_qr import qr
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


def svd(a: torch.Tensor, *, full: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, the singular values from the largest on, and V; U and V are square with `full`.

    From `a = q @ r` and `r.mT @ w = v @ diag(s)` follows `a = (q @ w) @ diag(s) @ v.mT`. The columns of a QR
    factorisation's Q are orthonormal for singular values of zero too.
    """
    if a.shape[-2] < a.shape[-1]:
        v, s, u = svd(a.mT, full=full)
        return u, s, v
    size = a.shape[-1]
    largest = a.abs().flatten(-2).amax(-1)[..., None, None] if a.numel() else torch.ones((), dtype=a.dtype)
    scale = torch.where(largest == 0, 1.0, largest)
    q, r = qr(a / scale, "complete" if full else "reduced")
    rotated, w = _orthogonal_columns(r[..., :size, :].mT)
    s, order = (rotated * rotated).sum(-2).sqrt().sort(dim=-1, descending=True, stable=True)
    order = order.unsqueeze(-2).expand(rotated.shape)
    v, lengths = qr(rotated.gather(-1, order))
    v = torch.where(lengths.diagonal(0, -2, -1).unsqueeze(-2) < 0, -v, v)
    u = q[..., :size] @ w.gather(-1, order)
    return torch.cat([u, q[..., size:]], -1), s * scale.squeeze(-1), v


def _orthogonal_columns(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`a @ w` with orthogonal columns, and the orthogonal matrix w, of square matrices."""
    size = a.shape[-1]
    if size < 2:
        return a, torch.eye(size, dtype=a.dtype).expand(a.shape)
    both = torch.cat([a, torch.eye(size, dtype=a.dtype).expand(a.shape)], -2)
    players = size + size % 2  # without an opponent, a column plays against zeros
    both = aten.constant_pad_nd.default(both, [0, players - size])
    (both,) = repeat(_sweeps(a) * (players - 1), partial(_rotate_pairs, rows=size), (both,))
    return both[..., :size, :size], both[..., size:, :size]


def _sweeps(a: torch.Tensor) -> int:
    """How often every pair of columns is rotated.

    Convergence is quadratic, and the number of sweeps before it sets in grows like the logarithm of the size (Golub
    and Van Loan, 8.5.3 and 8.5.6). Random, graded, rank-deficient and clustered matrices up to size 128 took at most
    three sweeps more than the logarithm in float32 and four in float64, counting one that changes nothing. Hilbert
    matrices in float64 take more from size 50 on: columns of size 128 are then orthogonal to about 1e-11 only.
    """
    logarithm = int(a.shape[-1] - 1).bit_length()
    return logarithm + (4 if a.dtype == torch.float32 else 6)


def _rotate_pairs(step: torch.Tensor, both: torch.Tensor, *, rows: int) -> tuple[torch.Tensor]:
    """Make each column of the first half orthogonal to its opponent in the second, and move on to the next opponents.

    A product below the rounding of the largest column, which is at least 1, is zero. As many steps as there are
    columns, less one, bring all of them back to their places.
    """
    half = both.shape[-1] // 2
    one, other = both[..., :half], both[..., half:]
    above, beside = one[..., :rows, :], other[..., :rows, :]
    square, square_beside = (above * above).sum(-2, keepdim=True), (beside * beside).sum(-2, keepdim=True)
    product = (above * beside).sum(-2, keepdim=True)
    rotates = product.abs() > torch.finfo(both.dtype).eps * torch.maximum(square, square_beside).sqrt()
    cotangent = (square_beside - square) / (2 * torch.where(rotates, product, 1.0))  # of twice the angle
    tangent = torch.where(cotangent >= 0, 1.0, -1.0) / (cotangent.abs() + (1 + cotangent * cotangent).sqrt())
    tangent = torch.where(rotates, tangent, 0.0)
    cosine = (1 + tangent * tangent).rsqrt()
    sine = cosine * tangent
    one, other = cosine * one - sine * other, sine * one + cosine * other
    if half == 1:
        return (torch.cat([one, other], -1),)
    return (torch.cat([one[..., :1], other[..., :1], one[..., 1:-1], other[..., 1:], one[..., -1:]], -1),)


def eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues in ascending order, and eigenvectors, of symmetric matrices.

    Shifted by a bound of its norm, a matrix is positive semidefinite, and its eigenvectors are its singular vectors.
    The eigenvalues are Rayleigh quotients, in which the error of an eigenvector counts squared.
    """
    shift = _norm_bound(a) * torch.eye(a.shape[-1], dtype=a.dtype)
    vectors = svd(a + shift)[2]
    values, order = (vectors * (a @ vectors)).sum(-2).sort(dim=-1, stable=True)
    return values, vectors.gather(-1, order.unsqueeze(-2).expand(vectors.shape))


def _norm_bound(a: torch.Tensor) -> torch.Tensor:
    """A bound of the 2-norm of symmetric matrices, too large by a factor of up to size ** (1 / 8): [..., 1, 1].

    It is the 8-norm of the eigenvalues, from the Frobenius norm of the fourth power.
    """
    if a.numel() == 0:
        return torch.zeros((), dtype=a.dtype)
    scale = a.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale == 0, 1.0, scale)
    square = (a / scale) @ (a / scale)
    fourth = square @ square
    return scale * (fourth * fourth).sum((-2, -1), keepdim=True).sqrt().sqrt().sqrt()


@decomposes(aten._linalg_svd.default)
def _svd(
    a: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u, s, v = svd(a, full=full_matrices)
    none = a.new_zeros([0])
    return (u, s, v.mT) if compute_uv else (none, s, none)


@decomposes(aten._linalg_eigh.default)
def _eigh(a: torch.Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
    lower = a.tril() if UPLO.upper() == "L" else a.triu().mT
    values, vectors = eigh(lower + lower.tril(-1).mT)
    return values, vectors if compute_v else a.new_zeros([0])
