"""Upper bounds of the integers with which a module numbers the elements of tensors.

JAX numbers the elements of a random tensor in 64 bits, as indices times sizes. It uses the high word and the low word
of each number (`iota_2x32_shape` in its `prng.py`). The high word is zero for every tensor that fits into memory.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC, RESHAPES

# Operations whose result has the element values of their first operand.
_MOVES = RESHAPES | {"tensor.extract_slice"}
_CASTS = frozenset({"arith.index_cast", "arith.index_castui"})


def upper_bound(value: ir.Value) -> int | None:
    """An upper bound of an integer, or of a tensor's elements; None if it is unknown or the value may be negative.

    Bounds are known for constants, for indices of loops over static sizes, and for sums and products of these.
    """
    if isinstance(value, ir.BlockArgument):
        return _bound_of_argument(value)
    operation = value.owner
    if operation.name == "arith.constant":
        number = operation.attributes["value"]
        return number.value if isinstance(number, ir.IntegerAttr) and number.value >= 0 else None
    if operation.name == "linalg.index":
        return _bound_of_index(operation)
    if operation.name == GENERIC:
        inner = operation.regions[0].blocks[0].operations
        return upper_bound(inner[len(inner) - 1].operands[ir.OpResult(value).result_number])
    if operation.name in _MOVES or operation.name in _CASTS:
        return upper_bound(operation.operands[0])
    if operation.name in ("arith.addi", "arith.muli"):
        bounds = [upper_bound(o) for o in operation.operands]
        if None in bounds:
            return None
        one, other = bounds
        assert one is not None
        assert other is not None
        return one + other if operation.name == "arith.addi" else one * other
    return None


def _bound_of_argument(value: ir.BlockArgument) -> int | None:
    """The bound of an input element, as an argument of the body of a `linalg.generic`."""
    outer = value.owner.owner
    if outer.name != GENERIC or value.arg_number >= _input_count(outer):
        return None
    return upper_bound(outer.operands[value.arg_number])


def _bound_of_index(index: ir.Operation) -> int | None:
    """The bound of a `linalg.index`; known if the output's indexing map is the identity and its shape is static."""
    loop = index.parent
    maps: Any = loop.attributes["indexing_maps"]
    last = ir.AffineMapAttr(maps[len(maps) - 1])
    kind = ir.RankedTensorType(loop.operands[len(loop.operands) - 1].type)
    if last != ir.AffineMapAttr.get(ir.AffineMap.get_identity(kind.rank)) or not kind.has_static_shape:
        return None
    return max(int(kind.shape[ir.IntegerAttr(index.attributes["dim"]).value]) - 1, 0)


def _input_count(loop: ir.Operation) -> int:
    return len(loop.operands) - len(loop.results)
