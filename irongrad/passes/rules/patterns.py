"""Rules of the form "this expression is that one", and their application to the nodes of a graph.

Both sides of a rule are functions that build an expression of operators from variables:

    Rule("-(-x)", lambda x: neg(neg(x)), lambda x: x)

The parameters of the first are what it matches: any value, twice the same where one stands twice.
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

# Where a result lies in memory is nothing that a graph says.
_WITHOUT_MEANING = frozenset({"memory_format", "layout", "device", "pin_memory", "non_blocking"})

Operator: TypeAlias = OpOverload | Callable[[Any, Any], Any]  # the second is operator.getitem, of several results
Bindings = dict[str, Any]


@dataclass(frozen=True)
class Variable:
    """Stands for any value in a pattern."""

    name: str


@dataclass(frozen=True)
class Expression:
    """A call of one of the operators of `family`; an ellipsis as the last argument stands for any further ones."""

    family: Family
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """Operators that compute the same of the same arguments; an expression that is built uses the first."""

    operators: tuple[Operator, ...]
    commutative: bool = False

    def __call__(self, *arguments: Any) -> Expression:
        """An expression, of variables in a pattern and of values in a replacement."""
        return Expression(self, arguments)


def family(*operators: Operator, commutative: bool = False) -> Family:
    """The family of `operators`."""
    return Family(operators, commutative)


@dataclass(frozen=True)
class Rule:
    """One expression that may stand for another.

    A rule applies where the replacement has the shape and dtype of what it replaces, so that none has to say so.

    Attributes:
        name: what it does, as `irongrad compile --pass-report` counts it.
        pattern: builds what is looked for from variables.
        replacement: builds what stands for it, from any of these variables and `out`, the node that is replaced.
        when: what else has to hold of the variables.
        exact: whether the numbers stay bit for bit; otherwise they may round differently.
        sized: whether it takes sizes for numbers, and so is for graphs of known sizes.
    """

    name: str
    pattern: Callable[..., Expression]
    replacement: Callable[..., Any]
    when: Callable[..., bool] = lambda: True
    exact: bool = True
    sized: bool = False

    @cached_property
    def expression(self) -> Expression:
        """The pattern, of variables named as its parameters."""
        return self.pattern(*map(Variable, _names(self.pattern)))

    @cached_property
    def _inner(self) -> tuple[tuple[int, Family], ...]:
        """Which arguments have to be calls, by position; none of those that may also stand the other way around."""
        if self.expression.family.commutative:
            return ()
        return tuple((i, a.family) for i, a in enumerate(self.expression.arguments) if isinstance(a, Expression))

    def apply(self, graph: Graph, node: Node) -> Node | None:
        """What stands for `node`, before which it is put into `graph`; None where the rule does not apply."""
        args = node.args
        for position, inner in self._inner:  # most rules fail at this, which `match` would find out slowly
            if position < len(args) and getattr(args[position], "target", None) not in inner.operators:
                return None
        bound = match(self.expression, node, {"out": node})
        if bound is None or not _call_with(self.when, bound):
            return None
        with graph.inserting_before(node):
            new = build(_call_with(self.replacement, bound), graph, node)
        if not isinstance(new, Node):
            return None  # a number, which stands for no tensor
        if kind_of(value_of(new)) == kind_of(value_of(node)):
            return new
        drop(new, keep=node)
        return None


def match(pattern: Any, value: Any, bound: Bindings) -> Bindings | None:
    """`bound` with the variables of `pattern`, as they have to be for it to be `value`; None where it is not."""
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
    """All positional arguments of `node`, defaults too; None where another one says something but its default."""
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
    """Names and defaults of an operator's positional arguments, and of the others that mean something."""
    arguments = [(a.name, a.kwarg_only, a.default_value) for a in operator._schema.arguments]
    positional = tuple((name, default) for name, keyword, default in arguments if not keyword)
    named = tuple((n, default) for n, keyword, default in arguments if keyword and n not in _WITHOUT_MEANING)
    return positional, named


def constant_of(value: Any) -> Any:
    """The number that `value` is, or that all elements of it are; otherwise `value` itself."""
    if isinstance(value, Node) and value.target is aten.full.default:
        return value.args[1]
    return value


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two arguments are equal, as an operator sees them: 0.0 and -0.0 are not."""
    if isinstance(one, Node) or isinstance(other, Node) or isinstance(one, (list, tuple)):
        return bool(one == other)
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return bool(one == other) and (not numbers or math.copysign(1, one) == math.copysign(1, other))


def build(value: Any, graph: Graph, like: Node) -> Any:
    """The node of an expression, made at the insertion point of `graph`; anything else as it is.

    Where one expression stands twice, so does its node.
    """
    made: dict[int, Node] = {}

    def node_of(part: Any) -> Any:
        if not isinstance(part, Expression):
            return part
        if id(part) not in made:
            operator, *_ = part.family.operators
            made[id(part)] = call(graph, operator, *map(node_of, part.arguments), like=like)
        return made[id(part)]

    return node_of(value)


def _call_with(function: Callable[..., Any], bound: Bindings) -> Any:
    """The result of `function` of those of `bound` that it names."""
    return function(*(bound[name] for name in _names(function)))


@cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def drop(node: Node, keep: Node | None = None) -> None:
    """Drop `node` and what only it needed, but for `keep`."""
    if node._erased or node.users or node is keep or node.op not in ("call_function", "get_attr"):
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        drop(source, keep)
