"""Refusals in the module that say what was given, and what has to come after them.

IREE 3.13.0 has constant texts only in what a program can fail with: cf.assert, util.status.check_ok and vm.fail take an
attribute. Its own check of a buffer view's shape alone prints numbers of the call
(runtime/src/iree/modules/hal/utils/buffer_diagnostics.c: "shape dimension 0 mismatch; expected 9 but have 12"). So a
number that is refused stands in the place of a size there, beside the nearest number that is allowed. All such refusals
have the status INVALID_ARGUMENT, as IREE's own of a wrong shape; FAILED_PRECONDITION is left to calls that come at a
wrong time, whatever they are given.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

from irongrad.graph.step_graph import Function
from irongrad.pipeline.assemble.step_functions import spec_type
from irongrad.pipeline.assemble.storage import quoted
from irongrad.runtime.manifest import EntryPoint
from irongrad.runtime.refusals import too_large, too_small

# A generator of lines that returns the SSA names of what they compute.
Lines = Generator[str, None, list[str]]


def refuse_unless(
    distances: Sequence[str],
    check: Function,
    entry: EntryPoint,
    name: str,
    limits: Mapping[str, Sequence[str]] | None = None,
) -> Lines:
    """Refuse values out of the range of their input; returns for each input that it passed, an i1.

    Args:
        distances: the SSA names of what `check` gave: a value's distance from the smallest of its range, for each.
        check: names the inputs.
        entry: the entry point, whose arguments they are.
        name: what the SSA names of what is computed begin with.
        limits: by input, the SSA names of further largest values, indices.
    """
    numbers = {spec.name: i for i, spec in enumerate(entry.inputs)}
    for i, (distance, result) in enumerate(zip(distances, check.results, strict=True)):
        own, number = f"{name}.{i}", numbers[result.name]
        spec = entry.inputs[number]
        assert spec.minimum is not None
        assert spec.maximum is not None
        yield f"{own}.far = tensor.extract {distance}[] : tensor<i64>"
        yield f"{own}.least = arith.constant {spec.minimum} : i64"
        yield from _most(f"{own}.most", spec.maximum - spec.minimum, (limits or {}).get(spec.name, ()), f"{own}.least")
        yield f"{own}.zero = arith.constant 0 : i64"
        yield f"{own} = arith.cmpi ule, {own}.far, {own}.most : i64"
        yield f"{own}.near = arith.minsi {own}.far, {own}.most : i64"
        yield from _sum_as_index(f"{own}.given", f"{own}.far", f"{own}.least")
        yield from _sum_as_index(f"{own}.wanted", f"{own}.near", f"{own}.least")
        yield from refuse_unless_equal(
            entry, number, [f"{own}.given"], [f"{own}.wanted"], too_large(spec), f"{own}.high"
        )
        yield f"{own}.above = arith.maxsi {own}.far, {own}.zero : i64"
        yield f"{own}.less = arith.subi {own}.above, {own}.far : i64"
        yield f"{own}.under = arith.index_cast {own}.less : i64 to index"
        yield f"{own}.none = arith.constant 0 : index"
        yield from refuse_unless_equal(entry, number, [f"{own}.under"], [f"{own}.none"], too_small(spec), f"{own}.low")
    return [f"{name}.{i}" for i in range(len(distances))]


def _most(result: str, constant: int, limits: Sequence[str], least: str) -> Iterator[str]:
    """The largest distance from the smallest value."""
    names = [f"{result}.{i}" for i in range(len(limits))] + [result]
    yield f"{names[0]} = arith.constant {constant} : i64"
    for before, after, limit in zip(names, names[1:], limits, strict=False):
        yield f"{after}.limit = arith.index_cast {limit} : index to i64"
        yield f"{after}.distance = arith.subi {after}.limit, {least} : i64"
        yield f"{after} = arith.minsi {before}, {after}.distance : i64"


def _sum_as_index(result: str, a: str, b: str) -> Iterator[str]:
    yield f"{result}.sum = arith.addi {a}, {b} : i64"
    yield f"{result} = arith.index_cast {result}.sum : i64 to index"


def refuse_unless_equal(
    entry: EntryPoint, number: int, given: Sequence[str], wanted: Sequence[str], text: str, name: str
) -> Iterator[str]:
    """Refuse a call in which indices that are `given` differ from those `wanted`, with a text and both.

    The message has them as sizes of a tensor in the buffer of argument `number`. Another dimension of size 0 comes
    after them, for a buffer has to hold all elements of its views.
    """
    yield f"{name}.ne = arith.constant false"
    differs = f"{name}.ne"
    for i, (one, other) in enumerate(zip(given, wanted, strict=True)):
        yield f"{name}.ne{i} = arith.cmpi ne, {one}, {other} : index"
        yield f"{name}.or{i} = arith.ori {differs}, {name}.ne{i} : i1"
        differs = f"{name}.or{i}"
    yield f"scf.if {differs} {{"
    yield from (f"  {line}" for line in exported(entry, number, name))
    yield f"  {name}.buffer = hal.buffer_view.buffer<{name}.view : !hal.buffer_view> : !hal.buffer"
    yield f"  {name}.length = hal.buffer.length<{name}.buffer : !hal.buffer> : index"
    yield f"  {name}.none = arith.constant 0 : index"
    yield f"  {name}.shown = hal.buffer_view.create buffer({name}.buffer : !hal.buffer)[{name}.none, {name}.length]"
    shape = ", ".join([*given, f"{name}.none"])
    yield f"      shape([{shape}]) type({name}.type) encoding({name}.order) : !hal.buffer_view"
    yield from (f"  {line}" for line in assert_shape(f"{name}.shown", [*wanted, f"{name}.none"], text, name))
    yield "}"


def exported(entry: EntryPoint, number: int, name: str) -> Iterator[str]:
    """Argument `number` as `{name}.view`, with its sizes as `{name}.0`, `{name}.1`, …."""
    spec = entry.inputs[number]
    kind = spec_type(spec)
    own: list[str] = []
    for d, size in enumerate(spec.shape):
        yield f"{name}.{d}.d = arith.constant {d} : index"
        yield f"{name}.{d} = tensor.dim %arg{number}, {name}.{d}.d : {kind}"
        if isinstance(size, str):
            own.append(f"{name}.{d}")
    sizes = f"{{{', '.join(own)}}}" if own else ""
    yield f"{name}.view = hal.tensor.export %arg{number} : {kind}{sizes} -> !hal.buffer_view"
    element = kind.removesuffix(">").rpartition("x")[2].removeprefix("tensor<")
    yield f"{name}.type = hal.element_type<{element}> : i32"
    yield f"{name}.order = hal.encoding_type<dense_row_major> : i32"


def assert_shape(view: str, shape: Sequence[str], text: str, name: str) -> Iterator[str]:
    """Refuse a buffer view of another shape, in words; `exported` has computed its type."""
    yield f'hal.buffer_view.assert<{view} : !hal.buffer_view> message("{quoted(text)}")'
    yield f"    shape([{', '.join(shape)}]) type({name}.type) encoding({name}.order)"


def results_of(check: Function, result: str) -> list[str]:
    """The SSA names of the results of a call of `check`."""
    return [f"{result}#{i}" for i in range(len(check.results))]


def after(passed: Sequence[str], result: str, value: str, kind: str) -> Iterator[str]:
    """`value`, but nothing that is computed from it comes before the outcome of a check.

    IREE 3.13.0 sorts the operations of a block by what they use alone (ScheduleExecutionPass), so a call that changes
    the state could come before the refusal.
    """
    names = [result, *(f"{result}.{i}" for i in range(len(passed)))]
    kinds = ", ".join([kind, *("i1" for _ in passed)])
    yield f"{', '.join(names)} = util.optimization_barrier {', '.join([value, *passed])} : {kinds}"


def indented(lines: Lines) -> Lines:
    """`lines` as the body of a region."""
    try:
        while True:
            yield f"  {next(lines)}"
    except StopIteration as stop:
        names: list[str] = stop.value
        return names
