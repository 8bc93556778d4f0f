"""Compile the constants that a kernel takes into a kernel of its own for each call, if they are very many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.stream import NUMBERS, numbers_of
from irongrad.mlir.walk import executable_of, inside, name_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# IREE 3.13.0 loads no kernel with over 64 constants of 32 bits: "dispatch requiring 240 constants exceeds limit of 64".
# Test: tests/passes/module/test_specialise_kernels.py::test_iree_still_limits_constants.
_MOST_CONSTANTS = 64

_EXECUTABLE = "stream.executable"
_EXPORT = "stream.executable.export"
_FUNCTION = "func.func"
_DISPATCH = "stream.cmd.dispatch"


@dataclass(frozen=True)
class SpecialiseKernels(ModulePass):
    """Give each call with other constants a kernel of its own, if a kernel takes more constants than IREE can pass.

    Before:
        stream.cmd.dispatch @sum(%c0, %c64, ...); stream.cmd.dispatch @sum(%c64, %c128, ...)     // 240 constants each
    After:
        stream.cmd.dispatch @sum_0(); stream.cmd.dispatch @sum_1()

    IREE gathers tensors that lie in one buffer into one binding, and passes the place of each as a number. A kernel
    that reads very many tensors, such as a gradient that an unrolled loop sums, needs very many. IREE compiles in those
    that are the same in all calls.
    """

    name: ClassVar[str] = "specialise-kernels"
    required: ClassVar[str] = "IREE loads no kernel with over 64 constants"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        calls: dict[str, list[Any]] = defaultdict(list)
        for operation in inside(module.operation):
            if operation.name == _DISPATCH and len(numbers_of(operation)) > _MOST_CONSTANTS:
                calls[executable_of(operation)].append(operation)
        executables = [op.operation for op in module.body.operations if op.operation.name == _EXECUTABLE]
        made = sum(_specialise(e, calls[name_of(e)]) for e in executables if name_of(e) in calls)
        return PassResult(bool(made), {"kernels": made})


def _specialise(executable: Any, calls: Sequence[Any]) -> int:
    """Make a kernel for each set of constants of `calls`; return the number of kernels."""
    values = [[_constant(number) for number in numbers_of(call)] for call in calls]
    known = [place for place, same in enumerate(zip(*values, strict=True)) if all(value is not None for value in same)]
    if not known:
        return 0
    kernels: dict[tuple[Any, ...], Any] = {}
    for call, found in zip(calls, values, strict=True):
        key = tuple(found[place] for place in known)
        if key not in kernels:
            kernels[key] = _copied(executable, len(kernels))
            _compile_in(kernels[key], dict(zip(known, key, strict=True)))
        _redirect(call, kernels[key], known)
    executable.erase()
    return len(kernels)


def _copied(executable: Any, number: int) -> Any:
    """A copy of `executable`, under names of its own."""
    copy = executable.clone(ir.InsertionPoint(executable))
    for named in (copy, *inside(copy)):
        if named.name in (_EXECUTABLE, _EXPORT, _FUNCTION):
            named.attributes["sym_name"] = ir.StringAttr.get(f"{name_of(named)}_{number}")
        if named.name == _EXPORT:
            named.attributes["function_ref"] = ir.FlatSymbolRefAttr.get(name_of(named))
    return copy


def _compile_in(executable: Any, constants: Mapping[int, Any]) -> None:
    """Replace arguments of the kernel in `executable` by constants, which are given by their place among numbers."""
    function = next(op for op in inside(executable) if op.name == _FUNCTION)
    block = function.regions[0].blocks[0]
    places = [i for i, argument in enumerate(block.arguments) if "stream.binding" not in str(argument.type)]
    with ir.InsertionPoint.at_block_begin(block), function.location:
        for place, value in constants.items():
            argument = block.arguments[places[place]]
            number = ir.Operation.create("arith.constant", [argument.type], attributes={"value": value}).result
            argument.replace_all_uses_with(number)
    gone = {places[place] for place in constants}
    for place in sorted(gone, reverse=True):
        block.erase_argument(place)
    kind = ir.FunctionType.get([argument.type for argument in block.arguments], [])
    function.attributes["function_type"] = ir.TypeAttr.get(kind)
    if "arg_attrs" in function.attributes:
        kept = [a for i, a in enumerate(ir.ArrayAttr(function.attributes["arg_attrs"])) if i not in gone]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)


def _redirect(dispatch: Any, executable: Any, gone: Collection[int]) -> None:
    """Make `dispatch` call the kernel of `executable`, without the numbers at the places in `gone`."""
    sizes = list(ir.DenseI32ArrayAttr(dispatch.attributes["operandSegmentSizes"]))
    start = sum(sizes[:NUMBERS])
    without = {start + place for place in gone}
    sizes[NUMBERS] -= len(without)
    path = [name_of(executable), next(name_of(op) for op in inside(executable) if op.name == _EXPORT)]
    kept = {attribute: dispatch.attributes[attribute] for attribute in dispatch.attributes}
    with ir.InsertionPoint(dispatch):
        ir.Operation.create(
            _DISPATCH,
            [],
            [operand for i, operand in enumerate(dispatch.operands) if i not in without],
            {
                **kept,
                "entry_points": ir.ArrayAttr.get([ir.SymbolRefAttr.get(path)]),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get(sizes),
            },
            loc=dispatch.location,
        )
    dispatch.erase()


def _constant(number: Any) -> Any:
    """The value of a constant; None if `number` is none."""
    owner = number.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    return owner.attributes["value"]


PASS = SpecialiseKernels
