"""Singular values and symmetric eigenvalues, without LAPACK, by rotations of pairs of columns.

The method is one-sided Jacobi in tournament order: G. H. Golub and C. F. Van Loan, "Matrix Computations", 4th edition,
2013, sections 8.5.5 (parallel orders) and 8.6.3 (one-sided). It runs on the transposed triangular factor of a QR
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
    """Compute the singular value decomposition `a = u @ diag(s) @ v.mT`.

    From `a = q @ r` and `r.mT @ w = v @ diag(s)` follows `a = (q @ w) @ diag(s) @ v.mT`. V is the Q of a QR
    factorisation, so its columns are orthonormal even for singular values of zero.

    Args:
        a: matrices, [..., rows, columns].
        full: whether U and V are square.

    Returns:
        U, the singular values in descending order, and V.
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
    """For square matrices, `a @ w` with orthogonal columns, and the orthogonal matrix w."""
    size = a.shape[-1]
    if size < 2:
        return a, torch.eye(size, dtype=a.dtype).expand(a.shape)
    both = torch.cat([a, torch.eye(size, dtype=a.dtype).expand(a.shape)], -2)
    players = size + size % 2  # a column without an opponent is paired with zeros
    both = aten.constant_pad_nd.default(both, [0, players - size])
    (both,) = repeat(_sweeps(a) * (players - 1), partial(_rotate_pairs, rows=size), (both,))
    return both[..., :size, :size], both[..., size:, :size]


def _sweeps(a: torch.Tensor) -> int:
    """The number of sweeps: how often every pair of columns is rotated.

    Convergence is quadratic. The number of sweeps before it sets in grows like the logarithm of the size (Golub and Van
    Loan, 8.5.3 and 8.5.6). Random, graded, rank-deficient and clustered matrices were tried up to size 128. They took
    at most three sweeps more than the logarithm in float32, and four in float64, including one that changes nothing.
    Hilbert matrices in float64 take more from size 50 on: at size 128 their columns are orthogonal to about 1e-11 only.
    """
    logarithm = int(a.shape[-1] - 1).bit_length()
    return logarithm + (4 if a.dtype == torch.float32 else 6)


def _rotate_pairs(step: torch.Tensor, both: torch.Tensor, *, rows: int) -> tuple[torch.Tensor]:
    """Rotate each column of the first half and its opponent in the second half to be orthogonal, then form new pairs.

    A dot product within the rounding error of the largest column, whose norm is at least 1, counts as zero. A sweep has
    one step fewer than there are columns. After a sweep, every column is back in its place.
    """
    half = both.shape[-1] // 2
    one, other = both[..., :half], both[..., half:]
    one_rows, other_rows = one[..., :rows, :], other[..., :rows, :]
    square, other_square = (one_rows * one_rows).sum(-2, keepdim=True), (other_rows * other_rows).sum(-2, keepdim=True)
    product = (one_rows * other_rows).sum(-2, keepdim=True)
    rotates = product.abs() > torch.finfo(both.dtype).eps * torch.maximum(square, other_square).sqrt()
    cotangent = (other_square - square) / (2 * torch.where(rotates, product, 1.0))  # of twice the rotation angle
    tangent = torch.where(cotangent >= 0, 1.0, -1.0) / (cotangent.abs() + (1 + cotangent * cotangent).sqrt())
    tangent = torch.where(rotates, tangent, 0.0)
    cosine = (1 + tangent * tangent).rsqrt()
    sine = cosine * tangent
    one, other = cosine * one - sine * other, sine * one + cosine * other
    if half == 1:
        return (torch.cat([one, other], -1),)
    return (torch.cat([one[..., :1], other[..., :1], one[..., 1:-1], other[..., 1:], one[..., -1:]], -1),)


def eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the eigenvalues, in ascending order, and the eigenvectors of symmetric matrices.

    A matrix that is shifted by a bound of its norm is positive semidefinite, so its eigenvectors are its singular
    vectors. The eigenvalues are Rayleigh quotients, whose error is quadratic in the error of the eigenvector.
    """
    shift = _norm_bound(a) * torch.eye(a.shape[-1], dtype=a.dtype)
    vectors = svd(a + shift)[2]
    values, order = (vectors * (a @ vectors)).sum(-2).sort(dim=-1, stable=True)
    return values, vectors.gather(-1, order.unsqueeze(-2).expand(vectors.shape))


def _norm_bound(a: torch.Tensor) -> torch.Tensor:
    """An upper bound of the 2-norm of symmetric matrices, [..., 1, 1].

    It is the 8-norm of the eigenvalues, computed from the Frobenius norm of the fourth power. It exceeds the 2-norm by
    a factor of at most size ** (1 / 8).
    """
    if a.numel() == 0:
        return torch.zeros((), dtype=a.dtype)
    scale = a.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale == 0, 1.0, scale)
    square = (a / scale) @ (a / scale)
    fourth = square @ square
    return scale * (fourth * fourth).sum((-2, -1), keepdim=True).sqrt().sqrt().sqrt()


def signs(vectors: torch.Tensor) -> torch.Tensor:
    """1 or -1 for each column, so that the column times its sign points the way of one fixed vector, [..., 1, columns].

    The sign of an eigenvector or of a singular vector is free, and LAPACK's depends on its version. The elements of the
    fixed vector are fractions of multiples of the golden ratio: hardly any vector of interest is orthogonal to it.
    """
    fixed = 1 + torch.arange(vectors.shape[-2], dtype=vectors.dtype).mul(0.6180339887498949).remainder(1).unsqueeze(-1)
    return torch.where((vectors * fixed).sum(-2, keepdim=True) < 0, -1.0, 1.0).to(vectors.dtype)


def directed(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A singular value decomposition whose right singular vectors have the signs of `signs`."""
    size = s.shape[-1]
    sign = signs(vh[..., :size, :].mT)
    u, vh = (torch.cat([x[..., :size] * sign, x[..., size:]], -1) for x in (u, vh.mT))
    return u, s, vh.mT


@decomposes(aten._linalg_svd.default)
def _svd(
    a: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u, s, v = svd(a, full=full_matrices)
    none = a.new_zeros([0])
    return directed(u, s, v.mT) if compute_uv else (none, s, none)


@decomposes(aten._linalg_eigh.default)
def _eigh(a: torch.Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
    lower = a.tril() if UPLO.upper() == "L" else a.triu().mT
    values, vectors = eigh(lower + lower.tril(-1).mT)
    return values, vectors * signs(vectors) if compute_v else a.new_zeros([0])
