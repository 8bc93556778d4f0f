"""Named dimensions in exported programs: symbols of torch.export's, as expressions of the names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeGuard
from torch.utils._sympy.functions import Mod, PythonMod

from irongrad.runtime.errors import CaptureError
from irongrad.sizes.expressions import in_dimensions, symbol, unit, unit_of
from irongrad.sizes.symbols import Derived

Names = Mapping[sympy.Symbol, sympy.Expr]
# Names of dimensions, by the input's name and position.
Dynamic = Mapping[str, Mapping[int, str]]


def dims_of(inputs: Iterable[str], dynamic: Dynamic) -> list[Mapping[int, str]]:
    """The names of the dimensions of each of `inputs`, by position; of one that has none, none."""
    return [dynamic.get(name, {}) for name in inputs]


def symbolic(
    dynamic: Sequence[Mapping[int, str]], multiples: Mapping[str, int] | None = None
) -> dict[str, tuple[dict[int, object], ...]] | None:
    """The `dynamic_shapes` of torch.export for a module of positional arguments `*values`.

    A dimension that is a multiple of a number is that number times a symbol, so that a part of it is no quotient.
    """
    made = {name: multiple * Dim(f"_{name}") for name, multiple in (multiples or {}).items()}
    sizes = tuple({d: made.get(name, Dim.DYNAMIC) for d, name in dims.items()} for dims in dynamic)
    return {"values": sizes} if dynamic else None


def names_of(inputs: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]]) -> Names:
    """What each symbol in the sizes of `inputs` is, as an expression of dimensions.

    Args:
        inputs: fake tensors of a graph that has been traced to its end; a size may become fixed at any operator.
        dynamic: names of dimensions of each.

    Raises:
        CaptureError: a dimension whose size is fixed, or that of another dimension.
    """
    names: dict[sympy.Symbol, sympy.Expr] = {}
    for name, size in _sizes(inputs, dynamic):
        if size.is_Integer:
            raise CaptureError(fixed([name]))
        if size.is_Symbol and names.setdefault(size, symbol(name)) != symbol(name):
            raise CaptureError(
                f"dimensions {str(names[size])!r} and {name!r} have to be equal for this model or loss: give them one "
                "name, or leave one of them out of dynamic"
            )
    for name, size in _sizes(inputs, dynamic):
        if size.free_symbols <= names.keys():
            continue
        multiple, one = size.as_coeff_Mul()
        if not one.is_Symbol:
            raise CaptureError(
                f"dimension {name!r} has to be {size} for this model, which is neither a multiple of a number nor made "
                "of other dimensions. Pad it in the data, or leave it out of dynamic"
            )
        names[one] = unit(name, int(multiple))
    return names


def names_in_program(program: ExportedProgram, inputs: Iterable[str], dynamic: Dynamic) -> Names:
    """As `names_of`, for the inputs of an exported program, whose names are `inputs`."""
    return names_of(symbolic_inputs(program), dims_of(inputs, dynamic))


def derived_of(inputs: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]], names: Names) -> Derived:
    """The sizes of dimensions that are no symbols of their own: of those, and of units."""
    sizes = {name: size.xreplace(dict(names)) for name, size in _sizes(inputs, dynamic)}
    return {name: size for name, size in sizes.items() if size != symbol(name)}


def relations_of(derived: Derived) -> tuple[Any, ...]:
    """What has to hold of named dimensions for their sizes to be `derived`."""
    relations: list[Any] = []
    for name, size in derived.items():
        own = [found for s in size.free_symbols if (found := unit_of(s)) is not None and found[0] == name]
        zero = [sympy.Eq(Mod(symbol(name), sympy.Integer(multiple)), 0) for _, multiple in own]
        relations += zero or [sympy.Eq(symbol(name), in_dimensions(size))]
    return tuple(relations)


def multiples_of(program: ExportedProgram, names: Names, example: Mapping[str, int]) -> dict[str, int]:
    """Numbers that dimensions are multiples of wherever `program` is right, the others being as in the example.

    PyTorch has that of a view as what it compares, such as `4*B*T == 32*B*(T//8)`.

    Raises:
        CaptureError: the program is right for no other size than the example's.
    """
    guards = [g.xreplace(dict(names)) for g in guards_of(symbolic_inputs(program))]
    asked = [g for g in guards if getattr(g, "free_symbols", ())]
    found: dict[str, int] = {}
    for name, size in example.items():
        mine = [c for c in asked if symbol(name) in c.free_symbols and _is_of_one(c, name, example)]
        if all(holds(c, {**example, name: n}) for c in mine for n in (size + 1, size + 2)):
            continue
        taken = [n for n in range(1, 2 * size + 1) if all(holds(c, {**example, name: n}) for c in mine)]
        if taken == [size]:
            raise CaptureError(fixed([name]))
        if (multiple := math.gcd(*taken)) > 1:
            found[name] = multiple
    return found


def _is_of_one(condition: Any, name: str, example: Mapping[str, int]) -> bool:
    """Whether a condition is one on the dimension `name` alone, the others being in it or not."""
    others = [{n: size + more for n, size in example.items()} for more in (0, 1, 4)]
    tried = [
        {holds(condition, {**sizes, name: n}) for sizes in others} for n in range(example[name], example[name] + 3)
    ]
    return all(len(outcomes) == 1 for outcomes in tried)


def _sizes(inputs: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]]) -> Iterator[tuple[str, sympy.Expr]]:
    for value, dims in zip(inputs, dynamic, strict=True):
        for d, name in dims.items():
            size = value.shape[d]
            yield name, sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)


def fixed(names: Sequence[str]) -> str:
    """What is said of dimensions that are in `dynamic`, where the graph has them as numbers."""
    listed = ", ".join(repr(n) for n in names)
    return (
        f"the size of {listed} is in dynamic, but the model or the loss works for that of the example alone: a size "
        "of 1 that broadcasts, a Python number in a shape, a parameter of that size, a decision (if, for, int(), "
        "len()) on it, a function of math (x.shape[0] ** 0.5 is none), or an operator that PyTorch traces for fixed "
        "sizes only. Use x.shape[...] where the size is meant, or leave "
        f"{listed} out of dynamic and buckets"
    )


def specialised(message: str, dynamic: Sequence[Mapping[int, str]]) -> list[str]:
    """Names of the dimensions that an error of torch.export calls specialised."""
    found = re.findall(r"marked L\['values'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic", message)
    return sorted({dynamic[int(i)][int(d)] for i, d in found})


def named_sizes(value: torch.Tensor, names: Names) -> tuple[Any, ...]:
    """The sizes of a fake tensor: numbers, and expressions of named dimensions."""
    return tuple(named_size(s, names) for s in value.shape)


def named_size(size: int | torch.SymInt, names: Names) -> Any:
    """A number, or an expression of named dimensions."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = in_dimensions(sympy.sympify(size.node.expr).xreplace(dict(names)))
    return int(expression) if expression.is_Integer else expression


def holds(condition: Any, sizes: Mapping[str, int]) -> bool:
    """Whether a condition is true of these sizes; one that divides by zero there is not."""
    try:
        return bool(condition.xreplace({symbol(n): sympy.Integer(s) for n, s in sizes.items()}))
    except (ZeroDivisionError, TypeError):  # the second of what is no number then
        return False


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
    conditions = filter(is_condition, environments[0].guards)
    # PyTorch asks for remainders of sizes by sizes to find out strides.
    kept = (g for g in conditions if not _is_of_sizes_by_sizes(g.expr))
    return tuple(environments[0].simplify(guard.expr) for guard in kept)


def _is_of_sizes_by_sizes(condition: Any) -> bool:
    remainders = condition.atoms(Mod, PythonMod)
    return isinstance(condition, sympy.Ne) and any(not r.args[1].is_number for r in remainders)


def is_condition(guard: Any) -> bool:
    """Whether a guard says for which sizes a graph is right; one of strides does not, nor one of broadcasting."""
    return not _of_strides(guard) and not _of_broadcasting(guard)


def _of_broadcasting(guard: Any) -> bool:
    """Whether a guard is that a size is not some number: PyTorch asks so for 1, and the graph is the same then.

    A model that asks does something else then.
    """
    is_of_size = isinstance(guard.expr, sympy.Ne) and not guard.expr.has(Mod, PythonMod)
    return is_of_size and not isinstance(guard, Decision)


def _of_strides(guard: Any) -> bool:
    place = getattr(guard.sloc.framework_loc, "filename", "")
    inside = place.endswith(("torch/_prims_common/__init__.py", "torch/_refs/__init__.py"))
    return inside and not isinstance(guard.expr, sympy.Eq)


class Decision(ShapeGuard):
    """What a model found true of sizes, among the guards of the environment in which they are symbols."""
