"""Checkpoints: safetensors files keyed by state tensor names, PyTorch's own for parameters and buffers.

A checkpoint can replace an artifact's `state.irpa`: `iree-run-module --parameters=state=FILE`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors.numpy

from irongrad.runtime.arrays import Array, shown_values
from irongrad.runtime.atomic_files import atomic_write, link_or_copy
from irongrad.runtime.base_file import refuse_other_values
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import OF_UPDATES, Manifest, ReliedSpec, Role, StateSpec, trained_state
from irongrad.runtime.nonfinite import is_finite
from irongrad.runtime.safetensors_file import (
    Checksum,
    Header,
    Tensor,
    header_of,
    metadata,
    numpy_dtype,
    opened,
    read_arrays,
)

# What a checkpoint says about itself, beside its checksum: the artifact that wrote it, and whether its state is finite.
# One of the trainable state alone says on which frozen state it relies.
ARTIFACT, FINITE, BASE = "artifact", "finite", "base"

# What the names of tensors begin with that are no state: the moving averages of parameters during training.
AVERAGE = "ema/"
OUTER = "outer/"  # the momentum of an outer optimizer (`irongrad.distributed`)

_SHOWN = 4  # of the problems of a state that does not fit


def write(
    path: Path,
    state: Mapping[str, Array],
    manifest: Manifest,
    *,
    finite: bool,
    trainable: bool = False,
    about: Mapping[str, Any] = MappingProxyType({}),
    beside: Mapping[str, Array] = MappingProxyType({}),
) -> None:
    """Write `state` to `path` atomically: a reader sees the old file or the complete new one.

    A tied tensor is written under its name and under each of its aliases.

    Args:
        path: the file.
        state: the state by name.
        manifest: the artifact's manifest.
        finite: whether no tensor became NaN or infinite.
        trainable: whether to leave frozen tensors out.
        about: what else the file says about itself, in the types of JSON.
        beside: tensors that are no state, under names that begin with `AVERAGE` or `OUTER`.

    Raises:
        OSError: the file cannot be written.
    """
    kept = [s for s in manifest.state if not (trainable and s.frozen)]
    arrays = {key: np.asarray(state[s.name], order="C") for s in kept for key in (s.name, *s.aliases)}
    arrays |= beside
    said: dict[str, Any] = {**about, ARTIFACT: manifest.digest, FINITE: finite}
    recorded = metadata(arrays.items(), said | ({BASE: manifest.base} if trainable else {}))
    atomic_write(path, safetensors.numpy.save(arrays, metadata=recorded))


def header(manifest: Manifest) -> bytes:
    """Return the beginning of a checkpoint of the trainable state, as `TRAIN_AND_EXPORT` returns it.

    With the outputs appended as raw bytes it is a checkpoint. The first bytes after it are the counts of steps.
    """
    tensors = ((s.name, s.dtype, s.shape) for s in trained_state(manifest.state))
    return header_of(tensors, {BASE: manifest.base})


def keep_finite(path: Path) -> Path | None:
    """Keep the checkpoint at `path`, if its state is finite, under another name; return that name.

    Returns:
        The path of the kept file, `NAME.finite`; None if there is no checkpoint, or its state is not finite.
    """
    path = Path(os.path.realpath(path))
    kept = path.with_name(f"{path.name}.finite")
    try:
        with opened(path) as file:
            known = file.header.about.get(FINITE)
            finite = known if known is not None else all(is_finite(array) for _, array in file.arrays())
    except ArtifactError:
        return None
    if not finite:
        return kept if kept.exists() else None
    with suppress(FileNotFoundError):
        os.unlink(kept)
    link_or_copy(path, kept)
    return kept


def under_all_names(arrays: Sequence[Array], manifest: Manifest) -> dict[str, Array]:
    """Return the arrays of the state by name; a tied parameter or buffer is one array under each of its names."""
    return {key: array for s, array in zip(manifest.state, arrays, strict=True) for key in s.model_names}


def read(path: Path, manifest: Manifest) -> dict[str, Array]:
    """Read the state from the checkpoint at `path`; frozen tensors may be missing.

    Raises:
        ArtifactError: the file is missing or damaged, or does not hold this model's state.
    """
    arrays, header = read_arrays(path)
    check_base(header, manifest, str(path))
    check_arrays(arrays, manifest, str(path), optional=_left_out(arrays, manifest))
    return {s.name: arrays[s.name] for s in manifest.state if s.name in arrays}


def check_base(header: Header, manifest: Manifest, source: str) -> None:
    """Refuse a checkpoint of the trainable state that relies on other frozen tensors.

    Raises:
        ArtifactError: it does.
    """
    base = header.about.get(BASE, manifest.base)
    if base != manifest.base:
        raise ArtifactError(
            f"{source} was trained on another base: its frozen tensors have the sha256 {base}, and those of this "
            f"artifact {manifest.base or 'do not exist'}"
        )


def _left_out(found: Collection[str], manifest: Manifest) -> frozenset[str]:
    """The frozen tensors, if a checkpoint has none of them."""
    return manifest.frozen if not manifest.frozen & set(found) else frozenset()


@dataclass(frozen=True)
class Checked:
    """What is known of a checkpoint of a model.

    Attributes:
        nonfinite: the names of the tensors that hold a NaN or an infinite value.
        is_whole: whether it holds the frozen tensors, too.
    """

    nonfinite: tuple[str, ...]
    is_whole: bool


def check(path: Path, manifest: Manifest, shared: Mapping[str, Array] = MappingProxyType({})) -> Checked:
    """Check that `path` is a checkpoint of this model; reads it one tensor at a time.

    Args:
        path: the file.
        manifest: the artifact's manifest.
        shared: the tensors of the artifact's base file, by name.

    Raises:
        ArtifactError: as `read`.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ArtifactError(f"the name of {str(path)!r} is no text in UTF-8; IREE cannot open it. Rename it") from None
    with opened(path) as file:
        check_base(file.header, manifest, str(path))
        left_out = _left_out(file.header.tensors, manifest)
        _compare(_kinds(file.header), manifest, str(path), left_out)
        tied = {key for s in manifest.state for key in (s.name, *s.aliases) if s.aliases}
        needed = tied | _counters(manifest) | manifest.relied.keys()
        kept: dict[str, Array] = {}
        checksum, nonfinite = Checksum(), []
        for name, array in file.arrays():
            checksum.add(name, array)
            if name in shared:
                refuse_other_values({name: array}, {name: shared[name]}, str(path))
            if not is_finite(array):
                nonfinite.append(name)
            if name in needed:
                kept[name] = array
        checksum.compare(file.header)
    _check_values(kept, manifest, str(path))
    return Checked(tuple(nonfinite), not left_out)


def check_arrays(
    arrays: Mapping[str, Array], manifest: Manifest, source: str, optional: frozenset[str] = frozenset()
) -> None:
    """Check the names, shapes and dtypes of `arrays`, that tied tensors have equal values, and that counts are counts.

    Raises:
        ArtifactError: lists the first differences; `optional` names may be missing.
    """
    _compare({k: (a.shape, a.dtype.name) for k, a in arrays.items()}, manifest, source, optional)
    _check_values(arrays, manifest, source)


def _check_values(arrays: Mapping[str, Array], manifest: Manifest, source: str) -> None:
    for spec in (s for s in manifest.state if s.name in arrays):
        for alias in spec.aliases:
            if alias in arrays and not np.array_equal(arrays[alias], arrays[spec.name], equal_nan=True):
                raise ArtifactError(
                    f"{source}: {alias} and {spec.name} are one tensor in the compiled step, but their values differ"
                )
    _refuse_others(arrays, manifest, source)
    for name in _counters(manifest):
        if name in arrays and not (np.asarray(arrays[name]) >= 0).all():
            raise ArtifactError(f"{source}: {name} is {arrays[name]}, and it counts, so it cannot be below 0")


def _refuse_others(arrays: Mapping[str, Array], manifest: Manifest, source: str) -> None:
    """Refuse other values of state on whose values at capture a step relies.

    Raises:
        ArtifactError: names the user's line.
    """
    for name, spec in manifest.relied.items():
        array = arrays.get(name)
        if array is not None and not _is_as_relied(array, spec):
            raise ArtifactError(f"{source} has {_not_as_relied(name, array, spec)}")


def _is_as_relied(array: Array, spec: ReliedSpec) -> bool:
    if spec.bounds is None:
        return hashlib.sha256(array.tobytes()).hexdigest() == spec.sha256
    return bool(((array >= spec.bounds[0]) & (array <= spec.bounds[1])).all())


def _not_as_relied(name: str, array: Array, spec: ReliedSpec) -> str:
    if spec.bounds is not None:
        return (
            f"values of {name} outside of [{spec.bounds[0]}, {spec.bounds[1]}]: {spec.line} computes an index from "
            "them, which is proved to be in range for these. Clamp it in the model, index.clamp(0, size - 1), or "
            "compile the step with the new values"
        )
    others = f"{shown_values(array)} for {name}, and the step was compiled for {spec.values}"
    if not spec.line:
        return (
            f"{others}. No step changes {name} and no state_dict holds it, so it comes from another program: leave it "
            "out, as model.state_dict() does"
        )
    return (
        f"{others}: {spec.line} makes a Python number or decision of it. Compile the step with the new values, or keep "
        f"{name} a tensor in the model, as in x * self.scale"
    )


def _counters(manifest: Manifest) -> set[str]:
    """The names of the tensors that hold a count, or a seed."""
    return {
        s.name
        for s in manifest.state
        if s.role in (Role.COUNTER, Role.RANDOM) or (s.role is Role.OPTIMIZER and s.name.startswith(_STEP))
    }


# The number of updates of a parameter, as torch.optim calls it.
_STEP = "optimizer/step/"


# What a message calls arrays that come from no file.
GIVEN = "the given state"

# What the names of the state that only updates read begin with.
_OF_UPDATES = ("optimizer/", "scaler/")


def _updates(manifest: Manifest) -> bool:
    """Whether the artifact has state that only updates read; one that only predicts ignores that of a checkpoint."""
    return any(s.role in OF_UPDATES for s in manifest.state)


def _kinds(header: Header) -> dict[str, tuple[tuple[int, ...], str]]:
    def kind(tensor: Tensor) -> tuple[tuple[int, ...], str]:
        return tensor.shape, tensor.dtype

    return {name: kind(tensor) for name, tensor in header.tensors.items()}


def _compare(
    found: Mapping[str, tuple[tuple[int, ...], str]], manifest: Manifest, source: str, optional: frozenset[str]
) -> None:
    wanted: dict[str, StateSpec] = {s.name: s for s in manifest.state}
    aliases = {a for s in manifest.state for a in s.aliases}
    unused = {n for n in found if n.startswith((AVERAGE, OUTER, *(() if _updates(manifest) else _OF_UPDATES)))}
    unknown = [f"{n} is unknown" for n in found if n not in wanted and n not in aliases and n not in unused]
    others = []
    for name, spec in wanted.items():
        for key in (name, *spec.aliases):
            if key in found and found[key] != (spec.shape, spec.dtype):
                shape, dtype = found[key]
                others.append(f"{key} is {dtype}{list(shape)}, the step has {spec.dtype}{list(spec.shape)}")
    missing = [f"{n} is missing" for n in wanted if n not in found and n not in optional]
    if unknown or others or missing:
        advice = "" if unknown or others or source != GIVEN else ". To replace some tensors alone, use update_state"
        raise ArtifactError(
            f"{source} does not fit this step (another model or optimizer?): "
            f"{some_of_each(unknown, others, missing)}{advice}"
        )


def some_of_each(*kinds: Sequence[str]) -> str:
    """The first problems of each kind, of which a long list of another hides none, and how many more there are."""
    problems = [p for row in zip_longest(*kinds) for p in row if p is not None]
    more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{'; '.join(problems[:_SHOWN])}{more}"


def from_bytes(raw: Mapping[str, Array], manifest: Manifest) -> dict[str, Array]:
    """Return the state from the bytes of its tensors, as copies."""
    arrays = [raw[s.name].view(numpy_dtype(s.dtype)).reshape(s.shape).copy() for s in manifest.state]
    return under_all_names(arrays, manifest)
