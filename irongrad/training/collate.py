"""Make batches of samples whose sizes differ: padded to the sizes for which the artifact is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.manifest import Manifest, TensorSpec
from irongrad.runtime.safetensors_file import numpy_dtype
from irongrad.training.inputs import training_entry


class Padded:
    """A collate function for ragged samples: stacks them, each padded at its end.

    The size is that of the smallest bucket that holds the batch. It is the longest sample's where the artifact takes
    any size, and the compiled size where that is fixed. Unlike the padding inside of the module, what is filled in here
    is data to the step: give the step a mask, or a target that the loss ignores. Keys that are no input are left out.
    """

    def __init__(
        self, manifest: Manifest, *, fill: Mapping[str, float] = MappingProxyType({}), mask: str | None = None
    ) -> None:
        """
        Args:
            manifest: the manifest of the step (`session.manifest`).
            fill: what the padding of an input holds, by the input's name. By default the target that the loss ignores,
                if the input has one (`ignore_index`), and 0 otherwise.
            mask: the name of an input that the samples lack: 1 where there is a sample, 0 in the padding.

        Raises:
            UserError: `fill` or `mask` names no input, or no other input has the shape of the mask.
        """
        self._manifest = manifest
        self._specs = {s.name: s for s in training_entry(manifest).inputs}
        for name in (*fill, *([] if mask is None else [mask])):
            if name not in self._specs:
                raise UserError(f"{name!r} is no input of the step; it takes {', '.join(self._specs)}")
        exempt = {s.name: 0 if s.exempt is None else s.exempt for s in self._specs.values()}
        self._fill: dict[str, float] = {**exempt, **fill}
        self._mask = None if mask is None else (mask, self._masked(mask))

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Make a batch.

        Args:
            samples: a dictionary of arrays, lists or numbers by the input's name for each sample.

        Raises:
            GuardError: a sample lacks an input, has another rank or kind of numbers, or is too long.
        """
        columns = {n: [_array(s, sample) for sample in samples] for n, s in self._specs.items() if not self._is_mask(n)}
        if self._mask is not None:
            name, other = self._mask
            columns[name] = [np.ones(a.shape, numpy_dtype(self._specs[name].dtype)) for a in columns[other]]
        sizes = self._sizes(columns, len(samples))
        return {name: self._stacked(spec, columns[name], sizes) for name, spec in self._specs.items()}

    def _is_mask(self, name: str) -> bool:
        return self._mask is not None and name == self._mask[0]

    def _masked(self, mask: str) -> str:
        """The input whose samples the mask tells from padding."""
        for name, spec in self._specs.items():
            if name != mask and spec.shape == self._specs[mask].shape:
                return name
        raise UserError(f"no other input has the shape of {self._specs[mask]}, so the mask {mask!r} cannot be made")

    def _sizes(self, columns: Mapping[str, list[Array]], count: int) -> dict[str, int]:
        """The size of each dimension that varies."""
        longest: dict[str, int] = {}
        for name, arrays in columns.items():
            first, *rest = self._specs[name].shape
            if isinstance(first, str):
                longest[first] = count
            for axis, size in enumerate(rest):
                if isinstance(size, str):
                    longest[size] = max(longest.get(size, 0), *(a.shape[axis] for a in arrays))
        for bucket in self._manifest.buckets:  # the smallest comes first
            if all(longest.get(n, 0) <= size for n, size in bucket.items()):
                return {**longest, **bucket}
        for name, size in longest.items():
            most = self._manifest.sizes.get(name, (1, None))[1]
            if most is not None and size > most:
                raise GuardError(
                    f"a batch has {name} = {size}, and the step takes {most} at most: cut the samples, or compile a "
                    "larger bucket"
                )
        if self._manifest.buckets and not self._takes_any():
            raise GuardError(f"no bucket holds a batch with {', '.join(f'{n} = {s}' for n, s in longest.items())}")
        return longest

    def _takes_any(self) -> bool:
        """Whether a function of any size runs what no bucket holds."""
        named = {n for bucket in self._manifest.buckets for n in bucket}
        return all(self._manifest.sizes.get(n, (1, None))[1] is None for n in named)

    def _stacked(self, spec: TensorSpec, arrays: Sequence[Array], sizes: Mapping[str, int]) -> Array:
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape[1:])
        fill = 0 if self._is_mask(spec.name) else self._fill[spec.name]
        batch = np.full((len(arrays), *shape), fill, numpy_dtype(spec.dtype))
        for row, array in enumerate(arrays):
            if any(have > size for have, size in zip(array.shape, shape, strict=True)):
                raise GuardError(f"{spec.name}: a sample is {list(array.shape)}, and {list(shape)} is the most")
            place: tuple[Any, ...] = (row, *map(slice, array.shape))
            batch[place] = array
        return batch


def _array(spec: TensorSpec, sample: Mapping[str, Any]) -> Array:
    """An input of one sample as an array of the input's dtype."""
    if spec.name not in sample:
        raise GuardError(
            f"a sample has no {spec.name!r}; it has {', '.join(map(str, sample))}. If it tells data from padding: "
            f"Padded(..., mask={spec.name!r})"
        )
    try:
        array = np.asarray(sample[spec.name])
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths, tensors on a GPU
        raise GuardError(f"{spec.name}: a sample is no array: {error}") from None
    if array.ndim != len(spec.shape) - 1:
        raise GuardError(f"{spec.name}: a sample has {array.ndim} dimensions, and the step takes {len(spec.shape) - 1}")
    dtype = numpy_dtype(spec.dtype)
    if not array.size:
        return array.astype(dtype)
    try:
        converted = array.astype(dtype, casting="same_kind")
    except TypeError:
        raise GuardError(f"{spec.name}: a sample is {array.dtype}, and the step takes {spec.dtype}") from None
    if array.dtype.kind in "iu" and dtype.kind in "iu" and not np.array_equal(converted, array):
        raise GuardError(f"{spec.name}: a sample has numbers that {spec.dtype} cannot hold")
    return converted
