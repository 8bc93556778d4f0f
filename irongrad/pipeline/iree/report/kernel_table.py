"""The kernels of a compiled module and their launches, each with where it comes from, read in IREE's flow phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from iree.compiler import ir

from irongrad.analysis.records import Kernel, Launch, Source, TargetRecord
from irongrad.mlir.locations import sources_of
from irongrad.mlir.walk import PACKING, around, functions_of, inside, name_of
from irongrad.pipeline.iree.report.branches import callee_of, calls_in, with_branches
from irongrad.pipeline.iree.report.bucket_launches import FoundLaunch, with_buckets
from irongrad.pipeline.iree.report.kernel_bytes import bytes_moved, intermediate_bytes
from irongrad.pipeline.iree.report.kernel_operations import EXECUTABLES, kernel_of, operations_inside, trips

_EXPORTS = frozenset({"flow.executable.export", "stream.executable.export"})


@dataclass
class _Sources:
    """The sources so far, each with an index."""

    indices: dict[Source, int] = field(default_factory=dict)

    def index(self, source: Source) -> int:
        return self.indices.setdefault(source, len(self.indices))


def target_record(flow: ir.Module) -> TargetRecord:
    """Record the kernels of a module compiled to the flow phase."""
    sources = _Sources()
    executables = [op.operation for op in flow.body.operations if op.operation.name in EXECUTABLES]
    functions = functions_of(flow)
    packings = dict.fromkeys(kernel_of(op) for f in functions for op in inside(f) if op.name == PACKING)
    kernels = (*(_kernel(op, sources) for op in executables), *(Kernel(name, 0, ()) for name in packings if name))
    positions = {name: number for number, name in enumerate((*map(name_of, executables), *packings))}
    found = {name_of(f): list(_launches(f, positions)) for f in functions}
    calls = {name_of(f): list(calls_in(f)) for f in functions}
    callees = {name: [(callee_of(call), branches) for call, branches in own] for name, own in calls.items()}
    launches = tuple(
        Launch(name, one.kernel, None if one.source is None else sources.index(one.source), *one.counts)
        for name, own in with_buckets(found, callees).items()
        for one in own
    )
    called = {name: tuple(_often(call for call, _ in own)) for name, own in calls.items() if own}
    return TargetRecord(tuple(sources.indices), kernels, launches, called)


def _kernel(executable: Any, sources: _Sources) -> Kernel:
    export = next(op for op in inside(executable) if op.name in _EXPORTS)
    own = dict.fromkeys(sources.index(source) for op in inside(executable) for source in sources_of(op))
    return Kernel(name_of(export), operations_inside(executable), tuple(own))


def _launches(function: Any, positions: dict[str | None, int]) -> Iterator[FoundLaunch]:
    for operation, branches in with_branches(function):
        name = kernel_of(operation)
        read, written = bytes_moved(operation)
        if not (read or written or name):
            continue
        times = math.prod(trips(loop) for loop in around(operation.block))
        intermediates = intermediate_bytes(operation)
        yield FoundLaunch(
            positions[name] if name else None,
            next(_sources(operation), None),
            branches,
            (read, written, times, len(intermediates), sum(intermediates)),
        )


def _sources(operation: Any) -> Iterator[Source]:
    """The sources of a launch; a packing without any has those of the products that read what it packs."""
    yield from sources_of(operation)
    if operation.name == PACKING:
        for use in operation.results[0].uses:
            yield from sources_of(use.owner.operation)


def _often(calls: Iterable[Any]) -> Iterator[str]:
    """The functions that calls name, each as often as its call runs."""
    for call in calls:
        yield from [callee_of(call)] * math.prod(trips(loop) for loop in around(call.block))
