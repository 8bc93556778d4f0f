"""The sizes of a step that vary from call to call, as the user gave them, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import STEPS_DIM, of_entry
from irongrad.sizes.buckets import Bucket, check_sizes, smallest
from irongrad.sizes.constraints import conditions_of
from irongrad.sizes.expressions import symbol

Tensors = Mapping[str, torch.Tensor]


def sizes_in(dynamic: Mapping[str, Mapping[int, str]], inputs: Tensors) -> dict[str, int]:
    """The sizes of named dimensions in `inputs`."""
    return {dim: inputs[n].shape[d] for n, dims in dynamic.items() if n in inputs for d, dim in dims.items()}


@dataclass(frozen=True)
class VaryingSizes:
    """The fields of these names of a `TrainStep`."""

    dynamic: Mapping[str, Mapping[int, str]]
    buckets: tuple[Bucket, ...]
    bucket_fallback: str
    constraints: Sequence[str]

    def check(self, inputs: Tensors, entries: Mapping[str, Tensors]) -> None:
        """Refuse sizes that cannot vary as the user says.

        Args:
            inputs: the example of the step.
            entries: the examples of its entries, by their names.

        Raises:
            CaptureError: a dimension, a bucket or a constraint is invalid, or the example does not fit.
        """
        known = {*inputs, *(of_entry(entry, n) for entry, own in entries.items() for n in own)}
        found: dict[str, tuple[str, int]] = {}
        for name, dims in self.dynamic.items():
            if name not in known:
                raise CaptureError(f"dynamic names {name!r}, which is not in inputs {sorted(known)}")
            if name in inputs:
                _check_dimensions(inputs[name], name, dims, found)
        for entry, own in entries.items():
            self._check_entry(entry, own, found, inputs)
        self._check_buckets(found, inputs)
        self._check_constraints(inputs)

    def _check_entry(self, entry: str, own: Tensors, known: Mapping[str, object], inputs: Tensors) -> None:
        """Check the dimensions of an entry: they are the step's, and may have another size in the example."""
        found: dict[str, tuple[str, int]] = {}
        for name, tensor in own.items():
            full = of_entry(entry, name)
            _check_dimensions(tensor, full, self.dynamic.get(full, {}), found)
        if unknown := [dim for dim in found if dim not in known]:
            raise CaptureError(
                f"entries[{entry!r}] has the dimension {unknown[0]!r}, which no input of the step has: dynamic must "
                f"name it for one of {list(inputs)}, too"
            )

    def _check_buckets(self, found: Mapping[str, tuple[str, int]], inputs: Tensors) -> None:
        if self.buckets and not found:
            raise CaptureError("buckets need the dimensions that they give sizes for, such as dynamic={'x': {0: 'B'}}")
        if self.bucket_fallback not in ("", "dynamic"):
            raise CaptureError(f"bucket_fallback is {self.bucket_fallback!r}; it must be 'dynamic', or empty for none")
        if self.bucket_fallback and not self.buckets:
            raise CaptureError("bucket_fallback is for calls that no bucket holds, and the step has no buckets")
        check_sizes(self.buckets, found)
        sizes = sizes_in(self.dynamic, inputs)
        if self.buckets and not self.bucket_fallback and smallest(self.buckets, sizes) is None:
            raise CaptureError(
                f"the example inputs have sizes {sizes}, which no bucket of {[dict(b) for b in self.buckets]} holds"
            )

    def _check_constraints(self, inputs: Tensors) -> None:
        given = sizes_in(self.dynamic, inputs)
        values = {symbol(name): size for name, size in given.items()}
        for text in self.constraints:
            if not all(condition.xreplace(values) for condition in conditions_of([text], given)):
                raise CaptureError(
                    f"the example inputs have sizes {given}, which do not satisfy the constraint {text!r}"
                )


def _check_dimensions(
    tensor: torch.Tensor, name: str, dims: Mapping[int, str], found: dict[str, tuple[str, int]]
) -> None:
    for d, dim in dims.items():
        if not (isinstance(dim, str) and dim.isidentifier()):
            raise CaptureError(f"dynamic[{name!r}][{d}] is {dim!r}; a dimension's name is an identifier, such as 'B'")
        if dim == STEPS_DIM:
            raise CaptureError(f"dynamic[{name!r}][{d}] is {dim!r}, as the steps of train_steps are called; rename it")
        if not 0 <= d < tensor.ndim:
            raise CaptureError(f"dynamic[{name!r}] names dimension {d} of a tensor with {tensor.ndim}")
        size = tensor.shape[d]
        other, same = found.setdefault(dim, (name, size))
        if same != size:
            raise CaptureError(f"dimension {dim!r} is {same} in input {other!r} and {size} in input {name!r}")
        if size < 2:
            raise CaptureError(
                f"dimension {dim!r} is {size} in the example input {name!r}. Give an example where it is 2 or more: "
                "torch.export takes a size of 1 for a fixed one"
            )
