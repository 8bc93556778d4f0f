"""The kernels of a compiled module and their launches, each with where it comes from, read in IREE's flow phase."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from iree.compiler import ir

from irongrad.analysis.records import Kernel, Launch, Source, TargetRecord
from irongrad.mlir.locations import sources_of
from irongrad.mlir.walk import KERNELS, around, functions_of, inside, name_of
from irongrad.pipeline.iree.report.kernel_bytes import bytes_moved
from irongrad.pipeline.iree.report.kernel_operations import (
    EXECUTABLES,
    executable_name,
    operations_inside,
    trips,
)

_CALL = "util.call"
_EXPORTS = frozenset({"flow.executable.export", "stream.executable.export"})


@dataclass
class _Table:
    """The sources so far, each with an index."""

    indices: dict[Source, int] = field(default_factory=dict)

    def of(self, operation: Any) -> list[int]:
        return [self.indices.setdefault(s, len(self.indices)) for s in sources_of(operation)]


def target_record(flow: ir.Module) -> TargetRecord:
    """Record the kernels of a module compiled to the flow phase."""
    table = _Table()
    executables = [op.operation for op in flow.body.operations if op.operation.name in EXECUTABLES]
    kernels = tuple(_kernel(op, table) for op in executables)
    positions = {name_of(op): number for number, op in enumerate(executables)}
    functions = functions_of(flow)
    launches = tuple(launch for f in functions for launch in _launches(f, positions, table))
    called = {name_of(f): tuple(_called(f)) for f in functions}
    calls = {name: names for name, names in called.items() if names}
    return TargetRecord(tuple(table.indices), kernels, launches, calls)


def _kernel(executable: Any, table: _Table) -> Kernel:
    export = next(op for op in inside(executable) if op.name in _EXPORTS)
    sources = dict.fromkeys(n for op in inside(executable) for n in table.of(op))
    return Kernel(name_of(export), operations_inside(executable), tuple(sources))


def _launches(function: Any, positions: dict[str, int], table: _Table) -> Iterator[Launch]:
    for operation in inside(function):
        read, written = bytes_moved(operation)
        if not (read or written or operation.name in KERNELS):
            continue
        kernel = positions[executable_name(operation)] if operation.name == "flow.dispatch" else None
        times = math.prod(trips(loop) for loop in around(operation.block))
        source = next(iter(table.of(operation)), None)
        yield Launch(name_of(function), kernel, source, read, written, times)


def _called(function: Any) -> Iterator[str]:
    for operation in inside(function):
        if operation.name == _CALL:
            times = math.prod(trips(loop) for loop in around(operation.block))
            yield from [str(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)] * times
