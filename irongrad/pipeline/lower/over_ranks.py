"""Import of exchanges between ranks as marked copies, in whose place the stage `assemble` writes the exchange.

torch-mlir 20261001 accepts no call in a module that it has lowered to linalg. Alone, a rank has its own values, so the
copy is what one rank computes.
"""

from __future__ import annotations

from torch_mlir.dialects import linalg, tensor
from torch_mlir.ir import StringAttr, Value

from irongrad.pipeline.lower.dynamic_slices import from_builtin, to_builtin

MARK = "irongrad.over_ranks"


def marked_copy(values: Value, kind: str) -> Value:
    """Copy a vector of a fixed size, and mark the copy as an exchange of this kind."""
    given = to_builtin(values)
    empty = tensor.EmptyOp(given.type.shape, given.type.element_type).result
    copied = linalg.copy(given, outs=[empty])
    copied.owner.attributes[MARK] = StringAttr.get(kind, values.context)
    return from_builtin(copied, values.type)
