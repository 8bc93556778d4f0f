"""A softmax along rows as the operations of which it consists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, linalg, math

from irongrad.mlir.linalg import GENERIC, is_known_but_first
from irongrad.mlir.transposes import size_along

SOFTMAX = "linalg.softmax"


def is_of_rows(operation: Any) -> bool:
    """Whether an operation is a softmax of float32 along the last dimension of a tensor.

    Its sizes are known, besides perhaps that of its first dimension.
    """
    if operation.name != SOFTMAX:
        return False
    kind = operation.operands[0].type
    last = ir.IntegerAttr(operation.attributes["dimension"]).value == len(kind.shape) - 1
    return last and is_known_but_first(kind) and str(kind.element_type) == "f32"


def in_parts(softmax: Any) -> list[Any]:
    """Write the operations of which a softmax consists, after it, and have its readers read the last of them."""
    (scores, _), kind = softmax.operands, softmax.results[0].type
    rank = len(kind.shape)
    whole, rows = (
        ir.AffineMap.get_identity(rank),
        ir.AffineMap.get(rank, 0, [ir.AffineDimExpr.get(d) for d in range(rank - 1)]),
    )
    readers = list(softmax.results[0].uses)
    with softmax.location, ir.InsertionPoint.after(softmax):
        numbers = ir.RankedTensorType.get(kind.shape[:-1], kind.element_type)

        def reduced(values: Any, begin: float, combine: Callable[[Any, Any], Any]) -> Any:
            number = ir.FloatAttr.get(kind.element_type, begin)
            room = linalg.fill(arith.constant(kind.element_type, number), outs=[_empty(numbers, scores)])
            return _generic([values], [whole], room, rows, combine)

        largest = reduced(scores, float("-inf"), arith.maximumf)
        differences = _generic(
            [scores, largest], [whole, rows], _empty(kind, scores), whole, lambda x, m, _: arith.subf(x, m)
        )
        powers = _generic([differences], [whole], _empty(kind, scores), whole, lambda x, _: math.exp(x))
        total = reduced(powers, 0.0, arith.addf)
        weights = _generic(
            [powers, total], [whole, rows], _empty(kind, scores), whole, lambda x, s, _: arith.divf(x, s)
        )
    for use in readers:
        use.owner.operands[use.operand_number] = weights
    return [v.owner.operation for v in (largest, differences, powers, total, weights)]


def _empty(kind: Any, scores: Any) -> Any:
    """An empty tensor as large as `scores` along its first dimension."""
    unknown = [] if kind.has_static_shape else [size_along(scores, 0)]
    return ir.Operation.create("tensor.empty", [kind], unknown).result


def _generic(
    inputs: Sequence[Any],
    maps: Sequence[ir.AffineMap],
    room: Any,
    of_result: ir.AffineMap,
    body: Callable[..., Any],
) -> Any:
    """A `linalg.generic` at the current insertion point; what `of_result` leaves out is reduced."""
    kinds = ["parallel" if d < len(of_result.results) else "reduction" for d in range(of_result.n_dims)]
    operation = ir.Operation.create(
        GENERIC,
        [room.type],
        [*inputs, room],
        {
            "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in (*maps, of_result)]),
            "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{k}>") for k in kinds]),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(inputs), 1]),
        },
        regions=1,
    )
    block = operation.regions[0].blocks.append(*(v.type.element_type for v in (*inputs, room)))
    with ir.InsertionPoint(block):
        ir.Operation.create("linalg.yield", operands=[body(*block.arguments)])
    return operation.result
