"""Checks of arguments that only Python can make: their names, and whether they can be read as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import numpy_dtype
from irongrad.runtime.errors import GuardError
from irongrad.runtime.manifest import EntryPoint, Manifest, TensorSpec

_NUMBERS = (bool, int, float, complex, np.generic)


def take(given: dict[str, Any], name: str, entry: EntryPoint) -> Any:
    """Remove the input `name` from `given` and return it.

    Raises:
        GuardError: the input is missing.
    """
    try:
        return given.pop(name)
    except KeyError:
        raise GuardError(f"{entry.name}: the input {name!r} is missing\n  expected {entry.signature}") from None


def refuse_leftovers(given: Mapping[str, Any], entry: EntryPoint, manifest: Manifest) -> None:
    """Refuse argument names that the entry point does not take.

    A hyperparameter's name without a group number (`lr` for `lr_0` and `lr_1`) means every parameter group, so it is
    accepted.

    Raises:
        GuardError: names the first unknown argument, and says so if its value is compiled in.
    """
    for name in given:
        if any(h.startswith(f"{name}_") and h[len(name) + 1 :].isdigit() for h in entry.hypers):
            continue
        if name in manifest.fixed:
            raise GuardError(
                f"{entry.name}: {name} is compiled in as {manifest.fixed[name]}: at that value the optimizer's update "
                "does not read it, or keeps no state for it. Compile with the value you want"
            )
        raise GuardError(f"{entry.name} takes no argument {name!r}\n  expected {entry.signature}")


def check_finite(entry: EntryPoint, inputs: Sequence[Any], hypers: Sequence[Any]) -> None:
    """Refuse inputs and hyperparameters that hold NaN or infinity.

    Raises:
        GuardError: names the input or hyperparameter, and counts its NaN and infinite values.
    """
    names = [s.name for s in entry.inputs] + list(entry.hypers)
    for name, value in zip(names, [*inputs, *hypers], strict=True):
        array = np.asarray(value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise GuardError(f"{entry.name}: {name} has {bad} values that are NaN or infinite (strict mode)")


def per_step(entry: EntryPoint, inputs: Sequence[Any], hypers: Sequence[Any]) -> list[Array]:
    """Return each hyperparameter of `train_steps` as a float64 array of shape [K].

    A single number is repeated K times. K is the first dimension of the first input.

    Raises:
        GuardError: a hyperparameter is neither a number nor an array of numbers.
    """
    steps = inputs[0].shape[0] if getattr(inputs[0], "shape", ()) else 0
    try:
        arrays = [np.asarray(h, np.float64) for h in hypers]
    except (TypeError, ValueError) as error:
        raise GuardError(f"{entry.name}: a hyperparameter is neither a number nor {steps} numbers: {error}") from None
    return [np.full(steps, a) if a.ndim == 0 else a for a in arrays]


def as_input(entry: EntryPoint, spec: TensorSpec, value: Any) -> Any:
    """Return a number as an array of the dtype of the input `spec`; return all other values unchanged.

    A float is rounded to a dtype of floats, as torch.tensor rounds it.

    Raises:
        GuardError: names the input, if its dtype does not hold the number.
    """
    if not isinstance(value, _NUMBERS):
        return value
    if spec.shape:
        return np.asarray(value)  # the module refuses the shape
    array = _of_dtype(value, numpy_dtype(spec.dtype))
    if array is None:
        raise GuardError(f"{entry.name}: {spec.name} is {spec.dtype}, which does not hold {value!r:.60}")
    return array


def as_steps(entry: EntryPoint, inputs: Sequence[Any]) -> list[Any]:
    """Repeat each number among the inputs of `train_steps` for every step, as `per_step` does for hyperparameters.

    Raises:
        GuardError: as `as_input`.
    """
    steps = next((i.shape[0] for i in inputs if getattr(i, "shape", ())), 0)
    return [
        np.full(steps, as_input(entry, replace(spec, shape=()), value)) if _is_per_step(spec, value) else value
        for spec, value in zip(entry.inputs, inputs, strict=True)
    ]


def _is_per_step(spec: TensorSpec, value: Any) -> bool:
    return isinstance(value, _NUMBERS) and len(spec.shape) == 1


def _of_dtype(value: Any, dtype: np.dtype[Any]) -> Array | None:
    """`value` as an array of `dtype`; None if it would change, except that floats are rounded to floats."""
    if np.iscomplexobj(value) and dtype.kind != "c":
        return None
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            array = np.asarray(value).astype(dtype)
            rounded = dtype.kind not in "biu" and isinstance(value, (float, complex, np.inexact))
            held = np.isfinite(array) or not np.isfinite(value) if rounded else array.item() == value
    except (OverflowError, TypeError, ValueError):  # such as an int of more than 64 bits
        return None
    return array if held else None


def as_array(value: Any) -> Array:
    """Return `value` as an array: a view through DLPack if it has `__dlpack__`, else `numpy.asarray(value)`.

    Raises:
        GuardError: DLPack cannot read it.
    """
    if not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise GuardError(
            f"a {type(value).__name__} cannot be read through DLPack: {error}. Pass a numpy array, or one on the CPU"
        ) from None


def as_seed(value: Any) -> Array:
    """Return a seed as an int64 scalar array.

    Raises:
        GuardError: it is not an integer from 0 to 2**63 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 2**63:
        raise GuardError(f"a seed is an integer from 0 to 2**63 - 1, not {value!r:.60}")
    return np.array(value, np.int64)


def as_number(entry: EntryPoint, name: str, value: Any) -> float:
    """Return the value of the hyperparameter `name` as a float.

    Raises:
        GuardError: it is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise GuardError(f"{entry.name}: {name} must be a number, not {value!r:.60}") from None
