"""The containers in which an optimizer keeps its state: taken down, and given to it again with other values."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from irongrad.step.optimizer_slots import Slot, is_holder, own_attributes, parts, write


@dataclass(frozen=True)
class Layout:
    """The containers in which an optimizer keeps its state, with its constants.

    Attributes:
        state: the optimizer's state, by the parameter's name, or by another key of it.
        groups: the parameter groups, without their parameters.
        attributes: the optimizer's own attributes.
    """

    state: Mapping[Any, Any]
    groups: Sequence[Mapping[str, Any]]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Layout:
        """The layout that `optimizer` has now."""
        state = {names.get(id(key), key): _rebuilt(held) for key, held in optimizer.state.items()}
        groups = [_rebuilt({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        return cls(state, groups, {n: _rebuilt(v) for n, v in own_attributes(optimizer).items()})

    def fill(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Any], values: Mapping[Slot, Any]
    ) -> dict[int, str]:
        """Give `optimizer` this layout with other values in some slots.

        Args:
            optimizer: the optimizer, whose groups hold `parameters`.
            parameters: by name.
            values: by slot.

        Returns:
            The names of the parameters, by id.
        """
        optimizer.state = defaultdict(dict)
        for key, held in self.state.items():
            place = parameters.get(key, key) if isinstance(key, str) else key
            optimizer.state[place] = _rebuilt(held)
        for group, held in zip(optimizer.param_groups, self.groups, strict=True):
            for name in [k for k in group if k not in held and k != "params"]:
                del group[name]
            group.update(_rebuilt(held))
        for name in own_attributes(optimizer).keys() - self.attributes.keys():
            delattr(optimizer, name)
        for name, held in self.attributes.items():
            setattr(optimizer, name, _rebuilt(held))
        names = {id(p): n for n, p in parameters.items()}
        for slot, value in values.items():
            write(optimizer, names, slot, value)
        return names


def _rebuilt(value: Any) -> Any:
    """A copy of nested containers and objects with the same values in them."""
    if isinstance(value, dict):
        return {k: _rebuilt(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rebuilt(v) for v in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_rebuilt(v) for v in value)
    if is_holder(value):
        made = copy.copy(value)
        for name, held in vars(value).items():
            object.__setattr__(made, name, _rebuilt(held))
        return made
    return value


def changed_flag(before: Layout, after: Layout) -> str | None:
    """The name of a truth value or a word that differs between two layouts."""
    flags = [dict(_flags((x.state, x.groups, x.attributes))) for x in (before, after)]
    changed = [path for path, flag in flags[1].items() if flags[0].get(path, flag) != flag]
    return ".".join(map(str, changed[0][1:])) if changed else None


def _flags(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, bool | str):
        yield path, value
    for key, item in parts(value):
        yield from _flags(item, (*path, key))
