"""Golden values: the example inputs and the float64 oracle's results for them, stored in the artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import safetensors.numpy

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import TICKET, EntryPoint, HyperSpec, Manifest
from irongrad.runtime.safetensors_file import read_arrays

# The number of elements that an artifact keeps of a larger tensor.
SAMPLE = 4096

# The safetensors metadata key. Its JSON value holds everything that is not a tensor.
_METADATA = "golden"


def key_of(kind: str, step: int, name: str = "") -> str:
    """Return the key of a golden value.

    Args:
        kind: `loss`, `value` (beside the loss), `gradient`, `forward` (outputs in training mode), `eval`, `predict` and
            the names of the user's own entry points are values of step `step`.
            `state` is the state before step `step`. `call` is the result of a compiled function (step 0).
        step: the step, from 0.
        name: the name of the tensor; empty for a loss (`loss` and `eval`).
    """
    return f"{kind}/{step}/{name}"


def is_later(key: str) -> bool:
    """Whether the value of a key comes from the inputs of a later step than the first (`Golden.later`)."""
    kind, step, _ = key.split("/", 2)
    return int(step) > (1 if kind == "state" else 0)


def sampled(value: Array) -> Array:
    """Return the elements that golden values keep, flat: a small tensor whole, a fixed random subset of a large one.

    Whole float64 copies for every step would make the golden file thirty times as large as the model.
    """
    flat = np.asarray(value).reshape(-1)
    return flat if flat.size <= SAMPLE else flat[_sample_indices(flat.size)]


@cache
def _sample_indices(size: int) -> Array:
    return np.sort(np.random.default_rng(0).choice(size, SAMPLE, replace=False))


@dataclass(frozen=True)
class Resting:
    """What a step does when nothing may move: at a learning rate of 0, and with gradients of zero.

    Attributes:
        hypers: the learning rates and the weight decays, all zero.
        moving: the parameters that eager moves nevertheless.
        unbounded: the state that is NaN or infinite in eager afterwards.
    """

    hypers: Mapping[str, float]
    moving: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Golden:
    """Expected values of the first training steps.

    Attributes:
        steps: the number of training steps.
        oracle: the dtype of the eager run that gave the values: `float64`, unless the model cannot run in it.
        inputs: the inputs by name; those of the user's own entry points by `EntryPoint.key`.
        expected: float64 values by key (see `key_of`): whole tensors, or flat samples (see `sampled`) if the golden
            values come from an artifact.
        allowed: the largest acceptable absolute error, by key.
        hypers: hyperparameters whose values are not their defaults.
        about: what the inputs (or those of the later steps) or the hyperparameters are, for a message; empty for those
            of the example.
        resting: what eager does when nothing may move; None if that is not known.
        later: inputs that replace the example's after the first step, by name; evaluation and the other entry points
            without an update are expected at both. Empty if every step has the example's.
        first_hypers: hyperparameters of the first step alone, by name.
        moves: the largest change of an element since the initial state, by the key of each updated parameter's value.
        order: for several steps over one state that run in turn, their names in this order. The inputs have the name of
            the step before theirs, and only the losses and the state at the end are expected.
    """

    steps: int
    oracle: str
    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]
    allowed: Mapping[str, float]
    hypers: Mapping[str, float] = field(default_factory=dict)
    about: str = ""
    resting: Resting | None = None
    later: Mapping[str, Array] = field(default_factory=dict)
    first_hypers: Mapping[str, float] = field(default_factory=dict)
    moves: Mapping[str, float] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    @property
    def batches(self) -> range:
        """The numbers of the steps whose inputs differ from those of the steps before."""
        return range(2 if self.later else 1)

    def inputs_of(self, entry: EntryPoint, step: int = 0) -> dict[str, Array]:
        """The inputs of an entry point in a step, by the names that it has for them."""
        given = {**self.inputs, **self.later} if step else self.inputs
        return {spec.name: given[entry.key(spec.name)] for spec in entry.inputs if spec.name != TICKET}

    def hypers_of(self, step: int) -> dict[str, float]:
        """The hyperparameters of a step whose values are not their defaults."""
        return {**self.hypers, **({} if step else self.first_hypers)}

    def stacked_hypers(self, specs: Iterable[HyperSpec]) -> dict[str, list[float]]:
        """Those of all steps, for an entry point that takes them in one call; `specs` have the defaults."""
        of_steps = [self.hypers_of(step) for step in range(self.steps)]
        changed = [h for h in specs if any(h.name in hypers for hypers in of_steps)]
        return {h.name: [hypers.get(h.name, h.default) for hypers in of_steps] for h in changed}

    def stacked_inputs_of(self, entry: EntryPoint) -> dict[str, Array]:
        """The inputs of an entry point that takes all steps in one call, one behind the other."""
        of_steps = [self.inputs_of(entry, step) for step in range(self.steps)]
        return {name: np.stack([inputs[name] for inputs in of_steps]) for name in of_steps[0]}


def kept(golden: Golden) -> Golden:
    """Return the golden values as an artifact stores them: large tensors as samples."""
    expected = {key: sampled(a) if a.size > SAMPLE else a for key, a in golden.expected.items()}
    return replace(golden, expected=expected)


def are_same(one: Golden, other: Golden) -> bool:
    """Return whether two sets of golden values are equal bit for bit."""
    hypers = [[g.hypers_of(step) for step in (0, 1)] for g in (one, other)]
    about = [(g.steps, g.oracle, dict(g.allowed), dict(g.moves), g.resting, g.order) for g in (one, other)]
    arrays = [(g.inputs, g.later, g.expected) for g in (one, other)]
    return about[0] == about[1] and hypers[0] == hypers[1] and all(map(_same_arrays, *arrays))


def _same_arrays(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    def content(array: Array) -> tuple[object, ...]:
        return array.dtype, array.shape, array.tobytes()

    return one.keys() == other.keys() and all(content(one[name]) == content(other[name]) for name in one)


def write_golden(golden: Golden, path: Path) -> None:
    """Write golden values to a safetensors file, large tensors as samples."""
    kinds = {"input": golden.inputs, "later": golden.later, "expected": kept(golden).expected}
    arrays = {f"{kind}/{n}": np.asarray(a, order="C") for kind, named in kinds.items() for n, a in named.items()}
    # All metadata has one key: safetensors writes several keys in an order that differs from run to run.
    about: dict[str, object] = {"steps": golden.steps, "oracle": golden.oracle, "allowed": dict(golden.allowed)}
    if golden.resting is not None:
        about["resting"] = asdict(golden.resting)
    if golden.first_hypers:
        about["first_hypers"] = dict(golden.first_hypers)
    if golden.moves:
        about["moves"] = dict(golden.moves)
    if golden.order:
        about["order"] = golden.order
    path.write_bytes(safetensors.numpy.save(arrays, metadata={_METADATA: json.dumps(about)}))


def read_golden(path: Path) -> Golden:
    """Read golden values from a safetensors file.

    Raises:
        ArtifactError: the file is damaged.
    """
    arrays, header = read_arrays(path)
    try:
        about = msgspec.convert(json.loads(header.metadata[_METADATA]), _About)
    except (KeyError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ArtifactError(
            f"{path} is not a readable golden file: {error}. Copy or compile the artifact again"
        ) from None
    inputs, later, expected = (
        {k.removeprefix(kind): a for k, a in arrays.items() if k.startswith(kind)}
        for kind in ("input/", "later/", "expected/")
    )
    return Golden(
        about.steps,
        about.oracle,
        inputs,
        expected,
        about.allowed,
        resting=about.resting,
        later=later,
        first_hypers=about.first_hypers,
        moves=about.moves,
        order=about.order,
    )


def read_goldens(directory: Path, manifest: Manifest) -> dict[str, Golden]:
    """Read all golden values of an artifact: by the name of the step, and under an empty name of all in turn.

    Raises:
        ArtifactError: as `read_golden`.
    """
    return {name: read_golden(directory / file) for name, file in manifest.golden_files.items()}


@dataclass(frozen=True)
class _About:
    """What a golden file holds beside its tensors; the fields are those of `Golden`."""

    steps: int
    oracle: str
    allowed: dict[str, float]
    resting: Resting | None = None
    first_hypers: dict[str, float] = field(default_factory=dict)
    moves: dict[str, float] = field(default_factory=dict)
    order: tuple[str, ...] = ()
