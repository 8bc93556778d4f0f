"""Slices at an index known only at run time, for the importer.

They use MLIR's tensor dialect, because torch-mlir's slice at an unknown index has a result of unknown sizes.
"""

from __future__ import annotations

import re
from typing import Any

from torch_mlir.dialects import arith, tensor
from torch_mlir.ir import IndexType, IntegerAttr, IntegerType, Operation, Type, Value

# A dynamic offset, as `tensor.extract_slice` and `tensor.insert_slice` encode it.
_DYNAMIC = -(2**63)

_VTENSOR = re.compile(r"!torch\.vtensor<\[([\d,]*)\],(\w+)>")


def convert(operation: str, value: Value, kind: Type) -> Value:
    """Create the operation named `operation`, with the operand `value`; return its one result, of type `kind`."""
    return Operation.create(operation, results=[kind], operands=[value]).result


def sizes_of(kind: Type) -> list[int]:
    """The static sizes of a type `!torch.vtensor<[sizes],element>`."""
    return _parsed(kind)[0]


def empty(kind: Type) -> Value:
    """An uninitialised tensor of type `kind`."""
    builtin = _builtin(*_parsed(kind), kind.context)
    return _from_builtin(tensor.EmptyOp(builtin.shape, builtin.element_type).result, kind)


def read_row(stacked: Value, index: Value) -> Value:
    """`stacked[index]`."""
    (_, *row), element = _parsed(stacked.type)
    context = stacked.context
    place = ([_DYNAMIC, *(0 for _ in row)], [1, *row], [1] * (len(row) + 1))
    part = tensor.ExtractSliceOp(
        _builtin(row, element, context), _to_builtin(stacked), [_index(index)], [], [], *place
    ).result
    return _from_builtin(part, _vtensor(row, element, context))


def write_row(row: Value, stacked: Value, index: Value) -> Value:
    """`stacked` with `stacked[index]` replaced by `row`."""
    (_, *sizes), _ = _parsed(stacked.type)
    place = ([_DYNAMIC, *(0 for _ in sizes)], [1, *sizes], [1] * (len(sizes) + 1))
    result = tensor.InsertSliceOp(_to_builtin(row), _to_builtin(stacked), [_index(index)], [], [], *place).result
    return _from_builtin(result, stacked.type)


def constant(value: int, context: Any) -> Value:
    """A 64-bit integer constant, the type of all indices here."""
    kind = IntegerType.get_signless(64, context)
    return arith.ConstantOp(kind, IntegerAttr.get(kind, value)).result


def _index(value: Value) -> Value:
    return arith.IndexCastOp(IndexType.get(value.context), value).result


def _parsed(kind: Type) -> tuple[list[int], str]:
    matched = _VTENSOR.fullmatch(str(kind))
    assert matched, f"{kind} is no tensor of known sizes"
    return [int(s) for s in matched[1].split(",") if s], matched[2]


def _vtensor(sizes: list[int], element: str, context: Any) -> Type:
    return Type.parse(f"!torch.vtensor<[{','.join(map(str, sizes))}],{element}>", context)


def _builtin(sizes: list[int], element: str, context: Any) -> Any:
    # MLIR's builtin integers are signless.
    unsigned = element.removeprefix("u").removeprefix("s")
    return Type.parse(f"tensor<{'x'.join([*map(str, sizes), unsigned])}>", context)


def _to_builtin(value: Value) -> Value:
    return convert("torch_c.to_builtin_tensor", value, _builtin(*_parsed(value.type), value.context))


def _from_builtin(value: Value, kind: Type) -> Value:
    return convert("torch_c.from_builtin_tensor", value, kind)
