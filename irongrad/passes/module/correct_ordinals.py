"""Correct which sizes IREE divides the work of a kernel by.

The code that counts the workgroups of a kernel takes sizes from each call, in an order. In the kernel an *ordinal* says
which of them a number is, by its place. If two of the sizes are equal in all calls, IREE 3.13.0 hands on one of them
(Dialect/Stream/Transforms/FoldUniformOperands.cpp). The code still takes it in both places. But IREE numbers the
ordinals anew by what is handed on, and gives 0 to each that it has dropped. So the count of a kernel that packs
`[B, T, T]` for a product reads B for the last T. Everything behind the first tile of 64 stays as it was in memory, if B
is at most 64. tests/passes/module/test_correct_ordinals.py tells when IREE is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.stream import calls_of, kernels_of, low_half, numbers_of, workload_of
from irongrad.mlir.walk import constant_of, inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_COUNT = "iree_tensor_ext.dispatch.workgroup_count_from_slice"
_ORDINAL = "iree_tensor_ext.dispatch.workload.ordinal"
_CASTS = ("arith.index_castui", "arith.index_cast", "arith.trunci")


@dataclass(frozen=True)
class CorrectOrdinals(ModulePass):
    """Number the sizes in a kernel as the count of its workgroups takes them.

    Before:
        workgroup_count_from_slice(%b, %t, %t); workload.ordinal %0, 0; workload.ordinal %1, 1; workload.ordinal %2, 0
    After:
        workgroup_count_from_slice(%b, %t, %t); workload.ordinal %0, 0; workload.ordinal %1, 1; workload.ordinal %2, 1

    Left alone: kernels that take each size once, and numbers that are no size of all calls.
    """

    name: ClassVar[str] = "correct-ordinals"
    required: ClassVar[str] = "a kernel may leave out a part of its work"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        calls = calls_of(module)
        kernels = kernels_of(module, {executable for executable, *_ in calls})
        renumbered = sum(_renumber(export, function, calls[path]) for path, export, function in kernels)
        return PassResult(renumbered > 0, {"renumbered": renumbered})


def _renumber(export: Any, function: Any, calls: Sequence[Any]) -> int:
    """Correct the ordinals of a kernel; return how many were wrong."""
    taken = [size for op in inside(export) if op.name == _COUNT for size in op.operands]
    first = {ir.BlockArgument(size).arg_number: place for place, size in reversed([*enumerate(taken)])}
    if len(first) == len(taken):
        return 0
    sizes, numbers = ([[_origin(v) for v in of(call)] for call in calls] for of in (workload_of, numbers_of))
    before = sum("stream.binding" in str(a.type) for a in function.regions[0].blocks[0].arguments)
    wrong = 0
    for ordinal in [op for op in inside(function) if op.name == _ORDINAL]:
        given = _given(ordinal.operands[0], before, numbers)
        equal = [s for s in first if all(of_call[s] == number for of_call, number in zip(sizes, given, strict=True))]
        if equal:
            wrong += _set(ordinal, first[equal[0]])
    return wrong


def _given(value: Any, before: int, numbers: Sequence[Sequence[Any]]) -> list[Any]:
    """What each call gives for a value in a kernel: a constant, or the origin of a number.

    Args:
        value: the value.
        before: how many arguments come before the numbers.
        numbers: the origins of the numbers of each call.
    """
    argument = low_half(value)
    return [constant_of(value) if argument is None else of_call[argument - before] for of_call in numbers]


def _origin(number: Any) -> Any:
    """A constant, or the value that the casts to `number` begin with."""
    while constant_of(number) is None and not isinstance(number.owner, ir.Block) and number.owner.name in _CASTS:
        number = number.owner.operands[0]
    return number if constant_of(number) is None else constant_of(number)


def _set(ordinal: Any, place: int) -> bool:
    """Give an ordinal a place, and return whether it had another."""
    number = ir.IntegerAttr(ordinal.attributes["ordinal"])
    ordinal.attributes["ordinal"] = ir.IntegerAttr.get(number.type, place)
    return bool(number.value != place)


PASS = CorrectOrdinals
