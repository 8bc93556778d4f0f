"""Copies between parts of tensors that differ only in where they read and write, made one kernel.

IREE 3.13.0 makes a kernel of every copy that is not one of whole rows, and compiles two such copies once only if they
begin at the same places. What a convolution gathers begins at as many places as its kernel has, so that of the 284
kernels of a small ResNet-18 156 are copies, of 36 kinds. Here the places become arguments of one kernel of each kind,
which saves a fifth of IREE's time for that network; its steps are no slower (docs/benchmarks.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from iree.compiler import ir

from irongrad.pipeline.operations import bytecode_of, inside, name_of

_LOAD = "iree_tensor_ext.dispatch.tensor.load"
_STORE = "iree_tensor_ext.dispatch.tensor.store"

# Which of an operation's segments of operands its offsets are, and the arguments of a kernel.
_OFFSETS = {_LOAD: 2, _STORE: 3}
_ARGUMENTS = 1

# In place of an offset that is an operand: `ShapedType::kDynamic`.
_IS_OPERAND = -(2**63)

Offsets: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _Copy:
    """A kernel that copies from one part of a tensor to one of another.

    Attributes:
        executable: the kernel.
        function: its code.
        load: what it reads.
        store: what it writes.
    """

    executable: Any
    function: Any
    load: Any
    store: Any

    @property
    def offsets(self) -> Offsets:
        """Where it reads and then where it writes."""
        return (*_offsets_of(self.load), *_offsets_of(self.store))

    @property
    def kind(self) -> tuple[str, ...]:
        """Equal for copies that differ in nothing but the offsets."""
        about = [op.attributes[name] for op in (self.load, self.store) for name in ("static_sizes", "static_strides")]
        return tuple(map(str, (self.function.attributes["function_type"], self.load.results[0].type, *about)))


@dataclass(frozen=True)
class _Call:
    """How to call the kernel that stands for another.

    Attributes:
        entry_points: the kernel's name, as a call has it.
        offsets: what it takes besides.
    """

    entry_points: Any
    offsets: Offsets


def share_copies(flow: bytes) -> bytes:
    """A module with one kernel for all copies that differ in their offsets alone.

    Args:
        flow: the module as it is after IREE's phase `flow`, as MLIR bytecode, which the result is too.
    """
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(flow)
        kinds: dict[tuple[str, ...], list[_Copy]] = defaultdict(list)
        for copy in _copies(module):
            kinds[copy.kind].append(copy)
        alike = [copies for copies in kinds.values() if len(copies) > 1]
        if not alike:
            return flow
        calls: dict[str, _Call] = {}
        for copies in alike:
            calls |= _merged(copies)
        for operation in list(inside(module.operation)):
            if operation.name == "flow.dispatch" and (call := calls.get(_kernel_of(operation))) is not None:
                _redirect(operation, call)
        for _, *others in alike:
            for copy in others:
                copy.executable.erase()
        return bytecode_of(module)


def _copies(module: ir.Module) -> Iterator[_Copy]:
    """The kernels of static shapes that do nothing but copy."""
    for executable in module.body.operations:
        if executable.operation.name != "flow.executable":
            continue
        functions = [op for op in inside(executable.operation) if op.name == "func.func"]
        code = [op for function in functions for op in inside(function)]
        if [op.name for op in code] == [_LOAD, _STORE, "func.return"]:
            load, store, _ = code
            if len(load.operands) == 1 and len(store.operands) == 2:
                yield _Copy(executable.operation, functions[0], load, store)


def _merged(copies: Sequence[_Copy]) -> Mapping[str, _Call]:
    """Make the first of `copies` compute all of them; by executable, how to call it for that one."""
    first = copies[0]
    every = {name_of(copy.executable): copy.offsets for copy in copies}
    varying = [i for i, values in enumerate(zip(*every.values(), strict=True)) if len(set(values)) > 1]
    reads = len(_offsets_of(first.load))
    block = first.function.regions[0].blocks[0]
    given = {i: block.add_argument(ir.IndexType.get(), first.function.location) for i in varying}
    kind = ir.FunctionType.get([argument.type for argument in block.arguments], [])
    first.function.attributes["function_type"] = ir.TypeAttr.get(kind)
    _take(first.load, {i: value for i, value in given.items() if i < reads})
    _take(first.store, {i - reads: value for i, value in given.items() if i >= reads})
    name = ir.SymbolRefAttr.get([name_of(first.executable), name_of(first.function)])
    entry_points = ir.ArrayAttr.get([name])
    return {n: _Call(entry_points, tuple(offsets[i] for i in varying)) for n, offsets in every.items()}


def _take(operation: Any, given: Mapping[int, Any]) -> None:
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
