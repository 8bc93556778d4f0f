"""`export_step`: export a JAX training step as a bundle (`irongrad.jax.bundle`)."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jaxlib.mlir.dialects import stablehlo

from irongrad.jax.bundle import FORMAT_VERSION, Bundle, Index, Program, write_bundle
from irongrad.jax.flat import FlatProgram, check_dtype, flat_function, flat_state, flat_step, placeholder
from irongrad.jax.golden import golden_of
from irongrad.jax.indices import index_rules
from irongrad.jax.pooling import pooling_rules
from irongrad.jax.programs import rewritten
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.runtime.installed import VERSION
from irongrad.runtime.manifest import HyperSpec, IndexSpec, TensorSpec

# Custom calls that every StableHLO consumer accepts without a definition: sharding annotations, which mean nothing
# here.
_HARMLESS = frozenset({"Sharding", "annotate_device_placement"})
_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")
_FUNCTION = re.compile(r"func\.func \w+ @([\w.$]+)")
_AT = re.compile(r"loc\((#loc\d*)\)$")
_LOCATION = re.compile(r"^(#loc\d+) = loc\((.*)\)$", re.MULTILINE)
_LINE = re.compile(r'"([^"]+\.py)":(\d+)')


def export_step(
    step: Callable[..., Any],
    state: Any,
    inputs: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    hypers: Mapping[str, float] | None = None,
    evaluate: Callable[..., Any] | None = None,
    predict: Callable[..., Any] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    stablehlo_version: str | None = None,
) -> None:
    """Write a bundle that `irongrad import` compiles to an artifact.

    Args:
        step: `step(state, **inputs, **hypers) -> (new state, loss)`, jitted or not; donated arguments are allowed.
        state: everything that lasts between steps, as one pytree: parameters, optimizer state, statistics, random keys.
        inputs: example inputs by name. Shapes and dtypes are compiled in; the values are used to verify the result.
        path: the directory to write.
        hypers: hyperparameters that are inputs of every step, with their defaults.
        evaluate: `evaluate(state, **inputs) -> loss`, for the entry point `eval_step`.
        predict: `predict(state, **some inputs) -> arrays`, for the entry point `predict`.
        ranges: the smallest and the largest valid value of integer inputs; the compiled step refuses all others. JAX
            itself clamps an index that is out of range, or reads NaN.
        stablehlo_version: the StableHLO version of the modules, such as `1.13.0`, for an IREE that cannot read newer
            ones. By default it is the version of twelve weeks ago, as in `jax.export`.

    Raises:
        CaptureError: a function does not take or return what it must.
        UnsupportedOpError: the step calls a function that StableHLO does not define, or has varying sizes.
    """
    flat = flat_state(state)
    arrays = {name: _input(name, value) for name, value in inputs.items()}
    specs = [_spec(name, array, ranges or {}) for name, array in arrays.items()]
    numbers = tuple(HyperSpec(n, float(v)) for n, v in (hypers or {}).items())
    programs = {"step": flat_step(step, flat, specs, numbers)}
    for name, function in (("eval", evaluate), ("predict", predict)):
        if function is not None:
            programs[name] = flat_function(function, name, flat, specs)
    modules, kept = {}, {}
    indices: dict[IndexSpec, None] = {}
    for name, program in programs.items():
        modules[name], kept[name] = _exported(name, program, stablehlo_version, lambda spec: indices.setdefault(spec))
    with jax.default_device(jax.devices("cpu")[0]):
        golden = golden_of(programs, flat, arrays, {h.name: h.default for h in numbers})
    versions = {"irongrad": VERSION, "python": platform.python_version()}
    versions |= {package: version(package) for package in ("jax", "jaxlib", "numpy")}
    stablehlo = _version_of(modules["step"])
    index = Index(FORMAT_VERSION, flat.specs, tuple(specs), numbers, kept, versions, stablehlo, tuple(indices))
    state_arrays = dict(zip((s.name for s in flat.specs), flat.arrays, strict=True))
    write_bundle(Bundle(index, modules, state_arrays, golden), Path(path))


def _input(name: str, value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise UnsupportedOpError(
            f"the input {name!r} has no values{_varying(value.shape)}: give an example array, whose shape is "
            "compiled in"
        )
    array = np.asarray(jax.numpy.asarray(value))
    check_dtype(array.dtype, f"the input {name}")
    return array


def _varying(shape: tuple[Any, ...]) -> str:
    named = [str(d) for d in shape if not isinstance(d, int)]
    return f", and its sizes {', '.join(named)} vary, which no step imported from JAX can have" if named else ""


def _spec(name: str, array: np.ndarray[Any, Any], ranges: Mapping[str, tuple[int, int]]) -> TensorSpec:
    low, high = ranges.get(name, (None, None))
    if low is not None and (array.dtype.kind not in "iu" or array.min() < low or array.max() > high):
        raise CaptureError(
            f"the example input {name!r} is {array.dtype} and not all of it in the range [{low}, {high}]"
        )
    return TensorSpec(name, array.dtype.name, array.shape, low, high)


def _exported(
    name: str, program: FlatProgram, stablehlo_version: str | None, record: Callable[[IndexSpec], object]
) -> tuple[bytes, Program]:
    """Return a program's module, and the arguments that the module takes: JAX drops arguments that nothing reads."""
    run = core.jaxpr_as_fun(rewritten(program.traced, index_rules(record) | pooling_rules()))
    exported = jax.export.export(jax.jit(run), platforms=["cpu"])(*map(placeholder, program.arguments))
    text = exported.mlir_module()
    _check_calls(text)
    data = exported.mlir_module_serialized
    if stablehlo_version is not None:
        try:
            data = stablehlo.serialize_portable_artifact_str(text, stablehlo_version)
        except Exception as error:
            raise UnsupportedOpError(
                f"the {name} cannot be written as StableHLO {stablehlo_version}: {error}"
            ) from None
    arguments = tuple(program.arguments[i] for i in exported.module_kept_var_idx)
    return data, Program(f"{name}.stablehlo", arguments, program.results)


def _check_calls(text: str) -> None:
    """Refuse custom calls that only one backend of JAX defines.

    Raises:
        UnsupportedOpError: names the call and the user's line.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = _CUSTOM_CALL.search(line)
        if found is not None and found[1] not in _HARMLESS:
            place = _users_line(number, lines, dict(_LOCATION.findall(text)))
            raise UnsupportedOpError(
                f"{place}the step calls {found[1]!r}, which JAX has as a library of its CPU backend and not as "
                "StableHLO. Write it with other operations, such as those of jax.numpy"
            )


def _users_line(number: int, lines: Sequence[str], locations: Mapping[str, str]) -> str:
    """Return the user's line for an operation, or for a call of the function that holds it.

    JAX leaves out the lines of its own code.
    """
    at = _AT.search(lines[number])
    if at is not None and (place := _line_of(at[1], locations)):
        return place
    function = next((m[1] for i in range(number, -1, -1) if (m := _FUNCTION.search(lines[i]))), "main")
    callers = [i for i, line in enumerate(lines) if f" call @{function}(" in line]
    return _users_line(callers[0], lines, locations) if callers and callers[0] != number else ""


def _line_of(name: str, locations: Mapping[str, str]) -> str:
    """Return the first line of a Python file that an MLIR location mentions."""
    text = locations.get(name, "")
    if line := _LINE.search(text):
        return f"{line[1]}:{line[2]}: "
    return next((place for inner in re.findall(r"#loc\d+", text) if (place := _line_of(inner, locations))), "")


def _version_of(module: bytes) -> str:
    """Return the version of StableHLO in the header of a portable artifact."""
    found = re.search(rb"StableHLO_v([\d.]+)", module[:64])
    return found[1].decode() if found else ""
