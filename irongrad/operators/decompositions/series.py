"""What elementary and special functions are made of: polynomials, Chebyshev series, and the dtypes to compute in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

_Function: TypeAlias = Callable[..., torch.Tensor]


def in_floating_point(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, or integers and booleans in the default dtype, as eager's special functions take them."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """The polynomial with these coefficients, that of the highest power first, by Horner's rule."""
    first, *rest = coefficients
    total = torch.full_like(x, first)
    for coefficient in rest:
        total = total * x + coefficient
    return total


def rational(x: torch.Tensor, numerator: Sequence[float], denominator: Sequence[float]) -> torch.Tensor:
    """The quotient of two polynomials."""
    return polynomial(x, numerator) / polynomial(x, denominator)


def chebyshev(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """The sum of c[k] T_k(x) for x in [-1, 1], by Clenshaw's recurrence (Math. Tables Aids Comput. 9, 1955).

    Terms that the dtype of `x` is too coarse for are left out.
    """
    limit = torch.finfo(x.dtype).eps / 8 * max(abs(c) for c in coefficients)
    kept = max(k for k, c in enumerate(coefficients) if abs(c) > limit) + 1
    after, following = torch.zeros_like(x), torch.zeros_like(x)
    for coefficient in reversed(coefficients[1:kept]):
        after, following = 2 * x * after - following + coefficient, after
    return x * after - following + coefficients[0]


def signed(size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """An odd function's value at x from that at |x|; zero keeps its sign, and NaN stays."""
    return torch.where(x > 0, size, torch.where(x < 0, -size, x))


def computes_in(*dtypes: torch.dtype) -> Callable[[_Function], _Function]:
    """Make a decomposition for tensors of `dtypes` one for all real dtypes.

    Integers are taken in the default dtype, as in eager, and 16-bit numbers in float32, and rounded again. What is
    in another dtype then stays as it is.
    """

    def decorate(function: _Function) -> _Function:
        """`function` for tensors of all real dtypes."""

        @functools.wraps(function)
        def decomposition(*tensors: torch.Tensor) -> torch.Tensor:
            dtype = functools.reduce(torch.promote_types, (in_floating_point(t).dtype for t in tensors))
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            if wide not in dtypes:
                return NotImplemented
            return function(*(t.to(wide) for t in tensors)).to(dtype)

        return decomposition

    return decorate
