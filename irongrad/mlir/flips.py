"""Tensors that are flipped along some dimensions.

torch-mlir writes a flip as elements that are looked up: `tensor.extract` at the last index less the loop's. IREE 3.13.0
does not vectorise it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC, inputs_of, producer_of

_LOOKS_UP = {"linalg.index", "arith.subi", "tensor.extract", "linalg.yield"}


class Flipped(NamedTuple):
    """A tensor that is read backwards.

    Attributes:
        value: the tensor.
        letters: the letters of its dimensions.
        backwards: those along which it is read backwards.
    """

    value: Any
    letters: str
    backwards: str


def flipped_source(value: Any, letters: str) -> Flipped | None:
    """The tensor that `value` is, flipped and transposed; None if it is something else."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != GENERIC or inputs_of(owner) or len(owner.results) != 1:
        return None
    if owner.attributes["indexing_maps"][0].value != ir.AffineMap.get_identity(len(letters)):
        return None
    body = [op.operation for op in owner.regions[0].blocks[0]]
    if {op.name for op in body} != _LOOKS_UP or body[-2].name != "tensor.extract":
        return None
    extract, last = body[-2:]
    if list(last.operands) != list(extract.results):
        return None
    source, *indices = extract.operands
    loops = [_loop(index, value.type.shape) for index in indices]
    if sorted(loop for loop, _ in loops) != list(range(len(letters))):
        return None
    backwards = "".join(letters[loop] for loop, is_backwards in loops if is_backwards)
    return Flipped(source, "".join(letters[loop] for loop, _ in loops), backwards)


def _loop(index: Any, sizes: Any) -> tuple[int, bool]:
    """The loop that an index counts, and whether it counts backwards from the last one; -1 if it is another index."""
    end = None
    if producer_of(index) == "arith.subi":
        end, index = index.owner.operands
    if producer_of(index) != "linalg.index":
        return -1, False
    loop = ir.IntegerAttr(index.owner.attributes["dim"]).value
    if end is None:
        return loop, False
    is_last = (
        producer_of(end) == "arith.constant" and ir.IntegerAttr(end.owner.attributes["value"]).value == sizes[loop] - 1
    )
    return (loop, True) if is_last else (-1, False)
