"""What the commands of a run read and write, in a module whose order of kernels IREE has fixed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import is_elementwise
from irongrad.mlir.walk import around, constant_of, inside, owner_of

# What IREE allocates at once, `max_allocation_size`; what is more is left to it.
LARGEST_ALLOCATION = 2**31 - 1


# What is submitted to a device at once: commands, one after the other or in groups that run at the same time.
RUN = "stream.cmd.execute"

_DISPATCH, _COPY, _FILL = "stream.cmd.dispatch", "stream.cmd.copy", "stream.cmd.fill"
_TENSOR = "iree_tensor_ext.dispatch.tensor"

# Which of the operands of a command are the memory, where it begins there, and how many bytes it is.
_READ_BY_COPY, _WRITTEN_BY_COPY, _WRITTEN_BY_FILL = (0, 2, 6), (3, 5, 6), (0, 2, 3)

# IREE's `stream.resource_access`, of which a dispatch has one for each of its resources.
_READ, _WRITE = 1, 2


@dataclass(frozen=True)
class Access:
    """What a command does to a value.

    Attributes:
        run: the `stream.cmd.execute` that it is in.
        group: what it is of the operations that run one after the other there.
        command: the operation.
        memory: which of its operands the value is.
        reads: whether it reads it.
        writes: whether it writes it.
        start: the first byte, where it is known.
        bytes: how many, where that is known.
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
        """Whether they are to different bytes of a value."""
        if self.start is None or self.bytes is None or other.start is None or other.bytes is None:
            return False
        return self.start + self.bytes <= other.start or other.start + other.bytes <= self.start


def accesses(value: Any) -> Iterator[Access]:
    """What the runs that `value` is handed to do to it."""
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
    """Which of its resources an operand of a dispatch is, and where the operands begin that are offsets and lengths."""
    sizes = list(ir.DenseI32ArrayAttr(dispatch.attributes["operandSegmentSizes"]))
    _, resources, _, offsets, lengths, _ = itertools.accumulate(sizes)
    return memory - resources, offsets, lengths


def keeps_places(read: Access, write: Access, kernels: Mapping[str, Any]) -> bool:
    """Whether a kernel reads each element of a value for that same element of a result of its alone."""
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
    """The one operation that reads or writes all of a binding of a kernel."""
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
