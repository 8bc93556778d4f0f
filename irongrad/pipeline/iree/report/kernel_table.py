"""The kernels of a compiled module and their launches, each with where it comes from, read in IREE's flow phase."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from iree.compiler import ir

from irongrad.analysis.records import Kernel, Launch, Source, TargetRecord
from irongrad.mlir.locations import sources_of
from irongrad.mlir.walk import KERNELS, around, functions_of, inside, name_of
from irongrad.pipeline.iree.report.kernel_bytes import bytes_moved, intermediate_bytes
from irongrad.pipeline.iree.report.kernel_operations import (
    EXECUTABLES,
    executable_name,
    operations_inside,
    trips,
)

_CALL, _IF = "util.call", "scf.if"
_EXPORTS = frozenset({"flow.executable.export", "stream.executable.export"})


@dataclass
class _Table:
    """The sources so far, each with an index."""

    indices: dict[Source, int] = field(default_factory=dict)

    def index(self, source: Source) -> int:
        return self.indices.setdefault(source, len(self.indices))

    def of(self, operation: Any) -> list[int]:
        return [self.index(source) for source in sources_of(operation)]


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


def _launches(function: Any, positions: dict[str, int], table: _Table) -> list[Launch]:
    found: list[tuple[Launch, object]] = []
    for operation, branch in _with_branches(function, None):
        read, written = bytes_moved(operation)
        if not (read or written or operation.name in KERNELS):
            continue
        kernel = positions[executable_name(operation)] if operation.name == "flow.dispatch" else None
        times = math.prod(trips(loop) for loop in around(operation.block))
        source = next(iter(table.of(operation)), None)
        intermediates = intermediate_bytes(operation)
        launch = Launch(name_of(function), kernel, source, read, written, times, len(intermediates), sum(intermediates))
        found.append((launch, branch))
    return _with_functions(found, table)


def _with_branches(operation: Any, branch: object) -> Iterator[tuple[Any, object]]:
    """The operations inside `operation`, each with the innermost branch that it is in: an object of its own."""
    for region in operation.regions:
        own = object() if operation.name == _IF else branch
        for block in region:
            for inner in block:
                yield inner.operation, own
                yield from _with_branches(inner.operation, own)


def _with_functions(launches: Sequence[tuple[Launch, object]], table: _Table) -> list[Launch]:
    """The launches; one without a source gets the function that its branch launches and no other branch does."""
    sources = list(table.indices)
    functions: dict[object, set[str]] = defaultdict(set)
    for launch, branch in launches:
        if launch.source is not None:
            functions[branch].add(sources[launch.source].function)
    often = Counter(function for found in functions.values() for function in found)
    own = {branch: [f for f in found if often[f] == 1] for branch, found in functions.items()}
    return [
        replace(launch, source=table.index(Source(own[branch][0], "", "", "", "")))
        if launch.source is None and len(own.get(branch, ())) == 1
        else launch
        for launch, branch in launches
    ]


def _called(function: Any) -> Iterator[str]:
    for operation in inside(function):
        if operation.name == _CALL:
            times = math.prod(trips(loop) for loop in around(operation.block))
            yield from [str(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)] * times
