"""Building blocks of elementary and special functions: polynomials, Chebyshev series, and the dtypes to compute in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

_Function: TypeAlias = Callable[..., torch.Tensor]


def in_floating_point(x: torch.Tensor) -> torch.Tensor:
    """Cast integers and booleans to the default dtype, as eager's special functions do; return other tensors as is."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Evaluate a polynomial by Horner's rule; `coefficients` begins with the highest power."""
    first, *rest = coefficients
    total = torch.full_like(x, first)
    for coefficient in rest:
        total = total * x + coefficient
    return total


def rational(x: torch.Tensor, numerator: Sequence[float], denominator: Sequence[float]) -> torch.Tensor:
    """Return the quotient of two polynomials, each given as in `polynomial`."""
    return polynomial(x, numerator) / polynomial(x, denominator)


def chebyshev(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Return the sum of c[k] T_k(x) for x in [-1, 1], by Clenshaw's recurrence (Math. Tables Aids Comput. 9, 1955).

    Terms below the resolution of the dtype of `x` are left out.
    """
    limit = torch.finfo(x.dtype).eps / 8 * max(abs(c) for c in coefficients)
    kept = max(k for k, c in enumerate(coefficients) if abs(c) > limit) + 1
    after, following = torch.zeros_like(x), torch.zeros_like(x)
    for coefficient in reversed(coefficients[1:kept]):
        after, following = 2 * x * after - following + coefficient, after
    return x * after - following + coefficients[0]


def signed(size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return an odd function's value at x from its value `size` at |x|; zero keeps its sign, and NaN stays NaN."""
    return torch.where(x > 0, size, torch.where(x < 0, -size, x))


def computes_in(*dtypes: torch.dtype) -> Callable[[_Function], _Function]:
    """Extend a decomposition for tensors of `dtypes` to all real dtypes.

    Integers are cast to the default dtype, as in eager. 16-bit floats are computed in float32, and the result is
    rounded back. If the dtype to compute in is not among `dtypes`, the operator stays as it is.
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
