"""Guards on named dimensions: the checks at the start of every entry point of a step with dynamic dimensions.

A refusal names the allowed size and the given size. For that, a guard compares the given size with the nearest allowed
one (`irongrad.pipeline.assemble.refusal_messages` explains why).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import sympy

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.assemble.index_expressions import index_of
from irongrad.pipeline.assemble.refusal_messages import assert_shape, exported, refuse_unless_equal
from irongrad.pipeline.assemble.step_functions import spec_type
from irongrad.runtime.manifest import STEPS_DIM, EntryPoint
from irongrad.runtime.refusals import NOT_RUN
from irongrad.sizes.buckets import Bucket, open_dimensions
from irongrad.sizes.limits import multiple_of, spelled

# By relation: the operation that yields the nearest allowed left side from both sides, and the number that is first
# added to the right side.
_NEAREST = {
    sympy.Le: ("minsi", 0),
    sympy.Lt: ("minsi", -1),
    sympy.Ge: ("maxsi", 0),
    sympy.Gt: ("maxsi", 1),
}


def measured(entry: EntryPoint, sizes: dict[str, str]) -> Iterator[str]:
    """Measure every named dimension into `sizes`, as an SSA name; refuse inputs that disagree on its size."""
    first: dict[str, str] = {}
    for d in sorted({d for spec in entry.inputs for d in range(len(spec.shape))}):
        yield f"%dim{d} = arith.constant {d} : index"
    for i, d, name in _named_dimensions(entry):
        spec = entry.inputs[i]
        yield f"%size{i}.{d} = tensor.dim %arg{i}, %dim{d} : {spec_type(spec)}"
        if name not in sizes:
            sizes[name], first[name] = f"%size{i}.{d}", f"dimension {d} of {spec.name}"
            continue
        text = f"{spec.name}: dimension {d} ({name}) must be as large as {first[name]}"
        yield from _refuse_size(entry, i, d, sizes[name], text)


def accepted_sizes(graph: StepGraph) -> dict[str, tuple[int, int | None]]:
    """By named dimension, the smallest and largest size of a call; None if there is no largest.

    Calls that no bucket holds run in a function of any size, so the largest size is that of any function. Other limits
    are those of every function.
    """
    accepted: dict[str, tuple[int, int | None]] = {}
    bucketed = graph.buckets[0] if graph.buckets else {}
    for name in (*bucketed, *open_dimensions(graph.dynamic, bucketed)) if bucketed else ():
        least, most = graph.bucket_limits.interval(name)
        ends = [most] if most is not None else []
        ends += [max(bucket[name] for bucket in graph.buckets)] if name in bucketed else []
        accepted[name] = least, min(ends, default=None)
    if graph.limits is None:
        return accepted
    for name in graph.limits.smallest:
        least, most = graph.limits.interval(name)
        low, high = accepted.get(name, (least, most))
        if name in bucketed:
            largest = None if most is None or high is None else max(most, high)
        else:
            largest = min((size for size in (most, high) if size is not None), default=None)
        accepted[name] = max(least, low), largest
    return accepted


def refusals(entry: EntryPoint, graph: StepGraph, sizes: Mapping[str, str]) -> Iterator[str]:
    """Refuse sizes that no function of the graph takes; define `%fits0`, `%fits1`, …, the outcome for each bucket."""
    buckets = [{n: size for n, size in bucket.items() if n in sizes} for bucket in graph.buckets]
    for number, bucket in enumerate(buckets):
        yield from _fits(f"%fits{number}", bucket, sizes)
    if buckets:
        yield from _any_of([f"%fits{number}" for number in range(len(buckets))])
    yield from _intervals(entry, sizes, accepted_sizes(graph))
    always = graph.bucket_limits.conditions
    for number, condition in enumerate(always):
        yield from _condition(entry, condition, sizes, f"%always{number}")
    if graph.limits is None:
        yield from _combinations(entry, buckets, sizes)
        return
    for number, condition in enumerate(c for c in graph.limits.conditions if c not in always):
        yield from _condition(entry, condition, sizes, f"%needs{number}", "%fits" if buckets else "")


def _named_dimensions(entry: EntryPoint) -> Iterator[tuple[int, int, str]]:
    """All named dimensions of the inputs: the input's number, the dimension's position, and its name."""
    for i, spec in enumerate(entry.inputs):
        for d, name in enumerate(spec.shape):
            if isinstance(name, str) and name != STEPS_DIM:
                yield i, d, name


def _refuse_size(entry: EntryPoint, number: int, dim: int, wanted: str, text: str) -> Iterator[str]:
    """Refuse a call if the size of dimension `dim` of input `number` is not `wanted`."""
    spec, name = entry.inputs[number], f"%refused{number}.{dim}.{wanted.strip('%')}"
    yield f"{name} = arith.cmpi ne, {wanted}, %size{number}.{dim} : index"
    yield f"scf.if {name} {{"
    yield from (f"  {line}" for line in exported(entry, number, name))
    shape = [wanted if d == dim else f"{name}.{d}" for d in range(len(spec.shape))]
    yield from (f"  {line}" for line in assert_shape(f"{name}.view", shape, f"{text}; {NOT_RUN};", name))
    yield "}"


def _fits(result: str, bucket: Bucket, sizes: Mapping[str, str]) -> Iterator[str]:
    """Whether every size is within the bucket."""
    yield f"{result}.0 = arith.constant true"
    for number, (name, size) in enumerate(bucket.items(), 1):
        yield f"{result}.{name}.n = arith.constant {size} : index"
        yield f"{result}.{name} = arith.cmpi ule, {sizes[name]}, {result}.{name}.n : index"
        yield f"{result}.{number} = arith.andi {result}.{number - 1}, {result}.{name} : i1"
    yield f"{result} = arith.andi {result}.0, {result}.{len(bucket)} : i1"


def _any_of(outcomes: Sequence[str]) -> Iterator[str]:
    """Define `%fits`: whether the call fits into any bucket."""
    yield f"%fits.0 = arith.ori {outcomes[0]}, {outcomes[0]} : i1"
    for number, outcome in enumerate(outcomes[1:], 1):
        yield f"%fits.{number} = arith.ori %fits.{number - 1}, {outcome} : i1"
    last = len(outcomes) - 1
    yield f"%fits = arith.ori %fits.{last}, %fits.{last} : i1"


def _first_occurrences(entry: EntryPoint) -> dict[str, tuple[int, int]]:
    """By name, the first input that has the dimension, and the dimension's position."""
    return {name: (i, d) for i, d, name in reversed(list(_named_dimensions(entry)))}


def _intervals(
    entry: EntryPoint, sizes: Mapping[str, str], accepted: Mapping[str, tuple[int, int | None]]
) -> Iterator[str]:
    """Refuse a size outside the interval of its dimension."""
    first = _first_occurrences(entry)
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
        yield from _refuse_size(entry, number, dim, nearest, text)


def _combinations(entry: EntryPoint, buckets: Sequence[Bucket], sizes: Mapping[str, str]) -> Iterator[str]:
    """Refuse sizes that each fit into some bucket, but do not fit into one bucket together."""
    listed = "; ".join(", ".join(f"{n} {size}" for n, size in bucket.items()) for bucket in buckets)
    limited = {name: size for name, size in sizes.items() if name in buckets[-1]}
    if not limited:
        return
    names = ", ".join(limited)
    text = f"{names}: the sizes fit into no bucket of [{listed}]; {NOT_RUN}; beside the largest, written as a shape:"
    wanted: list[str] = []
    for name, size in limited.items():
        yield f"%held.{name}.n = arith.constant {buckets[-1][name]} : index"
        yield f"%held.{name}.m = arith.minui {size}, %held.{name}.n : index"
        yield f"%held.{name} = arith.select %fits, {size}, %held.{name}.m : index"
        wanted.append(f"%held.{name}")
    yield from refuse_unless_equal(entry, 0, list(limited.values()), wanted, text, "%held")


def _condition(
    entry: EntryPoint, condition: Any, sizes: Mapping[str, str], name: str, unless: str = ""
) -> Iterator[str]:
    """Refuse sizes that violate a relation, except if `unless`, the SSA name of an i1, is true."""
    if any(s.name not in sizes for s in condition.free_symbols):
        return
    multiple = multiple_of(condition)
    side, other, relation = (multiple[0], multiple[1], None) if multiple else _balanced(condition)
    given = yield from _computed_index(side, sizes, f"{name}.given")
    bound = yield from _computed_index(other, sizes, f"{name}.bound")
    nearest = yield from (_multiple(given, bound, name) if relation is None else _nearest(given, bound, relation, name))
    if unless:
        yield f"{name}.wanted = arith.select {unless}, {given}, {nearest} : index"
        nearest = f"{name}.wanted"
    if side.is_Symbol:
        number, dim = _first_occurrences(entry)[side.name]
        text = f"{entry.inputs[number].name}: dimension {dim} ({side}): {needed(condition)}"
        yield from _refuse_size(entry, number, dim, nearest, text)
        return
    names = ", ".join(sorted(s.name for s in condition.free_symbols))
    text = f"{names}: {needed(condition)}; {NOT_RUN}; {side}, written as a shape:"
    yield from refuse_unless_equal(entry, 0, [given], [nearest], text, f"{name}.refused")


def needed(condition: Any) -> str:
    """The message of a refusal of sizes that violate `condition`."""
    return f"the step needs {spelled(condition)}"


def _balanced(condition: Any) -> tuple[Any, Any, Any]:
    """A relation's sides, without negative terms, and its type; a side that is a single dimension comes first."""
    terms = sympy.Add.make_args(sympy.expand(condition.lhs - condition.rhs))
    negative = [t for t in terms if t.could_extract_minus_sign()]
    left, right = sympy.Add(*(t for t in terms if t not in negative)), sympy.Add(*(-t for t in negative))
    if right.is_Symbol and not left.is_Symbol:
        return right, left, condition.reversed.func
    return left, right, condition.func


def _multiple(given: str, step: str, name: str) -> Generator[str, None, str]:
    """Compute the largest multiple of `step` up to `given`, but at least `step`; return its SSA name."""
    yield f"{name}.rest = arith.remui {given}, {step} : index"
    yield f"{name}.below = arith.subi {given}, {name}.rest : index"
    yield f"{name}.near = arith.maxui {name}.below, {step} : index"
    return f"{name}.near"


def _nearest(given: str, bound: str, relation: Any, name: str) -> Generator[str, None, str]:
    """Compute the number nearest to `given` that has the relation `relation` to `bound`; return its SSA name."""
    if relation is sympy.Eq:
        return bound
    if relation is sympy.Ne:
        yield f"{name}.equal = arith.cmpi eq, {given}, {bound} : index"
        yield f"{name}.one = arith.index_castui {name}.equal : i1 to index"
        yield f"{name}.near = arith.addi {given}, {name}.one : index"
        return f"{name}.near"
    operation, step = _NEAREST[relation]
    yield f"{name}.step = arith.constant {step} : index"
    yield f"{name}.edge = arith.addi {bound}, {name}.step : index"
    yield f"{name}.near = arith.{operation} {given}, {name}.edge : index"
    return f"{name}.near"


def _computed_index(size: Any, sizes: Mapping[str, str], name: str) -> Generator[str, None, str]:
    """Compute `size`, an expression of named dimensions or a number; return its SSA name."""
    found = yield from index_of(size, sizes, name)
    if found.startswith("%"):
        return found
    yield f"{name}.n = arith.constant {found} : index"
    return f"{name}.n"
