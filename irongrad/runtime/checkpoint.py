"""Checkpoints: safetensors files keyed by state tensor names, PyTorch's own for parameters and buffers.

A checkpoint can replace an artifact's `state.irpa`: `iree-run-module --parameters=state=FILE`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import Manifest, StateSpec


def write(path: Path, state: Mapping[str, Array], manifest: Manifest) -> None:
    """Write `state` to `path` atomically: a reader sees the old file or the complete new one.

    A tied tensor is written under its name and under each of its aliases.
    """
    arrays = {key: np.asarray(state[s.name], order="C") for s in manifest.state for key in (s.name, *s.aliases)}
    atomic_write(path, safetensors.numpy.save(arrays, metadata={"format": "irongrad-1"}))


def under_all_names(arrays: Sequence[Array], manifest: Manifest) -> dict[str, Array]:
    """Return the arrays of the state by name; a tied parameter or buffer is one array under each of its names."""
    return {key: array for s, array in zip(manifest.state, arrays, strict=True) for key in s.model_names}


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves either the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _default_mode())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _default_mode() -> int:
    """Return the permissions that an ordinary new file gets; a temporary file has fewer."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def read(path: Path, manifest: Manifest) -> dict[str, Array]:
    """Read the state from the checkpoint at `path`.

    Raises:
        ArtifactError: the file is missing or damaged, or does not hold this model's state.
    """
    with readable(path):
        arrays = arrays_of(path)
    check_arrays(arrays, manifest, str(path))
    return {s.name: arrays[s.name] for s in manifest.state}


def check(path: Path, manifest: Manifest) -> None:
    """Check that `path` is a checkpoint of this model; reads only its header.

    Raises:
        ArtifactError: as `read`.
    """
    with readable(path), safetensors.safe_open(path, framework="numpy") as file:
        found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        shapes = {key: (tuple(s.get_shape()), _DTYPES.get(s.get_dtype(), s.get_dtype())) for key, s in found.items()}
    _compare(shapes, manifest, str(path))


def check_arrays(arrays: Mapping[str, Array], manifest: Manifest, source: str) -> None:
    """Check the names, shapes and dtypes of `arrays`, and that tied tensors have equal values.

    Raises:
        ArtifactError: lists the first differences.
    """
    _compare({k: (a.shape, a.dtype.name) for k, a in arrays.items()}, manifest, source)
    for spec in manifest.state:
        for alias in spec.aliases:
            if alias in arrays and not np.array_equal(arrays[alias], arrays[spec.name], equal_nan=True):
                raise ArtifactError(
                    f"{source}: {alias} and {spec.name} are one tensor in the compiled step, but their values differ"
                )


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def arrays_of(path: Path) -> dict[str, Array]:
    """Read all arrays of a safetensors file.

    `safetensors.numpy.load` of safetensors 0.8.0 cannot read bfloat16; `safe_open` can.
    """
    with safetensors.safe_open(path, framework="numpy") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn any error while reading the checkpoint at `path` into an ArtifactError.

    Raises:
        ArtifactError: the checkpoint is missing or damaged.
    """
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"the checkpoint {path} does not exist") from None
    except Exception as error:
        raise ArtifactError(f"{path} is not a readable safetensors file: {error}") from None


def _compare(found: Mapping[str, tuple[tuple[int, ...], str]], manifest: Manifest, source: str) -> None:
    wanted: dict[str, StateSpec] = {s.name: s for s in manifest.state}
    aliases = {a for s in manifest.state for a in s.aliases}
    problems = [f"{n} is missing" for n in wanted if n not in found]
    problems += [f"{n} is unknown" for n in found if n not in wanted and n not in aliases]
    for name, spec in wanted.items():
        if name in found and found[name] != (spec.shape, spec.dtype):
            shape, dtype = found[name]
            problems.append(f"{name} is {dtype}{list(shape)}, the step has {spec.dtype}{list(spec.shape)}")
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ArtifactError(
            f"{source} does not fit this step (another model or optimizer?): {'; '.join(problems[:4])}{more}"
        )


def from_index(index: Any, manifest: Manifest) -> dict[str, Array]:
    """Read the state from an IREE parameter index (`iree.runtime.ParameterIndex`)."""
    entries = dict(index.items())
    arrays = [
        np.frombuffer(entries[spec.name].file_view, numpy_dtype(spec.dtype)).reshape(spec.shape).copy()
        for spec in manifest.state
    ]
    return under_all_names(arrays, manifest)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype called `name`; for bfloat16 it is the dtype of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
