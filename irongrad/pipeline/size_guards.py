"""Guards on named dimensions, in the module: what every entry point of a step with dynamic dimensions checks first.

A refusal says what is allowed and what was given. The text of cf.assert is a constant, so the given size comes from
IREE's own check of a buffer view's shape (runtime/src/iree/modules/hal/utils/buffer_diagnostics.c), which prints the
shape that it has and the one that it should have: the input is compared with the nearest size that is allowed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import sympy

from irongrad.buckets import Bucket
from irongrad.pipeline.cores import spec_type
from irongrad.pipeline.graphs import StepGraph
from irongrad.pipeline.indices import index_of
from irongrad.pipeline.limits import Limits, spelled
from irongrad.pipeline.storage import quoted
from irongrad.runtime.manifest import STEPS_DIM, EntryPoint

NOT_RUN = "the step was not run"

_COMPARISONS = {
    sympy.Eq: "eq",
    sympy.Ne: "ne",
    sympy.Le: "sle",
    sympy.Lt: "slt",
    sympy.Ge: "sge",
    sympy.Gt: "sgt",
}


def measured(entry: EntryPoint, sizes: dict[str, str]) -> Iterator[str]:
    """The size of every named dimension, which must be the same in all inputs, as an SSA name in `sizes`."""
    first: dict[str, str] = {}
    for d in sorted({d for spec in entry.inputs for d in range(len(spec.shape))}):
        yield f"%dim{d} = arith.constant {d} : index"
    for i, d, name in _named(entry):
        spec = entry.inputs[i]
        yield f"%size{i}.{d} = tensor.dim %arg{i}, %dim{d} : {spec_type(spec)}"
        if name not in sizes:
            sizes[name], first[name] = f"%size{i}.{d}", f"dimension {d} of {spec.name}"
            continue
        text = f"{spec.name}: dimension {d} ({name}) must be as large as {first[name]}"
        yield from _refused(entry, i, d, sizes[name], text)


def accepted_sizes(graph: StepGraph) -> dict[str, tuple[int, int | None]]:
    """The smallest and the largest size of each named dimension that some function takes; None for no largest."""
    smallest = dict(graph.smallest)
    largest = {name: max(bucket[name] for bucket in graph.buckets) for b in graph.buckets[:1] for name in b}
    if graph.limits is None:
        return {name: (smallest[name], largest[name]) for name in largest}
    accepted: dict[str, tuple[int, int | None]] = {}
    for name, least in graph.limits.smallest.items():
        most = graph.limits.largest.get(name)
        accepted[name] = min(least, smallest.get(name, least)), most and max(most, largest.get(name, most))
    return accepted


def refusals(entry: EntryPoint, graph: StepGraph, sizes: Mapping[str, str]) -> Iterator[str]:
    """Refuse sizes that no function of the graph takes; `%fits0`, `%fits1`, … say which bucket holds a call."""
    buckets = [{n: size for n, size in bucket.items() if n in sizes} for bucket in graph.buckets]
    for number, bucket in enumerate(buckets):
        yield from _fits(f"%fits{number}", bucket, sizes)
    yield from _intervals(entry, sizes, accepted_sizes(graph))
    if graph.limits is None:
        yield from _combinations(buckets, sizes)
    else:
        yield from _conditions(graph.limits, len(buckets), sizes)


def _named(entry: EntryPoint) -> Iterator[tuple[int, int, str]]:
    """Input, dimension and name of every named dimension of the inputs."""
    for i, spec in enumerate(entry.inputs):
        for d, name in enumerate(spec.shape):
            if isinstance(name, str) and name != STEPS_DIM:
                yield i, d, name


def _refused(entry: EntryPoint, number: int, dim: int, wanted: str, text: str) -> Iterator[str]:
    """Refuse a call whose input `number` has another size than `wanted` in dimension `dim`."""
    spec, name = entry.inputs[number], f"%refused{number}.{dim}.{wanted.strip('%')}"
    yield f"{name} = arith.cmpi ne, {wanted}, %size{number}.{dim} : index"
    yield f"scf.if {name} {{"
    own: list[str] = []
    for d, size in enumerate(spec.shape):
        yield f"  {name}.{d} = tensor.dim %arg{number}, %dim{d} : {spec_type(spec)}"
        if isinstance(size, str):
            own.append(f"{name}.{d}")
    kind = spec_type(spec)
    yield f"  {name}.view = hal.tensor.export %arg{number} : {kind}{{{', '.join(own)}}} -> !hal.buffer_view"
    element = kind.removesuffix(">").rpartition("x")[2]
    yield f"  {name}.type = hal.element_type<{element}> : i32"
    yield f"  {name}.order = hal.encoding_type<dense_row_major> : i32"
    shape = ", ".join(wanted if d == dim else f"{name}.{d}" for d in range(len(spec.shape)))
    yield f'  hal.buffer_view.assert<{name}.view : !hal.buffer_view> message("{quoted(f"{text}; {NOT_RUN};")}")'
    yield f"      shape([{shape}]) type({name}.type) encoding({name}.order)"
    yield "}"


def _fits(result: str, bucket: Bucket, sizes: Mapping[str, str]) -> Iterator[str]:
    """Whether every size is within the bucket."""
    yield f"{result}.0 = arith.constant true"
    for number, (name, size) in enumerate(bucket.items(), 1):
        yield f"{result}.{name}.n = arith.constant {size} : index"
        yield f"{result}.{name} = arith.cmpi ule, {sizes[name]}, {result}.{name}.n : index"
        yield f"{result}.{number} = arith.andi {result}.{number - 1}, {result}.{name} : i1"
    yield f"{result} = arith.andi {result}.0, {result}.{len(bucket)} : i1"


def _intervals(
    entry: EntryPoint, sizes: Mapping[str, str], accepted: Mapping[str, tuple[int, int | None]]
) -> Iterator[str]:
    """Refuse sizes outside of the interval of one dimension."""
    first = {name: (i, d) for i, d, name in reversed(list(_named(entry)))}
    for name, size in sizes.items():
        (number, dim), (least, most) = first[name], accepted[name]
        yield f"%least.{name} = arith.constant {least} : index"
        yield f"%near.{name} = arith.maxui {size}, %least.{name} : index"
        nearest, allowed = f"%near.{name}", f"at least {least}"
        if most is not None:
            yield f"%most.{name} = arith.constant {most} : index"
            yield f"%nearest.{name} = arith.minui %near.{name}, %most.{name} : index"
            nearest, allowed = f"%nearest.{name}", f"in [{least}, {most}]"
        text = f"{entry.inputs[number].name}: dimension {dim} ({name}) must be {allowed}"
        yield from _refused(entry, number, dim, nearest, text)


def _combinations(buckets: Sequence[Bucket], sizes: Mapping[str, str]) -> Iterator[str]:
    """Refuse sizes that are each in some bucket, but not together."""
    yield "%any0 = arith.ori %fits0, %fits0 : i1"
    for number in range(1, len(buckets)):
        yield f"%any{number} = arith.ori %any{number - 1}, %fits{number} : i1"
    listed = "; ".join(", ".join(f"{n} {size}" for n, size in bucket.items()) for bucket in buckets)
    text = f"{', '.join(sizes)}: the sizes fit into no bucket of [{listed}]; {NOT_RUN}"
    yield f'cf.assert %any{len(buckets) - 1}, "{quoted(text)}"'


def _conditions(limits: Limits, buckets: int, sizes: Mapping[str, str]) -> Iterator[str]:
    """Refuse sizes that no bucket holds and that the functions of any size do not take."""
    for number, condition in enumerate(limits.conditions):
        if any(s.name not in sizes for s in condition.free_symbols):
            continue
        left = yield from _index(condition.lhs, sizes, f"%left{number}")
        right = yield from _index(condition.rhs, sizes, f"%right{number}")
        comparison = _COMPARISONS[condition.func]
        yield f"%holds{number}.b = arith.cmpi {comparison}, {left}, {right} : index"
        for bucket in range(buckets):
            before = f"%holds{number}.{bucket - 1}" if bucket else f"%holds{number}.b"
            yield f"%holds{number}.{bucket} = arith.ori {before}, %fits{bucket} : i1"
        last = f"%holds{number}.{buckets - 1}" if buckets else f"%holds{number}.b"
        names = ", ".join(sorted(s.name for s in condition.free_symbols))
        yield f'cf.assert {last}, "{quoted(f"{names}: the step needs {spelled(condition)}; {NOT_RUN}")}"'


def _index(size: Any, sizes: Mapping[str, str], name: str) -> Generator[str, None, str]:
    """The SSA name of `size`, an expression of named dimensions or a number."""
    found = yield from index_of(size, sizes, name)
    if found.startswith("%"):
        return found
    yield f"{name}.n = arith.constant {found} : index"
    return f"{name}.n"
