"""Golden values of a JAX step: its own program in float64, with tolerances from runs in its own arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from irongrad.jax.bundle import Port
from irongrad.jax.evaluate import Noise, Wide, evaluate, is_float, noise_table
from irongrad.jax.flat import FlatProgram, State
from irongrad.runtime.arrays import Array
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import STEPS
from irongrad.runtime.tolerance import NOISY_RUNS, allowed_error
from irongrad.runtime.verification import largest_error

GOLDEN_STEPS = 3
# Each program runs only a few times, and XLA compiles it in half the time at this level.
_QUICK = {"xla_backend_optimization_level": 0}
ORACLE = "JAX in float64"

Runs = Mapping[str, Callable[..., Sequence[Any]]]


def golden_of(
    programs: Mapping[str, FlatProgram], state: State, inputs: Mapping[str, Array], hypers: Mapping[str, float]
) -> Golden:
    """Run the step unchanged, in float64 and with random rounding; return expected values and their tolerances."""
    traced = {name: program.traced for name, program in programs.items()}
    arguments = {**inputs, **hypers}

    def values(runs: Runs, wide: bool) -> dict[str, Array]:
        return _values(programs, runs, state, arguments, wide=wide)

    with jax.enable_x64(True):
        wide = {n: jax.jit(lambda *a, t=t: evaluate(t, a, Wide()), compiler_options=_QUICK) for n, t in traced.items()}
        exact = values(wide, True)
    own = {n: jax.jit(core.jaxpr_as_fun(t), compiler_options=_QUICK) for n, t in traced.items()}
    noisy = {
        n: jax.jit(lambda table, *a, t=t: evaluate(t, a, Noise(table)), compiler_options=_QUICK)
        for n, t in traced.items()
    }
    samples = [values(own, False)]
    for seed in range(NOISY_RUNS):
        table = noise_table(seed)
        samples.append(values({n: lambda *a, f=f, t=table: f(t, *a) for n, f in noisy.items()}, False))
    eps = _epsilons(programs)
    allowed = {
        key: allowed_error(value, max(largest_error(s[key], value) for s in samples), eps[_without_step(key)])
        for key, value in exact.items()
    }
    return Golden(GOLDEN_STEPS, ORACLE, dict(inputs), exact, allowed)


def _values(
    programs: Mapping[str, FlatProgram], runs: Runs, state: State, arguments: Mapping[str, Any], *, wide: bool
) -> dict[str, Array]:
    """Return every value of `GOLDEN_STEPS` steps as float64, by golden key."""
    found: dict[str, Array] = {}
    now = {s.name: _widened_if(a, wide) for s, a in zip(state.specs, state.arrays, strict=True)}
    outside = {
        n: _widened_if(np.asarray(v, None if isinstance(v, np.ndarray) else np.float32), wide)
        for n, v in arguments.items()
    }

    def run(name: str) -> list[tuple[Port, Any]]:
        ports = programs[name].arguments
        results = runs[name](*((now if p.kind == "state" else outside)[p.name] for p in ports))
        return list(zip(programs[name].results, results, strict=True))

    for name in ("eval", "predict"):
        for port, value in run(name) if name in programs else ():
            found[key_of(name, 0, "" if name == "eval" else port.name)] = _wide(value)
    for step in range(GOLDEN_STEPS):
        (_, loss), *new = run("step")
        found[key_of("loss", step)] = _wide(loss)
        now |= {port.name: value for port, value in new}
        found |= {key_of("state", step + 1, port.name): _wide(value) for port, value in new}
        found[key_of("state", step + 1, STEPS)] = np.array(step + 1.0)
    return found


def _widened_if(value: Array, wide: bool) -> Array:
    return value.astype(np.float64) if wide and is_float(value.dtype) else value


def _wide(value: Any) -> Array:
    return np.asarray(value).astype(np.float64)


def _without_step(key: str) -> str:
    """Return the kind and name of a golden key, without its step."""
    kind, _, name = key.split("/", 2)
    return f"{kind}/{name}"


def _epsilons(programs: Mapping[str, FlatProgram]) -> dict[str, float]:
    """Return the machine epsilon of each value's dtype, by `_without_step`; 0 for integers and booleans."""
    found = {f"state/{STEPS}": 0.0}
    for program, results in ((n, p.results) for n, p in programs.items()):
        for port in results:
            kind = {"step": "loss" if port.kind == "output" else "state"}.get(program, program)
            name = "" if kind in ("loss", "eval") else port.name
            dtype = jnp.dtype(port.dtype)
            found[f"{kind}/{name}"] = float(jnp.finfo(dtype).eps) if is_float(dtype) else 0.0
    return found
