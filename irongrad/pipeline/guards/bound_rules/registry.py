"""The table of rules that compute the bounds of an operator's result, and functions that the rules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Node

from irongrad.pipeline.guards.intervals import INFINITE, Interval

# A function whose values have bounds in exact arithmetic may exceed them by rounding.
SLACK = 1e-5

# Operators that return the values of their operand.
SEES_THROUGH = frozenset({"alias", "clone", "detach", "lift_fresh_copy"})
# Their results are their tensors, one for each, with other shapes.
EACH_EXPANDED = frozenset({"broadcast_tensors", "meshgrid"})


class Known(Protocol):
    """The bounds of the operands of an operator."""

    def of(self, value: Any) -> Interval:
        """Return the bounds of a node or a number."""
        ...

    def is_permutation(self, value: Any, size: Any) -> bool:
        """Whether a node has every number below `size` once."""
        ...


Rule = Callable[[Known, Node, dict[str, Any]], Interval]
RULES: dict[str, Rule] = {}


def rule(operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, named without overload and separated by spaces."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators.split(), function))
        return function

    return add


def expression_of(size: Any) -> Any:
    """A size as a number or an expression."""
    return sympy.sympify(size.node.expr) if isinstance(size, torch.SymInt) else size


def is_symbol(end: Any) -> bool:
    """Whether an end depends on symbolic sizes."""
    return isinstance(end, sympy.Basic) and bool(end.free_symbols)


def inexact(found: Interval) -> Interval:
    """An interval whose ends need not occur."""
    return Interval(found.low, found.high, found.points)


def below(size: Any) -> Interval:
    """The places in a dimension."""
    return Interval(0, expression_of(size) - 1)


def slack(end: Any, sign: int) -> Any:
    """An end with room for rounding; infinite if it is a symbol."""
    if is_symbol(end) or abs(end) == INFINITE:
        return sign * INFINITE
    return end + sign * SLACK * abs(end)
