"""Wrap a number into the integer dtype in which an operator takes it, as eager does: -1 is 255 beside bytes.

Eager casts a number, and a tensor of rank 0, to the dtype of the tensors beside it. So `byte == -1` holds for 255.
Compiled code would compare with the number itself, which no byte equals. Sums, products and bitwise operators need
nothing: their results wrap around to the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32})

_WRAPPING = frozenset(
    [
        "clamp",
        "clamp_max",
        "clamp_min",
        "div",
        "eq",
        "floor_divide",
        "fmax",
        "fmin",
        "fmod",
        "ge",
        "gt",
        "isin",
        "le",
        "lt",
        "maximum",
        "minimum",
        "ne",
        "remainder",
        "where",
    ]
)


def with_wrapped_numbers(operator: object, args: tuple[Any, ...], made: Any) -> tuple[Any, ...]:
    """Return `args` with whole numbers and tensors of rank 0 cast to the integer dtype of the tensors beside them.

    Args:
        operator: the target of a node.
        args: its positional arguments.
        made: the fake result of its node.
    """
    if not isinstance(operator, OpOverload) or operator._overloadpacket.__name__ not in _WRAPPING:
        return args
    dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.ndim and a.dtype != torch.bool}
    if len(dtypes) != 1 or not dtypes <= _INTEGERS or made.dtype.is_floating_point:
        return args
    (dtype,) = dtypes
    return tuple(tree_map(lambda a: _wrapped(a, dtype), a) for a in args)


def _wrapped(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype == torch.int64:
        return value.to(dtype)
    if type(value) is not int:
        return value
    limits = torch.iinfo(dtype)
    return (value - limits.min) % 2**limits.bits + limits.min
