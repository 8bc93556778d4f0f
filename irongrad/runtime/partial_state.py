"""A state of which a caller gives only a part: the model's tensors without those of the optimizer, or fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from irongrad.runtime.arguments import as_array
from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import check_arrays
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import Manifest, Role

# What becomes of tensors that are not given.
Absent: TypeAlias = Literal["keep", "reset"]


def completed(
    given: Mapping[str, Any], manifest: Manifest, source: str, rest: Callable[[], Mapping[str, Array]]
) -> dict[str, Array]:
    """Return the whole state: `given`, and for what may be absent the tensors of `rest()`.

    The trained parameters must be there; of several steps over modules of their own, those of one module. Each of these
    may be absent as a whole: the other parameters, the buffers, and
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
    _refuse_bare_names(arrays, manifest, source)
    missing = {s.name for s in manifest.state if s.name not in arrays}
    trained, kinds = _kinds(manifest)
    whole_kinds = all(kind <= missing or not kind & missing for kind in (*trained, *kinds))
    if missing and whole_kinds and any(not kind & missing for kind in trained):
        whole = rest()
        arrays |= {name: whole[name] for name in missing}
    check_arrays(arrays, manifest, source)
    return {s.name: arrays[s.name] for s in manifest.state}


def _under_own_names(given: Mapping[str, Any], manifest: Manifest) -> dict[str, Array]:
    """The given arrays; a tied tensor that has only other names also gets its own."""
    arrays = {name: _array(value) for name, value in given.items()}
    for spec in manifest.state:
        if spec.name not in arrays and (known := [n for n in spec.aliases if n in arrays]):
            arrays[spec.name] = arrays[known[0]]
    return arrays


def _array(value: Any) -> Array:
    """The value as an array; a parameter of PyTorch without its gradient."""
    return as_array(value.detach() if hasattr(value, "detach") else value)


def _refuse_bare_names(arrays: Mapping[str, Array], manifest: Manifest, source: str) -> None:
    """Refuse the names of a module alone, which has a name of its own in the state.

    Raises:
        ArtifactError: with that name.
    """
    known = {name for s in manifest.state for name in (s.name, *s.aliases)}
    if not arrays or known & arrays.keys():
        return
    for prefix in dict.fromkeys(name.partition(".")[0] for name in known if "." in name):
        if all(f"{prefix}.{name}" in known for name in arrays):
            raise ArtifactError(
                f"{source} has the names of one module, which begin with {prefix!r} here: give "
                f"{{f'{prefix}.{{name}}': value for name, value in state.items()}}"
            )


def _kinds(manifest: Manifest) -> tuple[list[set[str]], list[set[str]]]:
    """Sets of names that are given as a whole or not at all, of which one of the first list must be given.

    First the trained parameters, then each kind of other tensors. Each of several steps over modules of their own has
    sets of its own.
    """
    parameters = {s.name for s in manifest.state if s.role is Role.PARAMETER}
    buffers = {s.name for s in manifest.state if s.role is Role.BUFFER}
    trained = set(manifest.gradients) or parameters  # an artifact that accumulates no gradients does not list them
    others = (parameters - trained, buffers, {s.name for s in manifest.state} - parameters - buffers)
    frozen = manifest.frozen  # a checkpoint of the trainable state lacks them
    kinds = [part for kind in others for part in (kind & frozen, kind - frozen)]
    return _by_module(trained, manifest), [own for kind in kinds for own in _by_module(kind, manifest)]


def _by_module(names: set[str], manifest: Manifest) -> list[set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        first = name.partition(".")[0]
        found.setdefault(first if first in manifest.steps else "", set()).add(name)
    return list(found.values())
