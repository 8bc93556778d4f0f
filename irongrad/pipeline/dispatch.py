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

from irongrad.pipeline.cores import call, call_part, finish, spec_type, torch_dtype, typed_arguments, typed_results
from irongrad.pipeline.dtypes import mlir_type
from irongrad.pipeline.graphs import StepGraph, Value
from irongrad.pipeline.indices import index_of
from irongrad.pipeline.interface import chain_of
from irongrad.pipeline.size_guards import measured, refusals
from irongrad.pipeline.storage import Storage, quoted
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


def run_in_bucket(entry: EntryPoint, graph: StepGraph, values: Mapping[Value, str]) -> Lines:
    """Check the sizes and run the smallest bucket that they fit into."""
    sizes: dict[str, str] = {}
    yield from measured(entry, sizes)
    dispatch = _Dispatch(entry, graph, values, sizes)
    yield from refusals(entry, graph, sizes)
    names = yield from _choice(dispatch, 0)
    done = dict(zip(dispatch.results, names, strict=True))
    yield from finish(dispatch.chain, graph, dict(values), done)
    return [done[Value("output", s.name)] for s in entry.outputs]


def _choice(dispatch: _Dispatch, number: int) -> Lines:
    """Run bucket `number` where it fits, and else one of those after it, or what takes any size."""
    if number == len(dispatch.graph.forms) - 1:
        return (yield from _form(dispatch, number))
    results = len(dispatch.results)
    yield f"%out{number}:{results} = scf.if %fits{number} -> ({', '.join(dispatch.results.values())}) {{"
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
    yield f"  scf.yield {', '.join(names)} : {', '.join(dispatch.results.values())}"


def _form(dispatch: _Dispatch, number: int) -> Lines:
    """Check the inputs' values and call the function of a bucket, on padded inputs, or the one of any size."""
    graph, bucket = dispatch.graph, dispatch.graph.forms[number]
    name = graph.in_bucket(dispatch.chain[0], bucket)
    values: dict[Value, str] = {}
    names = yield from _inputs(dispatch, number)
    values |= {Value("input", s.name): n for s, n in zip(dispatch.entry.inputs, names, strict=True)}
    for dim in bucket or ():
        values[Value("size", dim)] = f"%true.{dim}.{number}"
        yield from _true_size(f"%true.{dim}.{number}", dispatch.sizes.get(dim))
    yield from _checked(graph, name, values, f"%ok.{number}")
    yield from call_part(name, graph, values, f"%part.{number}")
    function = graph.functions[name]
    for i, (value, kind) in enumerate(typed_results(function)):
        values[value] = f"%part.{number}#{i}"
        if value.kind == "output" and bucket is not None:
            spec = dispatch.outputs[value.name]
            sizes = graph.output_sizes.get(spec.name, spec.shape)
            values[value] = yield from _cut(values[value], f"%cut{i}.{number}", kind, spec, sizes, dispatch.sizes)
    for i, value in enumerate(dispatch.packs):
        yield from Storage(graph).gathered(f"%pack{i}.{number}", value, values)
        values[value] = f"%pack{i}.{number}"
    return [values[value] for value in dispatch.results]


def _checked(graph: StepGraph, name: str, values: dict[Value, str], result: str) -> Iterator[str]:
    """Refuse values that are outside the range of an input."""
    check = graph.functions.get(f"check.{name}")
    if check is None:
        return
    yield from call(f"graph.check.{name}", check, values, result)
    for i, limit in enumerate(check.results):
        yield f"{result}.{i} = tensor.extract {result}#{i}[] : tensor<i1>"
        yield f'cf.assert {result}.{i}, "{quoted(limit.name)}"'


def _inputs(dispatch: _Dispatch, number: int) -> Lines:
    """The inputs for the function of a bucket, which IREE cannot see through.

    One barrier holds them all: what is before a barrier is submitted, and waited for, by itself.
    """
    bucket, inputs = dispatch.graph.forms[number], dispatch.entry.inputs
    kinds = []
    for i, spec in enumerate(inputs):
        shape = tuple(bucket[d] if isinstance(d, str) and bucket else d for d in spec.shape)
        kinds.append(mlir_type(shape, torch_dtype(spec.dtype)))
        yield from _copied(f"%in{i}.{number}.c", i, spec, shape, dispatch.sizes)
    if not inputs:
        return []
    copies = ", ".join(f"%in{i}.{number}.c" for i in range(len(inputs)))
    yield f"%in.{number}:{len(inputs)} = util.optimization_barrier {copies} : {', '.join(kinds)}"
    names = [f"%in.{number}#{i}" for i in range(len(inputs))]
    for i, (spec, kind) in enumerate(zip(inputs, kinds, strict=True)):
        same = ", ".join(dispatch.sizes[d] for d in spec.shape if isinstance(d, str))
        if "?" in kind:  # the barrier hides the sizes too
            yield f"%in{i}.{number} = flow.tensor.tie_shape {names[i]} : {kind}{{{same}}}"
            names[i] = f"%in{i}.{number}"
    return names


def _copied(
    result: str, number: int, spec: TensorSpec, shape: tuple[int | str, ...], sizes: Mapping[str, str]
) -> Iterator[str]:
    """A copy of input `number` in the shape of a bucket, or in its own.

    Its padding is in the input's range: the check of that looks at all elements.
    """
    kind = mlir_type(shape, torch_dtype(spec.dtype))
    if shape == spec.shape:
        # Its own sizes: IREE takes what a clone says for the sizes of the input itself, and drops a guard on them.
        own = ", ".join(f"%size{number}.{d}" for d, name in enumerate(shape) if isinstance(name, str))
        yield f"{result} = flow.tensor.clone %arg{number} : {kind}{f'{{{own}}}' if own else ''}"
        return
    high = []
    for d, name in enumerate(spec.shape):
        high.append(f"{result}.{d}" if isinstance(name, str) else "0")
        if isinstance(name, str):
            yield f"{result}.{d}.n = arith.constant {shape[d]} : index"
            yield f"{result}.{d} = arith.subi {result}.{d}.n, {sizes[name]} : index"
    element = kind.removesuffix(">").rpartition("x")[2]
    filler = 0 if spec.minimum is None or spec.minimum <= 0 <= (spec.maximum or 0) else spec.minimum
    yield f"{result}.v = arith.constant {float(filler) if 'f' in element else filler} : {element}"
    places = ", ".join(f"{result}.p{d}: index" for d in range(len(shape)))
    yield f"{result} = tensor.pad %arg{number} low[{', '.join('0' for _ in shape)}] high[{', '.join(high)}] {{"
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
