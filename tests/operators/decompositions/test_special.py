"""Decompositions of elementary and special functions over their whole range, against PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import irongrad as ig
from irongrad.operators.legalize.retrace import retrace

SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1e-30, math.inf, -math.inf, math.nan]


def logarithmic(low: float, high: float) -> torch.Tensor:
    """Numbers of both signs whose magnitudes lie between two powers of ten."""
    sizes = 10 ** torch.linspace(low, high, 301, dtype=torch.float64)
    return torch.cat([sizes, -sizes])


def linear(low: float, high: float) -> torch.Tensor:
    return torch.linspace(low, high, 401, dtype=torch.float64)


def decomposed(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """The result of the decomposed graph of `function`, run in eager."""
    (result,) = retrace(lambda *t: [function(*t)], tensors)(*tensors)
    return result


EVERYWHERE = {
    "sin": (torch.sin, logarithmic(-8, 6)),
    "cos": (torch.cos, logarithmic(-8, 6)),
    "tan": (torch.tan, logarithmic(-8, 6)),
    "asin": (torch.asin, logarithmic(-8, 0)),
    "acos": (torch.acos, linear(-1, 1)),
    "atan": (torch.atan, logarithmic(-30, 30)),
    "sinh": (torch.sinh, logarithmic(-8, 1.9)),
    "tanh": (torch.tanh, logarithmic(-8, 3)),
    "asinh": (torch.asinh, logarithmic(-30, 30)),
    "acosh": (torch.acosh, 1 + logarithmic(-6, 30).abs()),
    "atanh": (torch.atanh, logarithmic(-8, 0) * 0.999),
    "expm1": (torch.expm1, logarithmic(-8, 1.9)),
    "log1p": (torch.log1p, logarithmic(-8, 30).abs()),
    "log2": (torch.log2, logarithmic(-30, 30).abs()),
    "log10": (torch.log10, logarithmic(-30, 30).abs()),
    "erf": (torch.erf, logarithmic(-8, 2)),
    "erfc": (torch.erfc, linear(-6, 9)),
    "erfcx": (torch.special.erfcx, linear(-9, 60)),
    "erfinv": (torch.erfinv, linear(-1, 1)),
    "ndtr": (torch.special.ndtr, linear(-12, 9)),
    "ndtri": (torch.special.ndtri, logarithmic(-30, 0).abs()),
    "log_ndtr": (torch.special.log_ndtr, linear(-300, 10)),
    "lgamma": (torch.lgamma, torch.cat([linear(0.001, 12), logarithmic(-30, 30).abs()])),
    "digamma": (torch.digamma, torch.cat([linear(2, 12), logarithmic(-30, 30).abs()])),
    "trigamma": (lambda x: torch.polygamma(1, x), torch.cat([linear(0.001, 12), logarithmic(0, 6).abs()])),
    "polygamma 3": (lambda x: torch.polygamma(3, x), torch.cat([linear(-3.9, -3.1), linear(0.01, 12)])),
    "i0": (torch.i0, linear(-60, 60)),
    "i0e": (torch.special.i0e, logarithmic(-8, 8)),
    "i1": (torch.special.i1, linear(-60, 60)),
    "i1e": (torch.special.i1e, logarithmic(-8, 8)),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_float64_is_right_in_the_last_digits(name: str) -> None:
    function, x = EVERYWHERE[name]
    expected = torch.special.zeta(2.0, x) if name == "trigamma" else function(x)  # eager's trigamma has only 10 digits
    torch.testing.assert_close(decomposed(function, x), expected, rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_float32_is_as_close_to_float64_as_eager(name: str) -> None:
    function, wide = EVERYWHERE[name]
    x = wide.float()
    exact = function(x.double()).float()
    found = decomposed(function, x)
    error, allowed = (
        (found - exact).abs(),
        4 * (function(x) - exact).abs() + 16 * torch.finfo(torch.float32).eps * (exact.abs()),
    )
    assert bool(((found == exact) | (error <= allowed)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(set(EVERYWHERE) - {"trigamma", "polygamma 3"}))
def test_special_values_are_those_of_eager(name: str, dtype: torch.dtype) -> None:
    function, _ = EVERYWHERE[name]
    x = torch.tensor(SPECIAL, dtype=dtype)
    found, expected = decomposed(function, x), function(x)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
    zero = (x == 0) & (expected == 0)
    torch.testing.assert_close(found[zero].signbit(), expected[zero].signbit())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_polygamma_is_infinite_at_its_poles(n: int) -> None:
    """Eager's trigamma is only a large number at the poles, because pi is rounded."""
    found = decomposed(lambda x: torch.polygamma(n, x), torch.tensor([0.0, -1.0, -2.0]))
    assert found.tolist() == [(-1) ** (n + 1) * math.inf] * 3


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float32, 1e-37), (torch.float64, 1e-320)])
def test_arguments_next_to_zero_match_eager(dtype: torch.dtype, smallest: float) -> None:
    x = torch.tensor([smallest, 1e-19, 1e-17, 1e-15], dtype=dtype)
    torch.testing.assert_close(decomposed(torch.lgamma, -x), torch.lgamma(-x))
    torch.testing.assert_close(decomposed(torch.special.ndtri, x), torch.special.ndtri(x))


def test_integers_are_converted_to_floats() -> None:
    x = torch.arange(1, 6)
    for function in (torch.sin, torch.lgamma, torch.erfc, torch.i0, torch.log10):
        torch.testing.assert_close(decomposed(function, x), function(x))


def test_bfloat16_is_computed_in_float32() -> None:
    x = torch.linspace(-3, 3, 50, dtype=torch.bfloat16)
    torch.testing.assert_close(decomposed(torch.sin, x), torch.sin(x))


def test_compiled_functions_match_eager_in_float64_and_in_float32() -> None:
    """Compiling compares with eager float64. Only here does IREE compile the exact steps of the argument reductions."""
    functions = [torch.sin, torch.tan, torch.atan, torch.asinh, torch.tanh, torch.erfc, torch.erfinv, torch.lgamma]

    def every(wide: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        small = [f(t) for f in functions for t in (wide, x)]
        return [*small, torch.sin(1e5 * wide), torch.cos(1e5 * x)]

    x = torch.linspace(-0.99, 0.99, 64)
    ig.compile_function(every, (x.double(), x))
