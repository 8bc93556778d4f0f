"""Flatten nested tuples, lists and dictionaries of arrays into flat lists, with a record of their structure.

Works like JAX's pytrees (docs.jax.dev, "Pytrees"), for the containers that JSON can describe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Structure:
    """The structure of a nested value.

    Attributes:
        kind: `leaf` (the next array of the flat list), `constant`, `tuple`, `list` or `dict`.
        items: the parts of a container, in order.
        keys: the keys of a dictionary, in order.
        value: the value of a constant: None, a boolean, a number or a string.
    """

    kind: str
    items: tuple[Structure, ...] = ()
    keys: tuple[str, ...] = ()
    value: bool | int | float | str | None = None


def flatten(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Structure]:
    """Split `value` into its leaves, in order, and its structure.

    Raises:
        TypeError: it holds something that is neither a leaf, a constant nor a container.
    """
    leaves: list[Any] = []

    def walk(part: Any) -> Structure:
        """Return the structure of a part, and append its leaves to `leaves`."""
        if is_leaf(part):
            leaves.append(part)
            return Structure("leaf")
        if part is None or isinstance(part, (bool, int, float, str)):
            return Structure("constant", value=part)
        if isinstance(part, (tuple, list)):
            return Structure("list" if isinstance(part, list) else "tuple", tuple(map(walk, part)))
        if isinstance(part, dict):
            return Structure("dict", tuple(map(walk, part.values())), tuple(map(str, part)))
        raise TypeError(f"a {type(part).__name__} is neither a tensor, a constant nor a tuple, list or dictionary")

    structure = walk(value)
    return leaves, structure


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Rebuild the value of `structure` from its `leaves`."""
    remaining = iter(leaves)

    def build(part: Structure) -> Any:
        """Build the value of a part from the next leaves."""
        match part.kind:
            case "leaf":
                return next(remaining)
            case "constant":
                return part.value
            case "dict":
                return dict(zip(part.keys, map(build, part.items), strict=True))
            case "list":
                return list(map(build, part.items))
        return tuple(map(build, part.items))

    return build(structure)
