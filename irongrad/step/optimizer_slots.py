"""Where an optimizer from outside torch.optim keeps its state: slots, read and written by name.

Such an optimizer keeps tensors and numbers for each parameter, in its parameter groups, in its attributes, and in
lists, dictionaries and objects inside of those. Each tensor or number is one slot.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

_VALUES = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat)
# The packages whose objects are no optimizer's own.
_APART = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy"}
_BASE = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


@dataclass(frozen=True)
class Slot:
    """A place in an optimizer that holds a tensor or a number.

    Attributes:
        optimizer: the position of the optimizer.
        owner: the parameter's name, `group<N>` with the group's position in the optimizer, `state` for what its state
            has for other keys, or `self`.
        path: the keys, positions and attributes that lead from there to the value.
        is_number: whether the value is a Python number; a step may turn it into a tensor, and the slot is the same.
    """

    optimizer: int
    owner: str
    path: tuple[Any, ...]
    is_number: bool = field(compare=False)

    @property
    def key(self) -> str:
        """The path in one word, such as `exp_avg` or `factors.0`."""
        return ".".join("<a parameter>" if isinstance(part, torch.Tensor) else str(part) for part in self.path)

    @property
    def name(self) -> str:
        """The name of the state tensor."""
        of_parameter = not (self.owner in ("self", "state") or self.owner.startswith("group"))
        place = self.owner if of_parameter or not self.optimizer else f"{self.owner}@{self.optimizer}"
        return f"optimizer/{self.key}/{place}"


def is_foreign(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step is written outside of torch.optim."""
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim")


def slots_of(number: int, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[Slot, Any]:
    """Every tensor and number that an optimizer holds, but for its parameters.

    Args:
        number: the position of the optimizer.
        optimizer: the optimizer.
        names: of the parameters, by id.
    """
    found: dict[Slot, Any] = {}
    for owner, place in _places(optimizer, names):
        for path, value in leaves(place):
            found[Slot(number, owner, path, not isinstance(value, torch.Tensor))] = value
    return found


def write(optimizer: torch.optim.Optimizer, names: Mapping[int, str], slot: Slot, value: Any) -> None:
    """Put `value` into a slot; the containers that lead to it are there."""
    for owner, place in _places(optimizer, names):
        if owner == slot.owner:
            _put(place, slot.path, value)
            if owner == "self":
                setattr(optimizer, slot.path[0], place[slot.path[0]])
            return
    raise KeyError(slot.name)


def as_tensor(value: Any) -> torch.Tensor:
    """The value of a slot as a tensor: a number in float64, or in int64."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def foreign_values(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The values in all slots of optimizers from outside torch.optim, by the names of the state tensors."""
    return {
        slot.name: as_tensor(value)
        for number, optimizer in enumerate(optimizers)
        if is_foreign(optimizer)
        for slot, value in slots_of(number, optimizer, names).items()
    }


def _places(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for key, held in optimizer.state.items():
        if isinstance(key, torch.Tensor) and id(key) in names:
            yield names[id(key)], held
    yield "state", _Part(optimizer.state, [k for k in optimizer.state if not isinstance(k, torch.Tensor)])
    for number, group in enumerate(optimizer.param_groups):
        yield f"group{number}", _Part(group, [k for k in group if k != "params"])
    yield "self", own_attributes(optimizer)


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that an optimizer has besides those of every optimizer."""
    return {n: v for n, v in vars(optimizer).items() if n not in _BASE}


class _Part(dict[Any, Any]):
    """Some entries of a dictionary, written through to it."""

    def __init__(self, whole: dict[Any, Any], keys: Iterable[Any]) -> None:
        super().__init__({k: whole[k] for k in keys})
        self._whole = whole

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._whole[key] = value


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tensors and numbers in nested containers and objects, with the path to each; parameters are none of these."""
    if isinstance(value, torch.nn.Parameter):
        return
    if isinstance(value, _VALUES) and not isinstance(value, bool):
        yield path, value
    for key, item in parts(value):
        yield from leaves(item, (*path, key))


def parts(value: Any) -> list[tuple[Any, Any]]:
    """The keys, positions or attributes of a container or of an object that only holds values, with what each holds."""
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list((value if isinstance(value, dict) else vars(value) if is_holder(value) else {}).items())


def is_holder(value: Any, depth: int = 4) -> bool:
    """Whether a value is an object of a package's or a user's class that holds only values, as GaLore's projector does.

    Its attributes are then part of the optimizer's state. An object that refers to anything else is not walked: it may
    lead anywhere, also to itself.
    """
    kind = type(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, Enum, dict, list, tuple)):
        return False
    if kind.__module__.partition(".")[0] in _APART or not hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
        return False
    return depth > 0 and all(_is_value(held, depth - 1) for held in vars(value).values())


def _is_value(value: Any, depth: int) -> bool:
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_value(item, depth - 1) for item in items)
    return isinstance(value, (*_VALUES, str, type(None), torch.dtype, torch.device)) or is_holder(value, depth)


def _put(place: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Set the value at `path` in nested containers and objects; returns `place`, or a new tuple in its stead."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if is_holder(place):
        object.__setattr__(place, key, _put(getattr(place, key), rest, value))
        return place
    item = _put(place[key], rest, value) if rest else value
    if isinstance(place, tuple):
        items = [*place[:key], item, *place[key + 1 :]]
        return type(place)(*items) if hasattr(place, "_fields") else tuple(items)
    place[key] = item
    return place
