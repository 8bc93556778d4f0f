"""Transposing copies and reshapes of tensors; a letter per dimension names its loop, as in einsum notation."""

from __future__ import annotations

from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import linalg

from irongrad.mlir.any_size import room_of, size_for_maker
from irongrad.mlir.linalg import GENERIC, inputs_of

# A tensor, and the letters of its dimensions.
Lettered = tuple[Any, str]


def copied(operand: Lettered, letters: str, wider: ir.Type | None = None) -> Any:
    """Copy `operand` by a `linalg.generic` at the current insertion point.

    Args:
        operand: the tensor.
        letters: the new order of its dimensions.
        wider: the type to which its elements are widened; None keeps theirs.
    """
    value, of_value = operand
    sizes = dict(zip(of_value, value.type.shape, strict=True))
    kind = ir.RankedTensorType.get([sizes[x] for x in letters], wider or value.type.element_type)
    unknown = [size_along(value, of_value.index(x)) for d, x in enumerate(letters) if kind.is_dynamic_dim(d)]
    init = ir.Operation.create("tensor.empty", [kind], unknown).result
    operation = ir.Operation.create(
        GENERIC,
        [kind],
        [value, init],
        {
            "indexing_maps": ir.ArrayAttr.get([_map(letters, of_value), _map(letters, letters)]),
            "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse("#linalg.iterator_type<parallel>")] * len(letters)),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1]),
        },
        regions=1,
    )
    body = operation.regions[0].blocks.append(value.type.element_type, kind.element_type)
    with ir.InsertionPoint(body):
        element = body.arguments[0]
        if wider is not None:
            element = ir.Operation.create("arith.extf", [wider], [element]).result
        ir.Operation.create("linalg.yield", operands=[element])
    return operation.result


def size_along(value: Any, dimension: int) -> Any:
    """The size of a tensor along an unknown dimension as an index, at the current insertion point.

    An operation that makes the tensor, or its memory, has the size as an operand: tensor.dim would read the tensor.
    """
    if (size := size_for_maker(room_of(value), dimension)) is not None:
        return size
    index = ir.IndexType.get()
    place = ir.Operation.create("arith.constant", [index], [], {"value": ir.IntegerAttr.get(index, dimension)}).result
    return ir.Operation.create("tensor.dim", [index], [value, place]).result


def unknown_sizes(value: Any) -> list[Any]:
    """The sizes of a tensor that are known at run time alone, as `size_along` gives them."""
    kind = value.type
    return [size_along(value, d) for d in range(len(kind.shape)) if kind.is_dynamic_dim(d)]


def summed(operand: Lettered, letters: str) -> Any:
    """Add up `operand` over the dimensions whose letters are not in `letters`, at the current insertion point.

    Args:
        operand: a tensor of floats.
        letters: the dimensions of the result, in its order.
    """
    value, of_value = operand
    element = value.type.element_type
    sizes = dict(zip(of_value, value.type.shape, strict=True))
    kind = ir.RankedTensorType.get([sizes[x] for x in letters], element)
    loops = letters + "".join(x for x in of_value if x not in letters)
    zero = ir.Operation.create("arith.constant", [element], [], {"value": ir.FloatAttr.get(element, 0)}).result
    init = linalg.fill(zero, outs=[ir.Operation.create("tensor.empty", [kind]).result])
    kinds = ["parallel" if x in letters else "reduction" for x in loops]
    operation = ir.Operation.create(
        GENERIC,
        [kind],
        [value, init],
        {
            "indexing_maps": ir.ArrayAttr.get([_map(loops, of_value), _map(loops, letters)]),
            "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{k}>") for k in kinds]),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1]),
        },
        regions=1,
    )
    body = operation.regions[0].blocks.append(element, element)
    with ir.InsertionPoint(body):
        total = ir.Operation.create("arith.addf", [element], list(body.arguments)).result
        ir.Operation.create("linalg.yield", operands=[total])
    return operation.result


def _map(loops: str, letters: str) -> ir.AffineMapAttr:
    dimensions = [ir.AffineDimExpr.get(loops.index(letter)) for letter in letters]
    return ir.AffineMapAttr.get(ir.AffineMap.get(len(loops), 0, dimensions))


def split(value: Any, dimension: int, size: int) -> Any:
    """Split a dimension of `value` in two, of which the inner one has `size` elements."""
    shape = list(value.type.shape)
    unknown = unknown_sizes(value)
    shape[dimension : dimension + 1] = [shape[dimension] // size, size]
    attributes = {
        "reassociation": _groups(len(shape), dimension),
        "static_output_shape": ir.DenseI64ArrayAttr.get(shape),
    }
    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    return ir.Operation.create("tensor.expand_shape", [kind], [value, *unknown], attributes).result


def padded(value: Any, dimension: int, size: int) -> Any:
    """Append zeros to `value` along a dimension, up to `size` elements."""
    shape = list(value.type.shape)
    low, high = [0] * len(shape), [0] * len(shape)
    high[dimension], shape[dimension] = size - shape[dimension], size
    numbers = {"static_low": ir.DenseI64ArrayAttr.get(low), "static_high": ir.DenseI64ArrayAttr.get(high)}
    attributes = {**numbers, "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 0])}
    element = value.type.element_type
    kind = ir.RankedTensorType.get(shape, element)
    operation = ir.Operation.create("tensor.pad", [kind], [value], attributes, regions=1)
    body = operation.regions[0].blocks.append(*[ir.IndexType.get()] * len(shape))
    with ir.InsertionPoint(body):
        zero = ir.Operation.create("arith.constant", [element], [], {"value": ir.FloatAttr.get(element, 0)}).result
        ir.Operation.create("tensor.yield", operands=[zero])
    return operation.result


def joined(value: Any, dimension: int) -> Any:
    """Join a dimension of `value` with the next one: the tensor that was split there, if it was, or a reshape of it."""
    shape = list(value.type.shape)
    groups = _groups(len(shape), dimension)
    owner = value.owner
    expands = not isinstance(owner, ir.Block) and owner.name == "tensor.expand_shape"
    if expands and owner.attributes["reassociation"] == groups:
        return owner.operands[0]
    shape[dimension : dimension + 2] = [shape[dimension] * shape[dimension + 1]]
    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    return ir.Operation.create("tensor.collapse_shape", [kind], [value], {"reassociation": groups}).result


def read_instead(old: Any, new: Lettered, letters: str) -> None:
    """Have the readers of `old`, whose dimensions have `letters`, read `new`, whose dimensions have another order."""
    value, of_value = new
    order = [letters.index(x) for x in of_value]
    for use in list(old.uses):
        reader, place = use.owner.operation, use.operand_number
        if reader.name == GENERIC and place < len(inputs_of(reader)):
            maps = list(reader.attributes["indexing_maps"])
            read = maps[place].value
            turned = ir.AffineMap.get(read.n_dims, 0, [read.results[d] for d in order])
            maps[place] = ir.AffineMapAttr.get(turned)
            reader.operands[place] = value
            reader.attributes["indexing_maps"] = ir.ArrayAttr.get(maps)
    if list(old.uses):
        old.replace_all_uses_with(value if of_value == letters else copied(new, letters))


def _groups(rank: int, dimension: int) -> ir.ArrayAttr:
    """The reassociation of an expand_shape that joins `dimension` and the next in one group."""
    number = ir.IntegerType.get_signless(64)
    firsts = [d for d in range(rank) if d != dimension + 1]
    groups = [[d, d + 1] if d == dimension else [d] for d in firsts]
    return ir.ArrayAttr.get([ir.ArrayAttr.get([ir.IntegerAttr.get(number, d) for d in g]) for g in groups])
