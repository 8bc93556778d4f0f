"""The real `optimizer.step()` as a function of tensors and symbolic numbers, for a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from irongrad.graph.step_graph import StateTensor, Value
from irongrad.pipeline.optimizer.foreign import ForeignState
from irongrad.pipeline.optimizer.foreign_step import ForeignStep
from irongrad.pipeline.optimizer.state import SCALAR_STATE, State, distinct
from irongrad.pipeline.optimizer.step_hooks import in_modules, step_with_hooks
from irongrad.step.hyperparameters import Hyper, groups_of, with_values
from irongrad.step.optimizer_slots import Slot
from irongrad.step.train_step import TrainStep

# Optimizers that branch on their step count unless they are `capturable`. In that form Adam, AdamW and Adamax divide by
# the step size: at a learning rate of 0 they would give NaN for a gradient of 0, where eager's default form gives 0.
_BRANCHING = (torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop)


def key_of(slot: Slot) -> tuple[str, str]:
    """The owner and the key of a slot, as in `State`."""
    _, key, owner = slot.name.split("/", 2)
    return owner, key


def traced_values(alike: Mapping[str, str], initial: State) -> tuple[Value, ...]:
    """Return the results of the traced graph: the first of each set of alike parameters, their state, all gradients."""
    firsts = dict.fromkeys(alike.values())
    state = distinct({k: t for k, t in initial.items() if k[0] in firsts or k[0] not in alike})
    updated = (*firsts, *(t.name for t in state))
    return (*(Value("state", n) for n in updated), *(Value("gradient", n) for n in alike))


@dataclass(frozen=True)
class _Given:
    """The traced arguments of one run, without the state.

    Attributes:
        parameters: by name, with their gradients.
        updated: those of the parameters that are updated.
        update_counts: the number of updates that each optimizer made.
        started: 1.0 for each optimizer that made an update, as a symbolic number.
        hypers: the value of each hyperparameter.
    """

    parameters: Mapping[str, torch.Tensor]
    updated: Mapping[str, torch.Tensor]
    update_counts: torch.Tensor
    started: Sequence[Any]
    hypers: Mapping[Hyper, object]


@dataclass
class OptimizerStep:
    """One step of all optimizers of a training step.

    Attributes:
        step: the training step.
        parameters: the parameters that are updated, by name.
        names: the names of the model's parameters, by id.
        initial: the optimizers' state before the step, by owner and key.
        foreign: the state of the optimizers from outside torch.optim, by the optimizer's position.
        alike: maps each parameter to the first that is updated like it; only that one is updated here.
        hypers: the hyperparameters that are arguments, in order.
        clips: the limits of gradient clipping, by name.
        unique: the state tensors among the arguments, in order.
    """

    step: TrainStep
    parameters: Mapping[str, torch.nn.Parameter]
    names: Mapping[int, str]
    initial: State
    foreign: Mapping[int, ForeignState]
    alike: Mapping[str, str]
    hypers: Sequence[Hyper]
    clips: Mapping[str, Hyper]
    unique: Sequence[StateTensor] = field(init=False)

    def __post_init__(self) -> None:
        # Here and not where they are read: a trace records operations on tensors, and `run` changes the groups.
        self.unique = distinct(self.initial)
        self._results = traced_values(self.alike, self.initial)
        self._firsts = set(self.alike.values())
        self._keys = [k for k in self.initial if k[0] in self._firsts or k[0] not in self.alike]
        self._slots = {key_of(slot): slot for held in self.foreign.values() for slot in held.slots}
        tensors = {k: self.initial[k].initial for k in self._slots}
        self._counters = {k for k, t in tensors.items() if t.dtype is torch.int64 and bool((t >= 0).all())}
        optimizers = self.step.optimizers
        self._members = [[[self.names.get(id(p), "") for p in g["params"]] for g in o.param_groups] for o in optimizers]

    def examples(self) -> list[torch.Tensor]:
        """Tensors like the arguments of `run`, apart from the hyperparameters."""
        tensors = [p.detach() for p in self.parameters.values()]
        update_counts = torch.zeros(len(self.step.optimizers), dtype=torch.int64)
        return [*tensors, *tensors, *(t.initial for t in self.unique), update_counts]

    def run(self, *values: Any) -> list[torch.Tensor]:
        """Take the step.

        Args:
            values: parameters, gradients, state, update counts and hyperparameters, in this order.

        Returns:
            The tensors that `traced_values` stands for.
        """
        taken = iter(values)
        parameters = self._parameters(taken)
        state = self._state(taken)
        given = self._given(parameters, taken)
        with torch.no_grad(), in_modules(self.step, self.names, parameters):
            _clip(list(parameters.values()), self.clips, given.hypers)
            for number in range(len(self.step.optimizers)):
                after = self._after_foreign if number in self.foreign else self._after
                state |= after(number, given, state)
        return self._outcome(given, state)

    def _parameters(self, taken: Iterator[Any]) -> dict[str, torch.Tensor]:
        """Copies of the parameters with copies of their gradients."""
        fresh: dict[str, torch.Tensor] = {n: next(taken).clone() for n in self.parameters}
        for parameter in fresh.values():
            parameter.grad = next(taken).clone()
        return fresh

    def _state(self, taken: Iterator[Any]) -> dict[tuple[str, str], Any]:
        """Copies of the state to update, by owner and key."""
        whole = {t.name: next(taken) for t in self.unique}
        return {k: self._value(k, whole[self.initial[k].name]) for k in self._keys}

    def _value(self, key: tuple[str, str], tensor: torch.Tensor) -> Any:
        slot = self._slots.get(key)
        if slot is None:
            return _working(key[1], tensor)
        return _number(tensor, key in self._counters) if slot.is_number else tensor.clone()

    def _given(self, parameters: Mapping[str, torch.Tensor], taken: Iterator[Any]) -> _Given:
        update_counts: torch.Tensor = next(taken)
        hypers = dict(zip(self.hypers, taken, strict=True))
        started = [(count > 0).to(torch.float64).item() for count in update_counts.unbind()]
        updated = {n: p for n, p in parameters.items() if n in self._firsts}
        return _Given(parameters, updated, update_counts, started, hypers)

    def _after(self, number: int, given: _Given, state: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
        """Take the step of an optimizer of torch.optim; return its new state."""
        optimizer = self.step.optimizers[number]
        mine = self._with_traced(number, given, {k: v for k, v in state.items() if k not in self._slots})
        _use_forms(optimizer, given.started[number])
        step_with_hooks(optimizer)
        return {
            (name, key): optimizer.state[mine[name]][key]
            for name, key in self._keys
            if name in mine and mine[name] in optimizer.state
        }

    def _after_foreign(
        self, number: int, given: _Given, state: Mapping[tuple[str, str], Any]
    ) -> dict[tuple[str, str], Any]:
        """Take the step of an optimizer from outside torch.optim; return its new state."""
        slots = {k: slot for k, slot in self._slots.items() if slot.optimizer == number}
        run = ForeignStep(
            self.foreign[number],
            self.step.optimizers[number],
            self._members[number],
            self._held(number, given),
            {slot: state[k] for k, slot in slots.items()},
            partial(self._prepared, number, given),
        )
        found = run.results(given.update_counts[number] > 0)
        return {k: found[slot] for k, slot in slots.items()}

    def _held(self, number: int, given: _Given) -> dict[str, torch.Tensor]:
        """The parameters that an optimizer updates, by name."""
        return {n: given.updated[n] for held in self._members[number] for n in held if n in given.updated}

    def _prepared(self, number: int, given: _Given, mine: Mapping[str, torch.Tensor]) -> AbstractContextManager[object]:
        """Give an optimizer the traced hyperparameters; while open, the model's modules have the parameters `mine`."""
        self._set_hypers(self.step.optimizers[number], given)
        return in_modules(self.step, self.names, {**given.parameters, **mine})

    def _with_traced(
        self, number: int, given: _Given, state: Mapping[tuple[str, str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Give an optimizer the traced parameters, state and hyperparameters; returns its parameters by name."""
        optimizer = self.step.optimizers[number]
        mine = self._held(number, given)
        for group, held in zip(optimizer.param_groups, self._members[number], strict=True):
            group["params"] = [mine[n] for n in held if n in mine]
        optimizer.state = defaultdict(dict)
        for name, parameter in mine.items():
            optimizer.state[parameter] = {k: v for (n, k), v in state.items() if n == name}
        self._set_hypers(optimizer, given)
        return mine

    def _set_hypers(self, optimizer: torch.optim.Optimizer, given: _Given) -> None:
        for number, (owner, group) in enumerate(groups_of(self.step.optimizers)):
            if owner is optimizer:
                mine = [h for h in self.hypers if h.group == number]
                group.update(with_values(group, mine, lambda h: given.hypers[h]))

    def _outcome(self, given: _Given, state: Mapping[tuple[str, str], Any]) -> list[torch.Tensor]:
        tensors = {k: _result(v) for k, v in state.items()}
        new = {Value("gradient", n): p.grad for n, p in given.parameters.items()}
        new |= {Value("state", n): p.detach() for n, p in given.updated.items()}
        new |= {Value("state", self.initial[k].name): tensors[k].to(self.initial[k].initial.dtype) for k in self._keys}
        return [new[r] for r in self._results]


def _number(tensor: torch.Tensor, is_counter: bool) -> Any:
    """The symbolic number in a slot; a counter is not negative."""
    value = tensor.to(torch.float64).item()
    if is_counter:
        torch._check(value >= 0)
    return value


def _working(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy to update; scalar state (step counts, running products) is in float64, like eager's Python floats."""
    wide = torch.float64 if key in SCALAR_STATE else tensor.dtype
    return tensor.to(wide, copy=True)


def _clip(parameters: list[torch.Tensor], clips: Mapping[str, Hyper], traced: Mapping[Hyper, object]) -> None:
    if hyper := clips.get("clip_grad_value"):
        clip_grad_value_(parameters, traced.get(hyper, hyper.default), foreach=False)
    if hyper := clips.get("clip_grad_norm"):
        clip_grad_norm_(parameters, traced.get(hyper, hyper.default), foreach=False)


def _use_forms(optimizer: torch.optim.Optimizer, has_started: Any) -> None:
    """Choose the forms of a torch.optim optimizer that can be traced."""
    forms = {"foreach": False, "fused": False, "capturable": isinstance(optimizer, _BRANCHING)}
    for group in optimizer.param_groups:
        group.update({key: value for key, value in forms.items() if key in group})
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0:
            # Eager dampens nothing in the first step, nor at a momentum of 0.
            group["dampening"] = group["dampening"] * has_started * _is_nonzero(group["momentum"])


def _is_nonzero(value: Any) -> Any:
    """1.0 for a number that is not zero, as a symbolic number if `value` is one."""
    if not isinstance(value, torch.SymFloat):
        return float(value != 0)
    return (torch.full((), value, dtype=torch.float64) != 0).to(torch.float64).item()


def _result(value: Any) -> torch.Tensor:
    """A new value of the state as a tensor; a number may be symbolic."""
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64)
