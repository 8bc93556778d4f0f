"""Inputs that a compiled step refuses, each with the text of its refusal."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from irongrad.runtime.commands import filled_value
from irongrad.runtime.golden import Golden
from irongrad.runtime.manifest import EntryPoint, Manifest, TensorSpec
from irongrad.runtime.refusals import NOT_RUN, mismatch, out_of_range


@dataclass(frozen=True)
class BadInputs:
    """Inputs of an entry point that it refuses.

    Attributes:
        what: what is wrong with them, as a part of a name.
        values: those that replace good ones, by name, in iree-run-module's notation.
        refusal: text that the error message contains.
    """

    what: str
    values: Mapping[str, str]
    refusal: str


@dataclass(frozen=True)
class _Entry:
    """An entry point with the inputs that it is given.

    Attributes:
        point: the entry point.
        golden: has the sizes of the example.
        given: the inputs that are given.
    """

    point: EntryPoint
    golden: Golden
    given: tuple[TensorSpec, ...]

    def sized(self, spec: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
        """`spec` with its named dimensions set to `sizes`, else to the golden input's sizes.

        The steps dimension of a stacked input stays.
        """
        key = self.point.key(spec.name)
        own = self.golden.inputs[key].shape if key in self.golden.inputs else ()
        known = dict(zip(reversed(spec.shape), reversed(own), strict=False)) | dict(sizes)
        return replace(spec, shape=tuple(known.get(d, d) if isinstance(d, str) else d for d in spec.shape))

    def filled(self, spec: TensorSpec, sizes: Mapping[str, int]) -> str:
        """A value of these sizes that is in the range of `spec`."""
        return filled_value(self.sized(spec, sizes), spec.minimum or 0, self.golden.steps)


def bad_inputs(manifest: Manifest, golden: Golden, point: EntryPoint, given: Container[str]) -> Iterator[BadInputs]:
    """Yield what `point` refuses: a wrong shape, a value out of range (one input at a time), wrong sizes.

    Args:
        manifest: has the sizes that the step accepts.
        golden: has the example inputs.
        point: the entry point.
        given: the names of the inputs that it is given.
    """
    entry = _Entry(point, golden, tuple(s for s in point.inputs if s.name in given))
    for spec in entry.given:
        own = entry.sized(spec, {})
        value, refusal = _wrong_shape(spec, own, golden.steps)
        yield BadInputs(f"wrong_shape.{spec.name}", {spec.name: value}, refusal)
        if (wrong := _outside(spec)) is not None:
            value = filled_value(own, wrong, golden.steps)
            yield BadInputs(f"out_of_range.{spec.name}", {spec.name: value}, out_of_range(spec, wrong))
    for name, (_, most) in manifest.sizes.items():
        resized = [s for s in entry.given if name in s.shape]
        if most is not None and resized:
            yield _too_large(entry, resized, name, most)
    for number, constraint in enumerate(manifest.constraints):
        resized = [s for s in entry.given if set(s.shape) & set(constraint.broken)]
        if constraint.broken and constraint.broken.keys() <= {d for s in resized for d in s.shape}:
            values = {s.name: entry.filled(s, constraint.broken) for s in resized}
            yield BadInputs(f"constraint.{number}", values, constraint.refusal)


def _too_large(entry: _Entry, resized: list[TensorSpec], name: str, most: int) -> BadInputs:
    """One more than the largest size; the message names the given size."""
    values = {s.name: entry.filled(s, {name: most + 1}) for s in resized}
    refusal = f"{NOT_RUN}; {mismatch(resized[0].shape.index(name), most, most + 1)}"
    return BadInputs(f"too_large.{name}", values, refusal)


def _wrong_shape(spec: TensorSpec, own: TensorSpec, size: int) -> tuple[str, str]:
    """Return a value of a wrong shape, and the text of its refusal.

    The value is like `own` with its last fixed dimension one too large. If `spec` fixes no dimension, its rank is one
    too large.
    """
    fixed = [i for i, d in enumerate(spec.shape) if isinstance(d, int)]
    shape = list(own.shape)
    if not fixed:
        return filled_value(replace(spec, shape=(1, *shape)), 0, size), f"{spec.name} shape rank mismatch"
    shape[fixed[-1]] = int(shape[fixed[-1]]) + 1
    wrong = replace(spec, shape=tuple(shape))
    return filled_value(wrong, spec.minimum or 0, size), f"{spec.name} shape dimension {fixed[-1]} mismatch"


def _outside(spec: TensorSpec) -> int | None:
    """Return a value that is out of the input's range at any sizes; None if its dtype has none."""
    if spec.minimum is None or spec.maximum is None:
        return None
    limits = np.iinfo(spec.dtype)
    above = () if spec.limits else (spec.maximum + 1, spec.maximum + 2)
    candidates = (*above, spec.minimum - 1, spec.minimum - 2)
    return next((c for c in candidates if c != spec.exempt and limits.min <= c <= limits.max), None)
