"""Merge kernels that differ only in the offsets at which they read and write parts of tensors.

IREE 3.13.0 makes a kernel of every copy that is not of whole rows. It compiles two kernels once only if their offsets
are equal. A convolution gathers at one offset per element of its window: of the 284 kernels of a small ResNet-18, 156
are copies, of 36 kinds. Winograd's transforms read one part of a tensor after the other. This pass keeps one kernel of
each kind and makes the offsets its arguments. That saves a fifth of IREE's time for that network, and its steps are no
slower (docs/dev/measurements/2026-11-22-cloud-x86-64.md).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from iree.compiler import ir

from irongrad.mlir.walk import executable_of, inside, name_of, text_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

_LOAD = "iree_tensor_ext.dispatch.tensor.load"
_STORE = "iree_tensor_ext.dispatch.tensor.store"

# Indices of operand segments: the offsets of a load or store, and the arguments of a dispatch.
_OFFSETS = {_LOAD: 2, _STORE: 3}
_ARGUMENTS = 1

# The number of operands of each operation if all its offsets and sizes are static.
_OPERANDS = {_LOAD: 1, _STORE: 2}

# Marks an offset that is an operand: `ShapedType::kDynamic`.
_IS_OPERAND = -(2**63)

# Parts of the text of kernels that may differ between merged kernels: names, and the offsets of loads and stores.
_NAMES = r"(?:flow\.executable private|flow\.executable\.export public|func\.func) @\w+"
_BEGINNINGS = r"(dispatch\.tensor\.(?:load|store) [^\n]*?)offsets = \[[^]]*\]"
_DIFFERENT = re.compile(f"{_NAMES}|{_BEGINNINGS}")

Offsets: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _Kernel:
    """A kernel that reads and writes parts of tensors.

    Attributes:
        executable: the `flow.executable` that holds the kernel.
        function: the kernel's function.
        parts: the operations that load or store parts of tensors.
    """

    executable: Any
    function: Any
    parts: Sequence[Any]

    @property
    def offsets(self) -> Offsets:
        """The offsets of all parts, concatenated."""
        return tuple(offset for part in self.parts for offset in _offsets_of(part))

    @property
    def type(self) -> str:
        """The type of the function, which is much shorter to print than the kernel."""
        return str(self.function.attributes["function_type"])

    @property
    def kind(self) -> str:
        """A text that is equal for kernels that differ only in names and offsets."""
        return _DIFFERENT.sub(r"\1", text_of(self.executable))


@dataclass(frozen=True)
class _Call:
    """How to call a merged kernel in place of another.

    Attributes:
        entry_points: the attribute of a dispatch that names the merged kernel.
        offsets: the additional arguments.
    """

    entry_points: Any
    offsets: Offsets


@dataclass(frozen=True)
class ShareKernels(ModulePass):
    """Merge kernels that differ only in the offsets at which they read and write.

    Before:
        flow.dispatch @copy_0(%x); flow.dispatch @copy_1(%x)     // the same code, at offsets [0, 1] and [0, 2]
    After:
        flow.dispatch @copy_0(%x, %c0, %c1); flow.dispatch @copy_0(%x, %c0, %c2)
    """

    name: ClassVar[str] = "share-kernels"

    def applies(self, context: ModuleContext) -> bool:
        """For targets on which a kernel with dynamic offsets is as fast as one with static offsets."""
        return context.target.shared_kernels

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        same_type = _groups_by(_kernels(module), lambda kernel: kernel.type)
        alike = [kernels for found in same_type for kernels in _groups_by(found, lambda kernel: kernel.kind)]
        calls: dict[str, _Call] = {}
        for kernels in alike:
            calls |= _merged(kernels)
        for operation in inside(module.operation):
            if operation.name == "flow.dispatch" and (call := calls.get(executable_of(operation))) is not None:
                _redirect(operation, call)
        merged = [kernel for _, *others in alike for kernel in others]
        for kernel in merged:
            kernel.executable.erase()
        return PassResult(bool(merged), {"merged": len(merged)})


def _groups_by(kernels: Iterable[_Kernel], key: Callable[[_Kernel], str]) -> list[list[_Kernel]]:
    """Group kernels by key; groups of one kernel are left out."""
    groups: dict[str, list[_Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[key(kernel)].append(kernel)
    return [group for group in groups.values() if len(group) > 1]


def _kernels(module: ir.Module) -> Iterator[_Kernel]:
    """The kernels whose offsets and sizes are all static."""
    for executable in module.body.operations:
        if executable.operation.name != "flow.executable":
            continue
        functions = [op for op in inside(executable.operation) if op.name == "func.func"]
        parts = [op for function in functions for op in inside(function) if op.name in _OPERANDS]
        if len(functions) == 1 and all(len(part.operands) == _OPERANDS[part.name] for part in parts):
            yield _Kernel(executable.operation, functions[0], parts)


def _merged(kernels: Sequence[_Kernel]) -> Mapping[str, _Call]:
    """Make the first of `kernels` compute all of them; return the call for each kernel, by executable."""
    first = kernels[0]
    every = {name_of(kernel.executable): kernel.offsets for kernel in kernels}
    varying = [i for i, values in enumerate(zip(*every.values(), strict=True)) if len(set(values)) > 1]
    block = first.function.regions[0].blocks[0]
    dynamic = dict(zip(varying, _add_indices(block, len(varying)), strict=True))
    kind = ir.FunctionType.get([argument.type for argument in block.arguments], [])
    first.function.attributes["function_type"] = ir.TypeAttr.get(kind)
    start = 0
    for part in first.parts:
        end = start + len(_offsets_of(part))
        _read_at(part, {i - start: value for i, value in dynamic.items() if start <= i < end})
        start = end
    name = ir.SymbolRefAttr.get([name_of(first.executable), name_of(first.function)])
    entry_points = ir.ArrayAttr.get([name])
    return {n: _Call(entry_points, tuple(offsets[i] for i in varying)) for n, offsets in every.items()}


def _add_indices(block: Any, count: int) -> list[Any]:
    """Add index arguments to a kernel, and return them.

    They are between the operands and the results, as in a dispatch. Otherwise IREE 3.13.0 takes the layouts of results
    from arguments that are as many places behind (SpecializeEncodings.cpp), and a reader sees the numbers permuted.
    """
    results = [argument for argument in block.arguments if "writeonly" in str(argument.type)]
    added = [block.add_argument(ir.IndexType.get(), ir.Location.unknown()) for _ in range(count)]
    first = len(block.arguments) - len(added) - len(results)
    for result in results:
        result.replace_all_uses_with(block.add_argument(result.type, ir.Location.unknown()))
    for _ in results:
        block.erase_argument(first)
    return list(block.arguments)[first : first + count]


def _read_at(operation: Any, dynamic: Mapping[int, Any]) -> None:
    """Replace offsets of `operation` by the values in `dynamic`, which are by dimension."""
    offsets = [_IS_OPERAND if i in dynamic else offset for i, offset in enumerate(_offsets_of(operation))]
    attributes = {"static_offsets": ir.DenseI64ArrayAttr.get(offsets)}
    _with_operands(operation, _OFFSETS[operation.name], list(dynamic.values()), attributes)


def _redirect(dispatch: Any, call: _Call) -> None:
    """Make a dispatch call the merged kernel."""
    index = ir.IndexType.get()
    with ir.InsertionPoint(dispatch):
        dynamic = [
            ir.Operation.create(
                "arith.constant", [index], attributes={"value": ir.IntegerAttr.get(index, offset)}
            ).result
            for offset in call.offsets
        ]
    _with_operands(dispatch, _ARGUMENTS, dynamic, {"entry_points": call.entry_points})


def _with_operands(operation: Any, segment: int, operands: Sequence[Any], attributes: Mapping[str, Any]) -> None:
    """Recreate `operation` with `operands` appended to one of its segments, and with changed attributes."""
    sizes = list(ir.DenseI32ArrayAttr(operation.attributes["operandSegmentSizes"]))
    before = sum(sizes[: segment + 1])
    every = list(operation.operands)
    sizes[segment] += len(operands)
    kept = {named: operation.attributes[named] for named in operation.attributes}
    with ir.InsertionPoint(operation):
        new = ir.Operation.create(
            operation.name,
            [result.type for result in operation.results],
            [*every[:before], *operands, *every[before:]],
            {**kept, **attributes, "operandSegmentSizes": ir.DenseI32ArrayAttr.get(sizes)},
            loc=operation.location,
        )
    for old, result in zip(operation.results, new.results, strict=True):
        old.replace_all_uses_with(result)
    operation.erase()


def _offsets_of(operation: Any) -> Offsets:
    return tuple(ir.DenseI64ArrayAttr(operation.attributes["static_offsets"]))


PASS = ShareKernels
