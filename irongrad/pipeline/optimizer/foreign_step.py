"""Trace a step of an optimizer from outside torch.optim: every way through its decisions, and its first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from irongrad.diagnostics.source_lines import where
from irongrad.pipeline.capture.selected_rows import refuse_selected
from irongrad.pipeline.optimizer.branches import along_all_ways
from irongrad.pipeline.optimizer.foreign import ForeignState
from irongrad.pipeline.optimizer.layout import Layout, changed_flag
from irongrad.pipeline.optimizer.own_step import changes_a_flag, changes_its_layout, step_of
from irongrad.pipeline.optimizer.step_hooks import step_with_hooks
from irongrad.runtime.errors import CaptureError
from irongrad.step.optimizer_slots import Slot, slots_of


class ChangedSlotsError(CaptureError):
    """A step changes numbers that are no state yet, on a way that the first steps do not take.

    Attributes:
        slots: their slots.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, slots: frozenset[Slot]) -> None:
        names = ", ".join(sorted(slot.key for slot in slots))
        super().__init__(
            f"{step_of(optimizer)}\n  {type(optimizer).__name__} changes {names} in some steps. Assign it in every step"
        )
        self.slots = slots


@dataclass(frozen=True)
class ForeignStep:
    """One step of an optimizer on traced values.

    Attributes:
        held: what is known of the optimizer's state.
        optimizer: the optimizer.
        members: the names of the parameters of each group.
        parameters: the traced parameters by name, with their gradients; they get their new values.
        state: the traced value in each slot.
        prepared: gives the optimizer its hyperparameters; while what it returns is open, modules have the parameters.
    """

    held: ForeignState
    optimizer: torch.optim.Optimizer
    members: Sequence[Sequence[str]]
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[Slot, Any]
    prepared: Callable[[Mapping[str, torch.Tensor]], AbstractContextManager[object]]

    def results(self, has_started: torch.Tensor) -> dict[Slot, torch.Tensor]:
        """Update the parameters, and return the new state.

        Args:
            has_started: whether this is not the first step.

        Raises:
            ChangedSlotsError: a run of the step changes a number that is no state.
            CaptureError: there are too many ways through the step, it cannot be traced, or a run of it keeps its state
                in other places.
        """
        first: Mapping[str | Slot, torch.Tensor] = {}
        if self.held.first is not None:
            first = self._along_all_ways(
                self.held.first, {s: v for s, v in self.state.items() if s in self.held.before}
            )
        found = self._along_all_ways(self.held.layout, self.state)
        if self.held.first is not None:
            found = {key: torch.where(has_started, value, first[key]) for key, value in found.items()}
        for name, parameter in self.parameters.items():
            parameter.copy_(found[name])
        return {slot: found[slot] for slot in self.state}

    def _along_all_ways(self, layout: Layout, state: Mapping[Slot, Any]) -> dict[str | Slot, torch.Tensor]:
        if not self.held.is_apart:
            return self._of(layout, state, self.parameters, [*self.parameters, *self.state])
        # The decisions for one parameter do not multiply those for another.
        found: dict[str | Slot, torch.Tensor] = {}
        for number, names in enumerate(self.members):
            for name in [n for n in names if n in self.parameters]:
                shared = ("self", "state", f"group{number}")
                wanted = [s for s in self.state if s.owner == name or (s.owner in shared and s not in found)]
                found |= self._of(layout, state, [name], [name, *wanted])
        return found

    def _of(
        self, layout: Layout, state: Mapping[Slot, Any], names: Collection[str], wanted: Sequence[str | Slot]
    ) -> dict[str | Slot, torch.Tensor]:
        return dict(zip(wanted, along_all_ways(partial(self._run, layout, state, names, wanted)), strict=True))

    def _run(
        self, layout: Layout, state: Mapping[Slot, Any], names: Collection[str], wanted: Sequence[str | Slot]
    ) -> list[torch.Tensor]:
        """Take one step of the parameters `names` on copies; returns the new values that are wanted."""
        mine = {n: p.clone() for n, p in self.parameters.items()}
        for name in names:
            gradient = self.parameters[name].grad
            assert gradient is not None
            mine[name].grad = gradient.clone()
        for group, held in zip(self.optimizer.param_groups, self.members, strict=True):
            group["params"] = [mine[n] for n in held if n in names]
        number = next((slot.optimizer for slot in self.state), 0)
        copies = {s: v.clone() if isinstance(v, torch.Tensor) else v for s, v in state.items()}
        filled = layout.fill(self.optimizer, mine, copies)
        with self.prepared(mine):
            before = slots_of(number, self.optimizer, filled)
            step_with_hooks(self.optimizer)
        found = slots_of(number, self.optimizer, filled)
        self._refuse_changes(before, found)
        if (flag := changed_flag(self.held.layout, Layout.of(self.optimizer, filled))) is not None:
            raise changes_a_flag(self.optimizer, flag)
        refuse_selected(*mine.values(), *found.values())
        if lost := [w for w in wanted if not isinstance(w, str) and w not in found]:
            kind = type(self.optimizer)
            raise CaptureError(
                f"{where(kind.step)}\n  {kind.__name__} keeps {lost[0].owner}.{lost[0].key:.60} under a key "
                "that another run of the step does not have, such as an address. Key its state by the parameter"
            )
        if layout is self.held.layout and (added := found.keys() - before.keys()):
            raise changes_its_layout(self.optimizer, min(added, key=lambda slot: slot.name))
        return [mine[w].detach() if isinstance(w, str) else _like(self.held.slots[w], found[w]) for w in wanted]

    def _refuse_changes(self, before: Mapping[Slot, Any], after: Mapping[Slot, Any]) -> None:
        """Refuse a run that changes a number that the compiled step would keep."""
        kept = {s: v for s, v in before.items() if s not in self.held.slots}
        if changed := frozenset(s for s, v in kept.items() if s in after and not _is_kept(v, after[s])):
            raise ChangedSlotsError(self.optimizer, changed)


def _is_kept(before: Any, after: Any) -> bool:
    """Whether a number is the same after a traced run; a tensor that is no state belongs to a hyperparameter."""
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return isinstance(before, torch.Tensor)
    one, other = (v.node.expr if isinstance(v, torch.SymInt | torch.SymFloat) else v for v in (before, after))
    return bool(one == other)


def _like(initial: torch.Tensor, value: Any) -> torch.Tensor:
    """A new value of the state; a number may be symbolic."""
    tensor = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64)
    shaped = tensor.reshape(initial.shape) if tensor.numel() == initial.numel() else tensor.expand(initial.shape)
    return shaped.to(initial.dtype)
