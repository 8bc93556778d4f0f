"""Comparisons and selections, after both operands are promoted to one type.

torch-mlir 20261001 casts operands of several integer dtypes as if all had the same signedness: it reads a byte above
127 as negative, and `True` as -1.

It has another fault with a number: it folds the comparison if the tensor is a constant (`comparisonScaleFolder`). The
folder reads the elements as if they had the number's type. `zeros(()) > 0` then becomes true, because the elements are
floats and the number is an integer. The folder also reads a constant `True` as -1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


def _promoted(operator: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    def compare(x: torch.Tensor, number: float) -> torch.Tensor:
        """Compare after promotion to floating point on both sides, or to integers on both sides.

        PyTorch's rules apply ("Type Promotion"): an integer tensor and a float are compared as float32. The
        result is boolean, of the shape of `x`.
        """
        if x.is_floating_point() and isinstance(number, int):
            result: torch.Tensor = operator(x, float(number))
        elif x.dtype == torch.bool and isinstance(number, int):
            result = operator(x.to(torch.int64), int(number))
        elif not x.is_floating_point() and isinstance(number, float):
            result = operator(x.to(torch.float32), number)
        else:
            return NotImplemented
        return result

    return compare


def _in_one_dtype(operator: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """The last two arguments of `operator` are cast; a selection has its condition before them."""

    def cast(*args: torch.Tensor) -> torch.Tensor:
        *condition, x, y = args
        if x.dtype == y.dtype:
            return NotImplemented
        dtype = torch.result_type(x, y)
        result: torch.Tensor = operator(*condition, x.to(dtype), y.to(dtype))
        return result

    return cast


for _comparison in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge):
    decomposes(_comparison.Scalar)(_promoted(_comparison.Scalar))
    decomposes(_comparison.Tensor)(_in_one_dtype(_comparison.Tensor))
decomposes(aten.where.self)(_in_one_dtype(aten.where.self))
