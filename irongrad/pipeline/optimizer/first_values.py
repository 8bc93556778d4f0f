"""Record what an optimizer assigns to its state: the first value of each part, and the keys that it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from irongrad.step.optimizer_slots import leaves


def record_assignments(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    assigned: dict[tuple[str, Any], Any],
    written: set[tuple[str, Any]],
) -> None:
    """Have `assigned` get the first value of each slot that the optimizer makes, and `written` each key it assigns."""

    def told(owner: str, key: Any, value: Any) -> None:
        for path, leaf in leaves(value, (key,)):
            assigned.setdefault((owner, path), copied(leaf))

    def entry(key: Any, held: Any) -> Any:
        if not isinstance(key, torch.Tensor) or not isinstance(held, dict):
            if not isinstance(key, torch.Tensor):
                told("state", key, held)
            return held
        owner = names.get(id(key))
        return recording(held, owner) if owner is not None else held

    def recording(held: Mapping[Any, Any], owner: str) -> _Recording:
        return _Recording(held, partial(told, owner), lambda key: written.add((owner, key)))

    optimizer.state = _RecordingState(optimizer.state, entry)
    for position, group in enumerate(optimizer.param_groups):
        optimizer.param_groups[position] = recording(group, f"group{position}")


def copied(value: Any) -> Any:
    """A copy of a tensor; anything else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _Recording(dict[Any, Any]):
    """A dictionary that tells of the first value under each key, and of each key that is assigned."""

    def __init__(self, held: Mapping[Any, Any], tell: Callable[[Any, Any], None], wrote: Callable[[Any], None]) -> None:
        super().__init__(held)
        self._tell, self._wrote = tell, wrote

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wrote(key)
        if key not in self:
            self._tell(key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class _RecordingState(defaultdict[Any, Any]):
    """An optimizer's state whose entries tell of their first values."""

    def __init__(self, held: Mapping[Any, Any], recording: Callable[[Any, Mapping[Any, Any]], Any]) -> None:
        super().__init__(dict)
        self._recording = recording
        for key, value in held.items():
            super().__setitem__(key, recording(key, value))

    def __missing__(self, key: Any) -> Any:
        super().__setitem__(key, self._recording(key, {}))
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        entry = value
        if key not in self:
            entry = self._recording(key, {} if isinstance(value, dict) else value)
        super().__setitem__(key, entry)
        if entry is not value:
            entry.update(value)
