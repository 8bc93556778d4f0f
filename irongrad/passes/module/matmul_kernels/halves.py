"""Operands and results of bfloat16: where a product widens what it reads, or rounds what it computes."""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import RESHAPES, inputs_of, is_elementwise

HALF = "bf16"


def narrowed(value: Any) -> Any | None:
    """The tensor of bfloat16 that `value` widens, in the shape of `value`; None if it widens none.

    The product of widened numbers is that of the numbers themselves. IREE recognises it if there is no reshape between.
    """
    if str(value.type.element_type) == HALF:
        return value
    reshapes = []
    while not isinstance(value.owner, ir.Block) and value.owner.name in RESHAPES:
        reshapes.append(value.owner)
        value = value.owner.operands[0]
    if isinstance(value.owner, ir.Block) or not _converts(value.owner, "arith.extf"):
        return None
    (value,) = inputs_of(value.owner)
    for reshape in reversed(reshapes) if str(value.type.element_type) == HALF else ():
        copy = reshape.operation.clone(ir.InsertionPoint(reshape))
        copy.operands[0] = value
        (value,) = copy.results
        value.set_type(ir.RankedTensorType.get(value.type.shape, ir.BF16Type.get()))
    return value if str(value.type.element_type) == HALF else None


def rounding(result: Any) -> Any | None:
    """The operation that rounds `result` to bfloat16; None if there is none, or if `result` has another reader."""
    readers = [use.owner.operation for use in result.uses]
    if len(readers) != 1 or not _converts(readers[0], "arith.truncf"):
        return None
    return readers[0] if str(readers[0].results[0].type.element_type) == HALF else None


def _converts(operation: Any, name: str) -> bool:
    """Whether an operation does nothing but `name`, element by element, in order."""
    if not is_elementwise(operation) or len(operation.results) != 1 or len(inputs_of(operation)) != 1:
        return False
    whole = ir.AffineMap.get_identity(len(operation.results[0].type.shape))
    in_order = all(m.value == whole for m in operation.attributes["indexing_maps"])
    body = [op.operation.name for op in operation.regions[0].blocks[0]]
    return in_order and body == [name, "linalg.yield"]
