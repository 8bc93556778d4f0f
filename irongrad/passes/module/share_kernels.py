"""Kernels that differ only in where they read and write parts of tensors, made one.

IREE 3.13.0 makes a kernel of every copy that is not one of whole rows, and compiles two kernels once only if they begin
at the same places. What a convolution gathers begins at as many places as its kernel has, so that of the 284 kernels of
a small ResNet-18 156 are copies, of 36 kinds; Winograd's transforms read one part of a tensor after the other. Here the
places become arguments of one kernel of each kind, which saves a fifth of IREE's time for that network; its steps are
no slower (docs/benchmarks.md).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from iree.compiler import ir

from irongrad.mlir.walk import inside, name_of, text_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

_LOAD = "iree_tensor_ext.dispatch.tensor.load"
_STORE = "iree_tensor_ext.dispatch.tensor.store"

# Which of an operation's segments of operands its offsets are, and the arguments of a kernel.
_OFFSETS = {_LOAD: 2, _STORE: 3}
_ARGUMENTS = 1

# How many operands each has where it begins at places that are known and all sizes are.
_OPERANDS = {_LOAD: 1, _STORE: 2}

# In place of an offset that is an operand: `ShapedType::kDynamic`.
_IS_OPERAND = -(2**63)

# What may differ, in their text, between kernels that are made one: their names, and where what they read and write
# begins.
_NAMES = r"(?:flow\.executable private|flow\.executable\.export public|func\.func) @\w+"
_BEGINNINGS = r"(dispatch\.tensor\.(?:load|store) [^\n]*?)offsets = \[[^]]*\]"
_DIFFERENT = re.compile(f"{_NAMES}|{_BEGINNINGS}")

Offsets: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _Kernel:
    """A kernel that reads and writes parts of tensors.

    Attributes:
        executable: the kernel.
        function: its code.
        parts: what it reads and what it writes.
    """

    executable: Any
    function: Any
    parts: Sequence[Any]

    @property
    def offsets(self) -> Offsets:
        """Where each part begins, one after the other."""
        return tuple(offset for part in self.parts for offset in _offsets_of(part))

    @property
    def type(self) -> str:
        """What it reads and writes; little to print where a kernel is much."""
        return str(self.function.attributes["function_type"])

    @property
    def kind(self) -> str:
        """Equal for kernels that differ in nothing but the offsets."""
        return _DIFFERENT.sub(r"\1", text_of(self.executable))


@dataclass(frozen=True)
class _Call:
    """How to call the kernel that stands for another.

    Attributes:
        entry_points: the kernel's name, as a call has it.
        offsets: what it takes besides.
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
        """Where a kernel with computed offsets is as fast as one with known offsets."""
        return context.target.shared_kernels

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        of_a_type = _alike(_kernels(module), lambda kernel: kernel.type)
        alike = [kernels for found in of_a_type for kernels in _alike(found, lambda kernel: kernel.kind)]
        calls: dict[str, _Call] = {}
        for kernels in alike:
            calls |= _merged(kernels)
        for operation in list(inside(module.operation)):
            if operation.name == "flow.dispatch" and (call := calls.get(_kernel_of(operation))) is not None:
                _redirect(operation, call)
        merged = [kernel for _, *others in alike for kernel in others]
        for kernel in merged:
            kernel.executable.erase()
        return PassResult(bool(merged), {"merged": len(merged)})


def _alike(kernels: Iterable[_Kernel], key: Callable[[_Kernel], str]) -> list[list[_Kernel]]:
    """Those of the same key, where there are several."""
    groups: dict[str, list[_Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[key(kernel)].append(kernel)
    return [group for group in groups.values() if len(group) > 1]


def _kernels(module: ir.Module) -> Iterator[_Kernel]:
    """The kernels that begin at places which are known, in parts of sizes which are."""
    for executable in module.body.operations:
        if executable.operation.name != "flow.executable":
            continue
        functions = [op for op in inside(executable.operation) if op.name == "func.func"]
        parts = [op for function in functions for op in inside(function) if op.name in _OPERANDS]
        if len(functions) == 1 and all(len(part.operands) == _OPERANDS[part.name] for part in parts):
            yield _Kernel(executable.operation, functions[0], parts)


def _merged(kernels: Sequence[_Kernel]) -> Mapping[str, _Call]:
    """Make the first of `kernels` compute all of them; by executable, how to call it for that one."""
    first = kernels[0]
    every = {name_of(kernel.executable): kernel.offsets for kernel in kernels}
    varying = [i for i, values in enumerate(zip(*every.values(), strict=True)) if len(set(values)) > 1]
    block = first.function.regions[0].blocks[0]
    given = {i: block.add_argument(ir.IndexType.get(), first.function.location) for i in varying}
    kind = ir.FunctionType.get([argument.type for argument in block.arguments], [])
    first.function.attributes["function_type"] = ir.TypeAttr.get(kind)
    start = 0
    for part in first.parts:
        end = start + len(_offsets_of(part))
        _read_at(part, {i - start: value for i, value in given.items() if start <= i < end})
        start = end
    name = ir.SymbolRefAttr.get([name_of(first.executable), name_of(first.function)])
    entry_points = ir.ArrayAttr.get([name])
    return {n: _Call(entry_points, tuple(offsets[i] for i in varying)) for n, offsets in every.items()}


def _read_at(operation: Any, given: Mapping[int, Any]) -> None:
    """Have `operation` begin at `given` along those dimensions."""
    offsets = [_IS_OPERAND if i in given else offset for i, offset in enumerate(_offsets_of(operation))]
    attributes = {"static_offsets": ir.DenseI64ArrayAttr.get(offsets)}
    _with_operands(operation, _OFFSETS[operation.name], list(given.values()), attributes)


def _redirect(dispatch: Any, call: _Call) -> None:
    """Call another kernel."""
    index = ir.IndexType.get()
    with ir.InsertionPoint(dispatch):
        given = [
            ir.Operation.create(
                "arith.constant", [index], attributes={"value": ir.IntegerAttr.get(index, offset)}
            ).result
            for offset in call.offsets
        ]
    _with_operands(dispatch, _ARGUMENTS, given, {"entry_points": call.entry_points})


def _with_operands(operation: Any, segment: int, operands: Sequence[Any], attributes: Mapping[str, Any]) -> None:
    """Put another in the place of `operation`, with more operands at the end of a segment, and other attributes."""
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


def _kernel_of(dispatch: Any) -> str:
    """The name of the executable that is called."""
    (entry_point,) = ir.ArrayAttr(dispatch.attributes["entry_points"])
    return str(ir.SymbolRefAttr(entry_point).value[0])


PASS = ShareKernels
