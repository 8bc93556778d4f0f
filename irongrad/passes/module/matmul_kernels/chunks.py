"""Products over chunks of the summands, and the sum over the chunks behind.

operators/decompositions/reductions.py writes a product of many summands so, as IREE adds in one chain. Our kernels add
in chains of a limited length themselves, so they compute the product as one:

    left [rows, chunks * chunk] and right [chunks * chunk, columns], maybe padded with zeros before they are reshaped
    sum over chunks of left[:, chunk] @ right[chunk]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from irongrad.mlir.letters import is_zero, lettered_source, zero_padding
from irongrad.mlir.linalg import GENERIC, inputs_of
from irongrad.mlir.transposes import Lettered, joined


@dataclass(frozen=True, eq=False)
class Chunks:
    """A product over chunks.

    Attributes:
        total: the operation that adds the products of the chunks.
        left: the left operand with all summands, and the letters of its dimensions.
        right: the right operand.
    """

    total: Any
    left: Lettered
    right: Lettered


def chunks_of(product: Any, left: Lettered, right: Lettered) -> Chunks | None:
    """The product over chunks that a batch of products is part of; None if it is a batch.

    Args:
        product: the batch of products.
        left: its left operand, with a letter for each dimension: `b` for the batch, `r`, `c`, and `k`.
        right: its right operand.
    """
    readers = [use.owner.operation for use in product.results[0].uses]
    if len(readers) != 1 or not _adds_batch(readers[0]) or not all("bk" in letters for _, letters in (left, right)):
        return None
    with product.location, ir.InsertionPoint(product):
        wholes = [(joined(value, letters.index("b")), letters.replace("b", "")) for value, letters in (left, right)]
    unpadded = [(_unpadded(value, letters.index("k")), letters) for value, letters in wholes]
    if len({value.type.shape[letters.index("k")] for value, letters in unpadded}) == 1:
        wholes = unpadded
    return Chunks(readers[0], *(lettered_source(*whole) for whole in wholes))


def _adds_batch(operation: Any) -> bool:
    """Whether an operation sums over the first of three dimensions."""
    if operation.name != GENERIC or len(inputs_of(operation)) != 1 or not is_zero(operation.operands[1]):
        return False
    body = [op.operation.name for op in operation.regions[0].blocks[0]]
    d = [ir.AffineDimExpr.get(i, operation.context) for i in range(3)]
    maps = [m.value for m in operation.attributes["indexing_maps"]]
    wanted = [ir.AffineMap.get(3, 0, of, operation.context) for of in (d, d[1:])]
    return body == ["arith.addf", "linalg.yield"] and maps == wanted


def _unpadded(value: Any, dimension: int) -> Any:
    """The tensor that `value` pads with zeros at the end of a dimension; else `value` itself."""
    if (padding := zero_padding(value)) is None:
        return value
    source, before, after = padding
    elsewhere = [n for d, n in enumerate(after) if d != dimension]
    return value if any(before) or any(elsewhere) else source
