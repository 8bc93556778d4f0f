"""Divide the update among ranks: each holds a part of the optimizer's state, and updates the parameters that it is of.

Before: `update` computes all new state.
After: `update` computes what every rank needs, and `update.<number>` the state of one shard and its parameters.

It is the first stage of ZeRO (Rajbhandari et al., SC 2020, arXiv:1910.02054), with whole tensors as torch's
ZeroRedundancyOptimizer divides them. So the update may be of any form, as long as it does not mix parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from irongrad.graph.step_graph import Function, Shard, StepGraph, Value
from irongrad.memory_model.kernel_roles import is_constant
from irongrad.pipeline.optimizer.extraction import Source, ancestors, results_of
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import Role

# The number of shards that a state is divided into if no tensor of it is larger: with four ranks, the largest share is
# then at most an eighth above the mean.
_SHARDS = 32
_WAY_OUT = "compile without shard"


@dataclass(frozen=True)
class _Group:
    """Results of the update that one rank has to compute together.

    Attributes:
        divided: the optimizer's state among them, which only that rank holds.
        results: all of them.
    """

    divided: tuple[Value, ...]
    results: tuple[Value, ...]

    @property
    def sent(self) -> tuple[Value, ...]:
        """What the other ranks need, such as the parameters."""
        return tuple(v for v in self.results if v not in self.divided)


def sharded(graphs: Mapping[str, StepGraph]) -> dict[str, StepGraph]:
    """Divide the update of the only step.

    Raises:
        UserError: there are several steps, whose updates may share state; or as `shard_update`.
    """
    if len(graphs) > 1:
        raise UserError(f"shard takes a single step, and there are {', '.join(graphs)}: {_WAY_OUT}")
    return {name: shard_update(graph) for name, graph in graphs.items()}


def shard_update(graph: StepGraph) -> StepGraph:
    """Divide `update` into shards.

    Raises:
        UserError: the update of a parameter depends on the optimizer's state of another one, or the optimizer has no
            state to divide.
    """
    update = graph.functions["update"]
    results, groups = results_of(update), _groups(graph)
    shards = list(_joined(groups, graph))
    divided = {v for group in groups for v in group.results}
    common = {v: n for v, n in results.items() if v not in divided}
    parts = [{v: results[v] for v in shard.results} for shard in shards]
    known = _numbers(common.values(), [part.values() for part in parts])
    source = Source.of(update)
    names = [f"update.{i}" for i in range(len(shards))]
    functions = {
        "update": source.extracted(common | {value: node for node, value in known.items()}, {}),
        **{name: source.extracted(part, known) for name, part in zip(names, parts, strict=True)},
    }
    return replace(
        graph,
        functions={**graph.functions, **functions},
        shards=tuple(
            Shard(name, tuple(v.name for v in shard.divided)) for name, shard in zip(names, shards, strict=True)
        ),
    )


def _groups(graph: StepGraph) -> list[_Group]:
    """The results that depend on the same state of the optimizer, in the order of the update's results."""
    results = results_of(graph.functions["update"])
    divided = _divisible(graph)
    reads = _reads(graph.functions["update"], divided)
    groups: list[_Group] = []
    for value, node in results.items():
        own = {*reads[node], *((value,) if value in divided else ())}
        if not own:
            continue
        touching = [g for g in groups if own & {*g.divided}]
        groups = [g for g in groups if g not in touching]
        states = dict.fromkeys([*(v for g in touching for v in g.divided), *(v for v in divided if v in own)])
        groups.append(_Group(tuple(states), (*(v for g in touching for v in g.results), value)))
    groups = [g for g in groups if g.sent]  # state that no parameter depends on stays whole
    for group in groups:
        _refuse_mixed(group, graph)
    if not groups:
        raise UserError(
            "the optimizer keeps no state for the elements of a parameter, such as momentum, so there is nothing to "
            f"divide among ranks: {_WAY_OUT}"
        )
    return groups


def _divisible(graph: StepGraph) -> list[Value]:
    """The optimizer's tensors that only the update reads and writes; numbers, such as step counts, stay whole."""
    update = graph.functions["update"]
    others = {a for name, f in graph.functions.items() if name != "update" for a in (*f.arguments, *f.results)}
    tensors = (t for t in graph.state if t.role is Role.OPTIMIZER and t.initial.numel() > 1)
    values = [Value("state", t.name) for t in tensors if t.initial.dtype is not torch.bool]
    return [v for v in values if v in update.results and v not in others]


def _reads(function: Function, wanted: Collection[Value]) -> dict[Node, frozenset[Value]]:
    """The values among `wanted` that each node depends on."""
    arguments = Source.of(function).arguments
    found: dict[Node, frozenset[Value]] = {}
    for node in function.graph.graph.nodes:
        own = frozenset([arguments[node]]) if node in arguments and arguments[node] in wanted else frozenset[Value]()
        found[node] = own.union(*(found[n] for n in node.all_input_nodes))
    return found


def _refuse_mixed(group: _Group, graph: StepGraph) -> None:
    dtypes = _dtypes(group.sent, graph)
    if len(dtypes) > 1:
        names = ", ".join(sorted(v.name for v in group.sent))
        raise UserError(f"the update computes {names} together, and they have several dtypes: {_WAY_OUT}")
    trained = [v.name for v in group.results if v.name in graph.gradients]
    if len(trained) > 1:
        raise UserError(
            f"the optimizer updates {trained[0]!r} and {trained[1]!r} together, from state of both, so ranks cannot "
            f"divide that state: {_WAY_OUT}"
        )


def _joined(groups: Sequence[_Group], graph: StepGraph) -> Iterator[_Group]:
    """Join small neighbours, as long as there are enough shards and what a rank sends fits into a bucket."""
    most = sum(_bytes(g.divided, graph) for g in groups) // _SHARDS
    joined: _Group | None = None
    for group in groups:
        if joined is None:
            joined = group
            continue
        larger = _Group(joined.divided + group.divided, joined.results + group.results)
        too_large = _bytes(larger.divided, graph) > most or _bytes(larger.sent, graph) > graph.bucket_bytes
        if too_large or len(_dtypes(larger.sent, graph)) > 1:
            yield joined
            larger = group
        joined = larger
    if joined is not None:
        yield joined


def _dtypes(values: Sequence[Value], graph: StepGraph) -> set[torch.dtype]:
    return {graph.tensor(v.name).initial.dtype for v in values}


def _bytes(values: Sequence[Value], graph: StepGraph) -> int:
    return sum(graph.tensor(v.name).initial.nbytes for v in values)


def _numbers(common: Collection[Node], parts: Sequence[Collection[Node]]) -> Mapping[Node, Value]:
    """The numbers that several parts need, such as the factor of clipping, so that `update` computes them once.

    Larger values are computed in each part again: no memory holds them between the functions.
    """
    needed = [set(ancestors(part, ())) for part in (common, *parts)]
    counts: dict[Node, int] = {}
    for node in (n for nodes in needed for n in nodes):
        counts[node] = counts.get(node, 0) + 1
    several = [n for n, count in counts.items() if count > 1 and _is_number(n)]
    border = {n for part in parts for n in ancestors(part, several)} & set(several)
    return {n: Value("shared", n.name) for n in counts if n in border}


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    is_computed = node.op != "placeholder" and not is_constant(node)
    return is_computed and isinstance(value, torch.Tensor) and value.numel() == 1
