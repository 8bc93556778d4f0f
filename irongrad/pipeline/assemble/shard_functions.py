"""The functions of a module that read and write shards of the optimizer's state, on the rank that holds them.

They are functions of their own, and take and return buffer views, for two reasons. A branch on the rank then hands on a
single reference. And the pass `state-in-place` works function by function: it writes a function's new state in place if
nothing can fail between that and the function's end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from irongrad.graph.step_graph import Shard, StepGraph, Value
from irongrad.pipeline.assemble.exchange import VIEW, Bucket, buckets_of, joined, share, shared, taken
from irongrad.pipeline.assemble.function_calls import call, typed_arguments, typed_results
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.ownership import OWNS, if_owned
from irongrad.pipeline.assemble.storage import Storage, tensor_type
from irongrad.runtime.collected_state import REST, shard_entry

# Two of so many parts of the parameters are in memory twice while ranks send them. Each part costs a wait.
_PARTS = 16


@dataclass(frozen=True)
class _Update:
    """The update of a shard.

    Attributes:
        number: the number of the shard.
        shard: the shard.
        graph: the step graph.
    """

    number: int
    shard: Shard
    graph: StepGraph

    @property
    def name(self) -> str:
        """The symbol of the function that runs it."""
        return f'@"held.{self.shard.function}"'

    @property
    def taker(self) -> str:
        """The symbol of the function that stores its parameters on every rank."""
        return f'@"taken.{self.shard.function}"'

    @property
    def sent(self) -> Bucket:
        """The new values that every rank needs."""
        function = self.graph.functions[self.shard.function]
        return Bucket({v: kind for v, kind in typed_results(function) if v.name not in self.shard.state})

    @property
    def given(self) -> dict[Value, str]:
        """The arguments that the caller has, with their MLIR types; the others are state that only this changes."""
        function = self.graph.functions[self.shard.function]
        own = {*function.results}
        return {v: kind for v, kind in typed_arguments(function) if v not in own}


def _updates(graph: StepGraph) -> list[_Update]:
    return [_Update(number, shard, graph) for number, shard in enumerate(graph.shards)]


def needed_by_shards(graph: StepGraph) -> dict[Value, str]:
    """What `update_shards` needs, with MLIR types."""
    return {value: kind for update in _updates(graph) for value, kind in update.given.items()}


def exchange_buckets(values: Mapping[Value, str], graph: StepGraph) -> list[Bucket]:
    """Group what ranks exchange before an update; gradients that one shard alone needs go to the rank that holds it."""
    if not graph.shards:
        return buckets_of(values, graph.bucket_bytes)
    readers: dict[Value, list[int]] = defaultdict(list)
    for update in _updates(graph):
        for value in update.given:
            readers[value].append(update.number)
    needed = {*graph.functions["update"].arguments, *(v for v, shards in readers.items() if len(shards) > 1)}
    alone = {v: shards[0] for v, shards in readers.items() if v.kind == "gradient" and v not in needed}
    return buckets_of(values, graph.bucket_bytes, alone)


def shard_functions(graph: StepGraph) -> Iterator[str]:
    """Write the functions that update and read shards, and those that store the parameters from other ranks."""
    for update in _updates(graph):
        arguments = ", ".join(f"%a{i}: {VIEW}" for i in range(len(update.given)))
        yield from _function(f"{update.name}({arguments}) -> {VIEW}", _updated(update))
        yield from _function(f"{update.taker}(%view: {VIEW})", _taken(update))
    if graph.shards:
        yield from _readers(graph)


def _function(signature: str, body: Iterator[str]) -> Iterator[str]:
    yield f"  func.func private {signature} attributes {{noinline}} {{"
    yield from (f"    {line}" for line in body)
    yield "  }"


def _updated(update: _Update) -> Iterator[str]:
    """Load the shard and its parameters, update them, store the shard, and return the parameters."""
    storage, function = Storage(update.graph), update.graph.functions[update.shard.function]
    values = {value: f"%t{i}" for i, value in enumerate(update.given)}
    for i, kind in enumerate(update.given.values()):
        yield f"%t{i} = hal.tensor.import %a{i} : {VIEW} -> {kind}"
    for i, (value, kind) in enumerate(typed_arguments(function)):
        if value not in values:
            values[value] = f"%s{i}"
            yield from storage.load(f"%s{i}", value, kind)
    yield from call(f"graph.{update.shard.function}", function, values, "%r")
    done = {value: f"%r#{i}" for i, value in enumerate(function.results)}
    for value, kind in typed_results(function):
        if value.name in update.shard.state:
            yield from storage.store(done[value], value, kind)
    yield from _exported("%sent", update.sent, done)
    yield f"return %sent : {VIEW}"


def _exported(name: str, bucket: Bucket, values: Mapping[Value, str]) -> Iterator[str]:
    whole = yield from joined(f"{name}.part", bucket, values)
    yield f'{name} = hal.tensor.export {whole} "shard" : {bucket.kind} -> {VIEW}'


def _taken(update: _Update) -> Iterator[str]:
    """Store the parameters of a shard."""
    storage, sent = Storage(update.graph), update.sent
    yield f'%all = hal.tensor.import %view "shard" : {VIEW} -> {sent.kind}'
    values = yield from taken("%m", sent, "%all")
    for value, kind in sent.members.items():
        own = f"{values[value]}.own"
        yield f"{own} = flow.tensor.clone {values[value]} : {kind}"
        yield from storage.store(own, value, kind)
    yield "return"


def update_shards(graph: StepGraph, values: Mapping[Value, str]) -> Iterator[str]:
    """Update each shard on the rank that holds it, and give all ranks the parameters.

    Some shards at a time: while these are sent, the next ones are updated, and then the buffers of these are freed.

    Args:
        graph: the step graph.
        values: the SSA names of what the updates need, such as gradients.
    """
    sent: tuple[list[_Update], list[str]] = ([], [])
    for number, some in enumerate(_some_at_a_time(_updates(graph))):
        for update in some:
            yield from if_owned(f"%u{update.number}", update.number, update.sent.kind, _called(update, values))
        yield from _arrived(*sent, f"%z{number}")
        sent = some, (yield from share([(f"%u{u.number}", u.number) for u in some]))
    yield from _arrived(*sent, "%z")


def _some_at_a_time(updates: Sequence[_Update]) -> Iterator[list[_Update]]:
    """Neighbours that send at most a part of all bytes, or one that sends more."""
    most = sum(update.sent.nbytes for update in updates) // _PARTS
    some: list[_Update] = []
    for update in updates:
        if some and sum(u.sent.nbytes for u in (*some, update)) > most:
            yield some
            some = []
        some.append(update)
    if some:
        yield some


def _arrived(updates: Sequence[_Update], names: Sequence[str], prefix: str) -> Iterator[str]:
    """Wait for parameters that were sent, and store them."""
    if not updates:
        return
    views = yield from shared(names, prefix)
    for update, view in zip(updates, views, strict=True):
        yield f"func.call {update.taker}({view}) : ({VIEW}) -> ()"


def _called(update: _Update, values: Mapping[Value, str]) -> Iterator[str]:
    for i, (value, kind) in enumerate(update.given.items()):
        yield f"%u.a{i} = hal.tensor.export {values[value]} : {kind} -> {VIEW}"
    count = len(update.given)
    arguments, kinds = ", ".join(f"%u.a{i}" for i in range(count)), ", ".join([VIEW] * count)
    yield f"%u.new = func.call {update.name}({arguments}) : ({kinds}) -> {VIEW}"
    yield f"scf.yield %u.new : {VIEW}"


def refuse_parts(graph: StepGraph, names: list[str], kinds: list[str]) -> Generator[str, None, list[str]]:
    """Refuse to read state that other ranks hold; return the SSA names of the state in `names`, behind the refusal."""
    if not graph.shards:
        return names
    yield "%w.one = arith.constant 1 : i32"
    for number in range(len(graph.shards)):
        yield f"%w{number}.shard = arith.constant {number} : i32"
        yield f"%w{number}.owned = util.call {OWNS}(%w{number}.shard) : (i32) -> i32"
        yield f"%w{number} = arith.cmpi eq, %w{number}.owned, %w.one : i32"
        yield f'cf.assert %w{number}, "other ranks hold a part of the state; Session.state() collects it"'
    passed = [f"%w{number}" for number in range(len(graph.shards))]
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        yield from after(passed, f"%whole{i}", name, kind)
    return [f"%whole{i}" for i in range(len(names))]


def _readers(graph: StepGraph) -> Iterator[str]:
    """The functions with which ranks collect the state: each shard, and all that is no part of a shard."""
    divided = {name for shard in graph.shards for name in shard.state}
    rest = [t.name for t in graph.state if t.name not in divided and not t.in_base]
    parts = {REST: rest} | {shard_entry(i): list(shard.state) for i, shard in enumerate(graph.shards)}
    for symbol, names in parts.items():
        kinds = [tensor_type(graph.tensor(name).initial) for name in names]
        yield f'  func.func @"{symbol}"() -> ({", ".join(kinds)}) {{'
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            yield from (f"    {line}" for line in Storage(graph).load(f"%g{i}", Value("state", name), kind))
            yield f"    %o{i} = flow.tensor.clone %g{i} : {kind}"
        yield f"    return {', '.join(f'%o{i}' for i in range(len(names)))} : {', '.join(kinds)}"
        yield "  }"
