"""Entry points of a step with buckets: guards on the named dimensions, and the smallest bucket that fits.

Compiled code measures the inputs, refuses sizes that no function takes, pads the inputs, calls the function of one
bucket on them and on the true sizes, and cuts its outputs to their own sizes. A function of any size gets the inputs as
they are.

What comes after forward and backward, and every store, comes after the choice: it is compiled once, and IREE 3.13.0
loses the offset of a tensor in its buffer where two branches store it ("attempted to access an address outside of the
valid buffer range").
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irongrad.graph.dtypes import mlir_type
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.pipeline.assemble.index_expressions import index_of
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.assemble.refusal_messages import Lines, after, indented, refuse_unless, results_of
from irongrad.pipeline.assemble.size_guards import measured, refusals
from irongrad.pipeline.assemble.step_functions import (
    call,
    call_part,
    finish,
    spec_type,
    torch_dtype,
    typed_arguments,
    typed_results,
)
from irongrad.pipeline.assemble.storage import Storage
from irongrad.runtime.manifest import EntryPoint, TensorSpec


@dataclass(frozen=True)
class Dispatch:
    """What chooses between the forms of the first function of an entry point.

    Attributes:
        entry: the entry point, or one of its steps.
        graph: the step graph.
        sizes: the SSA name of each named dimension's size, an index.
        prefix: of the SSA names of its inputs, which end in their numbers.
        leading: how many dimensions the entry point's arguments have before those of an input.
    """

    entry: EntryPoint
    graph: StepGraph
    sizes: Mapping[str, str]
    prefix: str = "%arg"
    leading: int = 0

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The outputs of the entry point by name."""
        return {s.name: s for s in self.entry.outputs}

    @property
    def chain(self) -> tuple[str, ...]:
        """The functions that it runs; the first has a form for every bucket."""
        return chain_of(self.entry.name, self.graph)

    @property
    def packs(self) -> dict[Value, str]:
        """The packs of gradients that the functions after the first read, with their types."""
        storage = Storage(self.graph)
        typed = [pair for name in self.chain[1:] for pair in typed_arguments(self.graph.functions[name])]
        return {value: kind for value, kind in typed if storage.is_gathered(value)}

    @property
    def results(self) -> dict[Value, str]:
        """What each branch of the choice has, with types: the results of the first function, cut to their own sizes.

        Gradients are put into their packs in the branch, where the kernels that compute them write there; after it
        they would be copied.
        """
        typed, packed = typed_results(self.graph.functions[self.chain[0]]), self.packs
        members = {m for p in self.graph.packs if Value("pack", p.name) in packed for m in p.starts}
        own = {value: kind for value, kind in typed if value not in members}
        return {v: spec_type(self.outputs[v.name]) if v.kind == "output" else k for v, k in own.items()} | packed

    def form(self, number: int) -> str:
        """The name of that first function in bucket `number`, or for any size."""
        return self.graph.in_bucket(self.chain[0], self.graph.forms[number])

    def check(self, number: int) -> Function | None:
        """What checks the values of its inputs."""
        return self.graph.functions.get(f"check.{self.form(number)}")

    def kind(self, spec: TensorSpec, number: int) -> tuple[tuple[int | str, ...], str]:
        """The shape that an input has in bucket `number`, its own for a function of any size, and its type."""
        bucket = self.graph.forms[number]
        shape = tuple(bucket[d] if isinstance(d, str) and bucket else d for d in spec.shape)
        return shape, mlir_type(shape, torch_dtype(spec.dtype))

    def own_sizes(self, number: int) -> dict[int, str]:
        """The SSA names of the sizes of the named dimensions of input `number`."""
        shape = self.entry.inputs[number].shape
        return {d: f"%size{number}.{d + self.leading}" for d, name in enumerate(shape) if isinstance(name, str)}


# What is run in bucket `number`, or at any size.
Form = Callable[[Dispatch, int], Lines]


def sizes_of_call(entry: EntryPoint, graph: StepGraph) -> Generator[str, None, dict[str, str]]:
    """Measure the named dimensions, and refuse sizes that no function takes."""
    sizes: dict[str, str] = {}
    yield from measured(entry, sizes)
    yield from refusals(entry, graph, sizes)
    return sizes


def run_in_bucket(entry: EntryPoint, graph: StepGraph, values: Mapping[Value, str]) -> Lines:
    """Check sizes and values, and run the smallest bucket that they fit into."""
    dispatch = Dispatch(entry, graph, (yield from sizes_of_call(entry, graph)))
    return (yield from _finished(dispatch, values, _checked_form))


def value_limits(graph: StepGraph, sizes: Mapping[str, str], name: str) -> Generator[str, None, dict[str, list[str]]]:
    """The largest values of inputs that depend on the sizes of a call: by input, SSA names of indices.

    Args:
        graph: the step graph.
        sizes: the SSA name of each named dimension's size, an index.
        name: what the SSA names of what is computed begin with.
    """
    found: dict[str, list[str]] = {}
    for number, (given, limits) in enumerate(graph.value_limits.items()):
        known = [m for m in limits if all(s.name in sizes for s in m.free_symbols)]
        found[given] = []
        for i, limit in enumerate(known):
            found[given].append((yield from index_of(limit, sizes, f"{name}.{number}.{i}")))
    return found


def run_checked(dispatch: Dispatch, values: Mapping[Value, str]) -> Lines:
    """Run the smallest bucket that holds a call whose sizes and values are known to be right."""
    return (yield from _finished(dispatch, values, _form))


def checks_in_bucket(dispatch: Dispatch) -> Lines:
    """What the checks of values find, in the smallest bucket that holds a call."""
    check = dispatch.check(0)
    return (yield from _choice(dispatch, 0, ["tensor<i64>"] * (len(check.results) if check else 0), _outcomes))


def _finished(dispatch: Dispatch, values: Mapping[Value, str], form: Form) -> Lines:
    """Run a form of the first function, and what comes after it."""
    results = dispatch.results
    names = yield from _choice(dispatch, 0, list(results.values()), form)
    done = dict(zip(results, names, strict=True))
    yield from finish(dispatch.chain, dispatch.graph, dict(values), done)
    return [done[Value("output", s.name)] for s in dispatch.entry.outputs]


def _choice(dispatch: Dispatch, number: int, kinds: Sequence[str], form: Form) -> Lines:
    """Run `form` in bucket `number` where that fits, and else in one of those after it, or at any size."""
    if number == len(dispatch.graph.forms) - 1:
        return (yield from form(dispatch, number))
    yield f"%out{number}:{len(kinds)} = scf.if %fits{number} -> ({', '.join(kinds)}) {{"
    yield from _region(kinds, form(dispatch, number))
    yield "} else {"
    yield from _region(kinds, _choice(dispatch, number + 1, kinds, form))
    yield "}"
    return [f"%out{number}#{i}" for i in range(len(kinds))]


def _region(kinds: Sequence[str], lines: Lines) -> Iterator[str]:
    names = yield from indented(lines)
    yield f"  scf.yield {', '.join(names)} : {', '.join(kinds)}"


def _checked_form(dispatch: Dispatch, number: int) -> Lines:
    """Refuse values that are outside the range of an input, and call the function of a bucket."""
    values = yield from _given(dispatch, number)
    check = dispatch.check(number)
    if check is not None:
        yield from call(f"graph.check.{dispatch.form(number)}", check, values, f"%far.{number}")
        limits = yield from value_limits(dispatch.graph, dispatch.sizes, f"%largest.{number}")
        found = results_of(check, f"%far.{number}")
        passed = yield from refuse_unless(found, check, dispatch.entry, f"%passed.{number}", limits)
        yield from _after_checks(dispatch, number, values, passed)
    return (yield from _results(dispatch, number, values))


def _after_checks(dispatch: Dispatch, number: int, values: dict[Value, str], passed: Sequence[str]) -> Iterator[str]:
    """Nothing that reads an input as an index comes before the checks of it."""
    for spec in dispatch.entry.inputs:
        old = values[Value("input", spec.name)]
        shape, kind = dispatch.kind(spec, number)
        yield from after(passed, f"{old}.a", old, kind)
        same = [dispatch.sizes[d] for d in shape if isinstance(d, str)]
        yield f"{old}.s = flow.tensor.tie_shape {old}.a : {kind}{_braced(same)}"
        values[Value("input", spec.name)] = f"{old}.s"


def _form(dispatch: Dispatch, number: int) -> Lines:
    values = yield from _given(dispatch, number)
    return (yield from _results(dispatch, number, values))


def _outcomes(dispatch: Dispatch, number: int) -> Lines:
    check = dispatch.check(number)
    assert check is not None
    values = yield from _given(dispatch, number)
    yield from call(f"graph.check.{dispatch.form(number)}", check, values, f"%far.{number}")
    return results_of(check, f"%far.{number}")


def _given(dispatch: Dispatch, number: int) -> Generator[str, None, dict[Value, str]]:
    """The inputs padded to a bucket, or as they are for a function of any size, and the true sizes."""
    bucket = dispatch.graph.forms[number]
    names = yield from _inputs(dispatch, number)
    values = {Value("input", s.name): n for s, n in zip(dispatch.entry.inputs, names, strict=True)}
    for dim in bucket or ():
        values[Value("size", dim)] = f"%true.{dim}.{number}"
        yield from _true_size(f"%true.{dim}.{number}", dispatch.sizes.get(dim))
    return values


def _results(dispatch: Dispatch, number: int, values: Mapping[Value, str]) -> Lines:
    """Call the function of a bucket, or the one of any size, and cut its outputs to their own sizes."""
    graph, name = dispatch.graph, dispatch.form(number)
    yield from call_part(name, graph, values, f"%part.{number}")
    done: dict[Value, str] = {}
    for i, (value, kind) in enumerate(typed_results(graph.functions[name])):
        done[value] = f"%part.{number}#{i}"
        if value.kind == "output" and graph.forms[number] is not None:
            spec = dispatch.outputs[value.name]
            sizes = graph.output_sizes.get(spec.name, spec.shape)
            done[value] = yield from _cut(done[value], f"%cut{i}.{number}", kind, spec, sizes, dispatch.sizes)
    for i, value in enumerate(dispatch.packs):
        yield from Storage(graph).gathered(f"%pack{i}.{number}", value, done)
        done[value] = f"%pack{i}.{number}"
    return [done[value] for value in dispatch.results]


def _inputs(dispatch: Dispatch, number: int) -> Lines:
    """The inputs for the function of a bucket, or for that of any size: those of named sizes padded, the others copied.

    IREE cannot see through a copy, and so never writes into the caller's buffer. One barrier holds all of them: what is
    before a barrier is submitted, and waited for, by itself. Slices of stacked inputs have one each, for IREE 3.13.0
    takes the lifetime of a barrier's first operand for that of all its results (Stream, ResourceUsage.cpp; "failed to
    verify that all of {operands, results} have same type"), and a slice of a vector is a part of the caller's buffer
    where others are copies. tests/pipeline/iree/test_toolchain_sizes.py tells when that is gone.
    """
    inputs = dispatch.entry.inputs
    names, copied = [f"%in{i}.{number}" for i in range(len(inputs))], dict[str, str]()
    for i, spec in enumerate(inputs):
        shape, kind = dispatch.kind(spec, number)
        if shape != spec.shape:
            yield from _padded(names[i], i, shape, dispatch)
            continue
        # Its own sizes: IREE takes what a clone says for the sizes of the input itself, and drops a guard on them.
        own = _braced(dispatch.own_sizes(i).values())
        yield f"{names[i]}.c = flow.tensor.clone {dispatch.prefix}{i} : {kind}{own}"
        copied[names[i]] = kind
    groups = [[name] for name in copied] if dispatch.leading else [list(copied)]
    for group in filter(None, groups):
        results, operands = ", ".join(f"{n}.b" for n in group), ", ".join(f"{n}.c" for n in group)
        yield f"{results} = util.optimization_barrier {operands} : {', '.join(copied[n] for n in group)}"
    for i, spec in enumerate(inputs):
        if names[i] in copied:  # the barrier hides the sizes too
            same = [dispatch.sizes[d] for d in spec.shape if isinstance(d, str)]
            yield f"{names[i]} = flow.tensor.tie_shape {names[i]}.b : {copied[names[i]]}{_braced(same)}"
    return names


def _braced(names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f"{{{listed}}}" if listed else ""


def _padded(result: str, number: int, shape: tuple[int | str, ...], dispatch: Dispatch) -> Iterator[str]:
    """A copy of input `number` in the shape of a bucket.

    Its padding is zeros, as `irongrad.padding` expects. Every range of indices has zero, so the check of that can look
    at all elements.
    """
    spec, value = dispatch.entry.inputs[number], f"{dispatch.prefix}{number}"
    kind = mlir_type(shape, torch_dtype(spec.dtype))
    high = []
    for d, name in enumerate(spec.shape):
        high.append(f"{result}.{d}" if isinstance(name, str) else "0")
        if isinstance(name, str):
            yield f"{result}.{d}.n = arith.constant {shape[d]} : index"
            yield f"{result}.{d} = arith.subi {result}.{d}.n, {dispatch.sizes[name]} : index"
    element = kind.removesuffix(">").rpartition("x")[2]
    yield f"{result}.v = arith.constant {'0.0' if 'f' in element else '0'} : {element}"
    places = ", ".join(f"{result}.p{d}: index" for d in range(len(shape)))
    yield f"{result} = tensor.pad {value} low[{', '.join('0' for _ in shape)}] high[{', '.join(high)}] {{"
    yield f"^bb0({places}):"
    yield f"  tensor.yield {result}.v : {element}"
    yield f"}} : {spec_type(spec)} to {kind}"


def _true_size(result: str, size: str | None) -> Iterator[str]:
    """The size of a dimension as a tensor; of one that the entry point's inputs do not have, 1."""
    if size is None:
        yield f"{result} = arith.constant dense<1> : tensor<i64>"
        return
    yield f"{result}.n = arith.index_cast {size} : index to i64"
    yield f"{result} = tensor.from_elements {result}.n : tensor<i64>"


def _cut(
    value: str, result: str, kind: str, spec: TensorSpec, shape: Sequence[object], sizes: Mapping[str, str]
) -> Generator[str, None, str]:
    """The true elements of a result."""
    if not any(isinstance(d, str) for d in spec.shape):
        return value
    wanted: list[str] = []
    for d, size in enumerate(shape):
        wanted.append((yield from index_of(size, sizes, f"{result}.{d}")))
    zeros, ones = ", ".join("0" for _ in shape), ", ".join("1" for _ in shape)
    yield (
        f"{result} = tensor.extract_slice {value}[{zeros}] [{', '.join(wanted)}] [{ones}] : {kind} to {spec_type(spec)}"
    )
    return result
