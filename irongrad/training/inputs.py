"""The arrays of a data set, compared with the inputs of a step before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError
from irongrad.runtime.manifest import EntryPoint, Manifest
from irongrad.training.numpy_files import MappedArray, read_npz


def training_entry(manifest: Manifest) -> EntryPoint:
    """Return the entry point that trains on a batch: `train_step`, or `grad_step`.

    Raises:
        GuardError: the artifact has neither.
    """
    entry = manifest.entry_point("train_step") or manifest.entry_point("grad_step")
    if entry is None:
        raise GuardError("this artifact was compiled without train_step and without grad_step")
    return entry


def read_arrays(path: Path, manifest: Manifest) -> dict[str, Array]:
    """Read the arrays with the names of the step's inputs from an .npz file, whole.

    Raises:
        GuardError: the file cannot be read, lacks an input, or its arrays differ in length or do not fit the step.
    """
    entry = training_entry(manifest)
    arrays = read_npz(path, [s.name for s in entry.inputs])
    check_samples(arrays, entry, str(path))
    return arrays


def check_samples(arrays: Mapping[str, Array | MappedArray], entry: EntryPoint, source: str) -> None:
    """Check the arrays of all samples, whose first dimension counts samples.

    Args:
        arrays: the array of each input by name.
        entry: the entry point that takes them.
        source: the file that they are from, for the message.

    Raises:
        GuardError: they differ in length, or their samples are not what the step takes.
    """
    if scalars := [n for n, a in arrays.items() if not a.shape]:
        raise GuardError(f"{source}: {scalars[0]} is a single number; the first dimension of an array counts samples")
    if len({a.shape[0] for a in arrays.values()}) > 1:
        lengths = ", ".join(f"{n}: {a.shape[0]}" for n, a in arrays.items())
        raise GuardError(f"{source}: the arrays have different numbers of samples ({lengths})")
    sizes: dict[str, int] = {}
    for spec in entry.inputs:
        array = arrays[spec.name]
        if array.dtype.name != spec.dtype or not _fits(array.shape[1:], spec.shape[1:], sizes):
            known = "".join(f" with {name} = {size}" for name, size in sizes.items() if name in spec.shape)
            raise GuardError(
                f"{source}: {spec.name} is {array.dtype}[{', '.join(map(str, array.shape))}], the step takes "
                f"{spec.dtype}[N{''.join(f', {d}' for d in spec.shape[1:])}]{known}; convert it before saving"
            )


def _fits(shape: Sequence[int], wanted: Sequence[int | str], sizes: dict[str, int]) -> bool:
    """Whether a sample has a wanted shape; the size of each named dimension is that in `sizes`, or is added there."""
    return len(shape) == len(wanted) and all(
        size == (sizes.setdefault(want, size) if isinstance(want, str) else want)
        for size, want in zip(shape, wanted, strict=True)
    )
