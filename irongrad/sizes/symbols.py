"""Fake tensors whose named dimensions are symbols, for graphs that are valid at every size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from irongrad.sizes.expressions import symbol, unit, unit_of

# Names of dimensions by index.
Dims = Mapping[int, str]
# Sizes of dimensions by name, as expressions of other dimensions and of units.
Derived = Mapping[str, sympy.Expr]


class Symbols:
    """The symbols of named dimensions in one traced graph.

    Args:
        environment: the environment that holds the symbols.
        examples: an example size of each dimension.
        derived: the sizes that are expressions of other dimensions and of units (`irongrad.sizes.expressions.unit`).
    """

    def __init__(self, environment: ShapeEnv, examples: Mapping[str, int], derived: Derived) -> None:
        self._environment = environment
        self._examples = dict(examples)
        for found in filter(None, (unit_of(s) for size in derived.values() for s in size.free_symbols)):
            name, multiple = found
            if name in examples:
                self._examples[unit(name, multiple).name] = examples[name] // multiple
        known = self._examples.keys()
        self._derived = {n: size for n, size in derived.items() if {s.name for s in size.free_symbols} <= known}
        self._sizes: dict[str, torch.SymInt] = {}

    def empty_like(self, example: torch.Tensor, dims: Dims) -> torch.Tensor:
        """A contiguous tensor of the example's shape and dtype, with symbols for its named dimensions."""
        shape = [self._size_of(dims[d]) if d in dims else size for d, size in enumerate(example.shape)]
        return torch.empty(shape, dtype=example.dtype)

    def _size_of(self, name: str) -> torch.SymInt:
        if name not in self._sizes:
            size = self._derived_size(self._derived[name]) if name in self._derived else self._new(name)
            assert isinstance(size, torch.SymInt)
            self._sizes[name] = size
        return self._sizes[name]

    def _derived_size(self, size: sympy.Expr) -> object:
        return sympy_interp(PythonReferenceAnalysis, {s: self._size_of(s.name) for s in size.free_symbols}, size)

    def _new(self, name: str) -> object:
        source, example = ConstantSource(name), self._examples[name]
        size = self._environment.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC)
        return self._environment.create_symintnode(size, hint=example, source=source)


def environment_of(values: Sequence[torch.Tensor]) -> ShapeEnv | None:
    """The environment that holds the symbols in the sizes of `values`; None if there are no symbols."""
    found = (s.node.shape_env for v in values for s in v.shape if isinstance(s, torch.SymInt))
    return next(found, None)


def names_in(environment: ShapeEnv) -> dict[sympy.Symbol, sympy.Symbol]:
    """The named dimension of every symbol that `Symbols` made in `environment`."""
    return {s: symbol(sources[0].name) for s, sources in environment.var_to_sources.items() if sources}


def has_symbols(value: object) -> bool:
    """Whether a value is a symbolic number, or a tensor with a symbolic size."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(s, torch.SymInt) for s in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
