"""Named dimensions in exported programs: symbols of torch.export's, as expressions of the names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from irongrad.padding.sizes import symbol
from irongrad.runtime.errors import CaptureError

Names = Mapping[sympy.Symbol, sympy.Expr]


def symbolic(
    module: nn.Module, dynamic: Sequence[Mapping[int, str]]
) -> dict[str, tuple[dict[int, object], ...]] | None:
    """The `dynamic_shapes` of torch.export for a module of positional arguments `*values`."""
    return {"values": tuple(dict.fromkeys(dims, Dim.DYNAMIC) for dims in dynamic)} if dynamic else None


def names_of(program: ExportedProgram, dynamic: Sequence[Mapping[int, str]]) -> Names:
    """What each symbol of `program` is, as an expression of dimensions.

    Where the program needs a multiple of a number, torch.export says so by a symbol of a whole part.

    Raises:
        CaptureError: a dimension that has a fixed size, or is none of the above.
    """
    names: dict[sympy.Symbol, sympy.Expr] = {}
    for value, dims in zip(symbolic_inputs(program), dynamic, strict=True):
        for d, name in dims.items():
            size = value.shape[d]
            if not isinstance(size, torch.SymInt):
                raise CaptureError(
                    f"dimension {name!r} is in dynamic, but the model or the loss works for the size {size} alone: a "
                    "size of 1 that broadcasts, a Python number in a shape, a parameter of that size, or a decision "
                    "(if, for) on it. Use x.shape[...] where the size is meant, or leave the dimension out of dynamic"
                )
            expression = sympy.sympify(size.node.expr)
            if not expression.is_Symbol:
                raise CaptureError(
                    f"dimension {name!r} has to be {expression} for this model, which buckets do not take yet. Pad it "
                    "in the data, or leave it out of dynamic"
                )
            names[expression] = symbol(name)
    return names


def symbolic_inputs(program: ExportedProgram) -> tuple[torch.Tensor, ...]:
    """The inputs of `program` as fake tensors with symbolic sizes."""
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return tuple(by_name[n].meta["val"] for n in program.graph_signature.user_inputs if isinstance(n, str))
