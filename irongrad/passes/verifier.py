"""What must hold of a graph after every pass."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from irongrad.passes.base import kind_of
from irongrad.passes.purity import is_pure
from irongrad.passes.rewrite import computed_value
from irongrad.passes.verify_control_flow import problem_of
from irongrad.pipeline.symbols import has_symbols

# shape and dtype
Kind = tuple[tuple[Any, ...], torch.dtype]


class InvalidGraphError(Exception):
    """A graph breaks a rule; the message says which node and which rule."""


@dataclass(frozen=True)
class Snapshot:
    """A graph that was right.

    Attributes:
        arguments: the kind of every placeholder, in order.
        results: the kind of every output, in order; None for outputs that are no tensors.
        nodes: every node with its operator and arguments, so that only what a pass touched is looked at again.
    """

    arguments: tuple[Kind | None, ...]
    results: tuple[Kind | None, ...]
    nodes: dict[Node, tuple[Any, ...]]


def snapshot(graph: GraphModule) -> Snapshot:
    """What `verify` compares with."""
    kinds = {n: kind_of(n.meta.get("val")) for n in graph.graph.nodes}
    arguments = tuple(kind for n, kind in kinds.items() if n.op == "placeholder")
    return Snapshot(arguments, _results(graph), {n: _form(n, kinds) for n in kinds})


def verify(graph: GraphModule, before: Snapshot) -> Snapshot:
    """Check that `graph` is well formed, functional, of the right types, and has the signature it had.

    Returns:
        What the next `verify` compares with.

    Raises:
        InvalidGraphError: naming the first node that breaks a rule.
    """
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise InvalidGraphError(f"a value is used before it is computed, or is not in the graph: {error}") from error
    now = snapshot(graph)
    if now.arguments != before.arguments:
        raise InvalidGraphError(f"the arguments were {before.arguments} and are {now.arguments}")
    if now.results != before.results:
        raise InvalidGraphError(f"the results were {before.results} and are {now.results}")
    for node, form in now.nodes.items():
        if isinstance(node.target, HigherOrderOperator):  # its bodies may be others under the same names
            _check_control_flow(graph, node)
        elif before.nodes.get(node) != form:
            _check(graph, node)
    return now


def _check(graph: GraphModule, node: Node) -> None:
    if node.op == "call_function":
        _check_call(node)
    elif node.op == "get_attr":
        _check_constant(graph, node)
    elif node.op not in ("placeholder", "output"):
        raise InvalidGraphError(f"{node.format_node()}: {node.op} is no call of an ATen operator")


def _check_constant(graph: GraphModule, node: Node) -> None:
    held = getattr(graph, str(node.target))
    if isinstance(held, torch.Tensor) and kind_of(held) != kind_of(node.meta.get("val")):
        raise InvalidGraphError(
            f"{node.format_node()}: meta['val'] says {kind_of(node.meta.get('val'))}, it holds {kind_of(held)}"
        )


def _check_control_flow(graph: GraphModule, node: Node) -> None:
    if problem := problem_of(graph, node):
        raise InvalidGraphError(f"{node.format_node()}: {problem}")


def _check_call(node: Node) -> None:
    target = node.target
    if has_symbols(node.meta.get("val")) and isinstance(target, BuiltinFunctionType):
        return  # the arithmetic of sizes
    if target is not operator.getitem and not isinstance(target, OpOverload):
        raise InvalidGraphError(f"{node.format_node()}: {target} is no ATen operator")
    if not is_pure(node):
        raise InvalidGraphError(
            f"{node.format_node()}: {target} writes into an argument, is random, or has another effect"
        )
    if "val" not in node.meta:
        raise InvalidGraphError(f"{node.format_node()}: the node has no meta['val']")
    try:
        real = computed_value(node)
    except Exception as error:
        raise InvalidGraphError(f"{node.format_node()}: {target} does not take these arguments: {error}") from error
    if kind_of(real) != kind_of(node.meta["val"]):
        raise InvalidGraphError(
            f"{node.format_node()}: meta['val'] says {kind_of(node.meta['val'])}, the operator gives {kind_of(real)}"
        )


def _results(graph: GraphModule) -> tuple[Kind | None, ...]:
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    values = torch.utils._pytree.tree_leaves(output.args[0])
    return tuple(kind_of(v.meta.get("val")) if isinstance(v, Node) else None for v in values)


def _form(node: Node, kinds: Mapping[Node, Any]) -> tuple[Any, ...]:
    """Changes when the operator, an argument, or the value of an argument does."""
    inputs = tuple(kinds.get(n) for n in node.all_input_nodes)
    return node.target, _plain(node.args), _plain(node.kwargs), inputs, kinds[node]


def _plain(argument: Any) -> Any:
    """An argument such that 1, 1.0 and True are three."""
    if isinstance(argument, Node):
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple(map(_plain, argument))
    if isinstance(argument, dict):
        return tuple((name, _plain(value)) for name, value in argument.items())
    return type(argument), argument
