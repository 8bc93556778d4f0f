"""Queries on linalg operations on tensors: elementwise operations, reductions, inputs and readers."""

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
    """Whether an operation is elementwise: a `linalg.generic` without a reduction dimension."""
    return str(operation.name) == GENERIC and not reduces(operation)


def reduces(operation: Any) -> bool:
    """Whether an operation has a reduction dimension; matrix products are not recognised."""
    if operation.name == GENERIC:
        return "reduction" in str(operation.attributes["iterator_types"])
    return str(operation.name).startswith(_REDUCTIONS)


def producer_of(value: Any) -> str | None:
    """The name of the operation that computes a value; None for an argument of a block."""
    return None if isinstance(value.owner, ir.Block) else str(value.owner.name)


def inputs_of(operation: Any) -> list[Any]:
    """The inputs of a `linalg.generic`, without its output operands."""
    return list(operation.opview.inputs)


def source_of(value: Any) -> Any:
    """The value that `value` is a reshape of, through any number of reshapes; else `value` itself."""
    while not isinstance(value.owner, ir.Block) and value.owner.name in RESHAPES:
        value = value.owner.operands[0]
    return value


def readers_of(value: Any) -> Iterator[Any]:
    """The operations that read `value`, directly or through reshapes."""
    for use in value.uses:
        reader = use.owner.operation
        if reader.name in RESHAPES:
            yield from readers_of(reader.results[0])
        else:
            yield reader


def has_known_sizes(operation: Any) -> bool:
    """Whether all sizes of an operation's tensors are known."""
    return all(value.type.has_static_shape for value in operation.operands)


def is_known_but_first(kind: Any) -> bool:
    """Whether all sizes of a tensor are known, or all but that of its first dimension."""
    return not any(kind.is_dynamic_dim(d) for d in range(1, len(kind.shape)))


def size_of(value: Any) -> float:
    """The number of elements of a tensor: infinity for a dynamic shape, 1 for a scalar."""
    kind = value.type
    if not isinstance(kind, ir.ShapedType):
        return 1
    return prod(kind.shape) if kind.has_static_shape else float("inf")
