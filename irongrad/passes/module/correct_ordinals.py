"""Correct which sizes IREE divides the work of a kernel by.

The code that counts the workgroups of a kernel takes its sizes in an order, and in the kernel an *ordinal* says which
of them a number is. If two sizes are equal in all calls, IREE 3.13.0 hands on one of them
(Dialect/Stream/Transforms/FoldUniformOperands.cpp). It then numbers the ordinals anew, but not the sizes of the count,
and takes 0 for each that it has dropped. So the count of a kernel that packs `[B, T, T]` for a product reads B for the
last T, and everything behind the first tile of 64 stays as it was in memory, if B is at most 64.
tests/passes/module/test_correct_ordinals.py tells when IREE is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import inside, name_of, named_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_EXECUTABLE, _FUNCTION = "stream.executable", "func.func"
_PACKS = "_encoding_"  # begins the names of executables that IREE makes of `iree_encoding.set_encoding`
_ORDINAL = "iree_tensor_ext.dispatch.workload.ordinal"


@dataclass(frozen=True)
class CorrectOrdinals(ModulePass):
    """Number the sizes in a kernel that packs an operand of a product as the count of its workgroups takes them.

    Before:
        workgroup_count_from_slice(%b, %t, %t); workload.ordinal %0, 0; workload.ordinal %1, 1; workload.ordinal %2, 0
    After:
        workgroup_count_from_slice(%b, %t, %t); workload.ordinal %0, 0; workload.ordinal %1, 1; workload.ordinal %2, 2

    Left alone: kernels that pack nothing. Only in kernels that do, IREE writes one ordinal for each size, in order.
    """

    name: ClassVar[str] = "correct-ordinals"
    required: ClassVar[str] = "a kernel may leave out a part of its work"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        renumbered = 0
        for function in _packing_kernels(module):
            ordinals = [op for op in inside(function) if op.name == _ORDINAL]
            renumbered += sum(_renumber(op, place) for place, op in enumerate(ordinals))
        return PassResult(renumbered > 0, {"renumbered": renumbered})


def _packing_kernels(module: ir.Module) -> Iterator[Any]:
    """The functions of kernels that pack."""
    for executable in named_in(module, _EXECUTABLE):
        if name_of(executable).startswith(_PACKS):
            yield from (op for op in inside(executable) if op.name == _FUNCTION)


def _renumber(ordinal: Any, place: int) -> bool:
    """Give an ordinal its place, and return whether it had another."""
    number = ir.IntegerAttr(ordinal.attributes["ordinal"])
    ordinal.attributes["ordinal"] = ir.IntegerAttr.get(number.type, place)
    return bool(number.value != place)


PASS = CorrectOrdinals
