"""Entry points of a step with buckets: guards on the named dimensions, and the smallest bucket that fits.

Compiled code measures the inputs, refuses sizes that no function takes, pads the inputs, calls the function of one
bucket on them and on the true sizes, and cuts its outputs to their own sizes. A function of any size gets the inputs as
they are. What comes after forward and backward,
and every store, comes after the choice: it is compiled once, and IREE 3.13.0 loses the offset of a tensor in its
buffer where two branches store it ("attempted to access an address outside of the valid buffer range").
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irongrad.buckets import Bucket
from irongrad.pipeline.assertions import Lines, indented, messages_of, refuse_unless, results_of
from irongrad.pipeline.cores import call, call_part, finish, spec_type, torch_dtype
from irongrad.pipeline.dtypes import mlir_type
from irongrad.pipeline.graphs import Function, StepGraph, Value
from irongrad.pipeline.indices import index_of
from irongrad.pipeline.interface import chain_of
from irongrad.pipeline.size_guards import measured, refusals
from irongrad.pipeline.storage import tensor_type
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
    def kinds(self) -> list[str]:
        """The types of the results of that first function, outputs cut to their own sizes."""
        function = self.graph.functions[self.chain[0]]
        return [
            spec_type(self.outputs[value.name]) if value.kind == "output" else tensor_type(made)
            for value, made in zip(function.results, function.results_like(), strict=True)
        ]

    def form(self, number: int) -> str:
        """The name of that first function in bucket `number`, or for any size."""
        return self.graph.in_bucket(self.chain[0], self.graph.forms[number])

    def check(self, number: int) -> Function | None:
        """What checks the values of its inputs."""
        return self.graph.functions.get(f"check.{self.form(number)}")

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


def run_checked(dispatch: Dispatch, values: Mapping[Value, str]) -> Lines:
    """Run the smallest bucket that holds a call whose sizes and values are known to be right."""
    return (yield from _finished(dispatch, values, _form))


def checks_in_bucket(dispatch: Dispatch) -> Lines:
    """The outcomes of the checks of values, in the smallest bucket that holds a call."""
    return (yield from _choice(dispatch, 0, ["tensor<i1>"] * len(messages_in(dispatch)), _outcomes))


def messages_in(dispatch: Dispatch) -> list[str]:
    """What is said for each of those checks that fails, in every bucket."""
    check = dispatch.check(0)
    return messages_of(check) if check is not None else []


def _finished(dispatch: Dispatch, values: Mapping[Value, str], form: Form) -> Lines:
    """Run a form of the first function, and what comes after it."""
    names = yield from _choice(dispatch, 0, dispatch.kinds, form)
    done = dict(zip(dispatch.graph.functions[dispatch.chain[0]].results, names, strict=True))
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
        yield from call(f"graph.check.{dispatch.form(number)}", check, values, f"%ok.{number}")
        yield from refuse_unless(results_of(check, f"%ok.{number}"), messages_of(check), f"%passed.{number}")
    return (yield from _results(dispatch, number, values))


def _form(dispatch: Dispatch, number: int) -> Lines:
    values = yield from _given(dispatch, number)
    return (yield from _results(dispatch, number, values))


def _outcomes(dispatch: Dispatch, number: int) -> Lines:
    check = dispatch.check(number)
    assert check is not None
    values = yield from _given(dispatch, number)
    yield from call(f"graph.check.{dispatch.form(number)}", check, values, f"%ok.{number}")
    return results_of(check, f"%ok.{number}")


def _given(dispatch: Dispatch, number: int) -> Generator[str, None, dict[Value, str]]:
    """The inputs padded to a bucket, or as they are for a function of any size, and the true sizes."""
    bucket = dispatch.graph.forms[number]
    values: dict[Value, str] = {}
    for i, spec in enumerate(dispatch.entry.inputs):
        result = values[Value("input", spec.name)] = f"%in{i}.{number}"
        if bucket is None or not dispatch.own_sizes(i):
            yield from _private(result, f"{dispatch.prefix}{i}", spec, dispatch.own_sizes(i), dispatch.sizes)
        else:
            yield from _padded(result, f"{dispatch.prefix}{i}", spec, bucket, dispatch.sizes)
    for dim in bucket or ():
        values[Value("size", dim)] = f"%true.{dim}.{number}"
        yield from _true_size(f"%true.{dim}.{number}", dispatch.sizes.get(dim))
    return values


def _results(dispatch: Dispatch, number: int, values: Mapping[Value, str]) -> Lines:
    """Call the function of a bucket, or the one of any size, and cut its outputs to their own sizes."""
    graph, name = dispatch.graph, dispatch.form(number)
    yield from call_part(name, graph, values, f"%part.{number}")
    function = graph.functions[name]
    names = []
    for i, (value, made) in enumerate(zip(function.results, function.results_like(), strict=True)):
        result = f"%part.{number}#{i}"
        if value.kind == "output" and graph.forms[number] is not None:
            spec = dispatch.outputs[value.name]
            sizes = graph.output_sizes.get(spec.name, spec.shape)
            result = yield from _cut(result, f"%cut{i}.{number}", tensor_type(made), spec, sizes, dispatch.sizes)
        names.append(result)
    return names


def _private(
    result: str, value: str, spec: TensorSpec, own: Mapping[int, str], sizes: Mapping[str, str]
) -> Iterator[str]:
    """A copy of an input at its own sizes, which IREE cannot see through.

    IREE takes the sizes that a clone names for the input's, and drops a guard on them: so it names `own`, and the
    copy, of which the barrier hides the sizes too, gets those that all inputs have.
    """
    kind = spec_type(spec)
    yield f"{result}.c = flow.tensor.clone {value} : {kind}{_braced(own.values())}"
    hidden = f"{result}.b" if own else result
    yield f"{hidden} = util.optimization_barrier {result}.c : {kind}"
    if own:
        same = [sizes[d] for d in spec.shape if isinstance(d, str)]
        yield f"{result} = flow.tensor.tie_shape {hidden} : {kind}{_braced(same)}"


def _braced(names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f"{{{listed}}}" if listed else ""


def _padded(result: str, value: str, spec: TensorSpec, bucket: Bucket, sizes: Mapping[str, str]) -> Iterator[str]:
    """A copy of an input at the sizes of the bucket, which IREE cannot see through.

    Its padding is in the input's range: the check of that looks at all elements.
    """
    shape = tuple(bucket[d] if isinstance(d, str) else d for d in spec.shape)
    kind = mlir_type(shape, torch_dtype(spec.dtype))
    high = []
    for d, name in enumerate(spec.shape):
        high.append(f"{result}.{d}" if isinstance(name, str) else "0")
        if isinstance(name, str):
            yield f"{result}.{d}.n = arith.constant {bucket[name]} : index"
            yield f"{result}.{d} = arith.subi {result}.{d}.n, {sizes[name]} : index"
    element = kind.removesuffix(">").rpartition("x")[2]
    filler = 0 if spec.minimum is None or spec.minimum <= 0 <= (spec.maximum or 0) else spec.minimum
    yield f"{result}.v = arith.constant {float(filler) if 'f' in element else filler} : {element}"
    places = ", ".join(f"{result}.p{d}: index" for d in range(len(shape)))
    yield f"{result}.c = tensor.pad {value} low[{', '.join('0' for _ in shape)}] high[{', '.join(high)}] {{"
    yield f"^bb0({places}):"
    yield f"  tensor.yield {result}.v : {element}"
    yield f"}} : {spec_type(spec)} to {kind}"
    yield f"{result} = util.optimization_barrier {result}.c : {kind}"


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
