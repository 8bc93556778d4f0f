"""The letters of operands: a letter for each dimension of a product names its loop, as in einsum notation.

`b` is the batch, `r` the rows, `c` the columns, `k` the reduction dimension.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC, inputs_of
from irongrad.mlir.transposes import Lettered


def is_zero(value: Any) -> bool:
    """Whether a tensor is filled with the constant zero."""
    if isinstance(value.owner, ir.Block) or value.owner.name != "linalg.fill":
        return False
    return is_constant_zero(value.owner.operands[0])


def zero_padding(value: Any) -> tuple[Any, list[int], list[int]] | None:
    """The tensor that `value` pads with zeros, and their numbers before and behind each dimension; None for any other.

    A negative number takes elements away.
    """
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "tensor.pad" or len(owner.operands) != 1:
        return None
    before, after = (list(ir.DenseI64ArrayAttr(owner.attributes[name])) for name in ("static_low", "static_high"))
    (element,) = [op.operation for op in owner.regions[0].blocks[0]][-1].operands
    return (owner.operands[0], before, after) if is_constant_zero(element) else None


def is_constant_zero(number: Any) -> bool:
    """Whether a float is the constant zero."""
    owner = number.owner
    is_constant = not isinstance(owner, ir.Block) and owner.name == "arith.constant"
    return is_constant and ir.FloatAttr(owner.attributes["value"]).value == 0


def lettered_source(value: Any, letters: str) -> Lettered:
    """The tensor that `value` transposes, or broadcasts over the batch, with its letters; else `value` itself."""
    if (source := copied_by(value)) is None:
        return value, letters
    of_source, of_value = [m.value for m in value.owner.attributes["indexing_maps"]]
    if not of_source.is_projected_permutation or of_value != ir.AffineMap.get_identity(len(letters)):
        return value, letters
    read = "".join(letters[d] for d in dimensions_in(of_source))
    return (source, read) if set(letters) <= {*read, "b"} else (value, letters)


def copied_by(value: Any) -> Any | None:
    """The tensor that `value` is a transposed or broadcast copy of; None if `value` is no such copy."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != GENERIC or len(inputs_of(owner)) != 1:
        return None
    body = owner.regions[0].blocks[0]
    copies = len(body.operations) == 1 and body.operations[0].operands[0] == body.arguments[0]
    return inputs_of(owner)[0] if copies else None


def dimensions_in(indexing: Any) -> list[int]:
    """For each dimension of an operand, the number of its loop; -1 if no single loop iterates over it."""
    return [x.position if isinstance(x, ir.AffineDimExpr) else -1 for x in indexing.results]
