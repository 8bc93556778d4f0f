"""Optimizers from outside torch.optim: find their state by running them, and let their Python code run on symbols.

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

from irongrad.diagnostics.source_lines import place_of
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.step.borrow import unchanged
from irongrad.step.optimizer_slots import Slot, as_tensor, leaves, own_attributes, slots_of, write

_CLOSURE = (
    "An optimizer whose step needs a closure, to evaluate the loss again, cannot be compiled: LBFGS and SAM are such. "
    "Use one that updates from the gradients alone"
)


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step without a closure, from dense gradients, or by itself.

    Raises:
        CaptureError: it is one; with its name.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CaptureError(
            f"{name} updates from sparse gradients, and a compiled step has dense ones. Use torch.optim.Adam"
        )
    inner = next((n for n, v in own_attributes(optimizer).items() if isinstance(v, torch.optim.Optimizer)), None)
    if inner is not None:
        raise CaptureError(
            f"{step_of(optimizer)}\n  {name} wraps another optimizer, self.{inner}, whose state would be lost. Use an "
            "optimizer that has both rules in its own step"
        )
    closure = signature(unwrap(type(optimizer).step)).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise CaptureError(f"{name}.step needs a closure. {_CLOSURE}")


def step_of(optimizer: torch.optim.Optimizer) -> str:
    """`file:line` of an optimizer's step, also in an installed package."""
    code = unwrap(type(optimizer).step).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


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


@dataclass(frozen=True)
class ForeignState:
    """The state of an optimizer from outside torch.optim.

    Attributes:
        slots: its state, with the values before the next step.
        layout: the containers around it.
        first: the containers before the first step, if that step does something else than later ones.
        before: the slots that exist before the first step.
        is_independent: tells whether the optimizer updates each parameter as if it had no other.
        is_continuous_at_zero: tells whether a value in a group, given its group's position and path, does at zero what
            it does near zero.
        is_apart: whether to trace the update of each parameter by itself.
    """

    slots: Mapping[Slot, torch.Tensor]
    layout: Layout
    first: Layout | None
    before: frozenset[Slot]
    is_independent: Callable[[], bool]
    is_continuous_at_zero: Callable[[int, tuple[Any, ...]], bool]
    is_apart: bool = False


def foreign_state(
    number: int,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    hypers: frozenset[tuple[Any, ...]],
) -> ForeignState:
    """Find the state of an optimizer.

    Args:
        number: the position of the optimizer.
        optimizer: the optimizer, as the user made it.
        parameters: those that get a gradient, by name.
        hypers: the owners and paths of values that are run-time hyperparameters.

    Raises:
        CaptureError: the layout of the state changes from step to step.
    """
    names = {id(p): n for n, p in parameters.items()}
    trial = _Trial(number, optimizer, parameters, names, seed=0)
    if (holder := _holder_of_a_tensor((trial.layout.state, trial.layout.groups, trial.layout.attributes))) is not None:
        raise CaptureError(
            f"{step_of(optimizer)}\n  {type(optimizer).__name__} keeps a tensor in an object of type {holder}, where a "
            "compiled step would not change it. Keep tensors in the optimizer's state or groups themselves"
        )
    starts = _starts_of_one_rule(trial, partial(_Trial, number, optimizer, parameters, names, seed=1), hypers)
    rest = frozenset(trial.before), trial.is_independent, trial.is_continuous_at_zero
    if starts is not None:
        return ForeignState(starts, trial.layout, None, *rest)
    starts = {
        slot: as_tensor(trial.before.get(slot, _nothing_like(value))).detach().clone().contiguous()
        for slot, value in trial.first.items()
        if not trial.is_constant(slot, trial.before.get(slot), hypers)
    }
    return ForeignState(starts, trial.layout, trial.layout_before, *rest)


def _holder_of_a_tensor(value: Any) -> str | None:
    """The type of an object, of no container that is walked, which has a tensor among its attributes."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(_holder_of_a_tensor, items)), None)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or callable(value):
        return None
    holds = any(isinstance(v, torch.Tensor) for v in getattr(value, "__dict__", {}).values())
    return type(value).__name__ if holds else None


def _starts_of_one_rule(
    trial: _Trial, another: Callable[[], _Trial], hypers: frozenset[tuple[Any, ...]]
) -> dict[Slot, torch.Tensor] | None:
    """The values to start from so that the rule of later steps gives the first step, too; None if none are found."""
    state: dict[Slot, torch.Tensor] = {}
    other = None
    for slot, value in trial.first.items():
        start = trial.before.get(slot, trial.start(slot))
        if trial.is_constant(slot, start, hypers):
            continue
        if start is None:
            return None
        start = torch.full_like(value, start) if not slot.is_number and not isinstance(start, torch.Tensor) else start
        if slot not in trial.before and isinstance(start, torch.Tensor) and start.is_floating_point():
            other = other or another()
            again = other.assigned.get((slot.owner, slot.path), start)
            if isinstance(again, torch.Tensor) and not torch.equal(start, again):
                start = torch.zeros_like(start)  # it starts as the gradient, as a momentum does
        is_whole = isinstance(start, int) and isinstance(value, int)  # a sum of floats may start as 0
        state[slot] = as_tensor(start if is_whole or isinstance(start, torch.Tensor) else float(start))
        state[slot] = state[slot].detach().clone().contiguous()
    return state if trial.begins_like(state) else None


def _nothing_like(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


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
        layout_before: the containers before the first step.
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
        self.layout_before = Layout.of(optimizer, names)
        self.assigned: dict[tuple[str, Any], Any] = {}
        with self._running():
            _record_assignments(optimizer, names, self.assigned)
            self.take_step()
            self.first = self.slots()
            self.layout = Layout.of(optimizer, names)
            self.updated = {n: p.detach().clone() for n, p in parameters.items()}
            self.take_step()
            self.second = self.slots()
            self._updated_twice = {n: p.detach().clone() for n, p in parameters.items()}
            later = Layout.of(optimizer, names)
        if (flag := _changed_flag(self.layout, later)) is not None:
            raise CaptureError(
                f"{step_of(optimizer)}\n  {type(optimizer).__name__} changes {flag} from step to "
                "step, which is neither a number nor a tensor: a compiled step would keep it. Keep a counter instead"
            )
        if self.first.keys() != self.second.keys():
            changed = next(iter(self.first.keys() ^ self.second.keys()))
            raise CaptureError(
                f"{step_of(optimizer)}\n  {type(optimizer).__name__} changes the layout of its state "
                f"from step to step, at {changed.name}; a compiled step's state has one layout. Keep tensors and "
                "numbers under the same keys from the first step on"
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

    def is_constant(self, slot: Slot, start: Any, hypers: frozenset[tuple[Any, ...]]) -> bool:
        """Whether a slot that starts as `start` is a constant of the optimizer, or a run-time input."""
        is_same = _is_same(start, self.first[slot], self.second.get(slot))
        return is_same and (slot.is_number or (slot.owner, slot.path) in hypers)

    def begins_like(self, state: Mapping[Slot, torch.Tensor]) -> bool:
        """Whether a first step from `state`, in the layout of later steps, gives what the real first step gives."""
        try:
            updated, slots = self.first_step_from({s: v.item() if s.is_number else v.clone() for s, v in state.items()})
            pairs = [(updated[n], value) for n, value in self.updated.items()]
            pairs += [(as_tensor(slots[s]), as_tensor(self.first[s])) for s in state]
        except (CaptureError, KeyError):
            return False
        return all(
            torch.allclose(found.double(), wanted.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
            for found, wanted in pairs
        )

    def is_independent(self) -> bool:
        """Whether each parameter, updated as the only one, changes as it does among the others."""
        place = {name: number for number, g in enumerate(self.optimizer.param_groups) for name in self._names_in(g)}
        return all(self._is_independent(name, place[name]) for name in self.parameters)

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(p)] for p in group["params"] if id(p) in self._names]

    def _is_independent(self, name: str, place: int) -> bool:
        with self._running():
            for number, group in enumerate(self.optimizer.param_groups):
                group["params"] = [self.parameters[name]] if number == place else []
            try:
                for _ in range(2):
                    self.parameters[name].grad = self.gradients[name].clone()
                    take_step(self.optimizer)
            except CaptureError:
                return False
            slots = self.slots()
            updated = self.parameters[name].detach().clone()
        owners = (name, "self", "state", f"group{place}")
        pairs = [(value, slots.get(slot)) for slot, value in self.second.items() if slot.owner in owners]
        return all(_is_same(wanted, found) for wanted, found in [(self._updated_twice[name], updated), *pairs])

    def is_continuous_at_zero(self, place: int, path: tuple[Any, ...]) -> bool:
        """Whether a hyperparameter near zero does what zero does."""
        at_zero, near = (self._updated_with(place, path, value) for value in (0.0, 1e-30))
        return at_zero is not None and near is not None and all(map(torch.allclose, at_zero, near))

    def _updated_with(self, place: int, path: tuple[Any, ...], value: float) -> list[torch.Tensor] | None:
        with self._running():
            write(self.optimizer, self._names, Slot(self._number, f"group{place}", path, is_number=True), value)
            try:
                self.take_step()
            except CaptureError:
                return None
            return [p.detach().double() for p in self.parameters.values()]

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
    """A copy of nested containers with the same values in them."""
    if isinstance(value, dict):
        return {k: _rebuilt(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rebuilt(v) for v in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_rebuilt(v) for v in value)
    return value


def _changed_flag(before: Layout, after: Layout) -> str | None:
    """The name of a truth value or a word that differs between two layouts."""
    flags = [dict(_flags((x.state, x.groups, x.attributes))) for x in (before, after)]
    changed = [path for path, flag in flags[1].items() if flags[0].get(path, flag) != flag]
    return ".".join(map(str, changed[0][1:])) if changed else None


def _flags(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, bool | str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flags(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _flags(item, (*path, position))


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


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
