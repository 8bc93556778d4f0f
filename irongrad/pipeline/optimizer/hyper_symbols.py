"""Hyperparameters as symbolic numbers of a trace, and those on which the traced Python code decided."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from irongrad.step.hyperparameters import Hyper

# The hint of a symbolic float whose default is zero: any value that takes the general branch.
_NONZERO_HINT = 0.01


def symbolic_float(env: ShapeEnv, hyper: Hyper) -> torch.SymFloat:
    """A symbolic number for a hyperparameter."""
    source = ConstantSource(hyper.name)
    hint = hyper.default or _NONZERO_HINT
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=hint, source=source)


def branched(env: ShapeEnv, symbols: Mapping[Hyper, torch.SymFloat]) -> tuple[list[Hyper], list[Hyper]]:
    """Hyperparameters that the traced Python branched on, and those that it compared with zero alone.

    The conditions `!= 0` and `> 0` have a general branch, which mostly holds at zero, too.
    """
    hyper_of = {s.node.expr: h for h, s in symbols.items()}
    found: tuple[dict[Hyper, None], dict[Hyper, None]] = {}, {}
    for guard in env.guards:
        with_zero = isinstance(guard.expr, (sympy.Ne, sympy.Gt)) and guard.expr.rhs.is_zero
        found[with_zero].update({hyper_of[s]: None for s in guard.expr.free_symbols if s in hyper_of})
    return list(found[False]), [h for h in found[True] if h not in found[False]]
