"""How large the integers can be that a module counts elements with.

JAX numbers the elements of a tensor of random numbers in 64 bits, by their indices times sizes, and uses the high word
and the low one (`iota_2x32_shape` in its `prng.py`). The high word is zero for every tensor that there is.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC, RESHAPES

# Operations that move the values of their first operand.
_MOVES = RESHAPES | {"tensor.extract_slice"}
_CASTS = frozenset({"arith.index_cast", "arith.index_castui"})


def upper_bound(value: ir.Value) -> int | None:
    """The largest value of an integer or of an element of a tensor; None if it is unknown or may be negative.

    Known are indices of loops over known sizes, constants, and sums and products of such.
    """
    if isinstance(value, ir.BlockArgument):
        return _of_argument(value)
    operation = value.owner
    if operation.name == "arith.constant":
        held = operation.attributes["value"]
        return held.value if isinstance(held, ir.IntegerAttr) and held.value >= 0 else None
    if operation.name == "linalg.index":
        return _of_index(operation)
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


def _of_argument(value: ir.BlockArgument) -> int | None:
    """Of an element that the body of a `linalg.generic` takes."""
    outer = value.owner.owner
    if outer.name != GENERIC or value.arg_number >= _inputs(outer):
        return None
    return upper_bound(outer.operands[value.arg_number])


def _of_index(index: ir.Operation) -> int | None:
    """Of the number of an iteration, where results lie as the iterations do."""
    loop = index.parent
    maps: Any = loop.attributes["indexing_maps"]
    last = ir.AffineMapAttr(maps[len(maps) - 1])
    kind = ir.RankedTensorType(loop.operands[len(loop.operands) - 1].type)
    if last != ir.AffineMapAttr.get(ir.AffineMap.get_identity(kind.rank)) or not kind.has_static_shape:
        return None
    return max(int(kind.shape[ir.IntegerAttr(index.attributes["dim"]).value]) - 1, 0)


def _inputs(loop: ir.Operation) -> int:
    return len(loop.operands) - len(loop.results)
