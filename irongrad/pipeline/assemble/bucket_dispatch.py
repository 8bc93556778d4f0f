"""Entry points of a step with buckets: guards on the named dimensions, and dispatch to the smallest bucket that fits.

The compiled code measures the inputs, refuses sizes that no function takes, and pads the inputs to a bucket along the
dimensions that the bucket names. It calls the function of the bucket on the padded inputs and the true sizes, and
slices the outputs to their true sizes. A function of any size gets the inputs unpadded.

The branch on the bucket contains only forward and backward. The functions after them, and all stores, follow the
branch, so they are compiled once. Stores in two branches would fail: IREE 3.13.0 then loses the offset of the tensor in
its buffer ("attempted to access an address outside of the valid buffer range").
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from irongrad.graph.dtypes import mlir_type
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.pipeline.assemble.exchange import begin
from irongrad.pipeline.assemble.function_calls import typed_arguments, typed_results
from irongrad.pipeline.assemble.index_expressions import index_of
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.refusal_messages import Lines, indented, refuse_unless, results_of
from irongrad.pipeline.assemble.size_guards import measured, refusals
from irongrad.pipeline.assemble.statistics import is_collective
from irongrad.pipeline.assemble.step_functions import (
    call_loaded,
    call_part,
    finish,
    samples_of,
    spec_type,
    torch_dtype,
)
from irongrad.pipeline.assemble.storage import Storage
from irongrad.runtime.manifest import EntryPoint, TensorSpec
from irongrad.sizes.buckets import open_dimensions


@dataclass(frozen=True)
class Dispatch:
    """The choice between the forms of an entry point's first function: one form per bucket, and one for any size.

    Attributes:
        entry: the entry point; for `train_steps`, with the inputs and the output of a single step.
        graph: the step graph; a form's number is its position in `graph.forms`.
        sizes: by named dimension, the SSA name of its size, an index.
        prefix: the prefix of the SSA names of the inputs; the input's number follows it.
        leading: how many leading dimensions the entry point's arguments have in addition to those of an input.
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
        """The functions that the entry point runs, in order; the first one has several forms."""
        return chain_of(self.entry.name, self.graph)

    @property
    def packs(self) -> dict[Value, str]:
        """The gradient packs that the functions after the first read, with their MLIR types."""
        storage = Storage(self.graph)
        typed = [pair for name in self.chain[1:] for pair in typed_arguments(self.graph.functions[name])]
        return {value: kind for value, kind in typed if storage.is_gathered(value)}

    @property
    def results(self) -> dict[Value, str]:
        """The results of every branch, with MLIR types: those of the first function, with outputs at their true sizes.

        Gradients are packed inside the branch, where their kernels write directly into the pack. After the branch, IREE
        would copy them.
        """
        typed, packed = typed_results(self.graph.functions[self.chain[0]]), self.packs
        members = {m for p in self.graph.packs if Value("pack", p.name) in packed for m in p.starts}
        own = {value: kind for value, kind in typed if value not in members}
        return {v: spec_type(self.outputs[v.name]) if v.kind == "output" else k for v, k in own.items()} | packed

    def form(self, number: int) -> str:
        """The name of form `number` of the first function."""
        return self.graph.in_bucket(self.chain[0], self.graph.forms[number])

    def check(self, number: int) -> Function | None:
        """The function that checks the values of a call of form `number`; None if there is nothing to check."""
        return self.graph.functions.get(f"check.{self.form(number)}")

    def kind(self, spec: TensorSpec, number: int) -> tuple[tuple[int | str, ...], str]:
        """The shape of an input in form `number`, and its MLIR type; open dimensions keep the size of the call."""
        bucket = self.graph.forms[number] or {}
        shape = tuple(bucket.get(d, d) if isinstance(d, str) else d for d in spec.shape)
        return shape, mlir_type(shape, torch_dtype(spec.dtype))

    def own_sizes(self, number: int) -> dict[int, str]:
        """The SSA names of the sizes of input `number`, by position of its named dimensions."""
        shape = self.entry.inputs[number].shape
        return {d: f"%size{number}.{d + self.leading}" for d, name in enumerate(shape) if isinstance(name, str)}


# Writes the code that runs in form `number`; see `Dispatch`.
Form = Callable[[Dispatch, int], Lines]


def sizes_of_call(entry: EntryPoint, graph: StepGraph) -> Generator[str, None, dict[str, str]]:
    """Measure the named dimensions and refuse sizes that no function takes; return SSA names by dimension."""
    sizes: dict[str, str] = {}
    yield from measured(entry, sizes)
    yield from refusals(entry, graph, sizes)
    return sizes


def run_in_bucket(entry: EntryPoint, graph: StepGraph, values: Mapping[Value, str]) -> Lines:
    """Check the sizes and values of a call, and run it in the smallest bucket that fits."""
    dispatch = Dispatch(entry, graph, (yield from sizes_of_call(entry, graph)))
    return (yield from _run_chain(dispatch, values, _checked_form))


def value_limits(graph: StepGraph, sizes: Mapping[str, str], name: str) -> Generator[str, None, dict[str, list[str]]]:
    """Compute the upper limits of input values, and of computed indices, that depend on the sizes of a call.

    Args:
        graph: the step graph.
        sizes: by named dimension, the SSA name of its size, an index.
        name: the prefix of the SSA names that the lines define.

    Returns:
        By input or computed index, the SSA names of its limits, indices. Limits on dimensions that `sizes` lacks are
        left out.
    """
    found: dict[str, list[str]] = {}
    for number, (input_name, limits) in enumerate(graph.value_limits.items()):
        known = [m for m in limits if all(s.name in sizes for s in m.free_symbols)]
        found[input_name] = []
        for i, limit in enumerate(known):
            found[input_name].append((yield from index_of(limit, sizes, f"{name}.{number}.{i}")))
    return found


def run_checked(dispatch: Dispatch, values: Mapping[Value, str]) -> Lines:
    """Run a call in the smallest bucket that fits; its sizes and values have been checked before."""
    return (yield from _run_chain(dispatch, values, _unchecked_form))


def run_step(dispatch: Dispatch, values: Mapping[Value, str], stacked: EntryPoint) -> Lines:
    """As `run_checked`, but check the values now; `stacked` is the entry point whose arguments hold the inputs."""
    return (yield from _run_chain(dispatch, values, partial(_checked_form, given=stacked)))


def checks_in_bucket(dispatch: Dispatch) -> Generator[str, None, dict[str, str]]:
    """Run the value checks of a call in the smallest bucket that fits; return the SSA names by result."""
    check = dispatch.check(0)
    assert check is not None
    names = yield from _first_form_that_fits(dispatch, 0, ["tensor<i64>"] * len(check.results), _check_outcomes)
    return {result.name: name for result, name in zip(check.results, names, strict=True)}


def _run_chain(dispatch: Dispatch, values: Mapping[Value, str], form: Form) -> Lines:
    """Run a form of the first function, then the functions after it; return the SSA names of the outputs."""
    results = dispatch.results
    names = yield from _first_form_that_fits(dispatch, 0, list(results.values()), form)
    done = dict(zip(results, names, strict=True))
    new = yield from finish(dispatch.chain, dispatch.graph, dict(values), done)
    return [new[Value("output", s.name)] for s in dispatch.entry.outputs]


def _first_form_that_fits(dispatch: Dispatch, number: int, kinds: Sequence[str], form: Form) -> Lines:
    """Run `form` for the first form number, from `number` on, whose bucket fits the call."""
    if number == len(dispatch.graph.forms) - 1:
        return (yield from form(dispatch, number))
    yield f"%out{number}:{len(kinds)} = scf.if %fits{number} -> ({', '.join(kinds)}) {{"
    yield from _region(kinds, form(dispatch, number))
    yield "} else {"
    yield from _region(kinds, _first_form_that_fits(dispatch, number + 1, kinds, form))
    yield "}"
    return [f"%out{number}#{i}" for i in range(len(kinds))]


def _region(kinds: Sequence[str], lines: Lines) -> Iterator[str]:
    names = yield from indented(lines)
    yield f"  scf.yield {', '.join(names)} : {', '.join(kinds)}"


def _checked_form(dispatch: Dispatch, number: int, given: EntryPoint | None = None) -> Lines:
    """Refuse values outside the range of their input, and call the function of form `number`.

    `given` is the entry point whose arguments hold the inputs, if it is another one than that of `dispatch`.
    """
    values = yield from _form_arguments(dispatch, number)
    check = dispatch.check(number)
    if check is not None:
        yield from call_loaded(f"check.{dispatch.form(number)}", check, dispatch.graph, values, f"%far.{number}")
        limits = yield from value_limits(dispatch.graph, dispatch.sizes, f"%largest.{number}")
        found, entry = results_of(check, f"%far.{number}"), given or dispatch.entry
        passed = yield from refuse_unless(found, check, entry, dispatch.graph, f"%passed.{number}", limits)
        yield from _after_checks(dispatch, number, values, passed)
    return (yield from _call_form(dispatch, number, values))


def _after_checks(dispatch: Dispatch, number: int, values: dict[Value, str], passed: Sequence[str]) -> Iterator[str]:
    """Order all readers of the inputs after the checks, so that no unchecked value becomes an index."""
    for spec in dispatch.entry.inputs:
        value = Value("input", dispatch.entry.key(spec.name))
        old = values[value]
        shape, kind = dispatch.kind(spec, number)
        yield from after(passed, f"{old}.a", old, kind)
        same = [dispatch.sizes[d] for d in shape if isinstance(d, str)]
        yield f"{old}.s = flow.tensor.tie_shape {old}.a : {kind}{_braced(same)}"
        values[value] = f"{old}.s"


def _unchecked_form(dispatch: Dispatch, number: int) -> Lines:
    values = yield from _form_arguments(dispatch, number)
    return (yield from _call_form(dispatch, number, values))


def _check_outcomes(dispatch: Dispatch, number: int) -> Lines:
    check = dispatch.check(number)
    assert check is not None
    values = yield from _form_arguments(dispatch, number)
    yield from call_loaded(f"check.{dispatch.form(number)}", check, dispatch.graph, values, f"%far.{number}")
    return list(results_of(check, f"%far.{number}").values())


def _form_arguments(dispatch: Dispatch, number: int) -> Generator[str, None, dict[Value, str]]:
    """The arguments of form `number`: the inputs, padded to a bucket if the form has one, and the true sizes."""
    bucket = dispatch.graph.forms[number]
    names = yield from _form_inputs(dispatch, number)
    keys = (Value("input", dispatch.entry.key(s.name)) for s in dispatch.entry.inputs)
    values = dict(zip(keys, names, strict=True))
    sized = (*bucket, *open_dimensions(dispatch.graph.dynamic, bucket)) if bucket is not None else ()
    for dim in sized:
        values[Value("size", dim)] = f"%true.{dim}.{number}"
        yield from _true_size(f"%true.{dim}.{number}", dispatch.sizes.get(dim))
    return values


def _call_form(dispatch: Dispatch, number: int, values: Mapping[Value, str]) -> Lines:
    """Call the function of form `number`, slice its outputs to their true sizes, and pack its gradients."""
    graph, name = dispatch.graph, dispatch.form(number)
    if is_collective(dispatch.chain, graph):
        yield from _begun(dispatch, number)
    yield from call_part(name, graph, values, f"%part.{number}")
    done: dict[Value, str] = {}
    for i, (value, kind) in enumerate(typed_results(graph.functions[name])):
        done[value] = f"%part.{number}#{i}"
        if value.kind == "output" and graph.forms[number] is not None:
            spec = dispatch.outputs[value.name]
            sizes = graph.output_sizes.get(dispatch.chain[0], {}).get(spec.name, spec.shape)
            done[value] = yield from _sliced_to_size(
                done[value], f"%cut{i}.{number}", kind, spec, sizes, dispatch.sizes
            )
    for i, value in enumerate(dispatch.packs):
        yield from Storage(graph).gathered(f"%pack{i}.{number}", value, done)
        done[value] = f"%pack{i}.{number}"
    return [done[value] for value in dispatch.results]


def _begun(dispatch: Dispatch, number: int) -> Iterator[str]:
    """Start a collective step, once the guards of the call have passed."""
    size, samples = samples_of(dispatch.chain, dispatch.graph), f"%samples.{number}"
    if isinstance(size, int):
        yield f"{samples} = arith.constant {size} : i64"
    else:
        yield f"{samples} = arith.index_cast {dispatch.sizes[size]} : index to i64"
    yield from begin(samples)


def _form_inputs(dispatch: Dispatch, number: int) -> Lines:
    """The inputs for form `number`: inputs whose shape the bucket changes are padded, all others are copied.

    IREE cannot see through the copy and its barrier, so it never writes into the caller's buffer. All copies share one
    barrier, because IREE submits the work before each barrier separately and waits for it. Slices of stacked inputs
    have a barrier each. IREE 3.13.0 gives all results of a barrier the lifetime of its first operand (Stream,
    ResourceUsage.cpp; "failed to verify that all of {operands, results} have same type"). But a slice of a vector is
    part of the caller's buffer, while other slices are copies. tests/pipeline/iree/test_toolchain_sizes.py tells when
    this is fixed.
    """
    inputs = dispatch.entry.inputs
    names, copied = [f"%in{i}.{number}" for i in range(len(inputs))], dict[str, str]()
    for i, spec in enumerate(inputs):
        shape, kind = dispatch.kind(spec, number)
        if shape != spec.shape:
            yield from _padded(names[i], i, shape, dispatch)
            continue
        # The measured sizes: IREE takes the sizes of the clone for those of the input, and would drop a guard on them.
        own = _braced(dispatch.own_sizes(i).values())
        yield f"{names[i]}.c = flow.tensor.clone {dispatch.prefix}{i} : {kind}{own}"
        copied[names[i]] = kind
    groups = [[name] for name in copied] if dispatch.leading else [list(copied)]
    for group in filter(None, groups):
        results, operands = ", ".join(f"{n}.b" for n in group), ", ".join(f"{n}.c" for n in group)
        yield f"{results} = util.optimization_barrier {operands} : {', '.join(copied[n] for n in group)}"
    for i, spec in enumerate(inputs):
        if names[i] in copied:  # the barrier hides the sizes from IREE
            same = [dispatch.sizes[d] for d in spec.shape if isinstance(d, str)]
            yield f"{names[i]} = flow.tensor.tie_shape {names[i]}.b : {copied[names[i]]}{_braced(same)}"
    return names


def _braced(names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f"{{{listed}}}" if listed else ""


def _padded(result: str, number: int, shape: tuple[int | str, ...], dispatch: Dispatch) -> Iterator[str]:
    """A copy of input `number`, padded to the shape of a bucket.

    The padding is zeros, as `irongrad.padding` expects. A range check of an input leaves it out where zero is not in
    the range (`irongrad.pipeline.guards.range_checks`).
    """
    spec, value = dispatch.entry.inputs[number], f"{dispatch.prefix}{number}"
    kind = mlir_type(shape, torch_dtype(spec.dtype))
    high = []
    for d, name in enumerate(spec.shape):
        is_padded = isinstance(name, str) and shape[d] != name
        high.append(f"{result}.{d}" if is_padded else "0")
        if isinstance(name, str) and is_padded:
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
    """The size of a dimension as a rank-0 tensor; 1 if the entry point's inputs lack the dimension."""
    if size is None:
        yield f"{result} = arith.constant dense<1> : tensor<i64>"
        return
    yield f"{result}.n = arith.index_cast {size} : index to i64"
    yield f"{result} = tensor.from_elements {result}.n : tensor<i64>"


def _sliced_to_size(
    value: str, result: str, kind: str, spec: TensorSpec, shape: Sequence[object], sizes: Mapping[str, str]
) -> Generator[str, None, str]:
    """Slice a padded result to its true sizes; return the SSA name."""
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
