"""Trace the update of one parameter, and copy it for all parameters that the optimizer updates alike.

A network has hundreds of parameters of a few shapes. With `foreach=False`, every optimizer of torch.optim updates each
parameter separately. So the graphs of two parameters of one group and one shape differ only in the tensors they read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from irongrad.diagnostics.source_lines import is_user_class
from irongrad.graph.step_graph import Value
from irongrad.pipeline.optimizer.state import State
from irongrad.runtime.errors import InternalError
from irongrad.step.hyperparameters import groups_of
from irongrad.step.optimizer_slots import is_foreign


def first_alike(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter], initial: State
) -> dict[str, str]:
    """Map each parameter to the first that is updated like it: the same group, shape, dtype and shared state.

    An optimizer from outside torch.optim, or a hook, may let one parameter depend on another, so its parameters are
    never alike.
    """
    number = {
        id(p): id(p) if is_foreign(optimizer) or is_user_class(type(optimizer)) or _has_hooks(optimizer) else i
        for i, (optimizer, group) in enumerate(groups_of(optimizers))
        for p in group["params"]
    }
    state: dict[str, list[object]] = {name: [] for name in parameters}
    for (name, key), tensor in initial.items():
        shared = tensor.name if tensor.aliases else None
        if name in state:
            state[name].append((key, tensor.initial.shape, tensor.initial.dtype, shared))
    first: dict[object, str] = {}
    return {
        name: first.setdefault((number[id(p)], p.shape, p.dtype, *state[name]), name) for name, p in parameters.items()
    }


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def copy_to_all(
    graph: GraphModule,
    arguments: Sequence[Value],
    results: Sequence[Value],
    alike: Mapping[str, str],
    initial: State,
) -> dict[Value, Node]:
    """Copy the update of the first parameter in each set of alike parameters for all others in the set.

    Args:
        graph: takes the parameters, gradients and state of all parameters, and updates the first of each set. Its
            output is not changed.
        arguments: what each placeholder stands for.
        results: what each result stands for, including the `gradient` of every parameter as the optimizer sees it.
        alike: the result of `first_alike`.
        initial: the optimizer's state.

    Returns:
        The node of each new value: of those in `results`, and of the copied updates.

    Raises:
        InternalError: an update does not read the gradient in `results`.
    """
    placeholders = dict(zip(arguments, (n for n in graph.graph.nodes if n.op == "placeholder"), strict=True))
    output = graph.graph.output_node()
    new = dict(zip(results, output.args[0], strict=True))
    traced = [n for n in graph.graph.nodes if n.op == "call_function"]
    own = {name: _own_values(name, initial) for name in alike}
    firsts = dict.fromkeys(alike.values())
    updates = {name: _dependents(traced, [_node_of(v, placeholders, new) for v in own[name]]) for name in firsts}
    for name, first in alike.items():
        if name == first:
            continue
        gradient = new[Value("gradient", first)]
        if not any(gradient in node.all_input_nodes for node in updates[first]):
            raise InternalError(f"the update of {first!r} does not read the gradient that it was traced with")
        twin = {
            _node_of(a, placeholders, new): _node_of(b, placeholders, new)
            for a, b in zip(own[first], own[name], strict=True)
        }
        with graph.graph.inserting_before(output):
            for node in updates[first]:
                twin[node] = graph.graph.node_copy(node, lambda n, twin=twin: twin.get(n, n))
        for a, b in zip(own[first], own[name], strict=True):
            if a in new and b not in new:
                new[b] = twin.get(new[a], new[a])
    return new


def _own_values(name: str, initial: State) -> list[Value]:
    """The values that only the update of `name` reads: its clipped gradient, the parameter, and its unshared state."""
    state = [t.name for (owner, _), t in initial.items() if owner == name and not t.aliases]
    return [Value("gradient", name), *(Value("state", n) for n in (name, *state))]


def _node_of(value: Value, placeholders: Mapping[Value, Node], new: Mapping[Value, Node]) -> Node:
    return new[value] if value.kind == "gradient" else placeholders[value]


def _dependents(nodes: Sequence[Node], sources: Sequence[Node]) -> list[Node]:
    found = set(sources)
    depending = []
    for node in nodes:
        if node not in found and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
            depending.append(node)
    return depending
