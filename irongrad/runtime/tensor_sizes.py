"""The sizes of the tensors that a manifest describes."""

from __future__ import annotations

from math import prod

from irongrad.runtime.manifest import StateSpec, TensorSpec
from irongrad.runtime.safetensors_file import numpy_dtype


def size_of(spec: StateSpec | TensorSpec) -> int:
    """The size of a tensor in bytes; no dimension may vary."""
    return prod(map(int, spec.shape)) * numpy_dtype(spec.dtype).itemsize
