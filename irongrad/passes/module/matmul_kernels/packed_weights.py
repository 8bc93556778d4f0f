"""Right operands that a step computes from numbers of 4, 8 or 16 bits, element by element.

`irongrad.quantisation` writes such weights, and models write them by hand, as `packed.float() * scale`. A kernel reads
the numbers, so the wide weights are never in memory. The forms that are found here are:

    number                                      bfloat16 or float16; IREE takes the conversion into the product
    number * scale                              int8
    number * scale + offset                     int8
    ((byte & 15) or (byte >> 4)) - 8 in place of an int8 number; the even column is in the low bits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC, inputs_of, source_of
from irongrad.mlir.walk import constant_of

HALVES = frozenset({"bf16", "f16"})

# A byte of `u4` has one number in the bits of `LOW`, the other one `HIGH` bits above, and `BIAS` added to both.
LOW, HIGH, BIAS = 15, 4, 8
_LESS = 4  # `arith.cmpf olt`


@dataclass(frozen=True)
class Packing:
    """How the elements of a weight [rows, columns] are stored.

    Attributes:
        kind: `i8`, `u4` (two to a byte, each plus 8), `bf16` or `f16`.
        rows: the number of rows.
        columns: the number of columns.
        groups: the number of groups of columns in a row, which share a scale; 0 without scales.
        has_offset: whether each group has an offset, too.
    """

    kind: str
    rows: int
    columns: int
    groups: int = 0
    has_offset: bool = False

    @property
    def tensors(self) -> int:
        """The number of tensors that hold the numbers, the scales and the offsets."""
        return 1 + (self.groups > 0) + self.has_offset

    @property
    def numbers_per_element(self) -> int:
        """How many numbers are stored in one element."""
        return 2 if self.kind == "u4" else 1

    @property
    def group(self) -> int:
        """The number of columns in a group."""
        return self.columns // max(self.groups, 1)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight as it is stored.

    Attributes:
        packing: the form.
        operands: the tensors: the numbers, and the scales and the offsets if there are any.
    """

    packing: Packing
    operands: tuple[Any, ...]


def packed_weight(weight: Any) -> PackedWeight | None:
    """How a right operand [rows, columns] is stored; None for float32 that no form above computes."""
    rows, columns = weight.type.shape
    if (half := str(weight.type.element_type)) in HALVES:
        return PackedWeight(Packing(half, rows, columns), (_untied(weight),))
    value = source_of(weight)
    offset, scale = [], None
    if (added := _combined(value, "arith.addf")) is not None:
        value, of_groups = added
        offset.append(of_groups)
    if (multiplied := _combined(value, "arith.mulf")) is not None:
        value, scale = multiplied
    numbers = _only(value, "arith.sitofp")
    if scale is None or numbers is None or not _is_in_order(numbers):
        return None
    kind, stored = _numbers(inputs_of(numbers)[0])
    groups = prod(scale.type.shape) // rows
    known = kind is not None and prod(stored.type.shape) * (2 if kind == "u4" else 1) == rows * columns
    if not known or any(prod(x.type.shape) != rows * groups for x in (scale, *offset)) or columns % groups:
        return None
    operands = (stored, *(_untied(x) for x in (scale, *offset)))
    return PackedWeight(Packing(str(kind), rows, columns, groups, bool(offset)), operands)


def _untied(value: Any) -> Any:
    """The tensor that `passes/recompute.py` has tied to a value of the backward; else `value` itself."""
    value = source_of(value)
    tied = _only(value, "arith.select")
    if tied is None or len(inputs_of(tied)) != 3:
        return value
    condition, _, original = inputs_of(tied)
    compared = _only(condition, "arith.cmpf")
    is_late = compared is not None and _only(inputs_of(compared)[0], "math.absf") is not None
    is_less = is_late and ir.IntegerAttr(_body(compared)[0].attributes["predicate"]).value == _LESS
    return source_of(original) if is_less and _maps(tied)[2] == _maps(tied)[3] else value


def _numbers(value: Any) -> tuple[str | None, Any]:
    """The kind and the tensor in which integers are stored; no kind for others."""
    stored = _untied(value)
    if str(stored.type.element_type) == "i8":
        return "i8", stored
    halves = _unbiased_halves(value)
    if halves is None:
        return None, None
    low, high = halves
    bytes_of_low, bytes_of_high = _masked(low, "arith.andi", LOW), _masked(high, "arith.shrsi", HIGH)
    if bytes_of_low is None or bytes_of_low != bytes_of_high:
        return None, None
    widened = _only(bytes_of_low, "arith.extui")
    if widened is None or not _is_in_order(widened):
        return None, None
    stored = _untied(inputs_of(widened)[0])
    return ("u4", stored) if str(stored.type.element_type) == "i8" else (None, None)


def _unbiased_halves(value: Any) -> tuple[Any, Any] | None:
    """The values for even and for odd columns that `value` has side by side, each less 8."""
    selected = _masked(value, "arith.subi", BIAS)
    if selected is None:
        return None
    select = _only(selected, "arith.select")
    if select is None or len(inputs_of(select)) != 3:
        return None
    is_even, low, high = inputs_of(select)
    rank = len(selected.type.shape)
    *of_inputs, of_result = _maps(select)
    halves = list(range(rank - 1))
    if [*of_inputs, of_result] != [[rank - 1], halves, halves, [*halves, rank - 1]] or list(is_even.type.shape) != [2]:
        return None
    return (low, high) if _is_even(is_even) else None


def _is_even(value: Any) -> bool:
    """Whether `value` is [True, False], computed as `arange(2) == 0`."""
    compared = _only(value, "arith.cmpi")
    if compared is None or len(inputs_of(compared)) != 1:
        return False
    comparison = _body(compared)[0]
    counted = inputs_of(compared)[0].owner
    counts = not isinstance(counted, ir.Block) and counted.name == GENERIC and not inputs_of(counted)
    is_equal = ir.IntegerAttr(comparison.attributes["predicate"]).value == 0
    names = [op.name for op in _body(counted)] if counts else []
    return is_equal and constant_of(comparison.operands[1]) == 0 and names == ["linalg.index", "arith.index_cast"]


def _masked(value: Any, name: str, number: int) -> Any | None:
    """The tensor of which `value` is `name` with a constant, element by element; else None."""
    owner = _only(value, name)
    if owner is None or len(inputs_of(owner)) != 1 or not _is_in_order(owner):
        return None
    return inputs_of(owner)[0] if constant_of(_body(owner)[0].operands[1]) == number else None


def _combined(value: Any, name: str) -> tuple[Any, Any] | None:
    """The whole tensor, and the tensor with a value for each row or group, that `value` combines; else None."""
    owner = _only(value, name)
    if owner is None or len(inputs_of(owner)) != 2:
        return None
    *of_inputs, of_result = _maps(owner)
    whole = list(range(len(value.type.shape)))
    first, second = zip(inputs_of(owner), of_inputs, strict=True)
    for (one, of_one), (other, of_other) in ((first, second), (second, first)):
        leading = [d for d in of_other if d is not None]
        if of_one == of_result == whole and leading == whole[: len(leading)] and leading != whole:
            return one, other
    return None


def _only(value: Any, name: str) -> Any | None:
    """The elementwise operation that computes `value`, if `name` is all that it does; else None."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != GENERIC:
        return None
    body = _body(owner)
    return owner if [op.name for op in body] == [name] else None


def _body(generic: Any) -> Sequence[Any]:
    """The operations of a `linalg.generic`, without the one that yields its result."""
    return [op.operation for op in generic.regions[0].blocks[0]][:-1]


def _is_in_order(generic: Any) -> bool:
    """Whether all operands are read in the order of the result."""
    whole = list(range(len(generic.results[0].type.shape)))
    return all(dimensions == whole for dimensions in _maps(generic))


def _maps(generic: Any) -> list[list[int | None]]:
    """For each operand, the loop of each of its dimensions; None for a dimension of size one."""
    maps = [m.value for m in generic.attributes["indexing_maps"]]
    return [[x.position if isinstance(x, ir.AffineDimExpr) else None for x in m.results] for m in maps]
