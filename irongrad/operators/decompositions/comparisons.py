"""Comparisons of tensors with numbers, in numbers of one kind.

torch-mlir 20261001 folds them where the tensor is a constant, and then takes its elements for what the number is
(`comparisonScaleFolder`): `zeros(()) > 0` is true, as its elements are floats and the number an integer. A constant
`True` is -1 there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


def _in_one_kind(operator: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    def compare(x: torch.Tensor, number: float) -> torch.Tensor:
        """The same comparison of the same values, both floating-point or both integers: booleans of the shape of `x`.

        As PyTorch promotes them ("Type Promotion"): an integer tensor and a float are compared as float32.
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
    decomposes(_operator)(_in_one_kind(_operator))
