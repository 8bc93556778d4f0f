"""Compute half-precision operators in float32 and 8-bit integer operators in int32, and round once, as eager does.

ATen computes a bfloat16 or float16 operator in float32 from end to end, sums included, and rounds only the result
(aten/src/ATen/OpMathType.h, AccumulateType.h). Compiled code would differ from that in three ways:

* A decomposition into several operators rounds after each of them.
* torch-mlir 20261001 accumulates in the dtype itself.
* For mixed dtypes (a LayerNorm of bfloat16 values with float32 weights) the result is float32; eager's is bfloat16.

So this module widens an operator's operands before it is decomposed, and casts its results to eager's dtypes. IREE
fuses the casts: a product of two widened bfloat16 matrices becomes a bfloat16 product that accumulates in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_any, tree_map

from irongrad.graph.movements import ANY, names
from irongrad.operators.random import is_random

HALVES = frozenset({torch.float16, torch.bfloat16})

# 8-bit integers are widened because torch-mlir 20261001 lacks lowerings for many of their operators, and takes the
# absolute value of an unsigned byte as if it were signed. A 32-bit result wraps around to the same 8 bits.
_WIDER = dict.fromkeys(HALVES, torch.float32) | dict.fromkeys((torch.int8, torch.uint8), torch.int32)

# Widening an operator that only moves values would move twice the bytes for the same result. nan_to_num and nextafter
# use the limits of the dtype; widened, they would use float32's.
_AS_THEY_ARE = names(ANY) | {"nan_to_num", "nextafter"}

_NORMS = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten._native_batch_norm_legit_functional.default,
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.native_group_norm.default,
    }
)


def is_computed_wider(operator: object, arguments: Any) -> TypeGuard[OpOverload]:
    """Return whether `operator` is an ATen or prims operator that computes on half-precision values or bytes.

    Args:
        operator: the target of a node.
        arguments: a tree with its arguments.
    """
    return (
        isinstance(operator, OpOverload)
        and operator.namespace in ("aten", "prims")
        and not (operator.is_view or operator._schema.is_mutable or is_random(operator))
        and operator._overloadpacket.__name__ not in _AS_THEY_ARE
        and tree_any(lambda v: isinstance(v, torch.Tensor) and v.dtype in _WIDER, arguments)
    )


@cache
def functional_of(operator: object) -> OpOverload | None:
    """Return the operator that computes what `operator` writes into its first operand; None if it writes nothing.

    Only ATen's operators `name_` write in this way. One without an operator `name` of the same arguments gives None.
    """
    if not isinstance(operator, OpOverload) or operator.namespace != "aten" or not operator._schema.is_mutable:
        return None
    name = operator._overloadpacket.__name__
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    return next((o for o in overloads if _arguments(o) == _arguments(operator)), None)


def _arguments(operator: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in operator._schema.arguments]


def widened(arguments: Any) -> Any:
    """Widen half precision to float32, and 8-bit integers to int32, in the tensors and dtypes of `arguments`."""
    return tree_map(_widened, arguments)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDER.get(value.dtype, value.dtype))
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def rounded(operator: OpOverload, arguments: Any, result: Any, made: Any) -> Any:
    """Cast `result` to the dtypes of eager's results.

    Args:
        operator: the operator.
        arguments: its positional arguments before widening.
        result: its result for the widened arguments.
        made: the fake results of its node in the graph.
    """
    if isinstance(result, list | tuple):
        kept = _statistics(operator, arguments)
        return type(result)(r if i in kept else _like(r, v) for i, (r, v) in enumerate(zip(result, made, strict=True)))
    return _like(result, made)


def _like(result: Any, made: Any) -> Any:
    narrow = isinstance(made, torch.Tensor) and (made.dtype in _WIDER or made.dtype == torch.int16)
    return result.to(made.dtype) if narrow else result


def _statistics(operator: OpOverload, arguments: Any) -> tuple[int, ...]:
    """Positions of the results that are the mean and deviation of a normalisation with float32 weights.

    Eager returns these in float32 (aten/src/ATen/native/batch_norm.h, `is_mixed_type`). The fake tensors of torch 2.13
    do not have that dtype.
    """
    if operator not in _NORMS:
        return ()
    weight = arguments[[a.name for a in operator._schema.arguments].index("weight")]
    return (1, 2) if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 else ()
