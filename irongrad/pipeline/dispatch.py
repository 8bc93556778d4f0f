"""Entry points of a step with buckets: guards on the named dimensions, and the smallest bucket that fits.

Compiled code measures the inputs, refuses sizes that no function takes, pads the inputs, calls the function of one
bucket on them and on the true sizes, and cuts its outputs to their own sizes. A function of any size gets the inputs as
they are. What comes after forward and backward,
and every store, comes after the choice: it is compiled once, and IREE 3.13.0 loses the offset of a tensor in its
buffer where two branches store it ("attempted to access an address outside of the valid buffer range").
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irongrad.buckets import Bucket
from irongrad.pipeline.cores import call, call_part, finish, spec_type, torch_dtype
from irongrad.pipeline.dtypes import mlir_type
from irongrad.pipeline.graphs import StepGraph, Value
from irongrad.pipeline.indices import index_of
from irongrad.pipeline.interface import chain_of
from irongrad.pipeline.size_guards import measured, refusals
from irongrad.pipeline.storage import quoted, tensor_type
from irongrad.runtime.manifest import EntryPoint, TensorSpec

# A generator of lines that returns the SSA names of what they compute.
Lines = Generator[str, None, list[str]]


@dataclass(frozen=True)
class _Dispatch:
    """One entry point with buckets.

    Attributes:
        entry: the entry point; its arguments are `%arg0`, `%arg1`, ….
        graph: the step graph.
        values: the SSA names of the hyperparameters.
        sizes: the SSA name of each named dimension's size, an index.
    """

    entry: EntryPoint
    graph: StepGraph
    values: Mapping[Value, str]
    sizes: Mapping[str, str]

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


def run_in_bucket(entry: EntryPoint, graph: StepGraph, values: Mapping[Value, str]) -> Lines:
    """Check the sizes and run the smallest bucket that they fit into."""
    sizes: dict[str, str] = {}
    yield from measured(entry, sizes)
    dispatch = _Dispatch(entry, graph, values, sizes)
    yield from refusals(entry, graph, sizes)
    names = yield from _choice(dispatch, 0)
    done = dict(zip(graph.functions[dispatch.chain[0]].results, names, strict=True))
    yield from finish(dispatch.chain, graph, dict(values), done)
    return [done[Value("output", s.name)] for s in entry.outputs]


def _choice(dispatch: _Dispatch, number: int) -> Lines:
    """Run bucket `number` where it fits, and else one of those after it, or what takes any size."""
    if number == len(dispatch.graph.forms) - 1:
        return (yield from _form(dispatch, number))
    results = len(dispatch.kinds)
    yield f"%out{number}:{results} = scf.if %fits{number} -> ({', '.join(dispatch.kinds)}) {{"
    yield from _region(dispatch, _form(dispatch, number))
    yield "} else {"
    yield from _region(dispatch, _choice(dispatch, number + 1))
    yield "}"
    return [f"%out{number}#{i}" for i in range(results)]


def _region(dispatch: _Dispatch, lines: Lines) -> Iterator[str]:
    names: list[str] = []

    def body() -> Iterator[str]:
        names.extend((yield from lines))

    yield from (f"  {line}" for line in body())
    yield f"  scf.yield {', '.join(names)} : {', '.join(dispatch.kinds)}"


def _form(dispatch: _Dispatch, number: int) -> Lines:
    """Check the inputs' values and call the function of a bucket, on padded inputs, or the one of any size."""
    graph, bucket = dispatch.graph, dispatch.graph.forms[number]
    name = graph.in_bucket(dispatch.chain[0], bucket)
    values: dict[Value, str] = {}
    for i, spec in enumerate(dispatch.entry.inputs):
        values[Value("input", spec.name)] = f"%in{i}.{number}"
        yield from _padded(f"%in{i}.{number}", f"%arg{i}", spec, bucket, dispatch.sizes)
    for dim in bucket or ():
        values[Value("size", dim)] = f"%true.{dim}.{number}"
        yield from _true_size(f"%true.{dim}.{number}", dispatch.sizes.get(dim))
    yield from _checked(graph, name, values, f"%ok.{number}")
    yield from call_part(name, graph, values, f"%part.{number}")
    function = graph.functions[name]
    names = []
    for i, (value, made) in enumerate(zip(function.results, function.results_like(), strict=True)):
        result = f"%part.{number}#{i}"
        if value.kind == "output" and bucket is not None:
            spec = dispatch.outputs[value.name]
            sizes = graph.output_sizes.get(spec.name, spec.shape)
            result = yield from _cut(result, f"%cut{i}.{number}", tensor_type(made), spec, sizes, dispatch.sizes)
        names.append(result)
    return names


def _checked(graph: StepGraph, name: str, values: dict[Value, str], result: str) -> Iterator[str]:
    """Refuse values that are outside the range of an input."""
    check = graph.functions.get(f"check.{name}")
    if check is None:
        return
    yield from call(f"graph.check.{name}", check, values, result)
    for i, limit in enumerate(check.results):
        yield f"{result}.{i} = tensor.extract {result}#{i}[] : tensor<i1>"
        yield f'cf.assert {result}.{i}, "{quoted(limit.name)}"'


def _padded(
    result: str, value: str, spec: TensorSpec, bucket: Bucket | None, sizes: Mapping[str, str]
) -> Iterator[str]:
    """A copy of an input at the sizes of the bucket, or at its own without one, which IREE cannot see through.

    Its padding is in the input's range: the check of that looks at all elements.
    """
    shape = tuple(bucket[d] if isinstance(d, str) and bucket else d for d in spec.shape)
    kind = mlir_type(shape, torch_dtype(spec.dtype))
    if shape == spec.shape:
        # Its own sizes: IREE takes what a clone says for the sizes of the input itself, and drops a guard on them.
        own = ", ".join(
            f"%size{value.removeprefix('%arg')}.{d}" for d, name in enumerate(shape) if isinstance(name, str)
        )
        yield f"{result}.c = flow.tensor.clone {value} : {kind}{f'{{{own}}}' if own else ''}"
        hidden = f"{result}.b" if own else result
        yield f"{hidden} = util.optimization_barrier {result}.c : {kind}"
        if own:  # the barrier hides the sizes too
            same = ", ".join(sizes[d] for d in shape if isinstance(d, str))
            yield f"{result} = flow.tensor.tie_shape {hidden} : {kind}{{{same}}}"
        return
    high = []
    for d, name in enumerate(spec.shape):
        high.append(f"{result}.{d}" if isinstance(name, str) else "0")
        if isinstance(name, str) and bucket:
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
