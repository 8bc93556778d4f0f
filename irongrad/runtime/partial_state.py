"""A state of which a caller gives only a part: the model's tensors without those of the optimizer, or fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import check_arrays
from irongrad.runtime.manifest import Manifest, Role

# What becomes of tensors that are not given.
Absent: TypeAlias = Literal["keep", "reset"]


def completed(
    given: Mapping[str, Any], manifest: Manifest, source: str, rest: Callable[[], Mapping[str, Array]]
) -> dict[str, Array]:
    """Return the whole state: `given`, and for what may be absent the tensors of `rest()`.

    The trained parameters must be there. Each of these may be absent as a whole: the other parameters, the buffers, and
    everything that belongs to no model (the optimizer's state, counters, the random numbers' state, the loss scale).
    Any of a tied tensor's names will do.

    Args:
        given: arrays by name.
        manifest: the artifact's manifest.
        source: what `given` is, for a message.
        rest: returns a whole state, with the dtypes and shapes of the manifest.

    Raises:
        ArtifactError: a tensor is unknown, has another shape or dtype, or is missing beside others of its kind; or two
            names of a tied tensor have different values.
    """
    arrays = _under_own_names(given, manifest)
    missing = {s.name for s in manifest.state if s.name not in arrays}
    trained, *kinds = _kinds(manifest)
    if missing and not missing & trained and all(kind <= missing or not kind & missing for kind in kinds):
        whole = rest()
        arrays |= {name: whole[name] for name in missing}
    check_arrays(arrays, manifest, source)
    return {s.name: arrays[s.name] for s in manifest.state}


def _under_own_names(given: Mapping[str, Any], manifest: Manifest) -> dict[str, Array]:
    """The given arrays; a tied tensor that has only other names also gets its own."""
    arrays = {name: np.asarray(value) for name, value in given.items()}
    for spec in manifest.state:
        if spec.name not in arrays and (known := [n for n in spec.aliases if n in arrays]):
            arrays[spec.name] = arrays[known[0]]
    return arrays


def _kinds(manifest: Manifest) -> tuple[set[str], ...]:
    """The names of the trained parameters, and then of each kind of tensors that is given as a whole or not at all."""
    parameters = {s.name for s in manifest.state if s.role is Role.PARAMETER}
    buffers = {s.name for s in manifest.state if s.role is Role.BUFFER}
    trained = set(manifest.gradients) or parameters  # an artifact that accumulates no gradients does not list them
    kinds = (parameters - trained, buffers, {s.name for s in manifest.state} - parameters - buffers)
    frozen = manifest.frozen  # a checkpoint of the trainable state lacks them
    return trained, *(part for kind in kinds for part in (kind & frozen, kind - frozen))
