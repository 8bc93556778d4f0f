"""Evaluate a JAX program with other arithmetic: in float64, or in its own dtypes with random rounding.

A traced program (a jaxpr) has explicit dtypes. Under JAX's 64-bit mode the user's Python would be another program: it
would draw other random bits, and use float32 wherever the code says so. So this module evaluates the traced program
itself, operation by operation. `Wide` keeps every floating-point value in float64. `Noise` multiplies every computed
floating-point value by 1 + u, as `irongrad.pipeline.oracle.rounding_noise.RoundingNoise` does in eager PyTorch.
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

# Operations that only call another program; the called program is evaluated in their place.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
)
# Operations that move or select values, and round nothing.
_EXACT = frozenset(
    {"reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "concatenate"}
    | {"gather", "rev", "pad", "select_n", "max", "min", "neg", "abs", "sign", "reduce_max", "reduce_min", "copy"}
    | {"stop_gradient", "dynamic_update_slice", "optimization_barrier", "split", "iota", "sort"}
)
# Operations that turn random bits into uniform random numbers, exactly. Noise on their results would change a draw.
_DRAW_OPERATIONS = frozenset({"sub", "add", "mul", "max", "reshape", "broadcast_in_dim", "bitcast_convert_type", "jit"})
_STRETCH = 1 << 15


class Arithmetic(Protocol):
    """The representation of values, and the rounding of results."""

    def dtype(self, dtype: Any) -> Any:
        """Return the dtype in which a value of `dtype` is kept."""
        ...

    def rounded(self, value: Any) -> Any:
        """Return a computed value as this arithmetic rounds it."""
        ...


@dataclass(frozen=True)
class Wide:
    """Arithmetic that keeps floating-point values in float64."""

    def dtype(self, dtype: Any) -> Any:
        """Return float64 for every floating-point dtype, and `dtype` otherwise."""
        return np.dtype(np.float64) if is_float(dtype) else dtype

    def rounded(self, value: Any) -> Any:
        """Return `value` unchanged."""
        return value


class Noise:
    """Arithmetic in the program's own dtypes with random rounding errors of up to `NOISE_ULPS` last-place units.

    `table` holds random numbers in [-1, 1]; each operation takes another stretch of it. It is a traced array, so that
    one compiled program serves every seed.
    """

    def __init__(self, table: Any) -> None:
        self._table = table
        self._taken = 0

    def dtype(self, dtype: Any) -> Any:
        """Return `dtype` unchanged."""
        return dtype

    def rounded(self, value: Any) -> Any:
        """Return `value` with noise if it is floating-point, else unchanged."""
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
    """Return the random numbers of a `Noise`, as a float32 array."""
    return np.random.default_rng(seed).uniform(-1, 1, 2 * _STRETCH).astype(np.float32)


def is_float(dtype: Any) -> bool:
    """Return whether `dtype` is floating-point, including the narrow dtypes of ml_dtypes."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def evaluate(program: core.ClosedJaxpr, arguments: Sequence[Any], arithmetic: Arithmetic) -> list[Any]:
    """Run `program` under `arithmetic`, on arguments that are already in its representation."""
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
    """Return whether the results are random bits as numbers, or exact functions of such numbers alone."""
    if equation.primitive.name not in _DRAW_OPERATIONS:
        return False
    if equation.primitive.name == "bitcast_convert_type":
        return True
    operands = [a for a in equation.invars if not isinstance(a, core.Literal) and is_float(a.aval.dtype)]
    return bool(operands) and all(a in drawn for a in operands)


def _represented(value: Any, arithmetic: Arithmetic) -> Any:
    dtype = arithmetic.dtype(value.dtype)
    return value if dtype == value.dtype else lax.convert_element_type(value, dtype)


def _run(equation: core.JaxprEqn, operands: list[Any], arithmetic: Arithmetic) -> list[Any]:
    name, parameters = equation.primitive.name, equation.params
    if name in _CALLS:
        program = parameters.get("jaxpr", parameters.get("call_jaxpr"))
        return _evaluate(*_open(program, arithmetic), operands, arithmetic)
    if name in _CONTROL_FLOW:
        return list(_CONTROL_FLOW[name](parameters, operands, arithmetic))
    if name == "bitcast_convert_type":
        # Reinterpret the bits of the program's own dtype, not those of the wider one.
        own = [lax.convert_element_type(v, a.aval.dtype) for v, a in zip(operands, equation.invars, strict=True)]
        return [_represented(equation.primitive.bind(*own, **parameters), arithmetic)]
    if name == "reduce_precision" and isinstance(arithmetic, Wide):
        return operands
    changed = {k: _parameter(v, arithmetic) for k, v in parameters.items()}
    results = equation.primitive.bind(*operands, **changed)
    return list(results) if equation.primitive.multiple_results else [results]


def _open(program: Any, arithmetic: Arithmetic) -> tuple[core.Jaxpr, list[Any]]:
    if isinstance(program, core.ClosedJaxpr):
        return program.jaxpr, [_represented(c, arithmetic) for c in program.consts]
    return program, []


def _parameter(value: Any, arithmetic: Arithmetic) -> Any:
    """Convert the dtypes in a parameter of an operation, and in its programs (of a scatter, say)."""
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
    """Retrace `program` on the dtypes of `arithmetic`, without noise: it combines the elements of a reduction."""
    if not isinstance(arithmetic, Wide):
        return program
    kinds = [jax.ShapeDtypeStruct(v.aval.shape, arithmetic.dtype(v.aval.dtype)) for v in program.jaxpr.invars]
    traced: core.ClosedJaxpr = jax.make_jaxpr(lambda *operands: evaluate(program, operands, arithmetic))(*kinds)
    return traced


def _cut(operands: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The first operands, the next ones, and the rest."""
    return operands[:first], operands[first : first + second], operands[first + second :]


def _scan(parameters: dict[str, Any], operands: list[Any], arithmetic: Arithmetic) -> Any:
    constants, carry = parameters["num_consts"], parameters["num_carry"]
    fixed, initial, stacked = _cut(operands, constants, carry)

    def body(carried: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        results = evaluate(parameters["jaxpr"], [*fixed, *carried, *row], arithmetic)
        return results[:carry], results[carry:]

    final, rows = lax.scan(
        body, initial, stacked, length=parameters["length"], reverse=parameters["reverse"], unroll=parameters["unroll"]
    )
    return [*final, *rows]


def _while(parameters: dict[str, Any], operands: list[Any], arithmetic: Arithmetic) -> Any:
    tested, looped = parameters["cond_nconsts"], parameters["body_nconsts"]
    test_constants, body_constants, initial = _cut(operands, tested, looped)
    return lax.while_loop(
        lambda carried: evaluate(parameters["cond_jaxpr"], [*test_constants, *carried], arithmetic)[0],
        lambda carried: evaluate(parameters["body_jaxpr"], [*body_constants, *carried], arithmetic),
        initial,
    )


def _cond(parameters: dict[str, Any], given: list[Any], arithmetic: Arithmetic) -> Any:
    index, *operands = given
    branches: list[Callable[..., Any]] = [
        lambda *values, program=program: evaluate(program, values, arithmetic) for program in parameters["branches"]
    ]
    return lax.switch(index, branches, *operands)


_CONTROL_FLOW = {"scan": _scan, "while": _while, "cond": _cond}
