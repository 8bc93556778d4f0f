"""The exchange of gradients between ranks, inside the module: bucket by bucket, while the backward still runs.

The module imports `comm`, and whoever runs it may provide that: `irongrad.runtime.ranks.exchange` does. Every import is
optional (`vm.fallback`). Without a provider the module runs alone, also under iree-run-module.

* `comm.begin(samples)` starts a step: the ranks agree that each of them runs it, and on the weights of their batches.
* `comm.allreduce(view, wait, signal)` returns at once. It fills its result with the weighted mean over all ranks after
  the fence `wait`, and then signals `signal`.
* `comm.finish()` returns when the step's exchanges are complete, and fails if one of them failed. The state is written
  after it, so a step that fails leaves the state as it was.
* `comm.rank()` is mixed into the seed of random numbers.

Buckets follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
arXiv:2006.15704: gradients in the order in which the backward computes them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irongrad.graph.step_graph import StepGraph, Value
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.storage import element_of, elements, flattened, put, tensor_type

VIEW = "!hal.buffer_view"
ALLREDUCE, BEGIN, FINISH, RANK = "@comm.allreduce", "@comm.begin", "@comm.finish", "@comm.rank"
PASSED = "%x.passed"
# An odd constant near 2**64 divided by the golden ratio: seeds of neighbouring ranks differ in many bits (Knuth, The
# Art of Computer Programming, volume 3, section 6.4).
_SEED_STEP = -7046029254386353131

# IREE 3.13.0 does not see the calls of a fallback. Without the barriers it drops the argument and the result of such a
# function, or the whole function, and says nothing. tests/pipeline/assemble/test_exchange.py runs a module alone.
_DECLARATIONS = f"""\
util.func private {ALLREDUCE}({VIEW}, !hal.fence, !hal.fence) -> {VIEW} attributes {{vm.fallback = @alone.allreduce}}
util.func private {BEGIN}(i64) -> i32 attributes {{vm.fallback = @alone.begin}}
util.func private {FINISH}() -> i32 attributes {{vm.fallback = @alone.finish}}
util.func private {RANK}() -> i32 attributes {{vm.fallback = @alone.rank}}
util.func private @alone.allreduce(%view: {VIEW}, %wait: !hal.fence, %signal: !hal.fence) -> {VIEW} {{
  %c0 = arith.constant 0 : index
  %device = hal.devices.get %c0 : !hal.device
  %all = arith.constant -1 : i64
  hal.device.queue.barrier<%device : !hal.device> affinity(%all) wait(%wait) signal(%signal) flags("None")
  %same = util.optimization_barrier %view : {VIEW}
  util.return %same : {VIEW}
}}
util.func private @alone.begin(%samples: i64) -> i32 {{
  %one = arith.constant 1 : i32
  %all, %agreed = util.optimization_barrier %samples, %one : i64, i32
  util.return %agreed : i32
}}
util.func private @alone.finish() -> i32 {{
  %one = arith.constant 1 : i32
  %done = util.optimization_barrier %one : i32
  util.return %done : i32
}}
util.func private @alone.rank() -> i32 {{
  %zero = arith.constant 0 : i32
  %first = util.optimization_barrier %zero : i32
  util.return %first : i32
}}"""


def declarations() -> Iterator[str]:
    """Declare the imports, and define what runs in their place without a provider."""
    yield from _DECLARATIONS.splitlines()


@dataclass(frozen=True)
class Bucket:
    """Values that are exchanged together.

    Attributes:
        members: the values with their MLIR types, all of one element type.
    """

    members: Mapping[Value, str]

    @property
    def size(self) -> int:
        """The number of elements of all members."""
        return sum(map(elements, self.members.values()))

    @property
    def element(self) -> str:
        """The MLIR type of an element."""
        return element_of(next(iter(self.members.values())))

    @property
    def nbytes(self) -> int:
        """The bytes of all members."""
        return self.size * _bits(self.element) // 8

    @property
    def kind(self) -> str:
        """The MLIR type of all members, one after the other."""
        return f"tensor<{self.size}x{self.element}>"


def _bits(element: str) -> int:
    return int(element.lstrip("bfi"))


def exchanged(graph: StepGraph, *, outputs: bool) -> dict[Value, str]:
    """What the ranks exchange before an update, with MLIR types, in order; `outputs` if the chain computes the loss.

    That is the gradients, the loss and the values beside it, and the buffers of the model that its forward writes, such
    as the statistics of BatchNorm. These differ between ranks as their batches do. Their mean keeps the state of all
    ranks equal. Integers, such as a count of batches, are equal anyway.
    """
    joint = graph.functions["joint"]
    typed = {v: tensor_type(t) for v, t in zip(joint.results, joint.results_like(), strict=True)}
    order = joint.order_of_results
    first = sorted((v for v in typed if v.kind == "gradient"), key=lambda v: order[v])
    kinds = ("output", "state") if outputs else ("state",)
    late = [v for v, kind in typed.items() if v.kind in kinds and element_of(kind).lstrip("b").startswith("f")]
    return {v: typed[v] for v in (*first, *late)}


def buckets_of(values: Mapping[Value, str], limit: int) -> list[Bucket]:
    """Group `values`, in their order, into buckets of at most `limit` bytes; a value of more bytes is alone."""
    done: list[Bucket] = []
    filling: dict[str, dict[Value, str]] = {}
    for value, kind in values.items():
        element = element_of(kind)
        mine = filling.setdefault(element, {})
        if mine and Bucket({**mine, value: kind}).nbytes > limit:
            done.append(Bucket(mine))
            mine = filling[element] = {}
        mine[value] = kind
    return [*done, *map(Bucket, filling.values())]


def batch_dimension(graph: StepGraph) -> int | str:
    """The size of a batch, or the name of its dimension: the first dimension of the first input that has one."""
    of_entries = {name for names in graph.entries.values() for name in names}
    sizes = (
        graph.dynamic.get(name, {}).get(0, tensor.shape[0])
        for name, tensor in graph.inputs.items()
        if tensor.ndim and name not in of_entries
    )
    return next(sizes, 1)


def begin(samples: str) -> Iterator[str]:
    """Start a step on `samples`, the SSA name of the number of samples in this rank's batch, an i64."""
    yield f"{samples}.agreed = util.call {BEGIN}({samples}) : (i64) -> i32"


def seed_of_rank(result: str, seed: str) -> Iterator[str]:
    """Define `result`, the seed of this rank's random numbers, from the shared seed; equal to it on the first rank."""
    yield f"{result}.rank = util.call {RANK}() : () -> i32"
    yield f"{result}.wide = arith.extsi {result}.rank : i32 to i64"
    yield f"{result}.step = arith.constant {_SEED_STEP} : i64"
    yield f"{result}.offset = arith.muli {result}.wide, {result}.step : i64"
    yield f"{result}.tensor = tensor.from_elements {result}.offset : tensor<i64>"
    yield f"{result} = arith.xori {seed}, {result}.tensor : tensor<i64>"


def exchange(buckets: Sequence[Bucket], values: Mapping[Value, str]) -> Generator[str, None, dict[Value, str]]:
    """Exchange `values`, the SSA names of the members of `buckets`; return the SSA names of their means.

    `PASSED`, an i1, exists once all exchanges are complete.
    """
    yield "%x.c0 = arith.constant 0 : index"
    yield "%x.device = hal.devices.get %x.c0 : !hal.device"
    for number, bucket in enumerate(buckets):
        yield from _sent(f"%x{number}", bucket, values)
    yield f"%x.done = util.call {FINISH}() : () -> i32"
    yield "%x.one = arith.constant 1 : i32"
    yield f"{PASSED} = arith.cmpi eq, %x.done, %x.one : i32"
    yield f'cf.assert {PASSED}, "the exchange between the ranks failed"'
    means: dict[Value, str] = {}
    for number, bucket in enumerate(buckets):
        means |= yield from _received(f"%x{number}", bucket)
    return means


def _sent(name: str, bucket: Bucket, values: Mapping[Value, str]) -> Iterator[str]:
    whole, start = bucket.kind, 0
    yield f"{name}.0 = flow.tensor.empty : {whole}"
    for i, (value, kind) in enumerate(bucket.members.items(), 1):
        yield from put(f"{name}.{i}", values[value], kind, f"{name}.{i - 1}", whole, start)
        start += elements(kind)
    for fence in ("wait", "signal"):
        yield f'{name}.{fence} = hal.fence.create device(%x.device : !hal.device) flags("None") : !hal.fence'
    yield f"{name}.whole = hal.tensor.barrier join({name}.{len(bucket.members)} : {whole}) => {name}.wait : !hal.fence"
    yield f'{name}.given = hal.tensor.export {name}.whole "gradients" : {whole} -> {VIEW}'
    arguments = f"({name}.given, {name}.wait, {name}.signal)"
    yield f"{name}.view = util.call {ALLREDUCE}{arguments} : ({VIEW}, !hal.fence, !hal.fence) -> {VIEW}"


def _received(name: str, bucket: Bucket) -> Generator[str, None, dict[Value, str]]:
    whole, start = bucket.kind, 0
    yield f'{name}.mean = hal.tensor.import wait({name}.signal) => {name}.view "gradients" : {VIEW} -> {whole}'
    yield from after([PASSED], f"{name}.all", f"{name}.mean", whole)
    means: dict[Value, str] = {}
    for i, (value, kind) in enumerate(bucket.members.items()):
        one, flat = f"{name}.m{i}", flattened(kind)
        yield f"{one}.start = arith.constant {start} : index"
        yield f"{one}.size = arith.constant {elements(kind)} : index"
        yield f"{one}.flat = flow.tensor.slice {name}.all[{one}.start for {one}.size] : {whole} -> {flat}"
        yield f"{one} = flow.tensor.reshape {one}.flat : {flat} -> {kind}"
        start += elements(kind)
        means[value] = one
    return means
