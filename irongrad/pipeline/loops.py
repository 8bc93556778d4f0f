"""Making operations of linalg on tensors, in which each letter is a loop, as in Einstein's notation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from iree.compiler import ir

from irongrad.pipeline.generics import GENERIC

# A tensor, and the letters of its dimensions.
Lettered = tuple[Any, str]


def generic(
    compute: Callable[..., Any], operands: Sequence[Lettered], init: Lettered, attributes: Mapping[str, Any]
) -> Any:
    """A `linalg.generic` at the current insertion point; its result.

    Args:
        compute: makes the new element of the result, of elements of the operands and the one that is there.
        operands: what is read.
        init: what is there before. Its letters are the first loops; those over others add up.
        attributes: what else the operation says of itself.
    """
    values, dimensions = zip(*operands, init, strict=True)
    loops = "".join(dict.fromkeys("".join((init[1], *dimensions))))
    kinds = [f"#linalg.iterator_type<{'parallel' if loop in init[1] else 'reduction'}>" for loop in loops]
    operation = ir.Operation.create(
        GENERIC,
        [init[0].type],
        list(values),
        {
            "indexing_maps": ir.ArrayAttr.get([_map(loops, letters) for letters in dimensions]),
            "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse(kind) for kind in kinds]),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(operands), 1]),
            **attributes,
        },
        regions=1,
    )
    body = operation.regions[0].blocks.append(*[value.type.element_type for value in values])
    with ir.InsertionPoint(body):
        ir.Operation.create("linalg.yield", operands=[compute(*body.arguments)])
    return operation.result


def _map(loops: str, letters: str) -> ir.AffineMapAttr:
    dimensions = [ir.AffineDimExpr.get(loops.index(letter)) for letter in letters]
    return ir.AffineMapAttr.get(ir.AffineMap.get(len(loops), 0, dimensions))


def empty(shape: Sequence[int], element: ir.Type) -> Any:
    """A tensor of which nothing is written."""
    return ir.Operation.create("tensor.empty", [ir.RankedTensorType.get(shape, element)]).result


def split(value: Any, dimension: int, size: int) -> Any:
    """`value` with a dimension as two, of which the second has `size` elements."""
    shape = list(value.type.shape)
    shape[dimension : dimension + 1] = [shape[dimension] // size, size]
    attributes = {
        "reassociation": _groups(len(shape), dimension),
        "static_output_shape": ir.DenseI64ArrayAttr.get(shape),
    }
    return _reshaped("tensor.expand_shape", value, shape, attributes)


def merged(value: Any, dimension: int) -> Any:
    """`value` with a dimension and the next as one."""
    shape = list(value.type.shape)
    groups = _groups(len(shape), dimension)
    shape[dimension : dimension + 2] = [shape[dimension] * shape[dimension + 1]]
    return _reshaped("tensor.collapse_shape", value, shape, {"reassociation": groups})


def _groups(rank: int, dimension: int) -> ir.ArrayAttr:
    """All dimensions, of which `dimension` and the next are one group."""
    number = ir.IntegerType.get_signless(64)
    firsts = [d for d in range(rank) if d != dimension + 1]
    groups = [[d, d + 1] if d == dimension else [d] for d in firsts]
    return ir.ArrayAttr.get([ir.ArrayAttr.get([ir.IntegerAttr.get(number, d) for d in g]) for g in groups])


def _reshaped(name: str, value: Any, shape: Sequence[int], attributes: Mapping[str, Any]) -> Any:
    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    return ir.Operation.create(name, [kind], [value], dict(attributes)).result
