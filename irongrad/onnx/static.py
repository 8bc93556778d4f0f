"""Operators on values that are known without data, in numpy: shapes, and indices computed from them.

Sizes may be symbols (`torch.SymInt`). They are in arrays of objects, on whose elements numpy uses Python's own
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from irongrad.onnx.dtypes import numpy_dtype
from irongrad.onnx.registry import Call, Static

Rule = Callable[..., Any]

# The first operand that says where to read, or how large the result is. numpy needs numbers there, not symbols.
_PLACES = {"Expand": 1, "Gather": 1, "Range": 0, "Reshape": 1, "Slice": 1, "Split": 1, "Tile": 1}


def rule_of(operator: str, operands: Sequence[Static | None]) -> Rule | None:
    """The rule that computes a node on known operands; None if numpy cannot compute it."""
    first = _PLACES.get(operator, len(operands))
    sizes = [o for o in operands[first:] if o is not None and o.dtype == object]
    if any(isinstance(size, torch.SymInt) for o in sizes for size in o.flat):
        return None
    return _RULES.get(operator)


def has_rule(operator: str) -> bool:
    """Whether numpy computes the operator on known operands."""
    return operator in _RULES


def _divide(a: Static, b: Static) -> Static:
    """Divide; integers are rounded towards zero."""
    if object in (a.dtype, b.dtype):
        return np.asarray(a // b)
    return np.asarray(np.trunc(a / b).astype(a.dtype) if a.dtype.kind in "iu" else a / b)


def _slice(call: Call, x: Static, *given: Static) -> Static:
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (
        call.option(given[i] if i < len(given) else None, n) or [] for i, n in enumerate(names)
    )
    index = [slice(None)] * x.ndim
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis, step = axes[i] if axes else i, steps[i] if steps else 1
        index[axis] = slice(start, None if step < 0 and end < -x.shape[axis] else end, step)
    return x[tuple(index)]


def _axes(call: Call, given: tuple[Static, ...], name: str = "axes") -> tuple[int, ...] | None:
    found = call.option(given[0] if given else None, name)
    return tuple(found) if found is not None else None


def _unsqueeze(call: Call, x: Static, *given: Static) -> Static:
    axes = _axes(call, given) or ()
    rank = x.ndim + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = np.expand_dims(x, axis)
    return x


def _reduced(function: Callable[..., Any]) -> Rule:
    def rule(call: Call, x: Static, *given: Static) -> Static:
        return np.asarray(function(x, axis=_axes(call, given), keepdims=bool(call.get("keepdims", 1))))

    return rule


def _reshape(call: Call, x: Static, shape: Static) -> Static:
    wanted = [x.shape[i] if s == 0 and not call.get("allowzero", 0) else s for i, s in enumerate(shape.tolist())]
    return x.reshape(wanted)


def _range(call: Call, start: Static, limit: Static, delta: Static) -> Static:
    return np.arange(start.item(), limit.item(), delta.item()).astype(start.dtype)


def _where(call: Call, condition: Static, a: Static, b: Static) -> Static:
    return np.where(condition, a, b)


def _cast(call: Call, x: Static) -> Static:
    dtype = numpy_dtype(call.get("to"))
    return x if x.dtype == object else x.astype(dtype)


def _split(call: Call, x: Static, *given: Static) -> list[Static]:
    axis = call.get("axis", 0)
    sizes = call.option(given[0] if given else None, "split")
    parts = sizes and list(np.cumsum(sizes)[:-1])
    return list(np.split(x, parts or call.get("num_outputs", len(call.node.outputs)), axis))


_RULES: dict[str, Rule] = {
    "Identity": lambda call, x: x,
    "Cast": _cast,
    "CastLike": lambda call, x, like: x if object in (x.dtype, like.dtype) else x.astype(like.dtype),
    "Add": lambda call, a, b: a + b,
    "Sub": lambda call, a, b: a - b,
    "Mul": lambda call, a, b: a * b,
    "Div": lambda call, a, b: _divide(a, b),
    "Mod": lambda call, a, b: np.asarray(np.fmod(a, b) if call.get("fmod", 0) else a % b),
    "Neg": lambda call, x: -x,
    "Abs": lambda call, x: abs(x),
    "Relu": lambda call, x: np.maximum(x, np.zeros((), x.dtype)),
    "Sqrt": lambda call, x: np.sqrt(x.astype(np.float64)).astype(x.dtype) if x.dtype != object else np.asarray(x**0.5),
    "Min": lambda call, *xs: reduce(np.minimum, xs),
    "Max": lambda call, *xs: reduce(np.maximum, xs),
    "Equal": lambda call, a, b: np.asarray(a == b),
    "Less": lambda call, a, b: np.asarray(a < b),
    "Greater": lambda call, a, b: np.asarray(a > b),
    "LessOrEqual": lambda call, a, b: np.asarray(a <= b),
    "GreaterOrEqual": lambda call, a, b: np.asarray(a >= b),
    "And": lambda call, a, b: np.logical_and(a, b),
    "Or": lambda call, a, b: np.logical_or(a, b),
    "Not": lambda call, x: np.logical_not(x),
    "Where": _where,
    "Floor": lambda call, x: np.floor(x),
    "Ceil": lambda call, x: np.ceil(x),
    "Concat": lambda call, *xs: np.concatenate(xs, call.get("axis", 0)),
    "Gather": lambda call, x, i: np.take(x, i.astype(np.int64), call.get("axis", 0)),
    "Slice": _slice,
    "Split": _split,
    "Squeeze": lambda call, x, *given: np.squeeze(x, _axes(call, given)),
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Transpose": lambda call, x: np.transpose(x, call.get("perm")),
    "Expand": lambda call, x, shape: x * np.ones(shape.tolist(), x.dtype),
    "Tile": lambda call, x, repeats: np.tile(x, repeats.tolist()),
    "Shape": lambda call, x: np.array(x.shape[call.get("start", 0) : call.get("end", x.ndim)], np.int64),
    "Size": lambda call, x: np.array(x.size, np.int64),
    "Range": _range,
    "NonZero": lambda call, x: np.array(np.nonzero(np.atleast_1d(x)), np.int64),
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
}
