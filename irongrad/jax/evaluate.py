"""A JAX program run again with other arithmetic: in float64, or in its own dtypes with random rounding.

A traced program (a jaxpr) has explicit dtypes, so running the user's Python under JAX's 64-bit mode would be another
program: other random bits, and float32 wherever the code says so. Here the traced program itself is evaluated,
operation by operation: with every floating-point value in float64 (`Wide`), or with every computed one multiplied by
1 + u (`Noise`), as `irongrad.pipeline.oracle.rounding_noise.RoundingNoise` does to eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from irongrad.runtime.tolerance import NOISE_ULPS, NOISE_ULPS_OF_HALVES

# Operations that only call another program, which is evaluated in their place.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
)
# Operations that move values or choose among them, and round nothing.
_EXACT = frozenset(
    {"reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "concatenate"}
    | {"gather", "rev", "pad", "select_n", "max", "min", "neg", "abs", "sign", "reduce_max", "reduce_min", "copy"}
    | {"stop_gradient", "dynamic_update_slice", "optimization_barrier", "split", "iota", "sort"}
)
# What uniform random numbers are made of random bits with, exactly: rounding them would move a draw.
_OF_DRAWS = frozenset({"sub", "add", "mul", "max", "reshape", "broadcast_in_dim", "bitcast_convert_type", "jit"})
_STRETCH = 1 << 15


class Arithmetic(Protocol):
    """How values are represented, and what happens to the results of an operation."""

    def dtype(self, dtype: Any) -> Any:
        """The dtype in which a value of `dtype` is kept."""
        ...

    def rounded(self, value: Any) -> Any:
        """A computed value."""
        ...


@dataclass(frozen=True)
class Wide:
    """Floating-point values in float64."""

    def dtype(self, dtype: Any) -> Any:
        """float64 in place of every floating-point dtype."""
        return np.dtype(np.float64) if is_float(dtype) else dtype

    def rounded(self, value: Any) -> Any:
        """As it is."""
        return value


class Noise:
    """Values in their own dtypes, every computed one up to `NOISE_ULPS` last-place units off at random.

    `table` has random numbers in [-1, 1], of which each operation takes another stretch; a traced array, so that one
    compiled program serves every seed.
    """

    def __init__(self, table: Any) -> None:
        self._table = table
        self._taken = 0

    def dtype(self, dtype: Any) -> Any:
        """The same."""
        return dtype

    def rounded(self, value: Any) -> Any:
        """`value` with noise, if it is a floating-point one."""
        if not is_float(value.dtype):
            return value
        size = int(np.prod(value.shape))
        self._taken = (self._taken * 5 + 12289) % _STRETCH
        stretch = lax.dynamic_slice(self._table, (self._taken,), (min(size, _STRETCH),))
        units = jnp.resize(stretch, value.shape)
        about = jnp.finfo(value.dtype)
        ulps = NOISE_ULPS if about.bits >= 32 else NOISE_ULPS_OF_HALVES
        return (value * (1 + units * (ulps * float(about.eps)))).astype(value.dtype)


def noise_table(seed: int) -> np.ndarray[Any, Any]:
    """The random numbers of a `Noise`."""
    return np.random.default_rng(seed).uniform(-1, 1, 2 * _STRETCH).astype(np.float32)


def is_float(dtype: Any) -> bool:
    """Whether `dtype` is floating-point, the narrow ones of ml_dtypes too."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def evaluate(program: core.ClosedJaxpr, arguments: Sequence[Any], arithmetic: Arithmetic) -> list[Any]:
    """Run `program` on arguments that are represented as `arithmetic` does."""
    return _evaluate(program.jaxpr, [_represented(c, arithmetic) for c in program.consts], arguments, arithmetic)


def _evaluate(
    program: core.Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], arithmetic: Arithmetic
) -> list[Any]:
    values: dict[Any, Any] = {}
    drawn: set[Any] = set()

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return _represented(np.asarray(atom.val, atom.aval.dtype), arithmetic)
        return values[atom]

    values |= dict(zip((*program.constvars, *program.invars), (*constants, *arguments), strict=True))
    for equation in program.eqns:
        results = _run(equation, [read(a) for a in equation.invars], arithmetic)
        name = equation.primitive.name
        if _is_draw(equation, drawn):
            drawn.update(equation.outvars)
        elif name not in _EXACT and name not in _CALLS:
            results = [arithmetic.rounded(r) for r in results]
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(a) for a in program.outvars]


def _is_draw(equation: core.JaxprEqn, drawn: set[Any]) -> bool:
    """Whether the results are random bits as numbers, or made of such alone without rounding."""
    if equation.primitive.name not in _OF_DRAWS:
        return False
    if equation.primitive.name == "bitcast_convert_type":
        return True
    given = [a for a in equation.invars if not isinstance(a, core.Literal) and is_float(a.aval.dtype)]
    return bool(given) and all(a in drawn for a in given)


def _represented(value: Any, arithmetic: Arithmetic) -> Any:
    dtype = arithmetic.dtype(value.dtype)
    return value if dtype == value.dtype else lax.convert_element_type(value, dtype)


def _run(equation: core.JaxprEqn, given: list[Any], arithmetic: Arithmetic) -> list[Any]:
    name, parameters = equation.primitive.name, equation.params
    if name in _CALLS:
        program = parameters.get("jaxpr", parameters.get("call_jaxpr"))
        return _evaluate(*_open(program, arithmetic), given, arithmetic)
    if name in _CONTROL_FLOW:
        return list(_CONTROL_FLOW[name](parameters, given, arithmetic))
    if name == "bitcast_convert_type":
        # The bits are those of the program's own dtype.
        own = [lax.convert_element_type(v, a.aval.dtype) for v, a in zip(given, equation.invars, strict=True)]
        return [_represented(equation.primitive.bind(*own, **parameters), arithmetic)]
    if name == "reduce_precision" and isinstance(arithmetic, Wide):
        return given
    changed = {k: _parameter(v, arithmetic) for k, v in parameters.items()}
    results = equation.primitive.bind(*given, **changed)
    return list(results) if equation.primitive.multiple_results else [results]


def _open(program: Any, arithmetic: Arithmetic) -> tuple[core.Jaxpr, list[Any]]:
    if isinstance(program, core.ClosedJaxpr):
        return program.jaxpr, [_represented(c, arithmetic) for c in program.consts]
    return program, []


def _parameter(value: Any, arithmetic: Arithmetic) -> Any:
    """A parameter of an operation: dtypes as the arithmetic has them, and programs (of a scatter, say) with them."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return arithmetic.dtype(np.dtype(value))
    if isinstance(value, core.ClosedJaxpr):
        return _retraced(value, arithmetic)
    if isinstance(value, core.Jaxpr):
        return _retraced(core.ClosedJaxpr(value, ()), arithmetic).jaxpr
    if isinstance(value, tuple) and any(isinstance(v, core.ClosedJaxpr) for v in value):
        return tuple(_parameter(v, arithmetic) for v in value)
    return value


def _retraced(program: core.ClosedJaxpr, arithmetic: Arithmetic) -> core.ClosedJaxpr:
    """`program` on other dtypes, without noise: it combines the elements of a reduction."""
    if not isinstance(arithmetic, Wide):
        return program
    kinds = [jax.ShapeDtypeStruct(v.aval.shape, arithmetic.dtype(v.aval.dtype)) for v in program.jaxpr.invars]
    traced: core.ClosedJaxpr = jax.make_jaxpr(lambda *given: evaluate(program, given, arithmetic))(*kinds)
    return traced


def _scan(parameters: dict[str, Any], given: list[Any], arithmetic: Arithmetic) -> Any:
    constants, carry = parameters["num_consts"], parameters["num_carry"]
    fixed, begun, stacked = given[:constants], given[constants : constants + carry], given[constants + carry :]

    def body(carried: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        results = evaluate(parameters["jaxpr"], [*fixed, *carried, *row], arithmetic)
        return results[:carry], results[carry:]

    ended, rows = lax.scan(
        body, begun, stacked, length=parameters["length"], reverse=parameters["reverse"], unroll=parameters["unroll"]
    )
    return [*ended, *rows]


def _while(parameters: dict[str, Any], given: list[Any], arithmetic: Arithmetic) -> Any:
    tested, looped = parameters["cond_nconsts"], parameters["body_nconsts"]
    of_test, of_body, begun = given[:tested], given[tested : tested + looped], given[tested + looped :]
    return lax.while_loop(
        lambda carried: evaluate(parameters["cond_jaxpr"], [*of_test, *carried], arithmetic)[0],
        lambda carried: evaluate(parameters["body_jaxpr"], [*of_body, *carried], arithmetic),
        begun,
    )


def _cond(parameters: dict[str, Any], given: list[Any], arithmetic: Arithmetic) -> Any:
    index, *operands = given
    branches: list[Callable[..., Any]] = [
        lambda *values, program=program: evaluate(program, values, arithmetic) for program in parameters["branches"]
    ]
    return lax.switch(index, branches, *operands)


_CONTROL_FLOW = {"scan": _scan, "while": _while, "cond": _cond}
