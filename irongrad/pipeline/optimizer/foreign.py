"""Optimizers from outside torch.optim: find their state by running them.

The optimizer takes two steps with made-up gradients on the user's own objects, which are put back. What it holds then
is its state. A value that exists before the first step starts as it is. One that the first step makes starts as what
the optimizer assigned first; a first step from there has to give what the real first step gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature, unwrap
from typing import Any

import torch

from irongrad.diagnostics.source_lines import place_of, where
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.step.borrow import unchanged
from irongrad.step.optimizer_slots import Slot, as_tensor, leaves, own_attributes, slots_of, write

_CLOSURE = (
    "An optimizer whose step needs a closure, to evaluate the loss again, cannot be compiled: LBFGS and SAM are such. "
    "Use one that updates from the gradients alone"
)


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step without a closure, or from dense gradients.

    Raises:
        CaptureError: it is one; with its name.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CaptureError(
            f"{name} updates from sparse gradients, and a compiled step has dense ones. Use torch.optim.Adam"
        )
    closure = signature(unwrap(type(optimizer).step)).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise CaptureError(f"{name}.step needs a closure. {_CLOSURE}")


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's own `step`, without hooks and without what a scheduler wraps around it.

    Raises:
        CaptureError: it fails; with the user's line.
    """
    step = type(optimizer).step
    try:
        getattr(step, "__wrapped__", step)(optimizer)
    except UserError:
        raise
    except Exception as error:
        needs_closure = "closure" in signature(unwrap(step)).parameters
        reason = str(error).partition("\n")[0] or type(error).__name__
        way_out = _CLOSURE if needs_closure else "It has to update from the gradients alone"
        name = type(optimizer).__name__
        raise CaptureError(
            f"{place_of(error, unwrap(step))}\n  {name}.step cannot be compiled: {reason}. {way_out}"
        ) from error


def foreign_state(
    number: int,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    hypers: frozenset[tuple[Any, ...]],
) -> tuple[dict[Slot, torch.Tensor], Layout]:
    """The slots of an optimizer's state, each with the value before the next step, and the containers around them.

    Args:
        number: the position of the optimizer.
        optimizer: the optimizer, as the user made it.
        parameters: those that get a gradient, by name.
        hypers: the owners and paths of values that are run-time hyperparameters.

    Raises:
        CaptureError: the first step does something else than later ones, or the layout of the state changes.
    """
    names = {id(p): n for n, p in parameters.items()}
    found = _Trial(number, optimizer, parameters, names, seed=0)
    state: dict[Slot, torch.Tensor] = {}
    others = None
    for slot, value in found.first.items():
        start = found.before.get(slot, found.start(slot))
        is_same = _is_same(start, value, found.second.get(slot))
        if is_same and (slot.is_number or (slot.owner, slot.path) in hypers):
            continue  # a constant of the optimizer, or a run-time input
        if start is None:
            raise CaptureError(
                f"{where(unwrap(type(optimizer).step))}\n  {type(optimizer).__name__} makes {slot.name} in its first "
                "step, in a way that is not seen. Take one eager step before compiling, so that its state exists"
            )
        value = torch.full_like(value, start) if not slot.is_number and not isinstance(start, torch.Tensor) else start
        if slot not in found.before and isinstance(value, torch.Tensor) and value.is_floating_point():
            others = others or _Trial(number, optimizer, parameters, names, seed=1)
            other = others.assigned.get((slot.owner, slot.path), value)
            if isinstance(other, torch.Tensor) and not torch.equal(value, other):
                value = torch.zeros_like(value)  # it starts as the gradient, as a momentum does
        state[slot] = as_tensor(value).detach().clone().contiguous()
    _check_first_step(found, state)
    return state, found.layout


def _is_same(*values: Any) -> bool:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return all(isinstance(v, torch.Tensor) and torch.equal(v, first) for v in values)
    return all(type(v) is type(first) and v == first for v in values)


class _Trial:
    """Two steps of an optimizer with made-up gradients, on the user's own objects, which are put back.

    Attributes:
        before: the slots before the first step.
        assigned: what the first step assigned first, by owner and path.
        first: the slots after the first step.
        second: the slots after the second step.
        updated: the parameters after the first step.
        layout: the containers after the first step.
    """

    def __init__(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        names: Mapping[int, str],
        seed: int,
    ) -> None:
        self.optimizer, self.parameters, self._names, self._number = optimizer, parameters, names, number
        generator = torch.Generator().manual_seed(seed)
        self.gradients = {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in parameters.items()}
        self.before = self.slots()
        self.assigned: dict[tuple[str, Any], Any] = {}
        with self._running():
            _record_assignments(optimizer, names, self.assigned)
            self.take_step()
            self.first = self.slots()
            self.layout = Layout.of(optimizer, names)
            self.updated = {n: p.detach().clone() for n, p in parameters.items()}
            self.take_step()
            self.second = self.slots()
        if self.first.keys() != self.second.keys():
            changed = next(iter(self.first.keys() ^ self.second.keys()))
            raise CaptureError(
                f"{where(unwrap(type(optimizer).step))}\n  {type(optimizer).__name__} changes the layout of its state "
                f"from step to step, at {changed.name}; a compiled step's state has one layout"
            )

    def slots(self) -> dict[Slot, Any]:
        """The slots now, with copies of tensors."""
        return {s: _copied(v) for s, v in slots_of(self._number, self.optimizer, self._names).items()}

    def start(self, slot: Slot) -> Any:
        """What a slot that the first step makes starts as: what was assigned first, or one count before it."""
        assigned, first, second = self.assigned.get((slot.owner, slot.path)), self.first[slot], self.second[slot]
        if slot.is_number and assigned == first != second:
            return first - (second - first)  # `state["step"] = state.get("step", 0) + 1`
        return assigned

    def take_step(self) -> None:
        """Take one step with the gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name].clone()
        take_step(self.optimizer)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with unchanged([self.optimizer]) as record:
            record.lend_memory(None)
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            yield

    def first_step_from(self, state: Mapping[Slot, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[Slot, Any]]:
        """The parameters and the slots after a first step from `state`."""
        with self._running():
            self.layout.fill(self.optimizer, self.parameters, state)
            self.take_step()
            return {n: p.detach().clone() for n, p in self.parameters.items()}, self.slots()


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
            group.update(_rebuilt(held))
        for name, held in self.attributes.items():
            setattr(optimizer, name, _rebuilt(held))
        names = {id(p): n for n, p in parameters.items()}
        for slot, value in values.items():
            write(optimizer, names, slot, value)
        return names


def _rebuilt(value: Any) -> Any:
    """A copy of nested containers with the same values in them."""
    if isinstance(value, dict):
        return {k: _rebuilt(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rebuilt(v) for v in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_rebuilt(v) for v in value)
    return value


class _Recording(dict[Any, Any]):
    """A dictionary that tells of the first value under each key."""

    def __init__(self, held: Mapping[Any, Any], tell: Callable[[Any, Any], None]) -> None:
        super().__init__(held)
        self._tell = tell

    def __setitem__(self, key: Any, value: Any) -> None:
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


def _record_assignments(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], assigned: dict[tuple[str, Any], Any]
) -> None:
    """Have `assigned` get the first value of each slot that the optimizer makes."""

    def told(owner: str, key: Any, value: Any) -> None:
        for path, leaf in leaves(value, (key,)):
            assigned.setdefault((owner, path), _copied(leaf))

    def entry(key: Any, held: Any) -> Any:
        if not isinstance(key, torch.Tensor) or not isinstance(held, dict):
            if not isinstance(key, torch.Tensor):
                told("state", key, held)
            return held
        owner = names.get(id(key))
        return _Recording(held, partial(told, owner)) if owner is not None else held

    optimizer.state = _RecordingState(optimizer.state, entry)
    for position, group in enumerate(optimizer.param_groups):
        optimizer.param_groups[position] = _Recording(group, partial(told, f"group{position}"))


def _check_first_step(trial: _Trial, state: Mapping[Slot, torch.Tensor]) -> None:
    """Hold a first step from the initial state against the real first step.

    Raises:
        CaptureError: they differ.
    """
    numbers = {s: (v.item() if s.is_number else v.clone()) for s, v in state.items()}
    updated, slots = trial.first_step_from(numbers)
    pairs = [(n, updated[n], value) for n, value in trial.updated.items()]
    pairs += [(s.name, as_tensor(slots[s]), as_tensor(trial.first[s])) for s in state]
    for name, found, wanted in pairs:
        if not torch.allclose(found.double(), wanted.double(), rtol=1e-5, atol=1e-7, equal_nan=True):
            raise CaptureError(
                f"{where(unwrap(type(trial.optimizer).step))}\n  the first step of {type(trial.optimizer).__name__} "
                f"does something else to {name} than a later one does. Take one eager step before compiling, so that "
                "its state exists"
            )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
