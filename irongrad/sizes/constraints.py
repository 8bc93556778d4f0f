"""A user's constraints on the sizes of named dimensions: comparisons such as `T % 8 == 0`, as in jax.export."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from irongrad.runtime.errors import CaptureError
from irongrad.sizes.expressions import symbol

_COMPARISONS: dict[type[ast.cmpop], Any] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
_OPERATIONS: dict[type[ast.operator], Any] = {
    ast.Add: sympy.Add,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: sympy.Mul,
    ast.FloorDiv: FloorDiv,
    ast.Mod: lambda a, b: Mod(a, b) if a.is_nonnegative and b.is_positive else PythonMod(a, b),
}


def conditions_of(constraints: Sequence[str], names: Collection[str]) -> tuple[Any, ...]:
    """Parse `constraints` into relations between named dimensions.

    Args:
        constraints: comparisons of whole numbers, dimensions, and their sums, differences, products, quotients (//) and
            remainders (%). `16 <= T <= 512` gives two relations.
        names: the names of all dimensions.

    Raises:
        CaptureError: a constraint is not such a comparison, or no sizes satisfy it.
    """
    return tuple(relation for text in constraints for relation in _relations(text, names))


def _relations(text: str, names: Collection[str]) -> list[Any]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, AttributeError):
        tree = None
    if not isinstance(tree, ast.Compare) or any(type(op) not in _COMPARISONS for op in tree.ops):
        raise CaptureError(
            f"the constraint {text!r} is no comparison of sizes, such as 'T % 8 == 0' or '16 <= T <= 512'"
        )
    sides = [_expression(side, text, names) for side in (tree.left, *tree.comparators)]
    pairs = itertools.pairwise(sides)
    relations = [_COMPARISONS[type(op)](*pair) for op, pair in zip(tree.ops, pairs, strict=True)]
    if sympy.false in relations:
        raise CaptureError(f"no sizes satisfy the constraint {text!r}")
    return [relation for relation in relations if relation is not sympy.true]


def _expression(node: ast.expr, text: str, names: Collection[str]) -> sympy.Expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name) and node.id in names:
        return symbol(node.id)
    if isinstance(node, ast.Name):
        known = ", ".join(names) or "none"
        raise CaptureError(f"the constraint {text!r} names {node.id!r}, which is no dimension of dynamic: {known}")
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        sides = [_expression(side, text, names) for side in (node.left, node.right)]
        result: sympy.Expr = _OPERATIONS[type(node.op)](*sides)
        return result
    raise CaptureError(
        f"the constraint {text!r} has {ast.unparse(node)!r} in it; only sizes, whole numbers, +, -, *, // and % are "
        "allowed"
    )
