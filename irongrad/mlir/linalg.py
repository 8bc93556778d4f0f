"""Walking functions of linalg on tensors: what is elementwise, what reduces, and who reads what."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from iree.compiler import ir

GENERIC = "linalg.generic"
PRODUCTS = frozenset({"linalg.matmul", "linalg.batch_matmul"})
RESHAPES = frozenset({"tensor.expand_shape", "tensor.collapse_shape"})

_REDUCTIONS = ("linalg.softmax", "iree_linalg_ext.", "tm_tensor.")


def is_elementwise(operation: Any) -> bool:
    """Whether each element of the results is computed from its own elements of the operands."""
    return str(operation.name) == GENERIC and not reduces(operation)


def reduces(operation: Any) -> bool:
    """Whether an operation reads many elements of an operand for one of its result; of products that is not said."""
    if operation.name == GENERIC:
        return "reduction" in str(operation.attributes["iterator_types"])
    return str(operation.name).startswith(_REDUCTIONS)


def inputs_of(operation: Any) -> list[Any]:
    """What a `linalg.generic` reads; the operands that it writes to are none of these."""
    return list(operation.opview.inputs)


def source_of(value: Any) -> Any:
    """What has the elements of `value` in another shape, or the same."""
    while not isinstance(value.owner, ir.Block) and value.owner.name in RESHAPES:
        value = value.owner.operands[0]
    return value


def readers_of(value: Any) -> Iterator[Any]:
    """The operations that read `value`, in any shape."""
    for use in value.uses:
        reader = use.owner.operation
        if reader.name in RESHAPES:
            yield from readers_of(reader.results[0])
        else:
            yield reader


def size_of(value: Any) -> float:
    """How many elements a tensor has; no number is as large as one that is not known."""
    kind = value.type
    if not isinstance(kind, ir.ShapedType):
        return 1
    return prod(kind.shape) if kind.has_static_shape else float("inf")
