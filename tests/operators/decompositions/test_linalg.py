"""The decompositions of linear algebra, which use no LAPACK, against LAPACK."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.operators.decompositions import decomposition_table
from irongrad.operators.decompositions.linalg_eigen import signs
from irongrad.pipeline.oracle.substitutes import Substitutes

aten = torch.ops.aten
BATCHES = [(), (2,), (0,), (2, 1)]
SHAPES = [(5, 5), (3, 5), (5, 3), (1, 1), (1, 4), (0, 0), (0, 3), (3, 0)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def check(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> None:
    """Compare a decomposition with the operator itself."""
    assert_close(decomposition_table()[op](*args, **kwargs), op(*args, **kwargs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_those_of_lapack(batch, shape):
    a = normal(*batch, *shape)
    check(aten.linalg_lu_factor_ex.default, a)
    check(aten.linalg_lu.default, a)
    check(aten.lu_unpack.default, *torch.linalg.lu_factor(a))
    for mode in ("reduced", "complete", "r"):
        check(aten.linalg_qr.default, a, mode)
    vectors, taus = torch.geqrf(a)
    check(aten.geqrf.default, a)
    for left in (True, False):
        x = normal(*batch, shape[0], 2)
        check(aten.ormqr.default, vectors, taus, x if left else x.mT, left, True)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", [5, 1, 0])
def test_square_systems_match_lapack(batch, size):
    a, b = normal(*batch, size, size), normal(*batch, size, 2)
    factors, pivots = torch.linalg.lu_factor(a)
    check(aten._linalg_det.default, a)
    check(aten._linalg_slogdet.default, a)
    check(aten.linalg_inv_ex.default, a)
    for left in (True, False):
        right = b if left else b.mT
        check(aten._linalg_solve_ex.default, a, right, left=left)
        for flag in (True, False):
            check(aten.linalg_lu_solve.default, factors, pivots, right, left=left, adjoint=flag)
            check(aten.linalg_solve_triangular.default, a, right, upper=flag, left=left, unitriangular=True)
    positive = a @ a.mT + torch.eye(size, dtype=a.dtype)
    for upper in (True, False):
        check(aten.linalg_cholesky_ex.default, positive, upper=upper)
        check(aten.cholesky_solve.default, b, torch.linalg.cholesky(positive, upper=upper), upper)


def test_a_matrix_that_is_not_positive_definite_has_its_column_reported():
    matrix = torch.diag(torch.tensor([1.0, 2.0, -1.0, -2.0]))
    assert decomposition_table()[aten.linalg_cholesky_ex.default](matrix)[1] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "rank 2", "zero", "graded", "identity", "huge", "tiny"])
@pytest.mark.parametrize("shape", [(6, 6), (7, 3), (3, 7)])
def test_singular_values_are_right_and_vectors_are_orthonormal(dtype, kind, shape):
    rows, columns = shape
    a = {
        "normal": normal(rows, columns),
        "rank 2": normal(rows, 2) @ normal(2, columns),
        "zero": torch.zeros(shape),
        "graded": normal(rows, columns) * 10.0 ** -torch.arange(columns),
        "identity": torch.eye(*shape),
        "huge": normal(rows, columns) * 1e30,
        "tiny": normal(rows, columns) * 1e-30,
    }[kind].to(dtype)
    rounding = 16 * torch.finfo(dtype).eps
    u, s, vh = decomposition_table()[aten._linalg_svd.default](a, True)
    exact = torch.linalg.svdvals(a.double())
    assert_close(s.double(), exact, rtol=0, atol=rounding * float(exact[0]))
    assert_close((u[:, : len(s)] * s) @ vh[: len(s)], a, rtol=0, atol=rounding * float(exact[0]))
    for vectors in (u, vh):
        assert_close(vectors.mT @ vectors, torch.eye(len(vectors), dtype=dtype), rtol=0, atol=rounding)


@pytest.mark.parametrize("size", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("half", ["L", "U"])
def test_symmetric_eigenvalues_match_lapack(size, half):
    a = normal(2, size, size)
    values, vectors = decomposition_table()[aten._linalg_eigh.default](a, half)
    triangle = a.tril() if half == "L" else a.triu().mT
    full = triangle + triangle.tril(-1).mT
    assert_close(values, torch.linalg.eigvalsh(full))
    assert_close(full @ vectors, vectors * values.unsqueeze(-2))


def test_vectors_have_the_signs_of_eager_runs():
    a = normal(5, 4)
    with Substitutes():
        expected = [*torch.linalg.svd(a, full_matrices=False), *torch.linalg.eigh(a.T @ a)]
    table = decomposition_table()
    found = [*table[aten._linalg_svd.default](a), *table[aten._linalg_eigh.default](a.T @ a)]
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    vectors, flipped = torch.linalg.eigh(a.T @ a)[1], torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=a.dtype)
    assert_close(vectors * signs(vectors), vectors * flipped * signs(vectors * flipped))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_matrix_exponentials_match_aten(scale):
    a = scale * normal(2, 5, 5)
    check(aten.linalg_matrix_exp.default, a - a.mT)


@pytest.mark.parametrize("shape", [(5, 5), (4, 3), (3, 4)])
def test_pseudoinverses_and_least_squares_match_aten(shape):
    a = normal(2, *shape)
    check(aten.linalg_pinv.atol_rtol_tensor, a)
    check(aten.linalg_pinv.atol_rtol_tensor, a, atol=torch.tensor(1.0, dtype=a.dtype))
    for driver in (None, "gels", "gelsd"):
        check(aten.linalg_lstsq.default, a, normal(2, shape[0], 2), driver=driver)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_distances_and_their_gradients_match_aten(p):
    x, y = normal(5, 3), normal(9, 3)[5:]
    x[0], x[1, 0] = y[0], y[1, 0]
    check(aten._cdist_forward.default, x, y, p, 2)
    check(aten._cdist_backward.default, normal(5, 4), x, y, p, torch.cdist(x, y, p))
    check(aten._pdist_forward.default, x, p)
    check(aten._pdist_backward.default, normal(10), x, p, torch.pdist(x, p))


@pytest.mark.parametrize("exponent", [-37, -25, 0, 25, 37])
def test_qr_is_accurate_if_squares_overflow_or_underflow(exponent):
    a = normal(5, 4).float() * torch.tensor([1.0, 10.0**exponent, 1.0, 10.0**exponent])
    exact, found = torch.linalg.qr(a.double()), decomposition_table()[aten.linalg_qr.default](a)
    assert_close(found[0], exact.Q.float(), rtol=0, atol=2e-6)
    assert_close(found[1] / a.abs().amax(0), (exact.R / a.abs().amax(0)).float(), rtol=0, atol=2e-6)


POSITIVE = [
    lambda a: torch.linalg.cholesky(a, upper=True),
    lambda a: torch.linalg.eigh(a).eigenvalues,
]
ANY = [
    lambda a: torch.linalg.det(a),
    lambda a: torch.linalg.det(a.sin().mT),
    lambda a: torch.linalg.det(a.transpose(0, 1)[:, :3]),
    lambda a: torch.linalg.slogdet(a.sin())[1],
    lambda a: torch.linalg.slogdet(a.mT)[1],
    lambda a: torch.linalg.solve(a, a.sin(), left=False),
    lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), a.sin(), adjoint=True),
    lambda a: torch.linalg.qr(a[..., :2]).Q,
    lambda a: torch.linalg.svdvals(a),
]


@pytest.mark.parametrize("functions", [POSITIVE, ANY], ids=["positive", "any"])
def test_gradients_of_the_decomposed_graphs_match_autograd(functions):
    """The decomposed graphs run in eager float64. The plain forms of these operators are rows in test_gradients.py."""
    a = normal(3, 3, 3)
    if functions is POSITIVE:
        a = a @ a.mT + torch.eye(3, dtype=a.dtype)
    weights = normal(27).reshape(a.shape)

    def run(a: torch.Tensor) -> torch.Tensor:
        outputs = [f(a) for f in functions]
        return sum((o * weights[tuple(map(slice, o.shape))]).sum() for o in outputs)

    flat = flat_function(run, (a,), gradients=True)
    call = trace_function(flat, run).functions["call"]
    assert_close(call.graph(a), flat.run(a), rtol=1e-8, atol=1e-9)


def test_compiled_linear_algebra_and_its_gradients_match_eager():
    """Compiling compares the results with eager float64."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        singular = torch.linalg.pinv(b[:, :1] @ b[:, 1:2].mT)
        covariance = torch.logdet(a @ a.mT + torch.eye(5))
        return torch.linalg.solve(a, b).sin().sum() + torch.linalg.svdvals(a).sum() + singular.sum() + covariance

    ig.compile_function(run, (normal(5, 5).float(), normal(5, 3).float()), gradients=True)
