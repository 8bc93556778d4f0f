"""Infinities, NaN, signed zeros and integer limits in compiled code: values and gradients match eager.

For most of them, torch-mlir 20261001 and IREE 3.13.0 give other values by themselves. Running the graph in eager would
not show that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

import irongrad as ig
from irongrad.graph.dtypes import to_numpy

INF, NAN = math.inf, math.nan
NUMBERS = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.5, -2.5, 7.0, -7.0, 0.5, 1e-10]
Results = list[torch.Tensor]


def gradients_too(function: Callable[..., Results]) -> Callable[..., Results]:
    def both(*tensors: torch.Tensor) -> Results:
        values, pull = torch.func.vjp(lambda *t: tuple(function(*t)), *tensors)
        return [*values, *pull(tuple(torch.ones_like(v) for v in values))]

    return both


def check(function: Callable[..., Results], *tensors: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Check that compiled `function` gives eager's values and dtypes, with infinities and NaN in the same places."""
    found = ig.compile_function(function, tensors)(*map(to_numpy, tensors))
    for number, (value, expected) in enumerate(zip(found, function(*tensors), strict=True)):
        assert value.dtype == to_numpy(expected).dtype, number
        wide = expected.double().numpy() if expected.is_floating_point() else to_numpy(expected)
        given = value.astype(np.float64) if expected.is_floating_point() else value
        np.testing.assert_allclose(given, wide, rtol=rtol, atol=atol, err_msg=f"result {number}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_of_special_numbers_match_eager(dtype: torch.dtype) -> None:
    numbers = torch.tensor(NUMBERS[:-1], dtype=dtype)
    x = numbers[:, None].expand(-1, len(numbers)).contiguous()

    def function(x: torch.Tensor, y: torch.Tensor) -> Results:
        extremes = [torch.maximum(x, y), torch.minimum(x, y), x.clamp(min=y), x.clamp(max=y)]
        divided = [torch.fmod(x, y), torch.remainder(x, y), torch.floor_divide(x, y), x / y]
        return [*extremes, *divided, torch.pow(x, y), torch.hypot(x, y), torch.logaddexp(x, y), torch.logaddexp2(x, y)]

    # eager's log2(1/2 + 1/2) is -1e-8
    check(function, x, x.t(), rtol=1e-5 if dtype is torch.float32 else 8e-3, atol=2e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_numbers_and_their_gradients_match_eager(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> Results:
        bounded = [x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=2.5), x.clamp(3, 1), functional.hardsigmoid(x)]
        powers = [x.pow(p) for p in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5)]
        of_numbers = [torch.pow(b, x) for b in (0.0, 1.0, 2.0, -2.0)]
        others = [x.sinh(), x.atanh(), x.acosh(), torch.erfc(x), x.sin(), x.cos(), x.tan()]
        return [*bounded, *powers, *of_numbers, *others]

    check(gradients_too(function), torch.tensor(NUMBERS, dtype=dtype), rtol=2e-5)


def test_zeros_keep_their_signs() -> None:
    x = torch.tensor([0.0, -0.0, -0.5, 0.5])

    def function(x: torch.Tensor) -> Results:
        return [1 / x.trunc(), 1 / x.clamp(-1, 1), 1 / torch.maximum(x, x), 1 / x.sinh(), 1 / x.pow(3)]

    check(function, x, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integers_at_the_ends_of_their_range_match_eager(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    edges = [0, 1, 2, 3, 7, info.max, info.max - 1, *([-1, -2, -7, info.min + 1] if info.min else [200, 128])]
    x = torch.tensor(edges, dtype=dtype)[:, None].expand(-1, len(edges)).contiguous()

    def function(x: torch.Tensor, y: torch.Tensor) -> Results:
        divided = [x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"), x // 3, 7 // y]
        signed = [-x, x.abs(), 7 - x, x**2, x**3, torch.maximum(x, y), x.clamp(1, 100)]
        shifted = [x << 1, x >> 1, x << (y % 9), x >> (y % 9), x ^ 1, x | 1]
        reduced = [x.amax(1), x.amin(1), x.sort(1).values, torch.cat([x[0], torch.ones(2)])]
        return [*divided, *signed, *shifted, *reduced]

    check(function, x, torch.where(x.t() == 0, 1, x.t()))


def test_half_precision_values_at_the_limits_match_eager() -> None:
    x = torch.tensor([INF, -INF, NAN, 1.0, -1.0, 4.0]).to(torch.bfloat16)

    def function(x: torch.Tensor) -> Results:
        return [x.nan_to_num(), torch.nextafter(x, x.flip(0))]

    check(function, x)
    check(lambda x: [x.nan_to_num()], x.to(torch.float16))


def test_a_number_is_scattered_to_places_that_are_known() -> None:
    def function(x: torch.Tensor) -> Results:
        places = torch.arange(4)
        return [x.scatter(1, places.unsqueeze(1), 0.5), x.scatter(1, torch.arange(24).reshape(4, 6) % 6, 0.25)]

    check(function, torch.randn(4, 6))
    check(lambda x: [x.scatter(0, torch.arange(4), True)], torch.tensor([False] * 6))


def test_gradients_of_one_element_match_eager() -> None:
    """IREE 3.13.0 drops a constant that is scattered to a computed index in a tensor of one element."""

    def function(x: torch.Tensor) -> Results:
        return [x.topk(1).values, x.sort().values, x.kthvalue(1).values]

    for x in (torch.tensor([2.0]), torch.tensor(2.0)):
        check(gradients_too(function), x)


def test_remainders_of_large_quotients_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(0, 6, (200,), generator=generator)
    x, y = torch.randn(200, generator=generator) * sizes, torch.rand(200, generator=generator) + 0.2
    check(lambda x, y: [torch.fmod(x, y), torch.remainder(x, y), torch.floor_divide(x, y)], x, y)
