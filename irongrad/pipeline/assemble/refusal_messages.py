"""Refusals in the module whose messages contain the refused number, and barriers that order code after them.

IREE 3.13.0 has only constant texts in operations that fail: cf.assert, util.status.check_ok and vm.fail take an
attribute. Only its check of a buffer view's shape prints numbers of the call
(runtime/src/iree/modules/hal/utils/buffer_diagnostics.c: "shape dimension 0 mismatch; expected 9 but have 12"). So a
refusal passes the refused number to that check as a size, and the nearest allowed number as the expected size.

All such refusals have the status INVALID_ARGUMENT, as IREE's own refusal of a wrong shape. FAILED_PRECONDITION is
reserved for calls at a wrong time, whatever their arguments.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.step_functions import call_loaded, spec_type
from irongrad.pipeline.assemble.storage import quoted, tensor_type
from irongrad.runtime.manifest import EntryPoint, TensorSpec
from irongrad.runtime.refusals import not_held, too_large, too_small

# A generator of lines that returns the SSA names of what they compute.
Lines = Generator[str, None, list[str]]


def guards(
    entry: EntryPoint, graph: StepGraph, values: dict[Value, str], passed: Sequence[str] = (), name: str = "%passed"
) -> Iterator[str]:
    """Check inputs, and indices computed from them, with the function `check.<name>`, before the call has any effect.

    All readers of the inputs are ordered after these checks, and after those whose outcomes are in `passed`. The SSA
    names that the lines define begin with `name`.
    """
    function = f"check.{chain_of(entry.name, graph)[0]}"
    check = graph.functions.get(function)
    if check is not None:
        yield from call_loaded(function, check, graph, values, f"{name}.far")
        outcomes = yield from refuse_unless(results_of(check, f"{name}.far"), check, entry, graph, name)
        passed = [*passed, *outcomes]
    for value in [v for v in values if v.kind == "input" and passed]:
        old, values[value] = values[value], f"{values[value]}.checked"
        yield from after(passed, values[value], old, tensor_type(graph.inputs[value.name]))


def refuse_unless(
    distances: Mapping[str, str],
    check: Function,
    entry: EntryPoint,
    graph: StepGraph,
    name: str,
    limits: Mapping[str, Sequence[str]] | None = None,
) -> Lines:
    """Refuse values outside the range of their input.

    Args:
        distances: by result of `check`, its SSA name: the distance of one value from its range's minimum. If any value
            of the input is out of range, it is the distance of such a value.
        check: the check function; its results have the names of inputs, or of computed indices.
        entry: the entry point, whose arguments the inputs are.
        graph: the step graph.
        name: the prefix of the SSA names that the lines define.
        limits: by input, the SSA names of further upper limits, indices.

    Returns:
        For each distance, the SSA name of an i1 that says whether it passed.
    """
    for i, (result, distance) in enumerate(distances.items()):
        own, (number, spec) = f"{name}.{i}", _checked(result, check, entry, graph)
        assert spec.minimum is not None
        assert spec.maximum is not None
        yield f"{own}.far = tensor.extract {distance}[] : tensor<i64>"
        yield f"{own}.least = arith.constant {spec.minimum} : i64"
        yield from _largest_distance(
            f"{own}.most", spec.maximum - spec.minimum, (limits or {}).get(result, ()), f"{own}.least"
        )
        yield f"{own}.zero = arith.constant 0 : i64"
        yield f"{own} = arith.cmpi ule, {own}.far, {own}.most : i64"
        yield f"{own}.near = arith.minsi {own}.far, {own}.most : i64"
        yield from _sum_as_index(f"{own}.given", f"{own}.far", f"{own}.least")
        yield from _sum_as_index(f"{own}.wanted", f"{own}.near", f"{own}.least")
        above = _broken(result, graph) or too_large(spec)
        yield from refuse_unless_equal(entry, number, [f"{own}.given"], [f"{own}.wanted"], above, f"{own}.high")
        yield f"{own}.above = arith.maxsi {own}.far, {own}.zero : i64"
        yield f"{own}.less = arith.subi {own}.above, {own}.far : i64"
        yield f"{own}.under = arith.index_cast {own}.less : i64 to index"
        yield f"{own}.none = arith.constant 0 : index"
        yield from refuse_unless_equal(entry, number, [f"{own}.under"], [f"{own}.none"], too_small(spec), f"{own}.low")
    return [f"{name}.{i}" for i in range(len(distances))]


def _checked(name: str, check: Function, entry: EntryPoint, graph: StepGraph) -> tuple[int, TensorSpec]:
    """The number of the argument in whose shape a message shows a value, and what the value must be.

    A computed index is shown in place of an input that the check takes.
    """
    numbers = {entry.key(spec.name): i for i, spec in enumerate(entry.inputs)}
    limit = next((r for r in graph.computed if r.input == name), None)
    if limit is None:
        return numbers[name], entry.inputs[numbers[name]]
    taken = [numbers[a.name] for a in check.arguments if a.kind == "input"]
    limits = tuple(map(str, limit.limits))
    return min(taken, default=0), TensorSpec(
        limit.place, "int64", (), limit.minimum, limit.maximum, limit.exempt, limits
    )


def _broken(name: str, graph: StepGraph) -> str:
    """The message about an assertion that does not hold; empty for an index."""
    limit = next((r for r in graph.computed if r.input == name and r.says), None)
    return not_held(limit.place, limit.says) if limit is not None else ""


def _largest_distance(result: str, constant: int, limits: Sequence[str], least: str) -> Iterator[str]:
    """The largest allowed distance from the minimum `least`, as `result`: the least of `constant` and all `limits`."""
    names = [f"{result}.{i}" for i in range(len(limits))] + [result]
    yield f"{names[0]} = arith.constant {constant} : i64"
    for before, lesser, limit in zip(names, names[1:], limits, strict=False):
        yield f"{lesser}.limit = arith.index_cast {limit} : index to i64"
        yield f"{lesser}.distance = arith.subi {lesser}.limit, {least} : i64"
        yield f"{lesser} = arith.minsi {before}, {lesser}.distance : i64"


def _sum_as_index(result: str, a: str, b: str) -> Iterator[str]:
    yield f"{result}.sum = arith.addi {a}, {b} : i64"
    yield f"{result} = arith.index_cast {result}.sum : i64 to index"


def refuse_unless_equal(
    entry: EntryPoint, number: int, given: Sequence[str], wanted: Sequence[str], text: str, name: str
) -> Iterator[str]:
    """Refuse a call if the indices `given` differ from `wanted`; the message is `text` with both.

    The message shows the indices as sizes of a view of argument `number`'s buffer. The view gets a last dimension of
    size 0, because a buffer must hold all elements of its views.
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
    """Export argument `number` as the buffer view `{name}.view`, with its sizes as `{name}.0`, `{name}.1`, …."""
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
    """Refuse a buffer view whose shape is not `shape`, with the message `text`; `exported` defines its type."""
    yield f'hal.buffer_view.assert<{view} : !hal.buffer_view> message("{quoted(text)}")'
    yield f"    shape([{', '.join(shape)}]) type({name}.type) encoding({name}.order)"


def results_of(check: Function, result: str) -> dict[str, str]:
    """By result of `check`, its SSA name after a call."""
    return {value.name: f"{result}#{i}" for i, value in enumerate(check.results)}


def indented(lines: Lines) -> Lines:
    """Indent `lines`, the body of a region."""
    try:
        while True:
            yield f"  {next(lines)}"
    except StopIteration as stop:
        names: list[str] = stop.value
        return names
