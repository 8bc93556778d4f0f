"""What the commands of a submission read and write, after IREE has fixed the order of kernels."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import is_elementwise
from irongrad.mlir.walk import around, constant_of, inside, name_of, named_in, owner_of

# IREE's `max_allocation_size`, in bytes. Memory beyond this size is left to IREE.
LARGEST_ALLOCATION = 2**31 - 1


PACK, ALLOCATION, PART = "stream.resource.pack", "stream.resource.alloca", "stream.resource.subview"
TRANSIENT = "!stream.resource<transient>"

# Attribute of a `stream.resource.pack`: the first and the last moment of each value's lifetime, as pairs.
_MOMENTS = "lifetime_intervals"

# A submission to a device. Its commands run one after the other, or concurrently within a group.
RUN = "stream.cmd.execute"

_DISPATCH, _COPY, _FILL = "stream.cmd.dispatch", "stream.cmd.copy", "stream.cmd.fill"
_TENSOR = "iree_tensor_ext.dispatch.tensor"

# The operand segments of a dispatch that hold the sizes by which IREE counts workgroups, and the kernel's numbers.
_WORKLOAD, NUMBERS = 0, 1

# Positions of three operands of a command: the memory, the offset and the length in bytes.
_READ_BY_COPY, _WRITTEN_BY_COPY, _WRITTEN_BY_FILL = (0, 2, 6), (3, 5, 6), (0, 2, 3)

# Bits of IREE's `stream.resource_access`; a dispatch has one such attribute for each of its resources.
_READ, _WRITE = 1, 2


@dataclass(frozen=True)
class Slice:
    """A value that a `stream.resource.pack` places.

    Attributes:
        bytes: its size in bytes.
        start: the first moment of its lifetime.
        end: the last moment of its lifetime.
    """

    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Access:
    """How one command accesses a value.

    Attributes:
        run: the submission, a `stream.cmd.execute`, that contains the command.
        group: the operation directly in the body of `run` that is, or contains, the command; these run in order.
        command: the command, as an operation.
        memory: the position of the value among the operands of `command`.
        reads: whether the command reads the value.
        writes: whether the command writes the value.
        start: the first byte of the access; None if unknown.
        bytes: the length of the access in bytes; None if unknown.
    """

    run: Any
    group: Any
    command: Any
    memory: int
    reads: bool
    writes: bool
    start: int | None
    bytes: int | None

    def is_apart(self, other: Access) -> bool:
        """Whether the two accesses are to disjoint bytes of the value."""
        if self.start is None or self.bytes is None or other.start is None or other.bytes is None:
            return False
        return self.start + self.bytes <= other.start or other.start + other.bytes <= self.start


def accesses(value: Any) -> Iterator[Access]:
    """All accesses to `value` by the submissions that take it as an operand."""
    for use in value.uses:
        run = use.owner.operation
        if run.name == RUN:
            body = run.regions[0].blocks[0]
            for inner in body.arguments[use.operand_number].uses:
                yield _access(run, body, inner.owner.operation, inner.operand_number)


def _access(run: Any, body: Any, command: Any, memory: int) -> Access:
    group = next(op for op in (command, *around(command.block)) if op.block == body)
    reads, writes, start, length = True, True, None, None
    if command.name == _DISPATCH:
        resource, begins, lengths = _segments_of(command, memory)
        access = ir.IntegerAttr(ir.ArrayAttr(command.attributes["resource_accesses"])[resource]).value
        reads, writes = bool(access & _READ), bool(access & _WRITE)
        start, length = begins + resource, lengths + resource
    elif command.name in (_COPY, _FILL):
        places = (_READ_BY_COPY, _WRITTEN_BY_COPY) if command.name == _COPY else (_WRITTEN_BY_FILL,)
        _, start, length = next(place for place in places if place[0] == memory)
        writes = command.name == _FILL or memory == _WRITTEN_BY_COPY[0]
        reads = not writes
    first, count = (None if place is None else constant_of(command.operands[place]) for place in (start, length))
    return Access(run, group, command, memory, reads, writes, first, count)


def _segments_of(dispatch: Any, memory: int) -> tuple[int, int, int]:
    """The resource index of the operand `memory` of a dispatch, and where its offset and length operands begin."""
    sizes = list(ir.DenseI32ArrayAttr(dispatch.attributes["operandSegmentSizes"]))
    _, resources, _, offsets, lengths, _ = itertools.accumulate(sizes)
    return memory - resources, offsets, lengths


def workload_of(dispatch: Any) -> list[Any]:
    """The sizes by which IREE counts the workgroups of a dispatch."""
    return _segment(dispatch, _WORKLOAD)


def numbers_of(dispatch: Any) -> list[Any]:
    """The numbers that a dispatch passes to its kernel."""
    return _segment(dispatch, NUMBERS)


def _segment(dispatch: Any, segment: int) -> list[Any]:
    sizes = list(ir.DenseI32ArrayAttr(dispatch.attributes["operandSegmentSizes"]))
    start = sum(sizes[:segment])
    return list(dispatch.operands)[start : start + sizes[segment]]


def calls_of(module: ir.Module) -> dict[tuple[str, ...], list[Any]]:
    """The dispatches of each kernel, by the kernel's path; one that may take any of several kernels is with each."""
    found: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for call in named_in(module, _DISPATCH):
        for entry in ir.ArrayAttr(call.attributes["entry_points"]):
            found[tuple(ir.SymbolRefAttr(entry).value)].append(call)
    return found


def kernels_of(module: ir.Module, executables: Set[str]) -> list[tuple[tuple[str, ...], Any, Any]]:
    """The kernels of the executables with these names: the path of each in dispatches, its export and its function."""
    kernels: list[tuple[tuple[str, ...], Any, Any]] = []
    for executable in [op.operation for op in module.body.operations if op.operation.name == "stream.executable"]:
        if name_of(executable) not in executables:
            continue
        parts = inside(executable)
        functions = {name_of(op): op for op in parts if op.name == "func.func"}
        for export in [op for op in parts if op.name == "stream.executable.export"]:
            function = functions.get(str(ir.FlatSymbolRefAttr(export.attributes["function_ref"]).value))
            if function is not None:
                kernels.append(((name_of(executable), name_of(export)), export, function))
    return kernels


def low_half(value: Any) -> int | None:
    """The number, among a kernel's arguments, that has the low bits of `value`; None for a constant.

    IREE puts a number of 64 bits together from two.
    """
    while not isinstance(value.owner, ir.Block):
        if not list(value.owner.operands):
            return None
        # `util.assume.int` has a result for each operand; `arith.ori` has the low half first.
        value = value.owner.operands[ir.OpResult(value).result_number]
    return int(ir.BlockArgument(value).arg_number)


def keeps_places(read: Access, write: Access, kernels: Mapping[str, Any]) -> bool:
    """Whether a kernel reads each element of a value only to compute the same element of a result.

    Args:
        read: the kernel's read of the value.
        write: the same kernel's write of the result.
        kernels: the executables by name.
    """
    command = read.command
    if command.name != _DISPATCH or None in (read.start, read.bytes):
        return False
    (entry,) = ir.ArrayAttr(command.attributes["entry_points"])
    name, *_ = ir.SymbolRefAttr(entry).value
    (function,) = [op for op in inside(kernels[name]) if op.name == "func.func"]
    bindings = [a for a in function.regions[0].blocks[0].arguments if str(a.type) == "!stream.binding"]
    source, result = (bindings[_segments_of(command, a.memory)[0]] for a in (read, write))
    load, store = _whole(source), _whole(result)
    if load is None or store is None or load.name != f"{_TENSOR}.load" or store.name != f"{_TENSOR}.store":
        return False
    computed, loaded = store.operands[0], load.results[0]
    compute = owner_of(computed)
    if not is_elementwise(compute) or computed.type != loaded.type:
        return False
    maps = list(ir.ArrayAttr(compute.attributes["indexing_maps"]))
    place = maps[len(maps) - len(compute.results) + list(compute.results).index(computed)]
    uses = list(loaded.uses)
    return all(u.owner == compute and maps[u.operand_number] == place for u in uses)


def _whole(binding: Any) -> Any | None:
    """The operation that loads or stores a whole binding of a kernel; None unless it is the binding's only use."""
    operations: list[Any] = []
    for expected in ("stream.binding.subspan", _TENSOR):
        uses = list((operations[-1].results[0] if operations else binding).uses)
        if len(uses) != 1 or not uses[0].owner.operation.name.startswith(expected):
            return None
        operations.append(uses[0].owner.operation)
    subspan, operation = operations
    tensor = operation.results[0] if len(operation.results) else operation.operands[0]
    begins = constant_of(subspan.operands[1]) == 0
    return operation if begins and str(subspan.results[0].type).endswith(f":{tensor.type}>") else None


def slices_of(pack: Any) -> Iterator[Slice]:
    """The values of static size that `pack` places."""
    moments = [ir.IntegerAttr(a).value for a in ir.ArrayAttr(pack.attributes[_MOMENTS])]
    if len(pack.operands) == len(pack.results) - 1:
        for size, start, end in zip(pack.operands, moments[::2], moments[1::2], strict=True):
            if (known := constant_of(size)) is not None:
                yield Slice(known, start, end)
