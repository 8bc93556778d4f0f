"""Comparisons of a tensor with a number, after both are promoted to one type.

torch-mlir 20261001 folds such a comparison if the tensor is a constant (`comparisonScaleFolder`). The folder reads the
elements as if they had the number's type. `zeros(()) > 0` then becomes true, because the elements are floats and the
number is an integer. The folder also reads a constant `True` as -1.
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


for _operator in (
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.lt.Scalar,
    aten.le.Scalar,
    aten.gt.Scalar,
    aten.ge.Scalar,
):
    decomposes(_operator)(_promoted(_operator))
