"""How many bytes the kernels of a compiled module read and write, from IREE's own list of them."""

from __future__ import annotations

import math
from typing import Any

from iree.compiler import ir

from irongrad.mlir.walk import KERNELS, functions_of, inside, name_of


def traffic_of(flow: ir.Module) -> dict[str, int]:
    """The bytes of the operands and results of all kernels, by function, of a module compiled to the flow phase.

    Static counts: what stands in a loop counts once, a tensor of dynamic shape not at all. A kernel may
    fetch an operand twice, and a small one may stay in a cache, so it says what a step asks of the memory, and not what
    the memory sees.
    """
    counted = {name_of(f): sum(map(_moved, inside(f))) for f in functions_of(flow)}
    return {name: moved for name, moved in counted.items() if moved}


def _moved(operation: Any) -> int:
    if operation.name == "flow.tensor.update":
        return 2 * _bytes(operation.operands[-1].type)
    if operation.name == "flow.tensor.slice":
        return 2 * _bytes(operation.results[0].type)
    if operation.name not in KERNELS:
        return 0
    return sum(_bytes(value.type) for value in (*operation.operands, *operation.results))


def _bytes(kind: Any) -> int:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return 0
    element = kind.element_type
    bits = element.width if isinstance(element, (ir.IntegerType, ir.FloatType)) else 64
    elements: int = math.prod(kind.shape)
    return elements * max(bits // 8, 1)
