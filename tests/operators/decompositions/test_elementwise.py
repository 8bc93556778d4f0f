"""Elementwise arithmetic, frexp and activations, against PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import irongrad as ig
from irongrad.operators.decompositions import decomposition_table
from irongrad.operators.legalize.core_operators import CORE
from irongrad.operators.legalize.retrace import retrace

aten = torch.ops.aten

NUMBERS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    -2.0,
    0.5,
    3.0,
    8.5,
    0.3,
    1e-45,
    -1e-45,
    1.1754944e-38,
    1e-39,
    math.inf,
    -math.inf,
]
BINARY = {
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "hypot": torch.hypot,
    "nextafter": torch.nextafter,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
}


def decomposed(function: Callable[..., object], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The results of the decomposed graph of `function`, run in eager."""

    def flat(*given: torch.Tensor) -> list[torch.Tensor]:
        result = function(*given)
        return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]

    return list(retrace(flat, tensors)(*tensors))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float32])
@pytest.mark.parametrize("number", [1, 1.0, 2.5])
def test_a_number_minus_a_tensor_matches_eager(dtype: torch.dtype, number: float) -> None:
    x = torch.tensor([0, 5, 127]).to(dtype)
    for function in (lambda x: number - x, lambda x: torch.rsub(x, number, alpha=2)):
        (found,) = decomposed(function, x)
        assert found.dtype == function(x).dtype
        assert torch.equal(found, function(x))


@pytest.mark.parametrize("shape", [[], [1], [2, 3]])
def test_constant_uint8_tensors_match_eager(shape: list[int]) -> None:
    x = torch.ones(())
    for function in (
        lambda x: torch.full(shape, 200, dtype=torch.uint8),
        lambda x: torch.zeros(shape, dtype=torch.uint8) + x,
    ):
        (found,) = decomposed(function, x)
        assert torch.equal(found, function(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BINARY)
def test_all_pairs_of_special_numbers_match_eager(name: str, dtype: torch.dtype) -> None:
    values = torch.tensor([*NUMBERS, math.nan, torch.finfo(dtype).max], dtype=dtype)
    x, y = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    if name in ("fmod", "remainder"):
        known = ~((x / y).abs() > 2.0**53) | x.isinf() | (y == 0)
        x, y = x[known], y[known]
    (found,) = decomposed(BINARY[name], x, y)
    exact = name in ("copysign", "fmax", "fmin", "nextafter")
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-6, "atol": 1e-44}
    torch.testing.assert_close(found, BINARY[name](x, y), equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frexp_matches_eager_at_every_magnitude(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    powers = 2.0 ** torch.arange(math.log2(info.smallest_normal) - 20, math.log2(info.max), dtype=torch.float64)
    x = torch.cat([powers, -powers, powers * 1.3, torch.tensor([0.0, -0.0, info.max])]).to(dtype)
    for found, expected in zip(decomposed(torch.frexp, x), torch.frexp(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_float64_remainders_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-5, 12, (500,), generator=generator)
    x = torch.randn(500, dtype=torch.float64, generator=generator) * sizes
    y = torch.randn(500, dtype=torch.float64, generator=generator)
    for function in (torch.fmod, torch.remainder):
        torch.testing.assert_close(decomposed(function, x, y)[0], function(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int8])
@pytest.mark.parametrize("divisor", [3, -2.5])
def test_remainders_by_a_number_match_eager(dtype: torch.dtype, divisor: float) -> None:
    x = torch.arange(-7, 8).to(dtype)
    for function in (torch.fmod, torch.remainder):
        graph = retrace(lambda t: [function(t, divisor)], [x])  # noqa: B023
        assert {str(n.target) for n in graph.graph.nodes if n.op == "call_function"} <= CORE
        torch.testing.assert_close(graph(x)[0], function(x, divisor), rtol=0, atol=0)


def test_angle_matches_eager() -> None:
    x = torch.tensor([*NUMBERS, math.nan])
    torch.testing.assert_close(decomposed(torch.angle, x)[0], torch.angle(x), equal_nan=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_matches_eager(approximate: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-6, 6, 101, dtype=dtype)
    function = lambda t: torch.nn.functional.gelu(t, approximate=approximate)  # noqa: E731
    torch.testing.assert_close(decomposed(function, x)[0], function(x))


@pytest.mark.parametrize("function", [torch.nn.functional.elu, torch.nn.functional.selu, torch.nn.functional.celu])
@pytest.mark.parametrize("size", [1e-3, 1e-6, 30.0])
def test_exponential_units_keep_the_digits_of_small_numbers(
    function: Callable[[torch.Tensor], torch.Tensor], size: float
) -> None:
    ig.compile_function(function, (torch.linspace(-size, size, 50),))


def test_backward_operators_of_activations_match_aten() -> None:
    x, grad, noise = torch.linspace(-2, 2, 41), torch.arange(41.0), torch.rand(41, generator=torch.Generator())
    for operator, arguments in (
        (aten.hardshrink_backward.default, (grad, x, 0.5)),
        (aten.softshrink_backward.default, (grad, x, 0.5)),
        (aten.rrelu_with_noise_backward.default, (grad, x, noise, 0.1, 0.3, False, False)),
        (aten.rrelu_with_noise_backward.default, (grad, x, noise, 0.1, 0.3, True, False)),
    ):
        torch.testing.assert_close(decomposition_table()[operator](*arguments), operator(*arguments))
