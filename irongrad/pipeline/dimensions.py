"""Named dimensions in exported programs: symbols of torch.export's, as expressions of the names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.functions import Mod, PythonMod

from irongrad.padding.sizes import symbol
from irongrad.runtime.errors import CaptureError

Names = Mapping[sympy.Symbol, sympy.Expr]


def symbolic(dynamic: Sequence[Mapping[int, str]]) -> dict[str, tuple[dict[int, object], ...]] | None:
    """The `dynamic_shapes` of torch.export for a module of positional arguments `*values`."""
    return {"values": tuple(dict.fromkeys(dims, Dim.DYNAMIC) for dims in dynamic)} if dynamic else None


def names_of(inputs: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]]) -> Names:
    """What each symbol in the sizes of `inputs` is, as an expression of dimensions.

    Args:
        inputs: fake tensors of a graph that has been traced to its end; a size may become fixed at any operator.
        dynamic: names of dimensions of each.

    Raises:
        CaptureError: a dimension whose size is fixed, a multiple of a number, or that of another dimension.
    """
    names: dict[sympy.Symbol, sympy.Expr] = {}
    for value, dims in zip(inputs, dynamic, strict=True):
        for d, name in dims.items():
            size = value.shape[d]
            expression = sympy.sympify(size.node.expr) if isinstance(size, torch.SymInt) else size
            if not isinstance(expression, sympy.Expr) or expression.is_Integer:
                raise CaptureError(fixed([name]))
            if not expression.is_Symbol:
                raise CaptureError(
                    f"dimension {name!r} has to be {expression} for this model, which buckets do not take yet. Pad it "
                    "in the data, or leave it out of dynamic"
                )
            other = names.setdefault(expression, symbol(name))
            if other != symbol(name):
                raise CaptureError(
                    f"dimensions {str(other)!r} and {name!r} have to be equal for this model or loss: give them one "
                    "name, or leave one of them out of dynamic"
                )
    return names


def fixed(names: Sequence[str]) -> str:
    """What is said of dimensions that are in `dynamic`, where the graph has them as numbers."""
    listed = ", ".join(repr(n) for n in names)
    return (
        f"the size of {listed} is in dynamic, but the model or the loss works for that of the example alone: a size "
        "of 1 that broadcasts, a Python number in a shape, a parameter of that size, a decision (if, for, int()) on "
        "it, or an operator that PyTorch traces for fixed sizes only. Use x.shape[...] where the size is meant, or "
        f"leave {listed} out of dynamic and buckets"
    )


def specialised(message: str, dynamic: Sequence[Mapping[int, str]]) -> list[str]:
    """Names of the dimensions that an error of torch.export calls specialised."""
    found = re.findall(r"marked L\['values'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic", message)
    return sorted({dynamic[int(i)][int(d)] for i, d in found})


def named_sizes(value: torch.Tensor, names: Names) -> tuple[Any, ...]:
    """The sizes of a fake tensor: numbers, and expressions of named dimensions."""
    return tuple(s.node.expr.xreplace(dict(names)) if isinstance(s, torch.SymInt) else s for s in value.shape)


def symbolic_inputs(program: ExportedProgram) -> tuple[torch.Tensor, ...]:
    """The inputs of `program` as fake tensors with symbolic sizes."""
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return tuple(by_name[n].meta["val"] for n in program.graph_signature.user_inputs if isinstance(n, str))


def guards_of(inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What the tracing of a graph with these inputs, fake tensors, has taken for true of its symbols.

    What PyTorch 2.13 compares sizes for to find out strides, and ways to view them, is left out: a compiled step has
    none. How many elements an operator needs is known from the sizes of its results.
    """
    environments = [s.node.shape_env for t in inputs for s in t.shape if isinstance(s, torch.SymInt)]
    if not environments:
        return ()
    # A guard is kept as it was asked; symbols that have turned out to be equal have one name since.
    return tuple(environments[0].simplify(guard.expr) for guard in environments[0].guards if not _of_strides(guard))


def is_condition(guard: Any) -> bool:
    """Whether a guard says for which sizes a graph is right; one of strides does not, nor that a size is not 1."""
    return not _of_strides(guard) and not is_of_broadcasting(guard.expr)


def is_of_broadcasting(condition: Any) -> bool:
    """Whether a condition is that a size is not some number: PyTorch asks so for 1, and the graph is the same then."""
    return isinstance(condition, sympy.Ne) and not condition.has(Mod, PythonMod)


def _of_strides(guard: Any) -> bool:
    place = getattr(guard.sloc.framework_loc, "filename", "")
    inside = place.endswith(("torch/_prims_common/__init__.py", "torch/_refs/__init__.py"))
    return inside and not isinstance(guard.expr, sympy.Eq)
