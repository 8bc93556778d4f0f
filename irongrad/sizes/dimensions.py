"""Named dimensions in exported programs: torch.export's symbols as expressions of the names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeGuard
from torch.utils._sympy.functions import Mod, PythonMod

from irongrad.runtime.errors import CaptureError
from irongrad.sizes.expressions import in_dimensions, symbol, unit, unit_of
from irongrad.sizes.symbols import Derived

Names = Mapping[sympy.Symbol, sympy.Expr]
# Names of dimensions, by the name of the input and the index of the dimension.
Dynamic = Mapping[str, Mapping[int, str]]


def dims_of(inputs: Iterable[str], dynamic: Dynamic) -> list[Mapping[int, str]]:
    """For each of `inputs`, the names of its dimensions by index; empty for an input without named dimensions."""
    return [dynamic.get(name, {}) for name in inputs]


def symbolic(
    dynamic: Sequence[Mapping[int, str]], multiples: Mapping[str, int] | None = None
) -> dict[str, tuple[dict[int, object], ...]] | None:
    """The `dynamic_shapes` of torch.export for a module with positional arguments `*values`; None if nothing varies.

    A dimension that is a multiple of a number becomes that number times a symbol. A view that splits the dimension then
    has the symbol as a size, not a quotient.
    """
    scaled = {name: multiple * Dim(f"_{name}") for name, multiple in (multiples or {}).items()}
    sizes = tuple({d: scaled.get(name, Dim.DYNAMIC) for d, name in dims.items()} for dims in dynamic)
    return {"values": sizes} if dynamic else None


def names_of(inputs: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]]) -> Names:
    """Express each symbol in the sizes of `inputs` in terms of named dimensions.

    Args:
        inputs: the fake input tensors of a completely traced graph; any operator may fix a size.
        dynamic: the names of the dimensions of each input, by index.

    Raises:
        CaptureError: the size of a dimension is fixed, equals that of another dimension, or is no multiple of a symbol.
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
                f"dimension {name!r} has to be {size} for this model, which is neither a multiple of a number nor an "
                "expression of other dimensions. Pad it in the data, or leave it out of dynamic"
            )
        names[one] = unit(name, int(multiple))
    return names


def names_in_program(program: ExportedProgram, inputs: Iterable[str], dynamic: Dynamic) -> Names:
    """As `names_of`, for an exported program whose inputs are called `inputs`."""
    return names_of(symbolic_inputs(program), dims_of(inputs, dynamic))


def derived_of(inputs: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]], names: Names) -> Derived:
    """The sizes of dimensions without a symbol of their own, as expressions of other dimensions and of units."""
    sizes = {name: size.xreplace(dict(names)) for name, size in _sizes(inputs, dynamic)}
    return {name: size for name, size in sizes.items() if size != symbol(name)}


def relations_of(derived: Derived) -> tuple[Any, ...]:
    """The relations between named dimensions that must hold for their sizes to be as in `derived`."""
    relations: list[Any] = []
    for name, size in derived.items():
        own = [found for s in size.free_symbols if (found := unit_of(s)) is not None and found[0] == name]
        zero = [sympy.Eq(Mod(symbol(name), sympy.Integer(multiple)), 0) for _, multiple in own]
        relations += zero or [sympy.Eq(symbol(name), in_dimensions(size))]
    return tuple(relations)


def multiples_of(program: ExportedProgram, names: Names, example: Mapping[str, int]) -> dict[str, int]:
    """The number that each dimension must be a multiple of for `program` to be valid.

    Other dimensions keep their sizes in the example. PyTorch states the requirement of a view as the comparison that it
    makes, such as `4*B*T == 32*B*(T//8)`.

    Args:
        program: the exported program.
        names: its symbols as expressions of named dimensions.
        example: the sizes of the dimensions in the example inputs.

    Returns:
        The number by dimension, for dimensions where it is greater than 1.

    Raises:
        CaptureError: the program is valid only for the example's size of a dimension.
    """
    guards = [g.xreplace(dict(names)) for g in guards_of(symbolic_inputs(program))]
    asked = [g for g in guards if getattr(g, "free_symbols", ())]
    found: dict[str, int] = {}
    for name, size in example.items():
        mine = [c for c in asked if symbol(name) in c.free_symbols and _depends_on_one(c, name, example)]
        if all(holds(c, {**example, name: n}) for c in mine for n in (size + 1, size + 2)):
            continue
        taken = [n for n in range(1, 2 * size + 1) if all(holds(c, {**example, name: n}) for c in mine)]
        if taken == [size]:
            raise CaptureError(fixed([name]))
        if (multiple := math.gcd(*taken)) > 1:
            found[name] = multiple
    return found


def _depends_on_one(condition: Any, name: str, example: Mapping[str, int]) -> bool:
    """Whether a condition depends on the dimension `name` alone, even if it mentions other dimensions."""
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
    """The error message for dimensions that are in `dynamic` but are constants in the graph."""
    listed = ", ".join(repr(n) for n in names)
    return (
        f"the size of {listed} is in dynamic, but the model or the loss works for that of the example alone. Possible "
        "causes: another input with this size, such as the labels, that dynamic does not name, a size of 1 that "
        "broadcasts, a Python number in a shape, a parameter of that size, a decision (if, "
        "for, int(), len()) on it, a function of the math module (x.shape[0] ** 0.5 is allowed), or an operator that "
        "PyTorch traces for fixed sizes only. Use x.shape[...] where the size is meant, or leave "
        f"{listed} out of dynamic and buckets"
    )


def specialised(message: str, dynamic: Sequence[Mapping[int, str]]) -> list[str]:
    """The names of the dimensions that an error message of torch.export calls specialised."""
    found = re.findall(r"marked L\['values'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic", message)
    return sorted({dynamic[int(i)][int(d)] for i, d in found})


def named_sizes(value: torch.Tensor, names: Names) -> tuple[Any, ...]:
    """The sizes of a fake tensor, as numbers or expressions of named dimensions."""
    return tuple(named_size(s, names) for s in value.shape)


def named_size(size: int | torch.SymInt, names: Names) -> Any:
    """A size as a number or an expression of named dimensions."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = in_dimensions(sympy.sympify(size.node.expr).xreplace(dict(names)))
    return int(expression) if expression.is_Integer else expression


def holds(condition: Any, sizes: Mapping[str, int]) -> bool:
    """Whether a condition is true at these sizes; a condition that divides by zero is false.

    So is one about the remainder of a negative number, such as the size of `x[3:]` for a size of 2: PyTorch's `Mod`
    refuses it.
    """
    try:
        return bool(condition.xreplace({symbol(n): sympy.Integer(s) for n, s in sizes.items()}))
    except (ZeroDivisionError, AssertionError, TypeError):  # TypeError: an operand is not a number at these sizes
        return False


def symbolic_inputs(program: ExportedProgram) -> tuple[torch.Tensor, ...]:
    """The inputs of `program` as fake tensors with symbolic sizes."""
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return tuple(by_name[n].meta["val"] for n in program.graph_signature.user_inputs if isinstance(n, str))


def guards_of(inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The conditions on symbols that tracing a graph with these fake input tensors assumed to be true.

    PyTorch 2.13 also compares sizes to find strides, and to find out how to view strided tensors. These comparisons are
    left out, because a compiled step has no strides. The number of elements that an operator needs follows from the
    sizes of its results.
    """
    environments = [s.node.shape_env for t in inputs for s in t.shape if isinstance(s, torch.SymInt)]
    if not environments:
        return ()
    # `simplify`: a guard is stored as it was asked, and symbols found equal later have one name since.
    conditions = filter(is_condition, environments[0].guards)
    # PyTorch compares remainders of a size by another size to find strides.
    kept = (g for g in conditions if not _has_remainder_by_size(g.expr))
    return tuple(part for guard in kept for part in sympy.And.make_args(environments[0].simplify(guard.expr)))


def _has_remainder_by_size(condition: Any) -> bool:
    remainders = condition.atoms(Mod, PythonMod)
    return isinstance(condition, sympy.Ne) and any(not r.args[1].is_number for r in remainders)


def canonical(condition: Any) -> Any:
    """The form that equal conditions have, however they were asked."""
    return condition.canonical if isinstance(condition, Relational) else condition


def is_condition(guard: Any) -> bool:
    """Whether a guard limits the sizes for which a graph is valid; guards on strides or broadcasting do not."""
    return not _is_stride_guard(guard) and not _is_broadcasting_guard(guard)


def _is_broadcasting_guard(guard: Any) -> bool:
    """Whether a guard says that a size differs from a number, and comes from PyTorch's broadcasting.

    PyTorch compares sizes with 1, and the graph is the same for both answers. If the model compares (`Decision`), it
    does something else for the other answer.
    """
    is_of_size = isinstance(guard.expr, sympy.Ne) and not guard.expr.has(Mod, PythonMod)
    return is_of_size and not isinstance(guard, Decision)


def _is_stride_guard(guard: Any) -> bool:
    place = getattr(guard.sloc.framework_loc, "filename", "")
    inside = place.endswith(("torch/_prims_common/__init__.py", "torch/_refs/__init__.py"))
    return inside and not isinstance(guard.expr, sympy.Eq)


class Decision(ShapeGuard):
    """A condition on sizes that the model itself tested and found true; it is kept among the environment's guards."""
