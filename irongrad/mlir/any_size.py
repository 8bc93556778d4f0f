"""Sizes of tensors that are known at run time alone: what makes them, so that equal ones can be recognised."""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import producer_of
from irongrad.mlir.walk import BOUNDS, constant_of

# The operations whose last operands are the unknown sizes of their result.
_NAME_SIZES = frozenset(
    {
        "tensor.empty",
        "tensor.expand_shape",
        "flow.tensor.tie_shape",
        "hal.tensor.import",
        "iree_tensor_ext.compute_barrier.start",
        "iree_tensor_ext.compute_barrier.end",
    }
)

# A size, or a tensor and the number of its dimension.
Origin = Any | tuple[Any, int]


def origin_of(size: Any) -> Origin:
    """What makes the index `size`: two sizes of one origin are equal. Iterations of a loop keep sizes of tensors."""
    if producer_of(size) != "tensor.dim":
        return size
    tensor, place = size.owner.operands
    dimension = constant_of(place)
    return size if dimension is None else origin_along(tensor, dimension)


def origin_along(tensor: Any, dimension: int) -> Origin:
    """What makes the unknown size of a tensor along a dimension."""
    while (before := _of_equal_sizes(tensor)) is not None:
        tensor = before
    size = size_for_maker(tensor, dimension)
    return (tensor, dimension) if size is None else origin_of(size)


def size_for_maker(tensor: Any, dimension: int) -> Any | None:
    """The unknown size of a tensor along a dimension, if it is an operand of the operation that makes it; else None."""
    if producer_of(tensor) not in _NAME_SIZES:
        return None
    behind = sum(tensor.type.is_dynamic_dim(d) for d in range(dimension, tensor.type.rank))
    return list(tensor.owner.operands)[-behind]


def room_of(tensor: Any) -> Any:
    """The tensor in whose memory linalg operations write `tensor`."""
    while (producer_of(tensor) or "").startswith("linalg."):
        results = tensor.owner.results
        tensor = tensor.owner.operands[len(tensor.owner.operands) - len(results) + ir.OpResult(tensor).result_number]
    return tensor


def _of_equal_sizes(tensor: Any) -> Any | None:
    """A tensor of the same sizes that comes before `tensor`; None if there is none."""
    if (room := room_of(tensor)) != tensor:
        return room
    if isinstance(tensor.owner, ir.Block):
        loop, place = tensor.owner.owner, ir.BlockArgument(tensor).arg_number - 1
        return loop.operands[BOUNDS + place] if loop.name == "scf.for" and place >= 0 else None
    if tensor.owner.name == "scf.for":
        return tensor.owner.operands[BOUNDS + ir.OpResult(tensor).result_number]
    return tensor.owner.operands[1] if tensor.owner.name == "tensor.insert_slice" else None
