"""Checks of arguments that only Python can make: their names, and whether they can be read as arrays."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from math import isfinite, isinf
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.manifest import EntryPoint, Manifest, TensorSpec
from irongrad.runtime.safetensors_file import numpy_dtype

_LIMITS = ("clip_grad_norm", "clip_grad_value")
_NUMBERS = (bool, int, float, complex, np.generic)


def take(given: dict[str, Any], name: str, entry: EntryPoint) -> Any:
    """Remove the input `name` from `given` and return it.

    Raises:
        GuardError: the input is missing.
    """
    try:
        return given.pop(name)
    except KeyError:
        unknown = [n for n in given if n not in {s.name for s in entry.inputs} and not is_hyper(n, entry)]
        other = f", and there is no argument {unknown[0]!r}" if unknown else ""
        raise GuardError(f"{entry.symbol}: the input {name!r} is missing{other}; expected {entry.signature}") from None


def refuse_leftovers(given: Mapping[str, Any], entry: EntryPoint, manifest: Manifest) -> None:
    """Refuse argument names that the entry point does not take.

    Raises:
        GuardError: names the first unknown argument, and says so if its value is compiled in.
    """
    for name in given:
        if is_hyper(name, entry):
            continue
        if name in manifest.fixed:
            if given[name] == manifest.fixed[name]:
                continue
            raise GuardError(
                f"{entry.symbol}: {name} is compiled in as {manifest.fixed[name]}: at that value the optimizer's "
                "update does not read it, or keeps no state for it. Compile with the value you want"
            )
        raise GuardError(f"{entry.symbol} takes no argument {name!r}; expected {entry.signature}")


def is_hyper(name: str, entry: EntryPoint) -> bool:
    """Whether a name means hyperparameters of an entry point; `lr` means every group, of `lr_0` and `lr_1`."""
    return name in entry.hypers or any(h.startswith(f"{name}_") and h[len(name) + 1 :].isdigit() for h in entry.hypers)


def check_finite(entry: EntryPoint, inputs: Sequence[Any]) -> None:
    """Refuse inputs that hold NaN or infinity.

    Raises:
        GuardError: names the input, and counts its NaN and infinite values.
    """
    for spec, value in zip(entry.inputs, inputs, strict=True):
        array = np.asarray(value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise GuardError(f"{entry.symbol}: {spec.name} has {bad} values that are NaN or infinite (strict mode)")


def infinite_hypers(manifest: Manifest) -> frozenset[str]:
    """Return the hyperparameters that may be infinite: limits of gradients, and those that are by default."""
    return frozenset({*_LIMITS, *(h.name for h in manifest.hypers if isinf(h.default))})


def per_step(entry: EntryPoint, inputs: Sequence[Any], hypers: Sequence[Any], infinite: Container[str]) -> list[Array]:
    """Return each hyperparameter of `train_steps` as a float64 array of shape [K].

    A single number is repeated K times. K is the first dimension of the first input.

    Raises:
        GuardError: a hyperparameter is neither a number nor an array of numbers, or one is NaN.
    """
    steps = inputs[0].shape[0] if getattr(inputs[0], "shape", ()) else 0
    arrays = [_hypers(entry, name, value, infinite) for name, value in zip(entry.hypers, hypers, strict=True)]
    return [np.full(steps, a) if a.ndim == 0 else a for a in arrays]


def as_number(entry: EntryPoint, name: str, value: Any, infinite: Container[str]) -> float:
    """Return the value of the hyperparameter `name` as a float.

    Raises:
        GuardError: it is not a number, or NaN.
    """
    if type(value) is float and isfinite(value) and value > 0:  # nearly every call; an array takes 2 microseconds
        return value
    array = _hypers(entry, name, value, infinite)
    if array.size != 1:
        raise GuardError(f"{entry.symbol}: {name} must be a number, not {value!r:.60}")
    return float(array.reshape(()))


def _hypers(entry: EntryPoint, name: str, value: Any, infinite: Container[str]) -> Array:
    """A hyperparameter as float64: one number, or one for each step.

    numpy would read None as NaN, a text as the number it spells, and a complex number as its real part.
    """
    wrong = f"{entry.symbol}: {name} must be a number{'' if not entry.is_stacked else ', or one for each step'}"
    refused = GuardError(f"{wrong}, not {value!r:.60}")
    try:
        given = value if isinstance(value, np.ndarray) else np.asarray(value)
        if isinstance(given, np.ma.MaskedArray) or given.dtype.kind not in "biufV":
            raise refused
        array = given.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, dtypes that are no numbers, tensors on a GPU
        raise refused from None
    bad = np.isnan(array) | (np.isinf(array) & (name not in infinite))
    if bad.any():
        where = f" of step {int(np.argmax(bad))}" if array.ndim else ""
        raise GuardError(
            f"{entry.symbol}: {name}{where} is {array[bad][0] if array.ndim else array}: it must be finite"
        )
    if name in _LIMITS and (array <= 0).any():
        raise GuardError(f"{entry.symbol}: {name} is {array.min():g}: it must be positive; inf turns clipping off")
    return array


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
        raise GuardError(f"{entry.symbol}: {spec.name} is {spec.dtype}, which does not hold {value!r:.60}")
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
    if isinstance(value, np.ma.MaskedArray):
        raise GuardError("a masked array cannot be an input: its mask would be ignored. Pass value.filled(…)")
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return _plain_array(value)
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        if (copied := _without_dlpack(value)) is not None:
            return copied
        raise GuardError(
            f"a {type(value).__name__} cannot be read through DLPack: {error}. Pass a numpy array, or one on the CPU"
        ) from None


def _without_dlpack(value: Any) -> Array | None:
    """A copy of a tensor of bfloat16 or of 8-bit floats, which numpy cannot read; None for other tensors.

    float32 holds each of their numbers.
    """
    name = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if not hasattr(ml_dtypes, name) or getattr(value, "requires_grad", False):
        return None
    try:
        return np.asarray(value.float() if hasattr(value, "float") else value).astype(numpy_dtype(name))
    except (RuntimeError, TypeError, ValueError):
        return None


def as_path(value: Any, what: str) -> Path:
    """Return a path of the file system.

    Raises:
        UserError: it is none; says what it should be the path of.
    """
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str):
        raise UserError(f"{what} must be a path, not {value!r:.60}")
    return Path(found)


def refuse_no_mapping(value: Any, what: str) -> None:
    """Refuse a value that holds no arrays by name.

    Raises:
        UserError: says what it should be.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{what} must be a mapping of names to arrays, not {value!r:.60}")


def check_whole(what: str, value: object, least: int = 0) -> int:
    """Return a value that is an integer, one of numpy's too, of at least `least`, and no boolean.

    Raises:
        UserError: begins with `what`, and says what it should be.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{what} is {value!r:.60}: it must be a whole number of {least} or more")
    return int(value)


def as_seed(value: Any) -> Array:
    """Return a seed as an int64 scalar array.

    Raises:
        GuardError: it is not an integer from 0 to 2**63 - 1.
    """
    if not _is_whole(value, 63):
        raise GuardError(f"a seed is an integer from 0 to 2**63 - 1, not {value!r:.60}")
    return np.array(value, np.int64)


def as_count(value: Any) -> Array:
    """Return a number of gradients as an int64 scalar array.

    Raises:
        GuardError: it is not an integer from 0 to 2**31 - 1.
    """
    if not _is_whole(value, 31):
        raise GuardError(f"import_gradients: the count must be a whole number of gradients, not {value!r:.60}")
    return np.array(value, np.int64)


def _is_whole(value: Any, bits: int) -> bool:
    """Whether a value is an integer of at least 0 with at most so many bits, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= value < 2**bits


def _plain_array(value: Any) -> Array:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise GuardError(f"a {type(value).__name__} cannot be read as an array: {error}") from None
