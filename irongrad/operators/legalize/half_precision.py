"""Half-precision operators computed in float32 and rounded once, as eager's kernels do it, and those of bytes in int32.

ATen computes a bfloat16 or float16 operator in float32 from end to end, sums included, and rounds what it returns
(aten/src/ATen/OpMathType.h, AccumulateType.h). A decomposition of several operators would round after each of them,
torch-mlir 20261001 adds up in the dtype itself, and for mixed dtypes (a LayerNorm of bfloat16 values with float32
weights) gives float32 where eager gives bfloat16. So the values an operator takes are widened before it is decomposed,
and its results get the dtypes that eager's have. IREE fuses the casts: a product of two widened bfloat16 matrices
becomes one of bfloat16 matrices, added up in float32.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_any, tree_map

from irongrad.operators.random import is_random

HALVES = frozenset({torch.float16, torch.bfloat16})

# Integers of 8 bits too: torch-mlir 20261001 has no lowering for many operators of them, and takes the absolute value
# of an unsigned one for that of a signed. What 32 bits hold wraps around to the same 8 bits.
_WIDER = dict.fromkeys(HALVES, torch.float32) | dict.fromkeys((torch.int8, torch.uint8), torch.int32)

# Operators of values that they move and do not change: widened, they would move twice the bytes for the same result.
# Those that ask for the dtype's own limits would get float32's: nan_to_num and nextafter.
_MOVES = """
    _reshape_alias _to_copy _unsafe_index _unsafe_view alias cat clone constant_pad_nd convert_element_type copy detach
    diag_embed diagonal_scatter embedding empty_like fill flip full_like gather index index_select lift_fresh_copy
    masked_fill nan_to_num new_empty new_empty_strided new_full new_ones new_zeros nextafter ones_like repeat roll
    select_backward select_scatter slice_backward slice_scatter stack tril triu where zeros_like
"""
_MOVING = frozenset(_MOVES.split())


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
    """Whether `operator` is one of ATen's that computes, and takes half-precision values or bytes."""
    return (
        isinstance(operator, OpOverload)
        and operator.namespace in ("aten", "prims")
        and not (operator.is_view or operator._schema.is_mutable or is_random(operator))
        and operator._overloadpacket.__name__ not in _MOVING
        and tree_any(lambda v: isinstance(v, torch.Tensor) and v.dtype in _WIDER, arguments)
    )


def widened(arguments: Any) -> Any:
    """`arguments` with float32 in place of half precision, and int32 of bytes: tensors, and dtypes asked for."""
    return tree_map(_widened, arguments)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDER.get(value.dtype, value.dtype))
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def rounded(operator: OpOverload, arguments: Any, result: Any, made: Any) -> Any:
    """`result` with the dtypes that eager's has.

    Args:
        operator: the operator.
        arguments: its positional arguments, before they were widened.
        result: what it made of widened ones.
        made: the fake tensors of its node in the graph.
    """
    if isinstance(result, list | tuple):
        kept = _statistics(operator, arguments)
        return type(result)(r if i in kept else _like(r, v) for i, (r, v) in enumerate(zip(result, made, strict=True)))
    return _like(result, made)


def _like(result: Any, made: Any) -> Any:
    narrow = isinstance(made, torch.Tensor) and (made.dtype in _WIDER or made.dtype == torch.int16)
    return result.to(made.dtype) if narrow else result


def _statistics(operator: OpOverload, arguments: Any) -> tuple[int, ...]:
    """Which results are the mean and deviation of a normalisation with float32 weights.

    They are float32 then (aten/src/ATen/native/batch_norm.h, `is_mixed_type`), but torch 2.13's fake tensors are not.
    """
    if operator not in _NORMS:
        return ()
    weight = arguments[[a.name for a in operator._schema.arguments].index("weight")]
    return (1, 2) if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 else ()
