"""A user's JAX functions as functions over flat lists of named arrays."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from irongrad.jax.bundle import Port
from irongrad.jax.programs import check_operations, without_prints
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.runtime.manifest import STEPS, HyperSpec, Role, StateSpec, TensorSpec

# The dtypes that an artifact can hold, by numpy's name.
_DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "bool"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


@dataclass(frozen=True)
class State:
    """The user's state as a flat list of arrays.

    Attributes:
        specs: the name, shape, dtype and role of each array.
        arrays: the initial values.
        tree: the pytree structure of the user's value.
        keys: for each array, the random generator's implementation if the user's leaf is a typed random key; None
            otherwise.
    """

    specs: tuple[StateSpec, ...]
    arrays: tuple[Array, ...]
    tree: Any
    keys: tuple[Any, ...]

    def build(self, arrays: Sequence[Any]) -> Any:
        """Rebuild the user's value from flat arrays."""
        leaves = [
            a if k is None else jax.random.wrap_key_data(a, impl=k) for a, k in zip(arrays, self.keys, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.tree, leaves)


@dataclass(frozen=True)
class FlatProgram:
    """One function over flat lists of arrays.

    Attributes:
        traced: the function, arrays -> arrays.
        arguments: its arguments, in order.
        results: its results, in order.
    """

    traced: core.ClosedJaxpr
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]


def placeholder(port: Port) -> jax.ShapeDtypeStruct:
    """Return the abstract value that stands for an argument while a program is traced.

    Hyperparameters are weakly typed, like Python's floats.
    """
    return jax.ShapeDtypeStruct(port.shape, port.dtype, weak_type=port.kind == "hyper")


def flat_state(value: Any) -> State:
    """Flatten the user's state into named arrays.

    Raises:
        CaptureError: a leaf is not an array, or two leaves have the same name.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(value)
    specs: list[StateSpec] = []
    arrays, keys = [], []
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "state"
        if name in (s.name for s in specs) or name == STEPS:
            raise CaptureError(f"two tensors of the state are called {name!r}; rename one of them")
        data, key = _plain(leaf, name)
        specs.append(StateSpec(name, data.dtype.name, data.shape, _role(name, data, key)))
        arrays.append(data)
        keys.append(key)
    return State(tuple(specs), tuple(arrays), tree, tuple(keys))


def _plain(leaf: Any, name: str) -> tuple[Array, Any]:
    """Return a leaf as an array, and its random generator's implementation if the leaf is a typed random key."""
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        raise CaptureError(f"the state has a {type(leaf).__name__} at {name!r}, which is no array: {error}") from None
    key = jax.random.key_impl(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else None
    data = np.asarray(array if key is None else jax.random.key_data(array))
    check_dtype(data.dtype, f"the state's {name}")
    return data, key


def check_dtype(dtype: Any, what: str) -> None:
    """Refuse a dtype that an artifact cannot hold.

    Raises:
        CaptureError: names the value and its dtype.
    """
    if np.dtype(dtype).name not in _DTYPES:
        raise CaptureError(f"{what} is {np.dtype(dtype).name}, which an artifact cannot hold")


def _role(name: str, data: Array, key: Any) -> Role:
    """Guess the role from the names in Flax's TrainState and Optax's examples; it is only displayed."""
    top = name.partition("/")[0]
    if key is not None or (data.dtype == np.uint32 and data.shape in ((2,), (4,))):
        return Role.RANDOM
    if top.startswith("opt"):
        return Role.OPTIMIZER
    if top == "params":
        return Role.PARAMETER
    return Role.COUNTER if data.ndim == 0 and data.dtype.kind in "iu" else Role.BUFFER


def flat_step(
    step: Callable[..., Any], state: State, inputs: Sequence[TensorSpec], hypers: Sequence[HyperSpec]
) -> FlatProgram:
    """Return `step(state, **inputs, **hypers) -> (state, loss)` as a function over flat lists.

    Its results are the loss, then the state.

    Raises:
        CaptureError: the step does not take these arguments or does not return these results.
    """
    ports = _arguments(step, "the step", state, inputs, hypers)

    def run(*values: Any) -> list[Any]:
        returned = _call(step, state, ports, values)
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise CaptureError(f"the step returned {_shown(returned)}; it must return the pair (new state, loss)")
        new, loss = returned
        if not _is_number(loss):
            raise CaptureError(f"the loss is {_shown(loss)}; it must be one floating-point number")
        return [jnp.asarray(loss), *_new_state(new, state)]

    program = _traced(run, "step", ports)
    results = (Port("output", "loss", program.out_avals[0].dtype.name, ()), *_state_ports(state))
    return FlatProgram(program, ports, results)


def flat_function(function: Callable[..., Any], what: str, state: State, inputs: Sequence[TensorSpec]) -> FlatProgram:
    """Return `function(state, **inputs)`, which does not change the state, as a function over flat lists.

    `eval` has the single output `loss`.
    """
    ports = _arguments(function, what, state, inputs, ())
    names: list[str] = []

    def run(*values: Any) -> list[Any]:
        paths, _ = jax.tree_util.tree_flatten_with_path(_call(function, state, ports, values))
        names[:] = ["loss"] if what == "eval" else [_output_name(p) for p, _ in paths]
        return [jnp.asarray(leaf) for _, leaf in paths]

    program = _traced(run, what, ports)
    returned = program.out_avals
    if what == "eval" and [m.shape for m in returned] != [()]:
        raise CaptureError(f"eval must return the loss alone, one number; it returned {len(returned)} arrays")
    results = tuple(Port("output", n, m.dtype.name, m.shape) for n, m in zip(names, returned, strict=True))
    return FlatProgram(program, ports, results)


def _traced(run: Callable[..., list[Any]], what: str, ports: Sequence[Port]) -> core.ClosedJaxpr:
    """Trace a function, without what prints; a collective outside of its devices has no meaning for JAX either."""
    try:
        program = jax.make_jaxpr(run)(*map(placeholder, ports))
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise UnsupportedOpError(
            f"the {what} calls a collective (such as psum): {error}. That is for several devices, and an artifact runs "
            "on one"
        ) from None
    check_operations(program, what)
    program, dropped = without_prints(program)
    if dropped:
        warnings.warn("the artifact does not print: " + "; ".join(dropped), stacklevel=4)
    return program


def _output_name(path: Any) -> str:
    name: str = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"output{name}" if name.isdigit() or not name else name


def _arguments(
    function: Callable[..., Any], what: str, state: State, inputs: Sequence[TensorSpec], hypers: Sequence[HyperSpec]
) -> tuple[Port, ...]:
    ports = [Port("input", s.name, s.dtype, tuple(map(int, s.shape))) for s in inputs]
    ports += [Port("hyper", h.name, "float32", ()) for h in hypers]
    _, *parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters]
        unknown = [p.name for p in parameters if p.default is p.empty and p.name not in (g.name for g in ports)]
        if unknown:
            raise CaptureError(f"{what} takes {unknown[0]!r}, which is neither an input nor a hyperparameter")
        if what == "the step" and (extra := [g.name for g in ports if g.name not in names]):
            raise CaptureError(f"{what} takes no argument {extra[0]!r}; it takes {', '.join(names) or 'none'}")
        ports = [g for g in ports if g.name in names]
    return (*_state_ports(state), *ports)


def _state_ports(state: State) -> tuple[Port, ...]:
    return tuple(Port("state", s.name, s.dtype, s.shape) for s in state.specs)


def _call(function: Callable[..., Any], state: State, ports: Sequence[Port], values: Sequence[Any]) -> Any:
    count = len(state.specs)
    named: Mapping[str, Any] = {p.name: v for p, v in zip(ports[count:], values[count:], strict=True)}
    return function(state.build(values[:count]), **named)


def _new_state(new: Any, state: State) -> list[Any]:
    leaves, tree = jax.tree_util.tree_flatten(new)
    if tree != state.tree:
        raise CaptureError(f"the new state is {tree}, the old one {state.tree}; a step returns (new state, loss)")
    plain = [leaf if k is None else jax.random.key_data(leaf) for leaf, k in zip(leaves, state.keys, strict=True)]
    for spec, leaf in zip(state.specs, plain, strict=True):
        found = (jnp.shape(leaf), np.dtype(jnp.result_type(leaf)).name)
        if found != (spec.shape, spec.dtype):
            raise CaptureError(
                f"the step takes {spec.name} as {spec.dtype}{list(spec.shape)} and returns it as "
                f"{found[1]}{list(found[0])}; a state tensor keeps its shape and dtype"
            )
    return [jnp.asarray(leaf) for leaf in plain]


def _is_number(value: Any) -> bool:
    leaves, tree = jax.tree_util.tree_flatten(value)
    return tree.num_nodes == 1 and not jnp.shape(leaves[0]) and jnp.issubdtype(jnp.result_type(leaves[0]), jnp.floating)


def _shown(value: Any) -> str:
    leaves = jax.tree_util.tree_leaves(value)
    return f"a {type(value).__name__} of {len(leaves)} arrays" if len(leaves) != 1 else str(jax.typeof(leaves[0]))
