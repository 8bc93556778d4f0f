"""Elementwise operations of linalg made one where they read the same and are for several readers.

What several read is a kernel of its own, unless IREE's pass FuseMultiUseElementwiseProducer makes it one with a reader.
In its phase `flow` IREE 3.13.0 runs it twice (DispatchCreation/Passes.cpp), and each time a producer goes to its first
reader alone, so of the chains that a recurrent layer and its gradients are, or that Adam is, several kernels are left.
Run as often as they are long, it leaves one: an LSTM of two layers launches a third fewer kernels
(docs/benchmarks.md). tests/pipeline/test_elementwise.py tells when IREE does that itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from iree.compiler import ir, passmanager

from irongrad.pipeline.barriers import hold_behind, release
from irongrad.pipeline.operations import around, block_of, inside, name_of

GENERIC = "linalg.generic"
RESHAPES = frozenset({"tensor.expand_shape", "tensor.collapse_shape"})

_PRODUCTS = frozenset({"linalg.matmul", "linalg.batch_matmul"})
_REDUCTIONS = ("linalg.softmax", "iree_linalg_ext.", "tm_tensor.")

_FUSE = "builtin.module(func.func(iree-dispatch-creation-fuse-multi-use-elementwise-producer{num-iterations=8}))"

# Elements of the largest results that one kernel computes beside others. Larger ones are written and read while more
# threads work, and what a kernel saves is little; with them a small GPT's step takes 1.04 as long.
_LARGEST = 8192

# The function of the optimizer, where every result is part of the state, and none is worth a kernel of its own.
_UPDATE = "graph.update"

# How many values a kernel with a product may read beside the product.
_MOST_PACKED = 2


def fuse_elementwise(functions: ir.Module) -> None:
    """Make elementwise operations one that read the same, in all functions.

    What a reduction reads is left to IREE, which computes that in the reduction's kernel: a softmax is one kernel.

    Args:
        functions: as torch-mlir makes them, in linalg; changed in place, in their own context.
    """
    found = [result for op in inside(functions.operation) if is_elementwise(op) for result in op.results]
    held = [hold_behind(result) for result in found if _is_for_others(result)]
    with functions.context:
        passes = passmanager.PassManager.parse(_FUSE)
        passes.enable_verifier(False)
        passes.run(functions.operation)
    for value in held:
        release(value)


def keep_products_apart(functions: ir.Module) -> None:
    """Hold products whose elementwise reader reads many other values: a kernel of its own then computes that one.

    With data tiling IREE 3.13.0 packs each value that is read beside a product in the product's kernel, which takes it
    a quarter of a second of compile time each, and the step more than the kernel saves. docs/benchmarks.md has figures.

    Args:
        functions: in linalg, with what is elementwise made one already; changed in place, in their own context.
    """
    for product in [op.results[0] for op in inside(functions.operation) if op.name in _PRODUCTS]:
        if any(_beside(product, reader) > _MOST_PACKED for reader in _readers(product)):
            hold_behind(product)


def is_elementwise(operation: Any) -> bool:
    """Whether each element of the results is computed from its own elements of the operands."""
    return str(operation.name) == GENERIC and not _reduces(operation)


def _is_for_others(result: Any) -> bool:
    """Whether what reads the result of an elementwise operation had better not compute it."""
    if any(map(_reduces, _readers(result))):
        return True
    return _size(result) > _LARGEST and _function(result) != _UPDATE


def _reduces(operation: Any) -> bool:
    if operation.name == GENERIC:
        return "reduction" in str(operation.attributes["iterator_types"])
    return str(operation.name).startswith(_REDUCTIONS)


def _beside(product: Any, reader: Any) -> int:
    """How many values an elementwise reader of a product reads that are as large as the product, and others."""
    if not is_elementwise(reader):
        return 0
    inputs, _ = ir.DenseI32ArrayAttr(reader.attributes["operandSegmentSizes"])
    read = {_source(operand) for operand in list(reader.operands)[:inputs]}
    return sum(value != product and _size(value) == _size(product) for value in read)


def _source(value: Any) -> Any:
    """What has the elements of `value` in another shape, or the same."""
    while not isinstance(value.owner, ir.Block) and value.owner.name in RESHAPES:
        value = value.owner.operands[0]
    return value


def _readers(value: Any) -> Iterator[Any]:
    """The operations that read `value`, in any shape."""
    for use in value.uses:
        reader = use.owner.operation
        if reader.name in RESHAPES:
            yield from _readers(reader.results[0])
        else:
            yield reader


def _size(value: Any) -> float:
    """How many elements a tensor has; no number is as large as one that is not known."""
    kind = value.type
    if not isinstance(kind, ir.ShapedType):
        return 1
    return prod(kind.shape) if kind.has_static_shape else float("inf")


def _function(result: Any) -> str:
    return next(name_of(op) for op in around(block_of(result)) if op.name == "func.func")
