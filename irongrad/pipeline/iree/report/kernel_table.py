"""The kernels of a compiled module and their launches, each with where it comes from, read in IREE's flow phase."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from iree.compiler import ir

from irongrad.analysis.records import Kernel, Launch, Source, TargetRecord
from irongrad.mlir.locations import sources_of
from irongrad.mlir.walk import PACKING, around, functions_of, inside, name_of
from irongrad.pipeline.iree.report.kernel_bytes import bytes_moved, intermediate_bytes
from irongrad.pipeline.iree.report.kernel_operations import (
    EXECUTABLES,
    kernel_of,
    operations_inside,
    trips,
)

_CALL, _IF = "util.call", "scf.if"

# The branches around an operation, from the outermost inwards, each an object of its own.
_Branches = tuple[object, ...]

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
    functions = functions_of(flow)
    packings = dict.fromkeys(kernel_of(op) for f in functions for op in inside(f) if op.name == PACKING)
    kernels = (*(_kernel(op, table) for op in executables), *(Kernel(name, 0, ()) for name in packings if name))
    positions = {name: number for number, name in enumerate((*map(name_of, executables), *packings))}
    launches = tuple(launch for f in functions for launch in _launches(f, positions, table))
    called = {name_of(f): tuple(_called(f)) for f in functions}
    calls = {name: names for name, names in called.items() if names}
    return TargetRecord(tuple(table.indices), kernels, launches, calls)


def _kernel(executable: Any, table: _Table) -> Kernel:
    export = next(op for op in inside(executable) if op.name in _EXPORTS)
    sources = dict.fromkeys(n for op in inside(executable) for n in table.of(op))
    return Kernel(name_of(export), operations_inside(executable), tuple(sources))


def _launches(function: Any, positions: dict[str | None, int], table: _Table) -> list[Launch]:
    found: list[tuple[Launch, _Branches]] = []
    for operation, branches in _with_branches(function, ()):
        name = kernel_of(operation)
        read, written = bytes_moved(operation)
        if not (read or written or name):
            continue
        kernel = positions[name] if name else None
        times = math.prod(trips(loop) for loop in around(operation.block))
        source = next(_sources(operation, table), None)
        intermediates = intermediate_bytes(operation)
        launch = Launch(name_of(function), kernel, source, read, written, times, len(intermediates), sum(intermediates))
        found.append((launch, branches))
    return _with_functions(found, table)


def _sources(operation: Any, table: _Table) -> Iterator[int]:
    """The sources of a launch; a packing without any has those of the products that read what it packs."""
    yield from table.of(operation)
    if operation.name == PACKING:
        for use in operation.results[0].uses:
            yield from table.of(use.owner.operation)


def _with_branches(operation: Any, branches: _Branches) -> Iterator[tuple[Any, _Branches]]:
    """The operations inside `operation`, each with the branches that it is in."""
    for region in operation.regions:
        own = (*branches, object()) if operation.name == _IF else branches
        for block in region:
            for inner in block:
                yield inner.operation, own
                yield from _with_branches(inner.operation, own)


def _with_functions(launches: Sequence[tuple[Launch, _Branches]], table: _Table) -> list[Launch]:
    """The launches; one without a source gets a function whose launches are all in the branch that it is in.

    If that branch holds functions of several buckets, it gets none.
    """
    functions = [Source(source.function, "", "", "", "") for source in table.indices]
    own: dict[Source, list[_Branches]] = defaultdict(list)
    for launch, branches in launches:
        if launch.source is not None:
            own[functions[launch.source]].append(branches)
    homes = {function: _common(found) for function, found in own.items()}
    return [
        launch if launch.source is not None else _placed(launch, branches, homes, table)
        for launch, branches in launches
    ]


def _placed(launch: Launch, branches: _Branches, homes: Mapping[Source, _Branches], table: _Table) -> Launch:
    function = _inside(branches, homes)
    return launch if function is None else replace(launch, source=table.index(function))


def _common(branches: Sequence[_Branches]) -> _Branches:
    """The branches that all of several operations are in."""
    return tuple(same[0] for same in takewhile(lambda level: len(set(level)) == 1, zip(*branches, strict=False)))


def _inside(branches: _Branches, homes: Mapping[Source, _Branches]) -> Source | None:
    """A function of the innermost of `branches` that holds all of a function; None if several buckets have any."""
    for depth in range(len(branches), 0, -1):
        found = [function for function, home in homes.items() if home[:depth] == branches[:depth]]
        if found:
            return found[0] if len({function.bucket for function in found}) == 1 else None
    return None


def _called(function: Any) -> Iterator[str]:
    for operation in inside(function):
        if operation.name == _CALL:
            times = math.prod(trips(loop) for loop in around(operation.block))
            yield from [str(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)] * times
