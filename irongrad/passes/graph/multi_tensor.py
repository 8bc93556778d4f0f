"""Replace equal updates of several tensors by one update of packed tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from irongrad.graph.nodes import call, sort_topologically, value_of
from irongrad.graph.purity import is_pure
from irongrad.passes.base import Context, PassResult

aten = torch.ops.aten
prims = torch.ops.prims

# Operators that return their argument unchanged if they keep its shape.
_IDENTITIES = (aten.clone.default, aten.alias.default, aten.view.default, aten.reshape.default)
# Elementwise, although torch 2.13 does not tag them so.
_ALSO_POINTWISE = (*_IDENTITIES, aten._to_copy.default, prims.convert_element_type.default)


# Bytes. IREE's kernels read and write whole vectors, and assume that a tensor begins at a multiple of this.
_ALIGNMENT = 64


@dataclass(frozen=True)
class MultiTensor:
    """Update many small tensors as one.

    Before:
        a = g * lr; b = p - a; c = h * lr; d = q - c; return (b, d)
    After:
        s = cat([g.view(-1), h.view(-1)]); t = cat([p.view(-1), q.view(-1)])
        u = t - s * lr; return (u[:n].view(p.shape), u[n:].view(q.shape))

    An optimizer runs the same elementwise program on every parameter. Each run is one kernel launch or several;
    `torch.optim` avoids them with `foreach` and `fused`. If the packed tensors are state, they are stored in packed
    form (`irongrad.pipeline.assemble.packed_state`), and nothing is copied.

    Programs are equal only if they read the same scalars, so `cse` runs before. A program must lead from arguments of
    the step graph's function `update` to results. Left alone:

    * programs with a non-elementwise operator in between
    * programs over tensors of more than `limit` elements, whose launch is cheap compared to their work
    * programs that fewer than `least` tensors share
    * updates that ranks divide among them, because tensors of one rank would be packed with those of another

    Attributes:
        limit: the most elements of a tensor that is packed.
        least: the fewest tensors that are packed together.
    """

    name: ClassVar[str] = "multi-tensor"

    limit: int = 4096
    least: int = 2

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        if context.function != "update" or (context.step is not None and context.step.shards):
            return PassResult(False)
        return pack_updates(graph, self.limit, self.least)


@dataclass(frozen=True)
class Program:
    """Connected elementwise nodes of one shape.

    Attributes:
        nodes: the nodes, in order.
        inputs: the values of that shape that the nodes read, in the order of their first use.
        outputs: the nodes that nodes outside the program use.
        form: a key that is equal for programs which compute the same from their inputs.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    form: Hashable


def pack_updates(graph: GraphModule, limit: int, least: int) -> PassResult:
    """Replace every group of equal programs by one program over packed tensors."""
    groups: dict[Hashable, list[Program]] = defaultdict(list)
    for program in _programs(graph.graph, limit):
        if _is_update(program):
            groups[program.form].append(program)
    chosen = [g for g in groups.values() if len(g) >= least]
    inside = {n for group in chosen for p in group for n in p.nodes}
    wholes: dict[tuple[Node, ...], Node] = {}
    for group in chosen:
        _run_packed(graph.graph, group, inside, wholes)
    if chosen:
        sort_topologically(graph.graph)
    return PassResult(bool(chosen), {"tensors": sum(map(len, chosen)), "updates": len(chosen)})


def _is_update(program: Program) -> bool:
    """Whether the program leads from arguments to results."""
    users = {u for n in program.outputs for u in n.users} - set(program.nodes)
    return all(i.op == "placeholder" for i in program.inputs) and all(u.op == "output" for u in users)


def _programs(graph: Graph, limit: int) -> list[Program]:
    """The programs over tensors of at most `limit` elements.

    A program is a connected set of elementwise nodes of one shape and one stage. A path that leaves the elementwise
    nodes of a shape enters a later stage. So no path leaves a program and returns to it, and none connects two programs
    of one stage. Every node is in the latest possible stage. So a parameter's decay is in one program with the update
    that the gradient norm scales.
    """
    lanes = {node: _tensor_operands(node, limit) for node in graph.nodes}
    stage: dict[Node, int] = {}  # counted back from the results
    part: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        left = (stage[u] - bool(lanes[node] and node not in lanes[u]) for u in node.users if u.op != "output")
        stage[node] = min(left, default=0)
    for node in graph.nodes:
        if lanes[node]:
            joined = {id(part[i]): part[i] for i in lanes[node] if i in part and stage[i] == stage[node]}.values()
            mine = [n for other in joined for n in other] + [node]
            part |= dict.fromkeys(mine, mine)
    order = {n: i for i, n in enumerate(graph.nodes)}
    parts = {id(p): p for p in part.values()}.values()
    return [_program(sorted(p, key=order.__getitem__), stage[p[0]]) for p in parts]


def _tensor_operands(node: Node, limit: int) -> list[Node]:
    """The operands of an elementwise node that have its shape, if all others are scalars; else nothing."""
    if not _is_pointwise(node) or not isinstance(value := node.meta.get("val"), torch.Tensor):
        return []
    if value.ndim == 0 or not 0 < value.numel() <= limit:
        return []
    operands = node.all_input_nodes
    if not all(value_of(n).ndim == 0 or value_of(n).shape == value.shape for n in operands):
        return []
    return [n for n in operands if value_of(n).ndim]


def _is_pointwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or not is_pure(node):
        return False
    return torch.Tag.pointwise in target.tags or target in _ALSO_POINTWISE


def _program(nodes: Sequence[Node], stage: int) -> Program:
    inside = {n: ("node", i) for i, n in enumerate(nodes)}
    inputs: dict[Node, tuple[str, int]] = {}

    def key(argument: Any) -> Hashable:
        """A key that is equal for arguments which play the same role in their programs."""
        if isinstance(argument, (list, tuple)):
            return tuple(map(key, argument))
        if not isinstance(argument, Node):
            return type(argument), repr(argument)
        if argument in inside:
            return inside[argument]
        if value_of(argument).ndim == 0:
            return "scalar", argument
        return inputs.setdefault(argument, ("input", len(inputs)))

    def call_key(node: Node) -> Hashable:
        if node.target in _IDENTITIES:
            return "same", key(node.args[0])
        return node.target, key(node.args), key(tuple(node.kwargs.items()))

    calls = tuple(map(call_key, nodes))
    outputs = tuple(n for n in nodes if any(u not in inside for u in n.users))
    dtypes = tuple(value_of(n).dtype for n in inputs)
    form = stage, calls, tuple(inside[o] for o in outputs), dtypes
    return Program(tuple(nodes), tuple(inputs), outputs, form)


def _run_packed(
    graph: Graph, group: Sequence[Program], inside: Set[Node], wholes: dict[tuple[Node, ...], Node]
) -> None:
    """Add the program over packed tensors; its slices replace the outputs and all other reads of the inputs.

    Args:
        graph: the graph.
        group: equal programs.
        inside: the nodes of all programs that are packed; another group may read the same inputs.
        wholes: the packed tensors so far, by their members.
    """
    # members without padding come first, so that they are contiguous
    group = sorted(group, key=lambda p: bool(_padding(value_of(p.inputs[0]))))
    first = group[0]
    graph.inserting_before(first.nodes[0])
    packed: dict[Node, Node] = {}
    for place, source in enumerate(first.inputs):
        others = [[u for u in p.inputs[place].users if u not in inside] for p in group]
        members = [p.inputs[place] for p in group]
        if tuple(members) in wholes:
            packed[source] = wholes[tuple(members)]
            continue
        flat = [_flattened(graph, p.inputs[place], like=p.nodes[0]) for p in group]
        whole = packed[source] = wholes[tuple(members)] = call(graph, aten.cat.default, flat, like=first.nodes[0])
        for old, users, start in zip(members, others, _starts(members), strict=True):
            part = _part(graph, whole, start, like=old) if users else old
            for user in users:
                user.replace_input_with(old, part)
    for node in first.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: packed.get(n, n))
        packed[node] = args[0] if node.target in _IDENTITIES else call(graph, node.target, *args, like=node, **kwargs)
    for place, output in enumerate(first.outputs):
        members = [p.outputs[place] for p in group]
        for old, start in zip(members, _starts(members), strict=True):
            old.replace_all_uses_with(_part(graph, packed[output], start, like=old))
    for program in group:
        for node in reversed(program.nodes):
            graph.erase_node(node)


def _starts(members: Sequence[Node]) -> list[int]:
    """The position at which each member of a packed tensor begins."""
    sizes = [value_of(n).numel() + _padding(value_of(n)) for n in members]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _part(graph: Graph, whole: Node, start: int, like: Node) -> Node:
    """The member of a packed tensor that begins at `start`, in the shape of `like`."""
    value = value_of(like)
    part = call(graph, aten.slice.Tensor, whole, 0, start, start + value.numel(), like=like)
    return _reshaped(graph, part, list(value.shape), like=like)


def _flattened(graph: Graph, node: Node, like: Node) -> Node:
    """`node` as a tensor of rank 1, zero-padded to where the next tensor may begin."""
    flat = _reshaped(graph, node, [value_of(node).numel()], like)
    padding = _padding(value_of(node))
    return call(graph, aten.constant_pad_nd.default, flat, [0, padding], like=like) if padding else flat


def _padding(value: torch.Tensor) -> int:
    return int(-value.numel() % (_ALIGNMENT // value.element_size()))


def _reshaped(graph: Graph, node: Node, shape: list[int], like: Node) -> Node:
    if value_of(node).ndim == len(shape) == 1:
        return node
    return call(graph, aten.reshape.default, node, shape, like=like)


PASS = MultiTensor
