"""Operands and results of bfloat16: where a sum of products widens what it reads, or rounds what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith

from irongrad.mlir.letters import copied_by, lettered_source
from irongrad.mlir.linalg import GENERIC, RESHAPES, inputs_of, is_elementwise, producer_of, source_of
from irongrad.mlir.transposes import Lettered

_HALF = "bf16"


def is_half(value: Any) -> bool:
    """Whether a tensor is of bfloat16."""
    return bool(str(value.type.element_type) == _HALF)


def _narrowed(value: Any) -> Any | None:
    """The tensor of bfloat16 that `value` widens, in the shape of `value`; None if it widens none.

    The product of widened numbers is that of the numbers themselves. IREE recognises it if there is no reshape between.
    """
    if is_half(value):
        return value
    reshapes = []
    while not isinstance(value.owner, ir.Block) and value.owner.name in RESHAPES:
        reshapes.append(value.owner)
        value = value.owner.operands[0]
    if isinstance(value.owner, ir.Block) or not _converts(value.owner, "arith.extf"):
        return None
    (value,) = inputs_of(value.owner)
    for reshape in reversed(reshapes) if is_half(value) else ():
        copy = reshape.operation.clone(ir.InsertionPoint(reshape))
        copy.operands[0] = value
        (value,) = copy.results
        value.set_type(ir.RankedTensorType.get(value.type.shape, ir.BF16Type.get()))
    return value if is_half(value) else None


def half_source(value: Any, letters: str) -> Lettered | None:
    """The source of an operand as bfloat16, widened before or after it is transposed; None if it is float32."""
    source, of_source = lettered_source(value, letters)
    narrow = _narrowed(source)
    return None if narrow is None else lettered_source(narrow, of_source)


def is_widened(value: Any) -> bool:
    """Whether a tensor has the numbers of a tensor of bfloat16, in any order."""
    while not is_half(value) and producer_of(value) is not None:
        value = source_of(value)
        if (source := copied_by(value)) is not None:
            value = source
        elif producer_of(value) is not None and _converts(value.owner, "arith.extf"):
            (value,) = inputs_of(value.owner)
        else:
            break
    return is_half(value)


def rounding(result: Any) -> Any | None:
    """The operation that rounds `result` to bfloat16; None if there is none, or if `result` has another reader."""
    readers = [use.owner.operation for use in result.uses]
    if len(readers) != 1 or not _converts(readers[0], "arith.truncf"):
        return None
    return readers[0] if is_half(readers[0].results[0]) else None


def pairs_along(image: Any, dimension: int, step: int) -> Any:
    """The pairs of the numbers of a tensor of bfloat16 that are `step` apart, at the current insertion point.

    Returns:
        A tensor of 32-bit integers, shorter by `step` along `dimension`. The low half is the first number of the pair.
    """
    shape = list(image.type.shape)
    shape[dimension] -= step
    starts = [0] * len(shape), [step if d == dimension else 0 for d in range(len(shape))]
    parts = [_part(image, start, shape) for start in starts]
    pair, half = (ir.IntegerType.get_signless(width) for width in (32, 16))
    kind = ir.RankedTensorType.get(shape, pair)
    whole = ir.AffineMapAttr.get(ir.AffineMap.get_identity(len(shape)))
    operation = ir.Operation.create(
        GENERIC,
        [kind],
        [*parts, ir.Operation.create("tensor.empty", [kind]).result],
        {
            "indexing_maps": ir.ArrayAttr.get([whole] * 3),
            "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse("#linalg.iterator_type<parallel>")] * len(shape)),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([2, 1]),
        },
        regions=1,
    )
    body = operation.regions[0].blocks.append(*[part.type.element_type for part in parts], pair)
    with ir.InsertionPoint(body):
        bits = [arith.bitcast(half, number) for number in list(body.arguments)[:2]]
        low, high = (arith.extui(pair, number) for number in bits)
        high = arith.shli(high, arith.constant(pair, 16))
        ir.Operation.create("linalg.yield", operands=[arith.ori(low, high)])
    return operation.result


def _part(tensor: Any, start: Sequence[int], shape: Sequence[int]) -> Any:
    """The part of a tensor of the given shape that begins at `start`."""
    kind = ir.RankedTensorType.get(shape, tensor.type.element_type)
    static = {"static_offsets": start, "static_sizes": shape, "static_strides": [1] * len(shape)}
    attributes = {name: ir.DenseI64ArrayAttr.get(values) for name, values in static.items()}
    segments = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 0, 0])}
    return ir.Operation.create("tensor.extract_slice", [kind], [tensor], attributes | segments).result


def _converts(operation: Any, name: str) -> bool:
    """Whether an operation does nothing but `name`, element by element, in order."""
    if not is_elementwise(operation) or len(operation.results) != 1 or len(inputs_of(operation)) != 1:
        return False
    whole = ir.AffineMap.get_identity(len(operation.results[0].type.shape))
    in_order = all(m.value == whole for m in operation.attributes["indexing_maps"])
    body = [op.operation.name for op in operation.regions[0].blocks[0]]
    return in_order and body == [name, "linalg.yield"]
