"""Rules of the form "this expression equals that one", and their application to the nodes of a graph.

Both sides of a rule are functions that build an expression of operators from variables:

    Rule("-(-x)", lambda x: neg(neg(x)), lambda x: x)

The parameters of the first function are the variables of the pattern. A variable matches any value. If it occurs twice,
both values must be equal.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from irongrad.graph.nodes import call, kind_of, value_of
from irongrad.graph.purity import is_mergeable

aten = torch.ops.aten

# Graphs do not represent where and how a result is stored.
_WITHOUT_MEANING = frozenset({"memory_format", "layout", "device", "pin_memory", "non_blocking"})

# The callable is operator.getitem, for operators of several results.
Operator: TypeAlias = OpOverload | Callable[[Any, Any], Any]
Bindings = dict[str, Any]


@dataclass(frozen=True)
class Variable:
    """A placeholder that matches any value in a pattern.

    Attributes:
        name: the name of the parameter that it stands for.
    """

    name: str


@dataclass(frozen=True)
class Expression:
    """A call of one of the operators of a family.

    Attributes:
        family: the operators.
        arguments: the arguments; an ellipsis as the last one matches any further arguments.
    """

    family: Family
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """Operators that compute the same result from the same arguments.

    Attributes:
        operators: the operators; a replacement calls the first.
        commutative: whether a pattern also matches with its arguments in reverse order.
    """

    operators: tuple[Operator, ...]
    commutative: bool = False

    def __call__(self, *arguments: Any) -> Expression:
        """Build an expression, from variables in a pattern and from values in a replacement."""
        return Expression(self, arguments)


def family(*operators: Operator, commutative: bool = False) -> Family:
    """Return the family of `operators`."""
    return Family(operators, commutative)


@dataclass(frozen=True)
class Rule:
    """A rule that replaces one expression by another.

    A rule only applies if the replacement has the shape and dtype of the node that it replaces. So no rule has to check
    them.

    Attributes:
        name: the name that `irongrad compile --pass-report` counts the rule under.
        pattern: builds the expression to match, from variables.
        replacement: builds the replacement, from any of these variables and `out`, the replaced node.
        when: a further condition on the variables.
        exact: whether the replacement is equal bit for bit; otherwise it may round differently.
        sized: whether the rule needs sizes as numbers; if so, it is skipped in graphs of symbolic sizes.
    """

    name: str
    pattern: Callable[..., Expression]
    replacement: Callable[..., Any]
    when: Callable[..., bool] = lambda: True
    exact: bool = True
    sized: bool = False

    @cached_property
    def expression(self) -> Expression:
        """The pattern, with variables named after its parameters."""
        return self.pattern(*map(Variable, _names(self.pattern)))

    @cached_property
    def _argument_families(self) -> tuple[tuple[int, Family], ...]:
        """The arguments that must be calls, by position; none if the family is commutative."""
        if self.expression.family.commutative:
            return ()
        return tuple((i, a.family) for i, a in enumerate(self.expression.arguments) if isinstance(a, Expression))

    def apply(self, graph: Graph, node: Node) -> Node | None:
        """Build the replacement of `node` before it in `graph`, and return it; None if the rule does not apply."""
        args = node.args
        for position, inner in self._argument_families:  # most rules fail here, and `match` is slower
            if position < len(args) and getattr(args[position], "target", None) not in inner.operators:
                return None
        bound = match(self.expression, node, {"out": node})
        if bound is None or not _call_with(self.when, bound):
            return None
        with graph.inserting_before(node):
            new = build(_call_with(self.replacement, bound), graph, node)
        if not isinstance(new, Node):
            return None  # a number cannot replace a tensor
        if kind_of(value_of(new)) == kind_of(value_of(node)):
            return new
        drop(new, keep=node)
        return None


def match(pattern: Any, value: Any, bound: Bindings) -> Bindings | None:
    """Return `bound` with the variables of `pattern` bound so that it equals `value`; None if it does not match."""
    if isinstance(pattern, Variable):
        known = bound.get(pattern.name, value)
        return {**bound, pattern.name: value} if known is value or _is_equal(known, value) else None
    if isinstance(pattern, Expression):
        return _match_call(pattern, value, bound)
    if isinstance(pattern, (list, tuple)):
        return _match_all(pattern, value, bound) if isinstance(value, (list, tuple)) else None
    return bound if _is_equal(pattern, constant_of(value)) else None


def _match_call(pattern: Expression, value: Any, bound: Bindings) -> Bindings | None:
    if not isinstance(value, Node) or value.target not in pattern.family.operators or not is_mergeable(value):
        return None
    arguments = arguments_of(value)
    if arguments is None:
        return None
    found = _match_all(pattern.arguments, arguments, bound)
    if found is None and pattern.family.commutative:
        found = _match_all(pattern.arguments[::-1], arguments, bound)
    return found


def _match_all(patterns: Sequence[Any], values: Sequence[Any], bound: Bindings) -> Bindings | None:
    if patterns and patterns[-1] is ...:
        patterns, values = patterns[:-1], values[: len(patterns) - 1]
    if len(patterns) != len(values):
        return None
    for pattern, value in zip(patterns, values, strict=True):
        found = match(pattern, value, bound)
        if found is None:
            return None
        bound = found
    return bound


def arguments_of(node: Node) -> tuple[Any, ...] | None:
    """Return all positional arguments of `node`, with defaults; None if a keyword argument is not its default."""
    if not isinstance(node.target, OpOverload):
        return tuple(node.args)
    positional, named = _parameters(node.target)
    if not node.kwargs and len(node.args) == len(positional):
        return tuple(node.args)
    if any(node.kwargs.get(name, default) != default for name, default in named):
        return None
    rest = positional[len(node.args) :]
    return (*node.args, *(node.kwargs.get(name, default) for name, default in rest))


@cache
def _parameters(operator: OpOverload) -> tuple[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]:
    """The names and defaults of an operator's positional arguments, and of its relevant keyword arguments."""
    arguments = [(a.name, a.kwarg_only, a.default_value) for a in operator._schema.arguments]
    positional = tuple((name, default) for name, keyword, default in arguments if not keyword)
    named = tuple((n, default) for n, keyword, default in arguments if keyword and n not in _WITHOUT_MEANING)
    return positional, named


def constant_of(value: Any) -> Any:
    """Return the number that `value` is or is filled with; otherwise `value` itself."""
    if isinstance(value, Node) and value.target is aten.full.default:
        return value.args[1]
    return value


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two arguments are equal to an operator: 0.0 and -0.0 are not."""
    if isinstance(one, Node) or isinstance(other, Node) or isinstance(one, (list, tuple)):
        return bool(one == other)
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return bool(one == other) and (not numbers or math.copysign(1, one) == math.copysign(1, other))


def build(value: Any, graph: Graph, like: Node) -> Any:
    """Build the node of an expression at the insertion point of `graph`; return any other value unchanged.

    An expression that occurs twice becomes one node.
    """
    nodes: dict[int, Node] = {}

    def node_of(part: Any) -> Any:
        if not isinstance(part, Expression):
            return part
        if id(part) not in nodes:
            operator, *_ = part.family.operators
            nodes[id(part)] = call(graph, operator, *map(node_of, part.arguments), like=like)
        return nodes[id(part)]

    return node_of(value)


def _call_with(function: Callable[..., Any], bound: Bindings) -> Any:
    """Call `function` with the bindings that its parameters name."""
    return function(*(bound[name] for name in _names(function)))


@cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def drop(node: Node, keep: Node | None = None) -> None:
    """Erase `node`, and recursively the operands that only it used, except `keep`."""
    if node._erased or node.users or node is keep or node.op not in ("call_function", "get_attr"):
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        drop(source, keep)
