"""How much the kernels of a compiled module compute, and how often they are launched, from IREE's own list of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import linalg

from irongrad.mlir.walk import BOUNDS, KERNELS, OPERATIONS, around, constant_of, found_in, inside, name_of

# IREE's own executables, and those of which it is given the code.
_EXECUTABLES = frozenset({"flow.executable", "stream.executable"})


@dataclass(frozen=True)
class Work:
    """What the kernels of a module do; of a loop as often as it runs, or once where that is not known.

    Attributes:
        operations: of all kernels; None where sizes are not known.
        launches: of kernels.
    """

    operations: int | None
    launches: int


def work_of(flow: ir.Module) -> Work:
    """The operations and launches of all kernels of a module compiled to the flow phase.

    What a linalg operation computes for one element counts as often as its loops run, so that a product of n x k and
    k x m elements has two n k m. Nothing is counted of what is not linalg, such as a scatter or a sort.
    """
    executables = [op.operation for op in flow.body.operations if op.operation.name in _EXECUTABLES]
    kernels = {name_of(op): _operations_inside(op) for op in executables}
    launches = found_in(flow, *KERNELS)
    often = [math.prod(_trips(loop) for loop in around(launch.block)) for launch in launches]
    counts = [kernels[_executable(op)] if op.name == "flow.dispatch" else 0 for op in launches]
    known = [count * times for count, times in zip(counts, often, strict=True) if count is not None]
    return Work(sum(known) if len(known) == len(counts) else None, sum(often))


def _trips(operation: Any) -> int:
    """How often what is in an operation runs."""
    if operation.name != "scf.for":
        return 1
    begin, end, step = (constant_of(value) for value in list(operation.operands)[:BOUNDS])
    return 1 if begin is None or end is None or not step else len(range(begin, end, step))


def _executable(dispatch: Any) -> str:
    """The executable of what a dispatch launches, its first choice where it has several: `[@executable::@entry]`."""
    (first, *_) = ir.ArrayAttr(dispatch.attributes["entry_points"])
    return str(ir.SymbolRefAttr(first).value[0])


def _operations_inside(executable: Any) -> int | None:
    if OPERATIONS in executable.attributes:
        return int(ir.IntegerAttr(executable.attributes[OPERATIONS]).value)
    counts = [_operations(op) for op in inside(executable) if op.name.startswith("linalg.")]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _operations(operation: Any) -> int | None:
    """Of a linalg operation; zero of what has no loops, such as `linalg.yield`."""
    maps = linalg.get_indexing_maps(operation)
    if maps is None:
        return 0
    loops: dict[int, int] = {}
    for operand, map_ in zip(operation.operands, maps, strict=True):
        if isinstance(operand.type, ir.RankedTensorType):
            places = ir.AffineMapAttr(map_).value.results
            sizes = zip(places, operand.type.shape, strict=True)
            loops |= {ir.AffineDimExpr(p).position: s for p, s in sizes if isinstance(p, ir.AffineDimExpr)}
    if any(size < 0 for size in loops.values()):
        return None
    body = sum(not inner.name.endswith(".yield") for inner in inside(operation))
    return body * math.prod(loops.values())
