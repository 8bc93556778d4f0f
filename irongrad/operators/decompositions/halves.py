"""Arithmetic of half-precision tensors with Python numbers.

Eager computes in float32 and rounds the result (aten/src/ATen/OpMathType.h). Only in a sum do its CPU kernels round the
number first. torch-mlir 20261001 always rounds the number to the tensor's dtype. In float16, `x / 100_000` then divides
by infinity, which makes the gradient of every long mean wrong. Here no number is rounded, not even in sums: the result
is closer to float64.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

_ARITHMETIC = (
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
)


def _in_float32(op: torch._ops.OpOverload) -> None:
    @decomposes(op)
    def rewrite(x: object, y: object, *args: object, **kwargs: object) -> object:
        """Compute round(op(float32(x), float32(y))), if the tensors' dtype rounds one of the numbers.

        Otherwise the operator stays as it is.
        """
        operands = (x, y, *args, *kwargs.values())
        dtypes = {v.dtype for v in operands if isinstance(v, torch.Tensor)}
        if len(dtypes) != 1 or not dtypes <= {torch.float16, torch.bfloat16}:
            return NotImplemented
        (dtype,) = dtypes
        if all(_is_exact(v, dtype) for v in operands if isinstance(v, float | int)):
            return NotImplemented
        wide = [v.float() if isinstance(v, torch.Tensor) else v for v in (x, y)]
        return op(*wide, *args, **kwargs).to(dtype)


def _is_exact(number: float, dtype: torch.dtype) -> bool:
    scalar_type = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16
    with np.errstate(over="ignore"):
        return number != number or float(scalar_type(number)) == number


for _op in _ARITHMETIC:
    _in_float32(_op)
