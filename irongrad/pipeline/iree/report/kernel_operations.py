"""The operations and launches of the kernels of a compiled module, counted in IREE's flow phase."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import linalg

from irongrad.analysis.kernel_names import packing_name
from irongrad.mlir.walk import BOUNDS, KERNELS, OPERATIONS, PACKING, around, constant_of, found_in, inside, name_of

# Executables that IREE generates, and those with code of our own.
EXECUTABLES = frozenset({"flow.executable", "stream.executable"})


@dataclass(frozen=True)
class Work:
    """The work of a module's kernels. Kernels in a loop count per iteration, or once if the trip count is unknown.

    Attributes:
        operations: the arithmetic operations of all kernels; None if a size is unknown.
        launches: the number of kernel launches.
    """

    operations: int | None
    launches: int


def work_of(flow: ir.Module) -> Work:
    """The operations and launches of all kernels of a module compiled to the flow phase.

    The body of a linalg operation counts per iteration of its loops. So a product of n x k and k x m elements has
    2 n k m operations. Operations outside linalg, such as a scatter or a sort, are not counted.
    """
    executables = [op.operation for op in flow.body.operations if op.operation.name in EXECUTABLES]
    kernels = {name_of(op): operations_inside(op) for op in executables}
    launches = found_in(flow, *KERNELS)
    often = [math.prod(trips(loop) for loop in around(launch.block)) for launch in launches]
    counts = [kernels[executable_name(op)] if op.name == "flow.dispatch" else 0 for op in launches]
    known = [count * times for count, times in zip(counts, often, strict=True) if count is not None]
    return Work(sum(known) if len(known) == len(counts) else None, sum(often))


def trips(operation: Any) -> int:
    """The trip count of a scf.for; 1 if it is unknown, and for other operations."""
    if operation.name != "scf.for":
        return 1
    begin, end, step = (constant_of(value) for value in list(operation.operands)[:BOUNDS])
    return 1 if begin is None or end is None or not step else len(range(begin, end, step))


def executable_name(dispatch: Any) -> str:
    """The executable that a dispatch launches, the first one of several alternatives: `[@executable::@entry]`."""
    (first, *_) = ir.ArrayAttr(dispatch.attributes["entry_points"])
    return str(ir.SymbolRefAttr(first).value[0])


def kernel_of(operation: Any) -> str | None:
    """The kernel that an operation launches: the executable of a dispatch, or what a packing does; else None."""
    if operation.name == PACKING:
        return packing_name(_shape(operation.operands[0].type), _shape(operation.results[0].type))
    return executable_name(operation) if operation.name == "flow.dispatch" else None


def _shape(kind: ir.RankedTensorType) -> str:
    sizes = ("D" if kind.is_dynamic_dim(axis) else str(kind.get_dim_size(axis)) for axis in range(kind.rank))
    return "x".join((*sizes, str(kind.element_type)))


def operations_inside(executable: Any) -> int | None:
    """The arithmetic operations of one launch of an executable; None if a size is unknown."""
    if OPERATIONS in executable.attributes:
        noted = executable.attributes[OPERATIONS]
        return int(noted.value) if isinstance(noted, ir.IntegerAttr) else None
    counts = [_operations(op) for op in inside(executable) if op.name.startswith("linalg.")]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _operations(operation: Any) -> int | None:
    """The operations of a linalg operation: 0 without loops, as for `linalg.yield`; None if a size is unknown."""
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
