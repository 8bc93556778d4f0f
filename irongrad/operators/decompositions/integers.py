"""Conversion to short integers, integer negation, shifts, and bitwise operators with a number.

torch-mlir 20261001 lowers few of these, and some of them wrongly.
"""

from __future__ import annotations

import torch

from irongrad.graph.recorder import undecomposed
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

_SHORT = (torch.uint8, torch.int8, torch.int16)


@decomposes(torch.ops.prims.convert_element_type.default)
def _to_short(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert floating-point numbers by way of int32, of which the short integer has the lowest bits, as in eager.

    torch-mlir 20261001 converts to a signed integer of as many bits. For numbers beyond its limits, which 128 of uint8
    is, vector code then gives the limit.
    """
    if dtype not in _SHORT or not x.is_floating_point():
        return NotImplemented
    return x.to(torch.int32).to(dtype)


@decomposes(aten.neg.default)
def _neg(x: torch.Tensor) -> torch.Tensor:
    """torch-mlir 20261001 negates integers in floating point: -16777217 becomes -16777216."""
    return NotImplemented if x.is_floating_point() or x.is_complex() else x * -1


@decomposes(aten.bitwise_left_shift.Tensor, aten.__lshift__.Tensor)
def _left(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A shift by a negative distance, or by all bits or more, gives zero: machines and compilers differ there."""
    x, places, outside = _prepared(x, places)
    with undecomposed():
        shifted = aten.bitwise_left_shift.Tensor(x, places)
    return torch.where(outside, torch.zeros_like(x), shifted)


@decomposes(aten.bitwise_right_shift.Tensor, aten.__rshift__.Tensor)
def _right(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A shift by a negative distance, or by all bits or more, gives the sign alone: -1 or 0."""
    x, places, outside = _prepared(x, places)
    with undecomposed():
        shifted = aten.bitwise_right_shift.Tensor(x, places)
    return torch.where(outside, -(x < 0).to(x.dtype), shifted)


def _prepared(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Promote and broadcast both operands; also return where the shift distance is out of range.

    A distance out of range is replaced by 0.
    """
    dtype = torch.result_type(x, places)
    x, places = torch.broadcast_tensors(x.to(dtype), places.to(dtype))
    outside = (places < 0) | (places >= torch.iinfo(dtype).bits)
    return x, torch.where(outside, 0, places), outside


def _register_number_last(operator: torch._ops.OpOverload, *with_number: torch._ops.OpOverload) -> None:
    @decomposes(*with_number)
    def rewrite(x: torch.Tensor, number: int) -> torch.Tensor:
        return operator(x, torch.full((), number, dtype=torch.result_type(x, number)))


_register_number_last(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.__lshift__.Scalar)
_register_number_last(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar)
_register_number_last(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)
_register_number_last(aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)


def _register_number_first(operator: torch._ops.OpOverload, with_number: torch._ops.OpOverload) -> None:
    @decomposes(with_number)
    def rewrite(number: int, x: torch.Tensor) -> torch.Tensor:
        return operator(torch.full((), number, dtype=torch.result_type(number, x)), x)


_register_number_first(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Scalar_Tensor)
_register_number_first(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Scalar_Tensor)
