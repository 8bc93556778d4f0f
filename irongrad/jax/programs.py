"""Rewrite JAX programs (jaxprs): replace operations by functions, and drop or refuse what no artifact can hold."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend import core

from irongrad.runtime.errors import UnsupportedOpError
from irongrad.runtime.installed import PACKAGE

# Finds the value of an operand that depends on constants alone; None for every other operand.
Known: TypeAlias = Callable[[Any], np.ndarray[Any, Any] | None]


@dataclass(frozen=True)
class Site:
    """An operation of a program.

    Attributes:
        equation: the operation.
        line: the user's line that it comes from.
        known: finds the values of its operands.
    """

    equation: core.JaxprEqn
    line: str
    known: Known


# Makes the function that replaces an operation; None keeps the operation.
Rule: TypeAlias = Callable[[Site], Callable[..., Any] | None]

_UNKNOWN = "(line unknown)"
# A constant of more elements than this is not computed while a program is rewritten.
_LARGEST_CONSTANT = 1 << 16
_PRINTS = frozenset({"debug_print", "debug_callback"})
_CALLBACKS = frozenset({"pure_callback", "io_callback", "python_callback", "ffi_call"})
_COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "axis_index")
_MAPS = frozenset({"shard_map", "xla_pmap"})
_OUTSIDE = (str(Path(jax.__file__).parent) + os.sep, str(PACKAGE) + os.sep, "<frozen")


def rewritten(program: core.ClosedJaxpr, rules: Mapping[str, Rule]) -> core.ClosedJaxpr:
    """Return `program` with operations replaced, also inside its loops, branches and calls.

    Args:
        program: the program; it is not changed.
        rules: the rule of each operation, by the name of its primitive.
    """
    return core.ClosedJaxpr(_rewritten(program.jaxpr, rules, program.consts), program.consts)


def _rewritten(
    program: core.Jaxpr, rules: Mapping[str, Rule], constants: Sequence[Any] = (), line: str = _UNKNOWN
) -> core.Jaxpr:
    known = _Constants(program, constants)
    return program.replace(eqns=[_changed(Site(e, _line_of(e, line), known), rules) for e in program.eqns])


def _changed(site: Site, rules: Mapping[str, Rule]) -> core.JaxprEqn:
    rule = rules.get(site.equation.primitive.name)
    function = rule(site) if rule is not None else None
    if function is not None:
        return _replaced(site.equation, function)
    return _inside(site.equation, lambda inner: _rewritten(inner, rules, line=site.line))


def _inside(equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]) -> core.JaxprEqn:
    """Change the programs in the parameters of an operation."""

    def changed(value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return core.ClosedJaxpr(change(value.jaxpr), value.consts)
        if isinstance(value, core.Jaxpr):
            return change(value)
        return tuple(map(changed, value)) if type(value) is tuple else value

    inner = [p for p in equation.params.values() if any(_programs(p))]
    return equation.replace(params={n: changed(v) for n, v in equation.params.items()}) if inner else equation


def _programs(value: Any) -> Iterator[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif type(value) is tuple:
        for part in value:
            yield from _programs(part)


def _replaced(equation: core.JaxprEqn, function: Callable[..., Any]) -> core.JaxprEqn:
    """The call of `function` in the place of an operation; all of it comes from the user's line."""
    operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    traced = jax.make_jaxpr(jax.jit(function))(*operands)
    (call,) = traced.jaxpr.eqns
    call = _inside(call, lambda inner: _at(inner, equation.source_info))
    return call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)


def _at(program: core.Jaxpr, source: Any) -> core.Jaxpr:
    equations = [_inside(e, lambda inner: _at(inner, source)).replace(source_info=source) for e in program.eqns]
    return program.replace(eqns=equations)


class _Constants:
    """Computes the values of a program's variables that depend on literals and constants alone."""

    def __init__(self, program: core.Jaxpr, constants: Sequence[Any]) -> None:
        self._program = program
        self._makers = {v: e for e in program.eqns for v in e.outvars}
        pairs = zip(program.constvars, constants, strict=False)
        self._values: dict[Any, np.ndarray[Any, Any] | None] = {
            v: np.asarray(c)
            for v, c in pairs
            if v.aval.size <= _LARGEST_CONSTANT and isinstance(v.aval.dtype, np.dtype)
        }

    def __call__(self, atom: Any) -> np.ndarray[Any, Any] | None:
        if isinstance(atom, core.Literal):
            return np.asarray(atom.val, atom.aval.dtype)
        if atom not in self._values:
            self._values[atom] = None
            self._compute(atom)
        return self._values[atom]

    def _compute(self, variable: Any) -> None:
        maker = self._makers.get(variable)
        if maker is None or maker.effects or any(v.aval.size > _LARGEST_CONSTANT for v in maker.outvars):
            return
        places = list(dict.fromkeys(a for a in maker.invars if not isinstance(a, core.Literal)))
        operands = [self(a) for a in places]
        if any(o is None for o in operands) or not all(isinstance(v.aval.dtype, np.dtype) for v in maker.outvars):
            return
        program = self._program.replace(constvars=[], invars=places, outvars=maker.outvars, eqns=[maker])
        for place, value in zip(maker.outvars, jax.core.eval_jaxpr(program, (), *operands), strict=True):
            self._values[place] = np.asarray(value)


def all_operations(program: core.Jaxpr, line: str = _UNKNOWN) -> Iterator[tuple[core.JaxprEqn, str]]:
    """All operations of a program, also inside its loops, branches and calls, with the user's line of each."""
    for equation in program.eqns:
        place = _line_of(equation, line)
        yield equation, place
        for value in equation.params.values():
            for inner in _programs(value):
                yield from all_operations(inner, place)


def without_prints(program: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[str]]:
    """Drop `jax.debug.print` and other debug callbacks, which change no number.

    Returns:
        The program, and the user's lines that are dropped.
    """
    dropped = [(e, line) for e, line in all_operations(program.jaxpr) if e.primitive.name in _PRINTS]
    if not dropped:
        return program, []
    effects = frozenset().union(*(e.effects for e, _ in dropped))

    def without(inner: core.Jaxpr) -> core.Jaxpr:
        kept = [_inside(e, without) for e in inner.eqns if e.primitive.name not in _PRINTS]
        kept = [e.replace(effects=e.effects - effects) for e in kept]
        return inner.replace(eqns=kept, effects=inner.effects - effects)

    return core.ClosedJaxpr(without(program.jaxpr), program.consts), list(dict.fromkeys(line for _, line in dropped))


def check_operations(program: core.ClosedJaxpr, what: str) -> None:
    """Refuse calls of Python, and programs for several devices.

    Raises:
        UnsupportedOpError: names the operation and the user's line.
    """
    operations = list(all_operations(program.jaxpr))
    collectives = [e.primitive.name for e, _ in operations if e.primitive.name.startswith(_COLLECTIVES)]
    for equation, line in operations:
        name = equation.primitive.name
        if name in _CALLBACKS:
            raise UnsupportedOpError(
                f"{line}: the {what} calls Python ({name}), and an artifact has no Python. Compute the "
                "value before the step, and give it as an input"
            )
        if name in _MAPS or name in collectives:
            used = f" with the collective {', '.join(dict.fromkeys(collectives))}" if collectives else ""
            raise UnsupportedOpError(
                f"{line}: the {what} is for several devices ({name}{used}), and an artifact runs on one. "
                "Export the step of one device, without the collective"
            )


def _line_of(equation: core.JaxprEqn, otherwise: str) -> str:
    """The user's line that an operation comes from, `file:line: source`; or else the package's line.

    JAX traces functions of its own once, so they have no line of the user's; `otherwise` is that of their call.
    """
    traceback = equation.source_info.traceback
    frames = [f for f in (traceback.frames if traceback is not None else ()) if not f.file_name.startswith(_OUTSIDE)]
    own = [f for f in frames if "site-packages" not in Path(f.file_name).parts]
    for frame in own or frames:
        text = linecache.getline(frame.file_name, frame.line_num).strip()
        return f"{frame.file_name}:{frame.line_num}" + (f": {text}" if text else "")
    return otherwise
