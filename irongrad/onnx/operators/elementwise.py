"""Elementwise arithmetic, comparisons and logic."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from irongrad.onnx.dtypes import torch_dtype
from irongrad.onnx.registry import Call, Value, operator, tensor, tensors

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
}
_SWAPPED = {"Less": "Greater", "LessOrEqual": "GreaterOrEqual", "Greater": "Less", "GreaterOrEqual": "LessOrEqual"}


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda call, x: function(tensor(x))


for _name, _function in _UNARY.items():
    operator(_name)(_unary(_function))


@operator("Identity")
def identity(call: Call, x: Value) -> list[Value]:
    """Return the value itself, which may be a sequence."""
    return [x]


@operator(*_BINARY)
def binary(call: Call, a: Value, b: Value) -> Tensor:
    """Apply a binary operator; a number on the left moves to the right, where PyTorch accepts one."""
    name = call.node.operator
    left, right = tensors([a, b])
    if isinstance(left, Tensor):
        return _BINARY[name](left, right)
    if name == "Sub":
        return torch.rsub(right, left)
    return _BINARY[_SWAPPED.get(name, name)](right, left)


@operator("Div")
def div(call: Call, a: Value, b: Value) -> Tensor:
    """Divide; integers are rounded towards zero."""
    left, right = tensors([a, b])
    like = left if isinstance(left, Tensor) else right
    assert isinstance(like, Tensor)
    if not isinstance(left, Tensor):
        left = torch.full((), left, dtype=like.dtype)
    return torch.div(left, right, rounding_mode=None if like.is_floating_point() else "trunc")


@operator("Pow")
def pow(call: Call, a: Value, b: Value) -> Tensor:
    """Raise to a power; the result has the dtype of the base."""
    left, right = tensors([a, b])
    dtype = left.dtype if isinstance(left, Tensor) else torch.from_numpy(a).dtype
    return torch.pow(left, right).to(dtype)


@operator("Mod")
def mod(call: Call, a: Value, b: Value) -> Tensor:
    """Return the remainder, with the sign of the divisor (Python's `%`) or of the dividend (C's `fmod`)."""
    left, right = tensor(a), tensor(b)
    return torch.fmod(left, right) if call.get("fmod", 0) else torch.remainder(left, right)


@operator("BitShift")
def bit_shift(call: Call, a: Value, b: Value) -> Tensor:
    """Shift bits to the left or to the right."""
    shift = torch.bitwise_left_shift if call.get("direction") == "LEFT" else torch.bitwise_right_shift
    return shift(tensor(a), tensor(b))


@operator("Sum")
def sum_of(call: Call, *values: Value) -> Tensor:
    """Return the sum of all inputs."""
    return reduce(torch.add, map(tensor, values))


@operator("Mean")
def mean_of(call: Call, *values: Value) -> Tensor:
    """Return the mean of all inputs."""
    return reduce(torch.add, map(tensor, values)) / len(values)


@operator("Max")
def max_of(call: Call, *values: Value) -> Tensor:
    """Return the maximum of all inputs."""
    return reduce(torch.maximum, map(tensor, values))


@operator("Min")
def min_of(call: Call, *values: Value) -> Tensor:
    """Return the minimum of all inputs."""
    return reduce(torch.minimum, map(tensor, values))


@operator("Where")
def where(call: Call, condition: Value, a: Value, b: Value) -> Tensor:
    """Return `a` where the condition holds, and `b` elsewhere."""
    left, right = tensors([a, b])
    return torch.where(tensor(condition), left, right)


@operator("Clip")
def clip(call: Call, x: Value, low: Value | None = None, high: Value | None = None) -> Tensor:
    """Clamp to the limits that are given; if the lower limit is above the upper one, the upper one counts."""
    bounds = [call.get(n) if v is None else v for n, v in (("min", low), ("max", high))]
    lower, upper = (v.item() if isinstance(v, np.ndarray) and v.ndim == 0 else v for v in bounds)
    if lower is None and upper is None:
        return tensor(x)
    if isinstance(lower, Tensor) != isinstance(upper, Tensor) and None not in (lower, upper):
        lower, upper = (
            v if isinstance(v, Tensor) else torch.full((), v, dtype=tensor(x).dtype) for v in (lower, upper)
        )
    return torch.clamp(tensor(x), lower, upper)


@operator("Cast")
def cast(call: Call, x: Value) -> Tensor:
    """Convert to another element type.

    A model that was converted to float64 stays in float64 where the file says float32.
    """
    dtype = torch_dtype(call.get("to"))
    if dtype is None:
        raise call.node.unsupported(f"casts to element type {call.get('to')}, which nothing is trained in")
    value = tensor(x)
    return value if call.wide and value.dtype is torch.float64 and dtype.is_floating_point else value.to(dtype)


@operator("CastLike")
def cast_like(call: Call, x: Value, like: Value) -> Tensor:
    """Convert to the element type of another value."""
    return tensor(x).to(tensor(like).dtype)


@operator("IsInf")
def is_inf(call: Call, x: Value) -> Tensor:
    """Return where x is infinite, for the signs that the node asks for."""
    value: Any = tensor(x)
    found = torch.zeros_like(value, dtype=torch.bool)
    if call.get("detect_positive", 1):
        found = found | (value == float("inf"))
    return found | (value == float("-inf")) if call.get("detect_negative", 1) else found
