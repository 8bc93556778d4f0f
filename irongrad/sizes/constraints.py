"""What a user says of the sizes of named dimensions: comparisons such as `T % 8 == 0`, as jax.export takes them."""

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
    """The relations of named dimensions that `constraints` say.

    Args:
        constraints: comparisons of whole numbers, dimensions, and sums, products, quotients (//) and remainders (%) of
            them; `16 <= T <= 512` is two.
        names: the dimensions that there are.

    Raises:
        CaptureError: one that says something else, or that no size satisfies.
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
    made = [_COMPARISONS[type(op)](*pair) for op, pair in zip(tree.ops, pairs, strict=True)]
    if sympy.false in made:
        raise CaptureError(f"no sizes satisfy the constraint {text!r}")
    return [relation for relation in made if relation is not sympy.true]


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
        f"the constraint {text!r} has {ast.unparse(node)!r} in it; it may have sizes, whole numbers, +, -, *, // and %"
    )
