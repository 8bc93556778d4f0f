"""Sizes as MLIR: expressions of named dimensions, computed by index arithmetic on the host."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from irongrad.runtime.errors import UnsupportedOpError

_OPERATIONS = {
    sympy.Add: "addi",
    sympy.Mul: "muli",
    FloorDiv: "floordivsi",
    Mod: "remsi",
    PythonMod: "remsi",
    Max: "maxsi",
    Min: "minsi",
}


def index_of(size: Any, sizes: Mapping[str, str], name: str) -> Generator[str, None, str]:
    """Write lines of MLIR that compute `size`.

    Args:
        size: a number or an expression of named dimensions.
        sizes: by named dimension, the SSA name of its size, an index.
        name: the prefix of the SSA names that the lines define.

    Returns:
        The SSA name of the size, an index; for a constant size, the number itself.

    Raises:
        UnsupportedOpError: an operation in `size` has no index arithmetic.
    """
    expression = sympy.sympify(size)
    if expression.is_Integer:
        return str(int(expression))
    if expression.is_Symbol:
        return sizes[expression.name]
    if expression.func not in _OPERATIONS:
        names = ", ".join(sorted(repr(s.name) for s in expression.free_symbols))
        raise UnsupportedOpError(
            f"the size {expression} is not made of sums, products, floor divisions, remainders, maxima and minima, so "
            f"an entry point cannot compute it: leave {names} out of dynamic="
        )
    terms: list[str] = []
    for i, part in enumerate(expression.args):
        term = yield from index_of(part, sizes, f"{name}.{i}")
        if not term.startswith("%"):
            yield f"{name}.{i}.n = arith.constant {term} : index"
            term = f"{name}.{i}.n"
        terms.append(term)
    so_far = terms[0]
    for i, term in enumerate(terms[1:], 1):
        yield f"{name}.r{i} = arith.{_OPERATIONS[expression.func]} {so_far}, {term} : index"
        so_far = f"{name}.r{i}"
    return so_far
