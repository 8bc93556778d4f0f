"""Let an optimizer from outside torch.optim take steps on trial, with made-up gradients, and tell what they did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from irongrad.pipeline.optimizer.first_values import copied, record_assignments
from irongrad.pipeline.optimizer.layout import Layout, changed_flag
from irongrad.pipeline.optimizer.own_step import changes_a_flag, changes_its_layout, take_step
from irongrad.runtime.errors import CaptureError
from irongrad.step.borrow import unchanged
from irongrad.step.optimizer_slots import Slot, as_tensor, slots_of, write


class Trial:
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
        self._written: set[tuple[str, Any]] = set()
        with self._running():
            record_assignments(optimizer, names, self.assigned, self._written)
            self.take_step()
            self._written.clear()
            self.first = self.slots()
            self.layout = Layout.of(optimizer, names)
            self.updated = {n: p.detach().clone() for n, p in parameters.items()}
            self.take_step()
            self.second = self.slots()
            self._updated_twice = {n: p.detach().clone() for n, p in parameters.items()}
            later = Layout.of(optimizer, names)
        if (flag := changed_flag(self.layout, later)) is not None:
            raise changes_a_flag(optimizer, flag)
        if self.first.keys() != self.second.keys():
            raise changes_its_layout(optimizer, next(iter(self.first.keys() ^ self.second.keys())))

    def slots(self) -> dict[Slot, Any]:
        """The slots now, with copies of tensors."""
        return {s: copied(v) for s, v in slots_of(self._number, self.optimizer, self._names).items()}

    def start(self, slot: Slot) -> Any:
        """What a slot that the first step makes starts as: what was assigned first, or one count before it."""
        assigned, first, second = self.assigned.get((slot.owner, slot.path)), self.first[slot], self.second[slot]
        if slot.is_number and assigned == first != second:
            return first - (second - first)  # `state["step"] = state.get("step", 0) + 1`
        return assigned

    def is_constant(self, slot: Slot, start: Any, hypers: frozenset[tuple[Any, ...]]) -> bool:
        """Whether a slot that starts as `start` is a constant of the optimizer, or a run-time input.

        A float that each step assigns is neither, although two steps may leave it as it is: the estimate of Prodigy and
        of D-Adaptation grows later. A learning rate is one that a scheduler may set.
        """
        stays = is_same(start, self.first[slot], self.second.get(slot))
        is_assigned = isinstance(start, float) and (slot.owner, *slot.path) in self._written and slot.path != ("lr",)
        return bool(stays and not is_assigned and (slot.is_number or (slot.owner, slot.path) in hypers))

    def begins_like(self, state: Mapping[Slot, torch.Tensor]) -> bool:
        """Whether a first step from `state`, in the layout of later steps, gives what the real first step gives.

        It also has to give this from tensors that are rounded otherwise: the compiled step computes what it compares
        with them in another order. A norm that is kept to see whether it grows is such a tensor.
        """
        rounded = {s: t * (1 - 4 * torch.finfo(t.dtype).eps) for s, t in state.items() if self._is_made(s, t)}
        return self._begins_with(state) and (not rounded or self._begins_with({**state, **rounded}))

    def _is_made(self, slot: Slot, start: torch.Tensor) -> bool:
        return not slot.is_number and slot not in self.before and start.is_floating_point() and bool(start.any())

    def _begins_with(self, state: Mapping[Slot, torch.Tensor]) -> bool:
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
        return all(is_same(wanted, found) for wanted, found in [(self._updated_twice[name], updated), *pairs])

    def is_continuous_at_zero(self, place: int, path: tuple[Any, ...]) -> bool:
        """Whether a hyperparameter near zero does what zero does."""
        at_zero, near = (self._updated_with(place, path, value) for value in (0.0, 1e-30))
        return at_zero is not None and near is not None and all(map(_are_close, at_zero, near))

    def _updated_with(self, place: int, path: tuple[Any, ...], value: float) -> list[torch.Tensor] | None:
        """The parameters and the state after two steps; in the second, gradients are half as large."""
        with self._running():
            write(self.optimizer, self._names, Slot(self._number, f"group{place}", path, is_number=True), value)
            try:
                self.take_step()
                self.take_step(0.5)
            except CaptureError:
                return None
            state = [as_tensor(v).clone() for v in self.slots().values()]
            return [p.detach().double() for p in (*self.parameters.values(), *state)]

    def take_step(self, scale: float = 1.0) -> None:
        """Take one step with the gradients, times `scale`."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name] * scale
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


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.shape == other.shape and torch.allclose(one, other, equal_nan=True))


def is_same(*values: Any) -> bool:
    """Whether values are of one type and equal."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return all(isinstance(v, torch.Tensor) and torch.equal(v, first) for v in values)
    return all(type(v) is type(first) and v == first for v in values)
