"""Reductions of many elements in every floating-point dtype: compilation fails if they are less exact than eager."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import irongrad as ig
from irongrad.graph.dtypes import to_numpy

TEN_MILLIONS = 10_000_000


def reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    variance, mean = torch.var_mean(x)
    scalars = x.sum(), variance, mean, x.std(), x.norm(), torch.linalg.vector_norm(x, 1), x.logsumexp(0), x.nansum()
    rows, columns = x.reshape(10, -1), x.reshape(-1, 10)
    parts = rows.sum(1), columns.sum(0), columns.mean(0), x.reshape(10, -1, 100).var((0, 2)), columns.mean()
    softmax = x.softmax(0).square().sum(), x.log_softmax(0).mean(), rows.softmax(1).amax(1), columns.softmax(0).amax(0)
    return ((x * x).mean(), *scalars, *parts, *softmax)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_reductions_agree_with_the_oracle(dtype):
    torch.manual_seed(0)
    x = (torch.rand(100_000) + 0.5).to(dtype)
    ig.compile_function(reductions, (x,), gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reductions_of_ten_million_elements_agree_with_the_oracle(dtype):
    torch.manual_seed(0)
    ig.compile_function(reductions, (torch.rand(TEN_MILLIONS, dtype=dtype) + 0.5,), gradients=True)


@pytest.mark.slow
def test_matmul_gradients_over_a_long_batch_agree_with_the_oracle():
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).square().mean()

    torch.manual_seed(0)
    ig.compile_function(loss, (torch.rand(100_000, 100) + 0.5, torch.rand(100, 8)), gradients=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_with_numbers_that_half_precision_cannot_hold_matches_eager(dtype):
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x / 100_000, x * 1e-6, x + 1e-3, x - 0.1

    x = torch.linspace(-60_000, 60_000, 64).to(dtype)
    found = ig.compile_function(function, (x,))(to_numpy(x))
    for value, expected in zip(found, function(x), strict=True):
        np.testing.assert_array_equal(value.astype(np.float32), expected.float().numpy())
