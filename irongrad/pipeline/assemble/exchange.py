"""The exchange of gradients between ranks, inside the module: bucket by bucket, while the backward still runs.

The module imports `comm`, and whoever runs it may provide that: `irongrad.runtime.ranks.exchange` does. Every import is
optional (`vm.fallback`). Without a provider the module runs alone, also under iree-run-module.

* `comm.begin(samples)` starts a step: the ranks agree that each of them runs it, and on the weights of their batches.
* `comm.allreduce(view, wait, signal)` returns at once. It fills its result with the weighted mean over all ranks after
  the fence `wait`, and then signals `signal`.
* `comm.reduce(view, wait, signal, shard)` is the same for the rank alone that holds the shard of the optimizer's state.
* `comm.share(view, shard)` returns at once. It fills its result with the values of the rank that holds the shard,
  until `comm.finish()` returns.
* `comm.owns(shard)` tells whether this rank holds the shard.
* `comm.finish()` returns when the step's exchanges are complete, and fails if one of them failed. The state is written
  after it, so a step that fails leaves the state as it was.
* `comm.rank()` is mixed into the seed of random numbers.

Buckets follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
arXiv:2006.15704: gradients in the order in which the backward computes them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from irongrad.graph.step_graph import StepGraph, Value
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.ownership import OWNS
from irongrad.pipeline.assemble.storage import element_of, elements, flattened, put, tensor_type

VIEW = "!hal.buffer_view"
ALLREDUCE, BEGIN, FINISH, RANK = "@comm.allreduce", "@comm.begin", "@comm.finish", "@comm.rank"
REDUCE, SHARE = "@comm.reduce", "@comm.share"
ENDED = "%e.ended"
# An odd constant near 2**64 divided by the golden ratio: seeds of neighbouring ranks differ in many bits (Knuth, The
# Art of Computer Programming, volume 3, section 6.4).
_SEED_STEP = -7046029254386353131

# IREE 3.13.0 does not see the calls of a fallback. Without the barriers it drops the argument and the result of such a
# function, or the whole function, and says nothing. tests/pipeline/assemble/test_exchange.py runs a module alone.
_DECLARATIONS = f"""\
util.func private {BEGIN}(i64) -> i32 attributes {{vm.fallback = @alone.begin}}
util.func private {FINISH}() -> i32 attributes {{vm.fallback = @alone.finish}}
util.func private {RANK}() -> i32 attributes {{vm.fallback = @alone.rank}}
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


_DECLARATIONS_OF_SHARDS = f"""\
util.func private {OWNS}(i32) -> i32 attributes {{vm.fallback = @alone.owns}}
util.func private {SHARE}({VIEW}, i32) -> {VIEW} attributes {{vm.fallback = @alone.share}}
util.func private @alone.owns(%shard: i32) -> i32 {{
  %one = arith.constant 1 : i32
  %any, %owned = util.optimization_barrier %shard, %one : i32, i32
  util.return %owned : i32
}}
util.func private @alone.share(%view: {VIEW}, %shard: i32) -> {VIEW} {{
  %same, %any = util.optimization_barrier %view, %shard : {VIEW}, i32
  util.return %same : {VIEW}
}}"""


def import_of(name: str, *, shard: bool = False, waits: bool = False) -> Iterator[str]:
    """Declare the import `name` of an exchange that fills its result later, and define what returns its operand alone.

    Args:
        name: its symbol, without the sign.
        shard: whether its last argument is the number of a shard.
        waits: whether to return alone only when the operand exists. A function of any size needs this: IREE 3.13.0
            records its commands with the buffer itself, which has no memory before ("transient buffer has not been
            committed").
    """
    alone = f"@alone.{name.rpartition('.')[2]}"
    more = ", i32" if shard else ""
    kinds = f"({VIEW}, !hal.fence, !hal.fence{more}) -> {VIEW}"
    yield f"util.func private @{name}{kinds} attributes {{vm.fallback = {alone}}}"
    given = f"%view: {VIEW}, %wait: !hal.fence, %signal: !hal.fence{', %shard: i32' if shard else ''}"
    yield f"util.func private {alone}({given}) -> {VIEW} {{"
    yield "  %c0 = arith.constant 0 : index"
    yield "  %device = hal.devices.get %c0 : !hal.device"
    yield "  %all = arith.constant -1 : i64"
    queued = "affinity(%all) wait(%wait) signal(%signal)"
    yield f'  hal.device.queue.barrier<%device : !hal.device> {queued} flags("None")'
    if waits:
        yield "  %forever = arith.constant -1 : i32"
        yield '  %status = hal.fence.await until([%signal]) timeout_millis(%forever) flags("None") : i32'
    if shard:
        yield f"  %same, %any = util.optimization_barrier %view, %shard : {VIEW}, i32"
    else:
        yield f"  %same = util.optimization_barrier %view : {VIEW}"
    yield f"  util.return %same : {VIEW}"
    yield "}"


def declarations(*, shards: bool) -> Iterator[str]:
    """Declare the imports, and define what runs in their place without a provider."""
    yield from import_of(ALLREDUCE.removeprefix("@"))
    yield from _DECLARATIONS.splitlines()
    if shards:
        yield from import_of(REDUCE.removeprefix("@"), shard=True)
        yield from _DECLARATIONS_OF_SHARDS.splitlines()


@dataclass(frozen=True)
class Bucket:
    """Values that are exchanged together.

    Attributes:
        members: the values with their MLIR types, all of one element type.
        shard: the shard of the optimizer's state whose rank alone needs their means; None if all ranks do.
    """

    members: Mapping[Value, str]
    shard: int | None = None

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


def buckets_of(
    values: Mapping[Value, str], limit: int, shards: Mapping[Value, int] = MappingProxyType({})
) -> list[Bucket]:
    """Group `values`, in their order, into buckets of at most `limit` bytes; a value of more bytes is alone.

    Args:
        values: the values with their MLIR types.
        limit: the most bytes of a bucket of several values.
        shards: the shards of values that one rank alone needs. Such buckets are in the order of their last values.
    """
    done: list[Bucket] = []
    filling: dict[tuple[str, int | None], dict[Value, str]] = {}
    for value, kind in values.items():
        key = element_of(kind), shards.get(value)
        mine = filling.setdefault(key, {})
        if mine and Bucket({**mine, value: kind}).nbytes > limit:
            done.append(Bucket(mine, key[1]))
            mine = filling[key] = {}
        mine[value] = kind
    found = [*done, *(Bucket(mine, shard) for (_, shard), mine in filling.items())]
    if not shards:
        return found
    order = {value: i for i, value in enumerate(values)}
    return sorted(found, key=lambda bucket: max(map(order.__getitem__, bucket.members)))


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


@dataclass(frozen=True)
class Exchanged:
    """The outcome of an exchange.

    Attributes:
        means: the SSA names of the means.
        ready: the SSA names of the fences after which the exchanged values existed.
        passed: the SSA name of an i1 that exists once the exchange is complete.
    """

    means: Mapping[Value, str]
    ready: tuple[str, ...]
    passed: str


def exchange(buckets: Sequence[Bucket], values: Mapping[Value, str]) -> Generator[str, None, Exchanged]:
    """Exchange `values`, the SSA names of the members of `buckets`, for their means over all ranks."""
    yield "%x.c0 = arith.constant 0 : index"
    yield "%x.device = hal.devices.get %x.c0 : !hal.device"
    for number, bucket in enumerate(buckets):
        name = f"%x{number}"
        whole = yield from joined(name, bucket, values)
        for fence in ("wait", "signal"):
            yield f'{name}.{fence} = hal.fence.create device(%x.device : !hal.device) flags("None") : !hal.fence'
        yield f"{name}.whole = hal.tensor.barrier join({whole} : {bucket.kind}) => {name}.wait : !hal.fence"
        yield f'{name}.given = hal.tensor.export {name}.whole "gradients" : {bucket.kind} -> {VIEW}'
        arguments, kinds = f"{name}.given, {name}.wait, {name}.signal", f"{VIEW}, !hal.fence, !hal.fence"
        if bucket.shard is None:
            yield f"{name}.view = util.call {ALLREDUCE}({arguments}) : ({kinds}) -> {VIEW}"
        else:
            yield f"{name}.shard = arith.constant {bucket.shard} : i32"
            yield f"{name}.view = util.call {REDUCE}({arguments}, {name}.shard) : ({kinds}, i32) -> {VIEW}"
    yield from finished("%x")
    means: dict[Value, str] = {}
    for number, bucket in enumerate(buckets):
        name, kind = f"%x{number}", bucket.kind
        yield f'{name}.mean = hal.tensor.import wait({name}.signal) => {name}.view "gradients" : {VIEW} -> {kind}'
        yield from after(["%x.passed"], f"{name}.all", f"{name}.mean", kind)
        means |= yield from taken(f"{name}.m", bucket, f"{name}.all")
    return Exchanged(means, tuple(f"%x{number}.wait" for number in range(len(buckets))), "%x.passed")


def share(given: Sequence[tuple[str, int]]) -> Generator[str, None, list[str]]:
    """Begin to give every rank the buffers that one rank has, each for a shard; return what `shared` takes.

    Args:
        given: the SSA names of buffer views, each with the number of the shard; the values are those of its rank.
    """
    for view, shard in given:
        yield f"%y{shard}.shard = arith.constant {shard} : i32"
        yield f"%y{shard}.got = util.call {SHARE}({view}, %y{shard}.shard) : ({VIEW}, i32) -> {VIEW}"
    return [f"%y{shard}" for _, shard in given]


def shared(names: Sequence[str], prefix: str) -> Generator[str, None, list[str]]:
    """Wait until all ranks have the buffers that `share` named; return the SSA names of these buffers.

    They exist once what is computed before the update has ended, too (`ended`).
    """
    yield from finished(prefix)
    for name in names:
        yield from after([ENDED, f"{prefix}.passed"], name, f"{name}.got", VIEW)
    return list(names)


def joined(name: str, bucket: Bucket, values: Mapping[Value, str]) -> Generator[str, None, str]:
    """Put the members of a bucket one after the other; return the SSA name of the whole."""
    whole, start = bucket.kind, 0
    yield f"{name}.0 = flow.tensor.empty : {whole}"
    for i, (value, kind) in enumerate(bucket.members.items(), 1):
        yield from put(f"{name}.{i}", values[value], kind, f"{name}.{i - 1}", whole, start)
        start += elements(kind)
    return f"{name}.{len(bucket.members)}"


def ended(fences: Sequence[str], others: Mapping[str, str]) -> Iterator[str]:
    """Wait until what a step computes before its update has ended; `ENDED` is an i1 that exists then.

    Args:
        fences: the fences after which the exchanged values exist.
        others: the SSA names of the values that are not exchanged, with their MLIR types.
    """
    waited = list(fences)
    if others:
        kinds = ", ".join(others.values())
        yield '%e.fence = hal.fence.create device(%x.device : !hal.device) flags("None") : !hal.fence'
        yield f"%e.all:{len(others)} = hal.tensor.barrier join({', '.join(others)} : {kinds}) => %e.fence : !hal.fence"
        waited.append("%e.fence")
    yield "%e.forever = arith.constant -1 : i32"
    yield f'%e.status = hal.fence.await until([{", ".join(waited)}]) timeout_millis(%e.forever) flags("None") : i32'
    yield "%e.zero = arith.constant 0 : i32"
    yield f"{ENDED} = arith.cmpi eq, %e.status, %e.zero : i32"
    yield f'cf.assert {ENDED}, "the step failed before its update"'


def taken(name: str, bucket: Bucket, whole: str) -> Generator[str, None, dict[Value, str]]:
    """Take the members out of `whole`, the SSA name of a bucket; return their SSA names."""
    start, members = 0, dict[Value, str]()
    for i, (value, kind) in enumerate(bucket.members.items()):
        one, flat = f"{name}{i}", flattened(kind)
        yield f"{one}.start = arith.constant {start} : index"
        yield f"{one}.size = arith.constant {elements(kind)} : index"
        yield f"{one}.flat = flow.tensor.slice {whole}[{one}.start for {one}.size] : {bucket.kind} -> {flat}"
        yield f"{one} = flow.tensor.reshape {one}.flat : {flat} -> {kind}"
        start += elements(kind)
        members[value] = one
    return members


def finished(prefix: str) -> Iterator[str]:
    """Wait for all exchanges, and refuse the step if one failed; `prefix`.passed is an i1 that exists after it."""
    yield f"{prefix}.done = util.call {FINISH}() : () -> i32"
    yield f"{prefix}.one = arith.constant 1 : i32"
    yield f"{prefix}.passed = arith.cmpi eq, {prefix}.done, {prefix}.one : i32"
    yield f'cf.assert {prefix}.passed, "the exchange between the ranks failed"'
