"""The bytes that the kernels of a compiled module read and write, counted in IREE's flow phase."""

from __future__ import annotations

import math
from typing import Any

from iree.compiler import ir

from irongrad.mlir.walk import KERNELS, functions_of, inside, name_of

# What keeps a value beyond the call, and what only passes it on.
_KEEPS = frozenset({"util.global.store", "hal.tensor.export", "util.return"})
_PASSES_ON = frozenset({"flow.tensor.reshape", "flow.tensor.bitcast", "flow.tensor.tie_shape", "hal.tensor.barrier"})


def traffic_of(flow: ir.Module) -> dict[str, int]:
    """The bytes of all kernels' operands and results, by function, of a module compiled to the flow phase.

    The counts are static: a kernel in a loop counts once, and a tensor of dynamic shape counts zero. A kernel may fetch
    an operand twice, and a small operand may stay in a cache. So the count is what a step requests of memory, and not
    the traffic that memory sees.
    """
    counted = {name_of(f): sum(sum(bytes_moved(op)) for op in inside(f)) for f in functions_of(flow)}
    return {name: moved for name, moved in counted.items() if moved}


def bytes_moved(operation: Any) -> tuple[int, int]:
    """The bytes that an operation of the flow phase reads and writes; none if it is no kernel and no copy."""
    if operation.name == "flow.tensor.update":
        return (_bytes_of(operation.operands[-1].type),) * 2
    if operation.name == "flow.tensor.slice":
        return (_bytes_of(operation.results[0].type),) * 2
    if operation.name not in KERNELS:
        return 0, 0
    return sum(_bytes_of(v.type) for v in operation.operands), sum(_bytes_of(v.type) for v in operation.results)


def intermediate_bytes(operation: Any) -> list[int]:
    """The bytes of each tensor that a kernel writes and that no function stores as state or returns; none of a copy."""
    if operation.name not in KERNELS:
        return []
    return [_bytes_of(v.type) for v in operation.results if not _is_kept(v)]


def _is_kept(value: Any) -> bool:
    users = [use.owner.operation for use in value.uses]  # an export has a name of its own
    return any(u.name in _KEEPS or (u.name in _PASSES_ON and any(map(_is_kept, u.results))) for u in users)


def _bytes_of(kind: Any) -> int:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return 0
    element = kind.element_type
    bits = element.width if isinstance(element, (ir.IntegerType, ir.FloatType)) else 64
    elements: int = math.prod(kind.shape)
    return elements * max(bits // 8, 1)
