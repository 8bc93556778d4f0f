"""Golden values: the example inputs and what the float64 oracle made of them, stored in the artifact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import arrays_of
from irongrad.runtime.errors import ArtifactError

# How many elements of a larger tensor an artifact keeps.
SAMPLE = 4096

# The key of the file's metadata under which everything is that is no tensor, as JSON.
_METADATA = "golden"


def key_of(kind: str, step: int, name: str = "") -> str:
    """The golden key of a value: `loss`, `gradient`, `forward` (outputs in training mode), `eval` and `predict` of step
    `step` (from 0), the `state` before step `step`, and the `call` of a compiled function (step 0)."""
    return f"{kind}/{step}/{name}"


def sampled(value: Array) -> Array:
    """The elements of `value` that golden values keep, flat: all of a small tensor, a fixed random part of a large one.

    Whole float64 copies of every step would make the golden file thirty times as large as the model.
    """
    flat = np.asarray(value).reshape(-1)
    return flat if flat.size <= SAMPLE else flat[_places(flat.size)]


@cache
def _places(size: int) -> Array:
    return np.sort(np.random.default_rng(0).choice(size, SAMPLE, replace=False))


@dataclass(frozen=True)
class Golden:
    """Expected values of the first steps, all on the same inputs.

    Attributes:
        steps: how many training steps.
        oracle: the dtype of the eager run that gave them, `float64` unless the model cannot run in it.
        inputs: by name, as they are passed to the entry points.
        expected: by key (see `key_of`), as float64; whole tensors, or flat samples of them (see `sampled`) where
            the golden values come from an artifact.
        allowed: the largest absolute error that is right, by key.
    """

    steps: int
    oracle: str
    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]
    allowed: Mapping[str, float]


def kept(golden: Golden) -> Golden:
    """The golden values as an artifact keeps them: large tensors as samples."""
    expected = {key: sampled(a) if a.size > SAMPLE else a for key, a in golden.expected.items()}
    return replace(golden, expected=expected)


def are_same(one: Golden, other: Golden) -> bool:
    """Whether golden values are the same to the last bit."""
    about = [(g.steps, g.oracle, dict(g.allowed)) for g in (one, other)]
    arrays = _same_arrays(one.inputs, other.inputs) and _same_arrays(one.expected, other.expected)
    return about[0] == about[1] and arrays


def _same_arrays(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    def content(array: Array) -> tuple[object, ...]:
        return array.dtype, array.shape, array.tobytes()

    return one.keys() == other.keys() and all(content(one[name]) == content(other[name]) for name in one)


def write_golden(golden: Golden, path: Path) -> None:
    """Store golden values as safetensors, large tensors as samples."""
    arrays = {f"input/{n}": np.asarray(a, order="C") for n, a in golden.inputs.items()}
    arrays |= {f"expected/{k}": np.asarray(a, order="C") for k, a in kept(golden).expected.items()}
    # One key: safetensors writes several in an order that differs from run to run.
    about = {"steps": golden.steps, "oracle": golden.oracle, "allowed": dict(golden.allowed)}
    path.write_bytes(safetensors.numpy.save(arrays, metadata={_METADATA: json.dumps(about)}))


def read_golden(path: Path) -> Golden:
    """Load golden values.

    Raises:
        ArtifactError: the file is damaged.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()[_METADATA])
        arrays = arrays_of(path)
    except Exception as error:
        raise ArtifactError(
            f"{path} is not a readable golden file: {error}. Copy or compile the artifact again"
        ) from None
    inputs = {k.removeprefix("input/"): a for k, a in arrays.items() if k.startswith("input/")}
    expected = {k.removeprefix("expected/"): a for k, a in arrays.items() if k.startswith("expected/")}
    return Golden(about["steps"], about["oracle"], inputs, expected, about["allowed"])
