"""Where the module keeps values between calls: each tensor has a global, or a slice of a global shared by several."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch

from irongrad.graph.dtypes import mlir_type
from irongrad.graph.step_graph import Pack, StateTensor, StepGraph, Value
from irongrad.mlir.barriers import held_line
from irongrad.pipeline.assemble.ownership import if_owned
from irongrad.runtime.manifest import BASE_SCOPE, SCOPE, Role


def tensor_type(tensor: torch.Tensor) -> str:
    """The MLIR type of `tensor`."""
    return mlir_type(tuple(tensor.shape), tensor.dtype)


def symbol(kind: str, name: str) -> str:
    """The symbol of the global of a state tensor, gradient accumulator or pack."""
    return f'@"{quoted(f"{kind}:{name}")}"'


def accumulator(graph: StepGraph, name: str) -> str:
    """The symbol of the global that accumulates the gradient of the parameter `name` in a step."""
    return symbol("accumulator", graph.prefix + name)


def accumulated(graph: StepGraph) -> str:
    """The symbol of the global that counts the gradients in a step's accumulators."""
    return f'@"accumulated.{graph.name}"' if graph.name else "@accumulated"


def stored_type(kind: str) -> str:
    """The type of the global that holds a tensor of type `kind`.

    Booleans are stored as bytes: with --iree-opt-data-tiling, IREE 3.13.0 fails on a parameter of i1 elements.
    """
    return f"{kind.removesuffix('i1>')}i8>" if kind.endswith("i1>") else kind


def quoted(text: str) -> str:
    """`text`, escaped for a string literal of MLIR, which takes bytes of its UTF-8 as two hexadecimal digits."""
    return "".join(c if c.isprintable() and c not in '"\\' else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return "".join(f"\\{byte:02X}" for byte in character.encode())


class Storage:
    """Writes the loads, stores and initial values of the state, the accumulators and the packs."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._packs = {p.name: p for p in graph.packs}
        self._places: dict[Value, tuple[str, str, int]] = {}
        self._base = {Value("state", tensor.name) for tensor in graph.state if tensor.in_base}
        self._shards = {name: number for number, shard in enumerate(graph.shards) for name in shard.state}
        for pack in graph.packs:
            for member, start in pack.starts.items():
                self._places[member] = symbol("pack", pack.name), self._pack_type(pack), start

    @property
    def is_exchanged(self) -> bool:
        """Whether ranks share the state and train it together."""
        return self._graph.bucket_bytes > 0

    def globals(self) -> Iterator[str]:
        """The globals of the state; their initial values are parameters of the archive that the module runs with."""
        for tensor in self._graph.state:
            if tensor.name in self._shards:
                yield from self._of_shard(tensor)
            elif Value("state", tensor.name) not in self._places:
                kind = stored_type(tensor_type(tensor.initial))
                name = symbol("state", tensor.name)
                if tensor.in_base:
                    yield f"util.global private {name} = {_parameter(tensor.base_name, BASE_SCOPE)} : {kind}"
                else:
                    yield f"util.global private mutable {name} = {_parameter(tensor.name)} : {kind}"
        for pack in self._graph.packs:
            if not self._is_gradients(pack):
                yield f"util.global private mutable {symbol('pack', pack.name)} : {self._pack_type(pack)}"
                yield "util.initializer {"
                yield from (f"  {line}" for line in self._initial(pack))
                yield "}"

    def _of_shard(self, tensor: StateTensor) -> Iterator[str]:
        """The global of a tensor that only one rank holds; on the others it stays null, and takes no memory."""
        kind = tensor_type(tensor.initial)
        yield f"util.global private mutable {symbol('state', tensor.name)} : {kind}"
        yield "util.initializer {"
        yield from (f"  {line}" for line in self._on_its_rank("%v", tensor, self._first("%v.first", tensor)))
        yield "  util.return"
        yield "}"

    def _first(self, result: str, tensor: StateTensor) -> Iterator[str]:
        kind = stored_type(tensor_type(tensor.initial))
        yield f"{result}.p = flow.tensor.constant {_parameter(tensor.name)} : {kind}"
        yield f"{result} = flow.tensor.clone {result}.p : {kind}"
        yield from self._store(result, Value("state", tensor.name), kind)

    def _on_its_rank(self, result: str, tensor: StateTensor, body: Iterator[str]) -> Iterator[str]:
        """Run `body` on the rank that holds `tensor`; on all ranks if it belongs to no shard."""
        if tensor.name in self._shards:
            yield from if_owned(result, self._shards[tensor.name], None, body)
        else:
            yield from body

    def _initial(self, pack: Pack) -> Iterator[str]:
        values = {member: f"%v{i}" for i, member in enumerate(pack.starts)}
        for member, value in values.items():
            kind = tensor_type(self._graph.tensor(member.name).initial)
            yield f"{value} = flow.tensor.constant {_parameter(member.name)} : {kind}"
        yield from self._concatenated("%whole", pack, values)
        yield f"util.global.store %whole, {symbol('pack', pack.name)} : {self._pack_type(pack)}"
        yield "util.return"

    def reset(self, roles: Collection[Role] = tuple(Role)) -> Iterator[str]:
        """Reset the state of these roles to its initial values."""
        for i, tensor in enumerate(t for t in self._graph.state if t.role in roles and not t.in_base):
            yield from self._on_its_rank(f"%o{i}", tensor, self._first(f"%v{i}", tensor))

    def load(self, result: str, value: Value, kind: str) -> Iterator[str]:
        """Load the stored value `value`, of MLIR type `kind`, as `result`."""
        if value in self._places:
            yield from self._load_slice(result, value, kind)
            return
        name, stored = self._symbol(value), stored_type(kind)
        loaded = result if stored == kind else f"{result}.bytes"
        if value in self._base:
            yield f"{loaded}.mapped = util.global.load {name} : {stored}"
            yield held_line(loaded, f"{loaded}.mapped", stored)
        else:
            yield f"{loaded} = util.global.load {name} : {stored}"
        if stored == kind:
            return
        yield f"{result} = arith.trunci {result}.bytes : {stored} to {kind}"

    def _load_slice(self, result: str, value: Value, kind: str) -> Iterator[str]:
        """Load a slice of a pack.

        It is no tensor.extract_slice: IREE would fuse that into the kernel that reads the slice, and so compile the
        kernel once per slice.
        """
        name, whole, start = self._places[value]
        flat = flattened(kind)
        yield f"{result}.pack = util.global.load {name} : {whole}"
        yield f"{result}.start = arith.constant {start} : index"
        yield f"{result}.size = arith.constant {elements(kind)} : index"
        yield f"{result}.flat = flow.tensor.slice {result}.pack[{result}.start for {result}.size] : {whole} -> {flat}"
        yield f"{result} = flow.tensor.reshape {result}.flat : {flat} -> {kind}"

    def _symbol(self, value: Value) -> str:
        if value.kind == "accumulator":
            return accumulator(self._graph, value.name)
        return symbol(value.kind, value.name)

    def store(self, source: str, value: Value, kind: str) -> Iterator[str]:
        """Store `source`, of MLIR type `kind`, as the new value of `value`."""
        stored = stored_type(kind)
        if stored != kind:
            converted = f"{source.replace('#', '.')}.bytes"
            yield f"{converted} = arith.extui {source} : {kind} to {stored}"
            source = converted
        yield from self._store(source, value, stored)

    def replace(self, source: str, value: Value, kind: str) -> Iterator[str]:
        """Store `source` as `store` does; of a shard, on the rank that holds it."""
        stored = self.store(source, value, kind)
        if value.kind == "state":
            stored = self._on_its_rank(f"{source}.o", self._graph.tensor(value.name), stored)
        yield from stored

    def _store(self, source: str, value: Value, kind: str) -> Iterator[str]:
        if value not in self._places:
            yield f"util.global.store {source}, {self._symbol(value)} : {kind}"
            return
        name, whole, start = self._places[value]
        part = source.replace("#", ".")
        yield f"{part}.pack = util.global.load {name} : {whole}"
        yield from put(f"{part}.next", source, kind, f"{part}.pack", whole, start)
        yield f"util.global.store {part}.next, {name} : {whole}"

    def gathered(self, result: str, value: Value, values: Mapping[Value, str]) -> Iterator[str]:
        """Build the gradient pack `value`, as `result`, from the SSA names of its members in `values`."""
        yield from self._concatenated(result, self._packs[value.name], values)

    def is_gathered(self, value: Value) -> bool:
        """Whether `value` is a pack of gradients."""
        return value.kind == "pack" and self._is_gradients(self._packs[value.name])

    def is_member(self, value: Value) -> bool:
        """Whether `value` is a member of a pack."""
        return value in self._places

    def _is_gradients(self, pack: Pack) -> bool:
        return not pack.holds_state

    def _pack_type(self, pack: Pack) -> str:
        first = next(iter(pack.starts))
        return mlir_type((pack.size,), self._graph.tensor(first.name).initial.dtype)

    def _concatenated(self, result: str, pack: Pack, values: Mapping[Value, str]) -> Iterator[str]:
        """Put the members at their offsets in an uninitialised tensor; gaps between members are never read.

        IREE lets the kernels of the members write directly into an empty tensor. Into zeros, it would copy the members.
        """
        whole = self._pack_type(pack)
        yield f"{result}.0 = flow.tensor.empty : {whole}"
        for i, (member, start) in enumerate(pack.starts.items(), 1):
            kind = tensor_type(self._graph.tensor(member.name).initial)
            last = i == len(pack.starts)
            yield from put(result if last else f"{result}.{i}", values[member], kind, f"{result}.{i - 1}", whole, start)


def put(result: str, source: str, kind: str, target: str, whole: str, start: int) -> Iterator[str]:
    """Write `source`, of type `kind`, into `target`, of type `whole`, from element `start` on; define `result`."""
    flat = flattened(kind)
    yield f"{result}.start = arith.constant {start} : index"
    yield f"{result}.flat = flow.tensor.reshape {source} : {kind} -> {flat}"
    yield f"{result} = flow.tensor.update {result}.flat, {target}[{result}.start] : {flat} -> {whole}"


def elements(kind: str) -> int:
    """The number of elements of a tensor of a static MLIR type."""
    *dims, _ = kind.removeprefix("tensor<").removesuffix(">").split("x")
    return math.prod(map(int, dims))


def element_of(kind: str) -> str:
    """The MLIR type of the elements of the tensor type `kind`."""
    return kind.removeprefix("tensor<").removesuffix(">").split("x")[-1]


def flattened(kind: str) -> str:
    """The rank-1 MLIR type with as many elements as the type `kind`."""
    return f"tensor<{elements(kind)}x{element_of(kind)}>"


def _parameter(name: str, scope: str = SCOPE) -> str:
    return f'#flow.parameter.named<"{scope}"::"{quoted(name)}">'
