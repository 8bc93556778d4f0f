"""Open dimensions: those that no bucket of a step gives a size for, so that they have any size beside the buckets.

In a bucket, the size of an open dimension is a symbol, and nothing is padded along it. Its symbol has a class of its
own. So the layouts of padded tensors tell from an expression alone whether it depends on padding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from irongrad.sizes.expressions import symbol, unit_of


class OpenSymbol(sympy.Symbol):
    """The symbol of an open dimension, or of an open dimension divided by a number that divides it."""

    __slots__ = ()


def is_padded_size(size: sympy.Expr) -> bool:
    """Whether a size depends on a dimension that is padded to a bucket's size."""
    return any(not isinstance(s, OpenSymbol) for s in size.free_symbols)


def opened(names: Mapping[sympy.Symbol, sympy.Expr], bucketed: Collection[str]) -> Mapping[sympy.Symbol, sympy.Expr]:
    """`names` (see `irongrad.sizes.dimensions`), with symbols of their own for the dimensions without a bucket."""
    found = {s for size in names.values() for s in size.free_symbols}
    own = {s: OpenSymbol(s.name, integer=True, positive=True) for s in found if name_of(s) not in bucketed}
    return {s: size.xreplace(own) for s, size in names.items()}


def closed(expression: Any) -> Any:
    """`expression` with the plain symbols of named dimensions and units."""
    found = {s: symbol(s.name) for s in expression.free_symbols if isinstance(s, OpenSymbol)}
    return expression.xreplace(found)


def name_of(one: sympy.Symbol) -> str:
    """The dimension of a symbol, which stands for the dimension or for a unit of it."""
    name, _ = unit_of(one) or (one.name, 1)
    return name


def open_sizes(
    graph: GraphModule, values: Sequence[torch.Tensor], names: Mapping[sympy.Symbol, sympy.Expr]
) -> dict[sympy.Symbol, Any]:
    """The sizes of open dimensions in the arguments of `graph`, by symbol.

    Args:
        graph: the graph, with symbolic sizes in its nodes' `meta`.
        values: its arguments.
        names: the symbols of the graph as expressions of named dimensions, as `opened` returns them.
    """
    found: dict[sympy.Symbol, Any] = {}
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, values, strict=True):
        for size, given in zip(node.meta["val"].shape, value.shape, strict=True):
            if not isinstance(size, torch.SymInt):
                continue
            multiple, one = size.node.expr.xreplace(dict(names)).as_coeff_Mul()
            if isinstance(one, OpenSymbol) and one not in found:
                found[one] = given // int(multiple) if multiple != 1 else given
    return found
