"""Divide elementwise code that would become one kernel with more operands than IREE can bind."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.linalg import GENERIC, inputs_of, is_elementwise, readers_of, source_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# The most inputs and results of a kernel. IREE 3.13.0 loads none of over 32 (iree_hal_local_executable). Four are left
# for values that are computed within a kernel and read by others, too; `fuse-elementwise` divides kernels of more.
_MOST = 28


@dataclass(frozen=True)
class _Kernel:
    """Elementwise operations that are computed together.

    Attributes:
        operations: the operations.
        read: the values that they read and do not compute, in order.
    """

    operations: frozenset[Any]
    read: tuple[Any, ...]


@dataclass(frozen=True)
class KeepOperandsApart(ModulePass):
    """Hold a value in the middle of elementwise operations that together read and write very many values.

    Before:
        %p = linalg.generic ins(%a0, ..., %a20) {...}; %r = linalg.generic ins(%p, %b0, ..., %b20) {...}
    After:
        %p = linalg.generic ins(%a0, ..., %a20) {...}; %held = util.optimization_barrier %p
        %r = linalg.generic ins(%held, %b0, ..., %b20) {...}

    The pass `fuse-elementwise` and IREE 3.13.0 compute a value in the kernel of its only readers, however many values
    the kernel then reads. Such a kernel compiles, and does not load: "binding count 41 > 32". A sum of forty tensors is
    one, as in the gradients of a DenseNet. tests/passes/module/test_keep_operands_apart.py tells when IREE divides
    them.
    """

    name: ClassVar[str] = "keep-operands-apart"
    required: ClassVar[str] = "the module may not load without it"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        kernels: dict[Any, _Kernel] = {}  # by their last operation
        held = 0
        for operation in inside(module.operation):
            if operation.name != GENERIC:
                continue
            kernel, within = _kernel_of(operation, kernels)
            while within and len(kernel.read) + len(operation.results) > _MOST:
                hold_behind(max(within, key=lambda value: len(kernels[value.owner.operation].read)))
                held += 1
                kernel, within = _kernel_of(operation, kernels)
            if is_elementwise(operation):
                kernels[operation.operation] = kernel
        return PassResult(held > 0, {"held": held})


def _kernel_of(operation: Any, kernels: dict[Any, _Kernel]) -> tuple[_Kernel, list[Any]]:
    """What is computed with `operation`, and the values within: all elementwise ones that nothing else reads."""
    operations, read = {operation.operation}, dict.fromkeys(map(source_of, inputs_of(operation)))
    within: list[Any] = []
    while found := [value for value in read if _is_read_only_by(operations, value, kernels)]:
        for value in found:
            part = kernels[value.owner.operation]
            operations |= part.operations
            del read[value]
            read |= dict.fromkeys(part.read)
        within += found
    return _Kernel(frozenset(operations), tuple(read)), within


def _is_read_only_by(operations: Set[Any], value: Any, kernels: dict[Any, _Kernel]) -> bool:
    """Whether `operations` are all readers of a value that is computed by an elementwise operation."""
    if isinstance(value.owner, ir.Block) or value.owner.operation not in kernels:
        return False
    return all(reader.operation in operations for reader in readers_of(value))


PASS = KeepOperandsApart
