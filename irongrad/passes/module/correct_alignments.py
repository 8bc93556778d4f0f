"""Correct what IREE says about the alignment of the numbers that kernels take.

IREE 3.13.0 annotates a number with the greatest power of two that divides it in all calls of the kernel. In its
analysis (`ValueAlignment` in Dialect/Stream/Transforms/AnnotateDispatchArguments.cpp) the result of arithmetic starts
at the largest alignment, and nothing lowers it. So a call with such a number does not count beside a call with a known
one. A kernel that writes a row of any place then uses aligned stores, and the process ends with SIGSEGV.
tests/passes/module/test_correct_alignments.py tells when IREE is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import mul
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.stream import calls_of, kernels_of, low_half, numbers_of
from irongrad.mlir.walk import constant_of, inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_CLAIM = "stream.alignment"
_LARGEST = 2**31  # of a number of 32 bits, the low half of an offset
_MOST_STEPS = 64  # of arithmetic to look through

# The alignment of a result, from those of the operands.
_CASTS = ("arith.index_castui", "arith.index_cast", "arith.extui", "arith.extsi", "arith.trunci")
_COMBINED: dict[str, Callable[..., int]] = {
    **dict.fromkeys(_CASTS, int),
    "arith.addi": min,
    "arith.muli": mul,
    "util.align": max,  # with the alignment, a power of two, as the second operand
}


@dataclass(frozen=True)
class CorrectAlignments(ModulePass):
    """Lower the alignment of a kernel's number to what every call of the kernel keeps.

    Before:
        stream.cmd.dispatch @copy(%aligned_to_64); stream.cmd.dispatch @copy(%row_times_12)
        func.func @copy(%n: i32) { %offset = arith.index_castui %n {stream.alignment = 64} ... }
    After:
        func.func @copy(%n: i32) { %offset = arith.index_castui %n {stream.alignment = 4} ... }
    """

    name: ClassVar[str] = "correct-alignments"
    required: ClassVar[str] = "a kernel may use instructions that need an alignment which its memory does not have"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        kept = _kept_alignments(module)
        kernels = kernels_of(module, {executable for executable, *_ in kept})
        lowered = sum(_lower(function, kept[path]) for path, _, function in kernels if path in kept)
        return PassResult(bool(lowered), {"lowered": lowered})


def _kept_alignments(module: ir.Module) -> dict[tuple[str, ...], list[int]]:
    """For each kernel that some call gives a computed number: the alignment of each number in all of its calls."""
    kept = {}
    for path, calls in calls_of(module).items():
        numbers = [numbers_of(call) for call in calls]
        if any(constant_of(number) is None for of_call in numbers for number in of_call):
            alignments = ([_alignment(number) for number in of_call] for of_call in numbers)
            kept[path] = [min(all_calls) for all_calls in zip(*alignments, strict=True)]
    return kept


def _lower(function: Any, kept: list[int]) -> int:
    """Lower the claims in a kernel to the alignments of its numbers; return how many were lowered."""
    block = function.regions[0].blocks[0]
    numbers = [a for a in block.arguments if "stream.binding" not in str(a.type)]
    alignments = {number.arg_number: alignment for number, alignment in zip(numbers, kept, strict=True)}
    lowered = 0
    for operation in inside(function):
        if _CLAIM in operation.attributes:
            claim = ir.IntegerAttr(operation.attributes[_CLAIM])
            number = low_half(operation.operands[0])
            true = claim.value if number is None else alignments[number]
            if true < claim.value:
                operation.attributes[_CLAIM] = ir.IntegerAttr.get(claim.type, true)
                lowered += 1
    return lowered


def _alignment(value: Any, steps: int = _MOST_STEPS) -> int:
    """A power of two that divides `value` for certain."""
    constant = constant_of(value)
    if constant is not None:
        return min(constant & -constant, _LARGEST) if constant else _LARGEST
    if isinstance(value.owner, ir.Block) or not steps:
        return 1
    combine = _COMBINED.get(value.owner.name)
    if combine is None:
        return 1
    return min(combine(*(_alignment(operand, steps - 1) for operand in value.owner.operands)), _LARGEST)


PASS = CorrectAlignments
