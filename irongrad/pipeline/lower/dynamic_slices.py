"""Slices at an index known only at run time, for the importer.

They use MLIR's tensor dialect, because torch-mlir's slice at an unknown index has a result of unknown sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch_mlir.dialects import arith, tensor
from torch_mlir.ir import IndexType, IntegerAttr, IntegerType, Operation, Type, Value

# A dynamic offset or size, as MLIR encodes it (`ShapedType::kDynamic`).
_DYNAMIC = -(2**63)

_VTENSOR = re.compile(r"!torch\.vtensor<\[([\d?,]*)\],(\w+)>")


def convert(operation: str, value: Value, kind: Type) -> Value:
    """Create the operation named `operation`, with the operand `value`; return its one result, of type `kind`."""
    return Operation.create(operation, results=[kind], operands=[value]).result


def size_of(value: Value, dim: int) -> Value:
    """The size of dimension `dim` of `value`, of type `index`."""
    return tensor.DimOp(to_builtin(value), constant_index(dim, value.context)).result


def empty(kind: Type, dynamic: Sequence[Value]) -> Value:
    """An uninitialised tensor of type `kind`, whose dynamic dimensions have the sizes `dynamic`, of type `index`."""
    sizes, element = _parsed(kind)
    known = iter(dynamic)
    shape = [next(known) if s == _DYNAMIC else s for s in sizes]
    return from_builtin(tensor.EmptyOp(shape, _builtin(sizes, element, kind.context).element_type).result, kind)


def read_row(stacked: Value, index: Value) -> Value:
    """`stacked[index]`."""
    (_, *row), element = _parsed(stacked.type)
    context = stacked.context
    place = ([_DYNAMIC, *(0 for _ in row)], [1, *row], [1] * (len(row) + 1))
    part = tensor.ExtractSliceOp(
        _builtin(row, element, context), to_builtin(stacked), [_index(index)], _sizes_of_row(stacked), [], *place
    ).result
    return from_builtin(part, _vtensor(row, element, context))


def write_row(row: Value, stacked: Value, index: Value) -> Value:
    """`stacked` with `stacked[index]` replaced by `row`."""
    (_, *sizes), element = _parsed(stacked.type)
    context = stacked.context
    # The type of a row may know sizes that the type of the stack does not.
    same = tensor.CastOp(_builtin(sizes, element, context), to_builtin(row)).result
    place = ([_DYNAMIC, *(0 for _ in sizes)], [1, *sizes], [1] * (len(sizes) + 1))
    result = tensor.InsertSliceOp(same, to_builtin(stacked), [_index(index)], _sizes_of_row(stacked), [], *place).result
    return from_builtin(result, stacked.type)


def _sizes_of_row(stacked: Value) -> list[Value]:
    """The dynamic sizes of `stacked[index]`, in order."""
    (_, *row), _ = _parsed(stacked.type)
    return [size_of(stacked, d + 1) for d, size in enumerate(row) if size == _DYNAMIC]


def constant(value: int, context: Any) -> Value:
    """A 64-bit integer constant, the type of all indices here."""
    kind = IntegerType.get_signless(64, context)
    return arith.ConstantOp(kind, IntegerAttr.get(kind, value)).result


def constant_index(value: int, context: Any) -> Value:
    """A constant of type `index`."""
    kind = IndexType.get(context)
    return arith.ConstantOp(kind, IntegerAttr.get(kind, value)).result


def _index(value: Value) -> Value:
    return arith.IndexCastOp(IndexType.get(value.context), value).result


def _parsed(kind: Type) -> tuple[list[int], str]:
    matched = _VTENSOR.fullmatch(str(kind))
    assert matched, f"{kind} is no tensor of known rank"
    return [_DYNAMIC if s == "?" else int(s) for s in matched[1].split(",") if s], matched[2]


def _vtensor(sizes: list[int], element: str, context: Any) -> Type:
    return Type.parse(f"!torch.vtensor<[{','.join(map(_written, sizes))}],{element}>", context)


def _builtin(sizes: list[int], element: str, context: Any) -> Any:
    # MLIR's builtin integers are signless.
    unsigned = element.removeprefix("u").removeprefix("s")
    return Type.parse(f"tensor<{'x'.join([*map(_written, sizes), unsigned])}>", context)


def _written(size: int) -> str:
    return "?" if size == _DYNAMIC else str(size)


def to_builtin(value: Value) -> Value:
    """A tensor of torch-mlir, of known rank, as one of MLIR."""
    return convert("torch_c.to_builtin_tensor", value, _builtin(*_parsed(value.type), value.context))


def from_builtin(value: Value, kind: Type) -> Value:
    """A tensor of MLIR as one of torch-mlir, of type `kind`."""
    return convert("torch_c.from_builtin_tensor", value, kind)
