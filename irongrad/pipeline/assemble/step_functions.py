"""The private functions of the module: each loads the state, calls functions of the step graph, stores the results.

Gradients and gradient packs are behind barriers (`mlir/barriers.py`). Without them, and with --iree-opt-data-tiling,
IREE 3.13.0 fuses the unpacking of a matmul into an optimizer update with several results. Then it refuses its own tile
sizes ("large vector sizes").
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

import torch

from irongrad.graph.dtypes import mlir_type
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.mlir.barriers import gradient_line
from irongrad.pipeline.assemble.exchange import (
    batch_dimension,
    begin,
    ended,
    exchange,
    exchanged,
    finished,
    seed_of_rank,
)
from irongrad.pipeline.assemble.function_calls import call, return_line, typed_arguments, typed_results
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.shard_functions import exchange_buckets, needed_by_shards, update_shards
from irongrad.pipeline.assemble.statistics import is_collective
from irongrad.pipeline.assemble.storage import Storage, accumulated, tensor_type
from irongrad.runtime.manifest import SEED, TensorSpec

_SEED = Value("state", SEED)


def spec_type(spec: TensorSpec) -> str:
    """The MLIR type of an input or output."""
    return mlir_type(spec.shape, torch_dtype(spec.dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with a numpy name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def declaration(name: str, graph: StepGraph) -> Iterator[str]:
    """Declare the imported function `name`."""
    function = graph.functions[name]
    arguments = ", ".join(tensor_type(function.example(i)) for i in range(len(function.arguments)))
    results = ", ".join(tensor_type(t) for t in function.results_like())
    yield f'  func.func private @"graph.{graph.prefix}{name}"({arguments}) -> ({results})'


def core(chain: tuple[str, ...], graph: StepGraph) -> Iterator[str]:
    """Write the core of `chain`: load the state, call the functions, store the new state, return the outputs."""
    given = given_to(chain, graph)
    returned = returned_by(chain, graph)
    arguments = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(given.values()))
    yield f'  func.func private @"{_core_name(chain, graph)}"({arguments}) -> ({", ".join(returned.values())}) {{'
    storage = Storage(graph)
    values = {value: f"%a{i}" for i, value in enumerate(given)}
    new: dict[Value, str] = {}
    rest = chain
    if is_collective(chain, graph):
        yield from (f"    {line}" for line in _begin(chain, graph))
    if chain[0] == "joint" and graph.accumulate > 1:
        lines = _micro_batches(graph, storage, values, new, updates="update" in chain)
        yield from (f"    {line}" for line in lines)
        rest = chain[2:]
    kinds = {v: k for name in chain for v, k in typed_results(graph.functions[name])}
    if _is_exchanged(chain, graph):
        kinds = exchanged(graph, outputs=False) | kinds
    yield from (f"    {line}" for line in _run(rest, graph, storage, values, new))
    yield from (f"    {line}" for line in _agreed(chain, graph, new, kinds))
    yield from (f"    {line}" for line in _stores(storage, new, kinds))
    yield return_line([new[v] for v in returned], list(returned.values()), indent="    ")
    yield "  }"


def _run(
    chain: Sequence[str], graph: StepGraph, storage: Storage, values: dict[Value, str], new: dict[Value, str]
) -> Iterator[str]:
    """Call the functions of `chain`; load the state that `values` lacks."""
    for position, name in enumerate(without_shards(chain, graph)):
        if name == "update" and graph.bucket_bytes:
            yield from _exchanged(graph, storage, values, new)
        yield from _loads(typed_arguments(graph.functions[name]), storage, values)
        if name == "update" and graph.shards:
            needed = needed_by_shards(graph)
            yield from _loads([(v, kind) for v, kind in needed.items() if v.kind != "shared"], storage, values)
            before = dict(values)
            yield from _call(name, graph, storage, values, new, str(position))
            yield from update_shards(graph, values | before)
        else:
            yield from _call(name, graph, storage, values, new, str(position))


def _is_exchanged(chain: Sequence[str], graph: StepGraph) -> bool:
    return graph.bucket_bytes > 0 and "update" in chain


def _begin(chain: Sequence[str], graph: StepGraph) -> Iterator[str]:
    """Start a collective step on a batch of fixed size, or on the gradients in the accumulators."""
    if chain[0] == "mean":
        yield f"%samples = util.global.load {accumulated(graph)} : i64"
    else:
        yield f"%samples = arith.constant {samples_of(chain, graph)} : i64"
    yield from begin("%samples")


def samples_of(chain: Sequence[str], graph: StepGraph) -> int | str:
    """The size of the batch that a collective chain begins with, or the name of its dimension.

    Gradients that are added to accumulators count as one, because `apply_step` takes their mean by their number.
    """
    return batch_dimension(graph) if "update" in chain else 1


def _agreed(chain: Sequence[str], graph: StepGraph, new: dict[Value, str], kinds: Mapping[Value, str]) -> Iterator[str]:
    """Order all results of a collective chain without an update after the end of its exchanges."""
    if "update" in chain or not is_collective(chain, graph):
        return
    yield from finished("%x")
    for i, (value, name) in enumerate(new.items()):
        if value in kinds:
            yield from after(["%x.passed"], f"%x.n{i}", name, kinds[value])
            new[value] = f"%x.n{i}"


def _exchanged(graph: StepGraph, storage: Storage, values: dict[Value, str], new: dict[Value, str]) -> Iterator[str]:
    """Replace what differs between the ranks by its mean over them, and order all other new state after the exchange.

    Where a bucket's branch has packed gradients, the packs are exchanged in their place.
    """
    packed = {m: Value("pack", p.name) for p in graph.packs for m in p.starts if Value("pack", p.name) in values}
    read = dict(typed_arguments(graph.functions["update"]))
    wanted = exchanged(graph, outputs=any(v.kind == "output" for v in new))
    members = {packed.get(v, v): read[packed[v]] if v in packed else kind for v, kind in wanted.items()}
    yield from _loads(list(members.items()), storage, values)
    sources = {v: new.get(v, values[v]) if v.kind in ("output", "state") else values[v] for v in members}
    exchanged_now = yield from exchange(exchange_buckets(members, graph), sources)
    means = exchanged_now.means
    values |= means
    new |= {v: name for v, name in means.items() if v.kind in ("output", "state")}
    kinds = dict(typed_results(graph.functions["joint"]))
    if graph.shards:  # other functions then overwrite the parameters, and know nothing of what still reads them here
        others = {name: kinds[v] for v, name in new.items() if v.kind in ("output", "state") and v not in means}
        yield from ended(exchanged_now.ready, others)
    for i, value in enumerate([v for v in new if v.kind == "state" and v not in means]):
        yield from after([exchanged_now.passed], f"%x.s{i}", new[value], kinds[value])
        new[value] = values[value] = f"%x.s{i}"


def _stores(storage: Storage, new: Mapping[Value, str], kinds: Mapping[Value, str]) -> Iterator[str]:
    """Store new values of the state, the accumulators, packs and saved values."""
    for value, name in new.items():
        if value.kind in ("state", "accumulator", "pack", "saved"):
            yield from storage.store(name, value, kinds[value])


def part(name: str, graph: StepGraph) -> Iterator[str]:
    """Write `@part.<name>`, which loads the state, calls the function `name`, and returns all its results."""
    function = graph.functions[name]
    typed = typed_arguments(function)
    given = {value: kind for value, kind in typed if value.kind in ("input", "size")}
    arguments = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(given.values()))
    results = [kind for _, kind in typed_results(function)]
    yield f'  func.func private @"part.{graph.prefix}{name}"({arguments}) -> ({", ".join(results)}) {{'
    values = {value: f"%a{i}" for i, value in enumerate(given)}
    yield from (f"    {line}" for line in _loads(typed, Storage(graph), values))
    yield from (f"    {line}" for line in call(f"graph.{graph.prefix}{name}", function, values, "%r"))
    yield return_line([f"%r#{i}" for i in range(len(results))], results, indent="    ")
    yield "  }"


def call_part(name: str, graph: StepGraph, values: Mapping[Value, str], result: str) -> Iterator[str]:
    """Call the function that `part` writes on the SSA names in `values`; its results are `result#0`, …."""
    function = graph.functions[name]
    given = {value: kind for value, kind in typed_arguments(function) if value.kind in ("input", "size")}
    results = [kind for _, kind in typed_results(function)]
    operands = ", ".join(values[v] for v in given)
    signature = f"({', '.join(given.values())}) -> ({', '.join(results)})"
    yield f'{result}:{len(results)} = func.call @"part.{graph.prefix}{name}"({operands}) : {signature}'


def finish(
    chain: tuple[str, ...], graph: StepGraph, values: dict[Value, str], done: Mapping[Value, str]
) -> Generator[str, None, dict[Value, str]]:
    """Call the functions of `chain` after the first, store the new state, and return the SSA names of all results.

    `done` are the results of the first, which may have gradient packs in place of gradients.
    """
    storage, kinds = Storage(graph), {v: k for name in chain for v, k in typed_results(graph.functions[name])}
    read = {v: k for name in chain[1:] for v, k in typed_arguments(graph.functions[name])}
    new = {value: name for value, name in done.items() if not storage.is_gathered(value)}
    for i, (value, name) in enumerate(done.items()):
        values[value] = name
        if storage.is_gathered(value) or (value.kind == "gradient" and not storage.is_member(value)):
            values[value] = f"%b.{i}"
            yield gradient_line(values[value], name, read.get(value) or kinds[value])
    yield from _run(chain[1:], graph, storage, values, new)
    yield from _agreed(chain, graph, new, kinds)
    yield from _stores(storage, new, kinds)
    return new


def _loads(wanted: Sequence[tuple[Value, str]], storage: Storage, values: dict[Value, str]) -> Iterator[str]:
    """Load the values in `wanted` that `values` lacks; build gradient packs from their members."""
    for value, kind in wanted:
        if value in values:
            continue
        result = values[value] = f"%s{len(values)}"
        if storage.is_gathered(value):
            yield from storage.gathered(f"{result}.free", value, values)
            yield gradient_line(result, f"{result}.free", kind)
        elif value == _SEED and storage.is_exchanged:
            yield from storage.load(f"{result}.shared", value, kind)
            yield from seed_of_rank(result, f"{result}.shared")
        else:
            yield from storage.load(result, value, kind)


def _call(
    name: str, graph: StepGraph, storage: Storage, values: dict[Value, str], new: dict[Value, str], suffix: str
) -> Iterator[str]:
    """Call a function on `values`; add its results to `new`, and to `values` for later functions."""
    function = graph.functions[name]
    yield from call(f"graph.{graph.prefix}{name}", function, values, f"%r{suffix}")
    for i, (value, kind) in enumerate(typed_results(function)):
        new[value] = values[value] = f"%r{suffix}#{i}"
        if value.kind == "gradient" and not storage.is_member(value):
            values[value] = f"%b{suffix}.{i}"
            yield gradient_line(values[value], new[value], kind)


def _micro_batches(
    graph: StepGraph, storage: Storage, values: dict[Value, str], new: dict[Value, str], *, updates: bool
) -> Iterator[str]:
    """Run `joint` on each micro-batch in a loop, sum its gradients, and average its loss and the values beside it.

    If an update follows, the sums start from zeros and become its gradients. Otherwise they are the accumulators.
    """
    joint = graph.functions["joint"]
    sums = typed_results(graph.functions["accumulate"])
    reported = [(v, k) for v, k in typed_results(joint) if v.kind == "output"]
    written = [(v, k) for v, k in typed_results(joint) if v.kind == "state"]
    yield from _loads([*typed_arguments(joint), *(() if updates else sums)], storage, values)
    for i, (value, kind) in enumerate([*(sums if updates else ()), *reported]):
        values[value] = f"%zero{i}"
        yield f"%zero{i} = arith.constant dense<0.0> : {kind}"
    carried = [*written, *sums, *reported]
    kinds = ", ".join(kind for _, kind in carried)
    yield from (f"%c{n} = arith.constant {n} : index" for n in (0, 1, graph.accumulate))
    begun = ", ".join(f"%l{i} = {values[v]}" for i, (v, _) in enumerate(carried))
    limits = f"%c0 to %c{graph.accumulate} step %c1"
    yield f"%l:{len(carried)} = scf.for %i = {limits} iter_args({begun}) -> ({kinds}) {{"
    inner = values | {v: f"%l{i}" for i, (v, _) in enumerate(carried)}
    yield from (f"  {line}" for line in _micro_batch(graph, storage, inner, carried, len(reported)))
    yield "}"
    new |= {v: f"%l#{i}" for i, (v, _) in enumerate(carried)}
    for i, (value, kind) in enumerate(reported):
        yield f"%count{i} = arith.constant dense<{graph.accumulate}.0> : {kind}"
        yield f"%mean{i} = arith.divf {new[value]}, %count{i} : {kind}"
        new[value] = f"%mean{i}"
    for i, (value, kind) in enumerate(sums if updates else ()):
        values[Value("gradient", value.name)] = f"%g{i}"
        yield gradient_line(f"%g{i}", new.pop(value), kind)


def _micro_batch(
    graph: StepGraph, storage: Storage, values: dict[Value, str], carried: Sequence[tuple[Value, str]], summed: int
) -> Iterator[str]:
    """The body of the loop: one step on micro-batch `%i`; the last `summed` of the carried values are summed here."""
    joint = graph.functions["joint"]
    for number, value in enumerate(joint.arguments):
        if value.kind == "input" and joint.example(number).ndim:
            yield from _slice(f"%in{number}", values[value], joint.example(number), graph.inputs[value.name])
            values[value] = f"%in{number}"
    new: dict[Value, str] = {}
    so_far = {value: values[value] for value, _ in carried[-summed:]}
    yield from _call("joint", graph, storage, values, new, ".j")
    yield from _call("accumulate", graph, storage, values, new, ".a")
    for i, (value, kind) in enumerate(carried[-summed:]):
        yield f"%sum{i} = arith.addf {so_far[value]}, {new[value]} : {kind}"
    names = [*(new[v] for v, _ in carried[:-summed]), *(f"%sum{i}" for i in range(summed))]
    yield f"scf.yield {', '.join(names)} : {', '.join(k for _, k in carried)}"


def _slice(result: str, whole: str, part: torch.Tensor, like: torch.Tensor) -> Iterator[str]:
    """Take micro-batch `%i` of the batch `whole`; `part` and `like` are examples of micro-batch and batch.

    The slice is behind a barrier, so that the kernels are the same as without micro-batches.
    """
    yield f"{result}.n = arith.constant {part.shape[0]} : index"
    yield f"{result}.at = arith.muli %i, {result}.n : index"
    offsets = ", ".join([f"{result}.at", *("0" for _ in part.shape[1:])])
    sizes, ones = ", ".join(map(str, part.shape)), ", ".join("1" for _ in part.shape)
    kinds = f"{tensor_type(like)} to {tensor_type(part)}"
    yield f"{result}.s = tensor.extract_slice {whole}[{offsets}][{sizes}][{ones}] : {kinds}"
    yield f"{result} = util.optimization_barrier {result}.s : {tensor_type(part)}"


def _core_name(chain: tuple[str, ...], graph: StepGraph) -> str:
    return f"core.{graph.prefix}{'.'.join(without_shards(chain, graph))}"


def without_shards(chain: Sequence[str], graph: StepGraph) -> list[str]:
    """The functions of a chain that run on every rank."""
    return [name for name in chain if all(name != s.function for s in graph.shards)]


def given_to(chain: tuple[str, ...], graph: StepGraph) -> dict[Value, str]:
    """The arguments of the core of `chain`, with MLIR types; inputs are whole batches."""
    typed = [pair for name in chain for pair in typed_arguments(graph.functions[name])]
    given = {value: kind for value, kind in typed if value.kind in ("input", "hyper", "count")}
    return {v: tensor_type(graph.inputs[v.name]) if v.kind == "input" else kind for v, kind in given.items()}


def returned_by(chain: tuple[str, ...], graph: StepGraph) -> dict[Value, str]:
    """The results of the core of `chain`, with MLIR types."""
    typed = [pair for name in chain for pair in typed_results(graph.functions[name])]
    return {value: kind for value, kind in typed if value.kind == "output"}


def call_loaded(
    name: str, function: Function, graph: StepGraph, values: Mapping[Value, str], result: str
) -> Iterator[str]:
    """Call the imported function `name` as `call` does, with the state that it reads loaded before."""
    known = dict(values)
    for i, (value, kind) in enumerate(typed_arguments(function)):
        if value not in known:
            known[value] = f"{result}.s{i}"
            yield from Storage(graph).load(known[value], value, kind)
    yield from call(f"graph.{graph.prefix}{name}", function, known, result)


def call_core(chain: tuple[str, ...], graph: StepGraph, values: dict[Value, str], result: str) -> Iterator[str]:
    """Call the core of `chain` on the SSA names in `values`; its results are `result#0`, …."""
    given, returned = given_to(chain, graph), returned_by(chain, graph)
    operands = ", ".join(values[v] for v in given)
    signature = f"({', '.join(given.values())}) -> ({', '.join(returned.values())})"
    assigned = f"{result}:{len(returned)} = " if returned else ""
    yield f'{assigned}func.call @"{_core_name(chain, graph)}"({operands}) : {signature}'
