"""Check the invariants of a graph after every pass."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import computed_value, kind_of
from irongrad.graph.purity import is_pure
from irongrad.passes.verify_control_flow import problem_of
from irongrad.sizes.symbols import has_symbols

# The shape and dtype of a tensor.
Kind = tuple[tuple[Any, ...], torch.dtype]


class InvalidGraphError(Exception):
    """A graph breaks a rule; the message names the node and the rule."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a graph at one time.

    Attributes:
        arguments: the kind of every placeholder, in order.
        results: the kind of every output, in order; None for outputs that are not tensors.
        nodes: the state of every node, so that only nodes that a pass touched are checked again.
        is_another: whether the graph differs from the snapshot that it was compared with.
        is_verified: whether the graph passed the checks.
    """

    arguments: tuple[Kind | None, ...]
    results: tuple[Kind | None, ...]
    nodes: dict[Node, _NodeState]
    is_another: bool = False
    is_verified: bool = False


class _NodeState(NamedTuple):
    """The state of a node. FX replaces the arguments of a node and never changes them in place.

    Attributes:
        target: the operator.
        args: the positional arguments.
        kwargs: the keyword arguments.
        value: the fake value of the result.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any

    @classmethod
    def of(cls, node: Node) -> _NodeState:
        """Return the present state of `node`."""
        return cls(node.target, node.args, node.kwargs, node.meta.get("val"))

    def equals(self, other: _NodeState | None) -> bool:
        """Whether both states have the same operator, equal arguments and results of the same kind."""
        return (
            other is not None
            and self.target is other.target
            and (self.args is other.args or _plain(self.args) == _plain(other.args))
            and (self.kwargs is other.kwargs or _plain(self.kwargs) == _plain(other.kwargs))
            and self.has_kind_of(other)
        )

    def has_kind_of(self, other: _NodeState) -> bool:
        """Whether both results are of the same kind."""
        return self.value is other.value or kind_of(self.value) == kind_of(other.value)


def snapshot(graph: GraphModule) -> Snapshot:
    """Return the snapshot that `verify` compares with."""
    nodes = {n: _NodeState.of(n) for n in graph.graph.nodes}
    arguments = tuple(kind_of(form.value) for n, form in nodes.items() if n.op == "placeholder")
    return Snapshot(arguments, _results(graph), nodes)


def verify(graph: GraphModule, before: Snapshot) -> Snapshot:
    """Check that `graph` is well formed, functional and correctly typed, and has the same signature as before.

    Returns:
        The snapshot for the next `verify`.

    Raises:
        InvalidGraphError: a node breaks a rule; names the first.
    """
    now = snapshot(graph)
    touched = {n for n, form in now.nodes.items() if not form.equals(before.nodes.get(n))}
    if touched or not before.is_verified or list(now.nodes) != list(before.nodes):
        _check_order(graph)
    if now.arguments != before.arguments:
        raise InvalidGraphError(f"the arguments were {before.arguments} and are {now.arguments}")
    if now.results != before.results:
        raise InvalidGraphError(f"the results were {before.results} and are {now.results}")
    retyped = {n for n in touched & before.nodes.keys() if not now.nodes[n].has_kind_of(before.nodes[n])}
    for node in now.nodes:
        if isinstance(node.target, HigherOrderOperator):  # its bodies may have changed under the same names
            _check_control_flow(graph, node)
        elif node in touched or (retyped and not retyped.isdisjoint(node.all_input_nodes)):
            _check(graph, node)
    return replace(now, is_another=bool(touched) or before.nodes.keys() != now.nodes.keys(), is_verified=True)


def _check_order(graph: GraphModule) -> None:
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise InvalidGraphError(f"a value is used before it is computed, or is not in the graph: {error}") from error


def _check(graph: GraphModule, node: Node) -> None:
    if node.op == "call_function":
        _check_call(node)
    elif node.op == "get_attr":
        _check_constant(graph, node)
    elif node.op not in ("placeholder", "output"):
        raise InvalidGraphError(f"{node.format_node()}: {node.op} is no call of an ATen operator")


def _check_constant(graph: GraphModule, node: Node) -> None:
    value = getattr(graph, str(node.target))
    if isinstance(value, torch.Tensor) and kind_of(value) != kind_of(node.meta.get("val")):
        raise InvalidGraphError(
            f"{node.format_node()}: meta['val'] says {kind_of(node.meta.get('val'))}, it holds {kind_of(value)}"
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


def _plain(argument: Any) -> Any:
    """`argument` in a form in which 1, 1.0 and True differ."""
    if isinstance(argument, Node):
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple(map(_plain, argument))
    if isinstance(argument, dict):
        return tuple((name, _plain(value)) for name, value in argument.items())
    return type(argument), argument
