"""Values that go from call to call, such as a hidden state: inputs that the step keeps as its own state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from irongrad.runtime.errors import CaptureError


@dataclass(frozen=True)
class Carry:
    """Values that a step or an entry carries from call to call.

    Attributes:
        leaves: the tensors at the beginning, by name: that of the value, with a number if the value is a tuple.
        structures: the structure of each value.
    """

    leaves: Mapping[str, torch.Tensor]
    structures: Mapping[str, TreeSpec]

    def nested(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The values of these leaves, by name, in the structure that the user's function takes."""
        return {n: tree_unflatten([leaves[m] for m in _names(n, s)], s) for n, s in self.structures.items()}

    def flat(self, values: Mapping[str, Any], place: str) -> dict[str, torch.Tensor]:
        """The leaves of new values.

        Raises:
            CaptureError: a value is missing, or has another structure, shape or dtype than at the beginning.
        """
        found: dict[str, torch.Tensor] = {}
        for name, structure in self.structures.items():
            if name not in values:
                raise CaptureError(
                    f"{place}: carry has {name!r}, whose new value is missing. Return it beside the result, as in "
                    f"(loss, {{{name!r}: {name}}})"
                )
            leaves, other = tree_flatten(values[name])
            if other != structure or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                raise CaptureError(f"{place}: the new value of {name!r} has another structure than in carry")
            found |= dict(zip(_names(name, structure), leaves, strict=True))
        for name, leaf in found.items():
            first = self.leaves[name]
            if leaf.shape != first.shape:
                raise CaptureError(
                    f"{place}: the new value of {name!r} has shape {tuple(leaf.shape)}; in carry it has "
                    f"{tuple(first.shape)}, and a compiled step keeps the shape"
                )
        return found


def carry_of(given: Any, inputs: Mapping[str, torch.Tensor]) -> Carry:
    """The values that a user gave to carry: by name, a tensor, or tensors in a tuple or list.

    Raises:
        CaptureError: a value holds something else, or has the name of an input.
    """
    if not isinstance(given, Mapping):
        raise CaptureError(
            f"carry is a {type(given).__name__}; it must be a dictionary of values at the beginning, such as "
            "{'hidden': model.init_hidden(batch)}"
        )
    leaves: dict[str, torch.Tensor] = {}
    structures: dict[str, TreeSpec] = {}
    for name, value in given.items():
        if not (isinstance(name, str) and name.isidentifier()) or name in inputs:
            raise CaptureError(f"carry has the name {name!r}; it must be an identifier, and no name of an input")
        flat, structures[name] = tree_flatten(value)
        if not flat or not all(isinstance(leaf, torch.Tensor) for leaf in flat):
            raise CaptureError(f"carry[{name!r}] is a {type(value).__name__}; it must be a tensor, or a tuple of these")
        own = (leaf.detach().clone() for leaf in flat)
        leaves |= dict(zip(_names(name, structures[name]), own, strict=True))
    return Carry(leaves, structures)


def _names(name: str, structure: TreeSpec) -> list[str]:
    return [name] if structure.is_leaf() else [f"{name}_{i}" for i in range(structure.num_leaves)]
