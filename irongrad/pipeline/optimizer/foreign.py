"""Find the state of an optimizer from outside torch.optim by running it.

The optimizer takes two steps with made-up gradients on the user's own objects, which are put back. What it holds then
is its state. A value that exists before the first step starts as it is. One that the first step makes starts as what
the optimizer assigned first; a first step from there has to give what the real first step gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from irongrad.pipeline.optimizer.layout import Layout
from irongrad.pipeline.optimizer.own_step import step_of
from irongrad.pipeline.optimizer.trial_steps import Trial, is_same
from irongrad.runtime.errors import CaptureError
from irongrad.step.optimizer_slots import Slot, as_tensor, is_holder, parts


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
    changing: frozenset[Slot] = frozenset(),
) -> ForeignState:
    """Find the state of an optimizer.

    Args:
        number: the position of the optimizer.
        optimizer: the optimizer, as the user made it.
        parameters: those that get a gradient, by name.
        hypers: the owners and paths of values that are run-time hyperparameters.
        changing: slots that later steps change, although the first two may leave them as they are.

    Raises:
        CaptureError: the layout of the state changes from step to step.
    """
    names = {id(p): n for n, p in parameters.items()}
    trial = Trial(number, optimizer, parameters, names, seed=0)
    another = cache(partial(Trial, number, optimizer, parameters, names, seed=1))
    if (holder := _holder_of_a_tensor((trial.layout.state, trial.layout.groups, trial.layout.attributes))) is not None:
        raise CaptureError(
            f"{step_of(optimizer)}\n  {type(optimizer).__name__} keeps a tensor in an object of type {holder}, where a "
            "compiled step would not change it. Keep tensors in the optimizer's state or groups themselves"
        )

    def is_constant(slot: Slot, start: Any) -> bool:
        """Whether a slot is no state. A number that the first step makes of the gradients is state."""
        if slot in changing or not trial.is_constant(slot, start, hypers):
            return False
        return slot in trial.before or is_same(trial.first[slot], another().first.get(slot))

    starts = _starts_of_one_rule(trial, another, is_constant)
    rest = frozenset(trial.before), trial.is_independent, trial.is_continuous_at_zero
    if starts is not None:
        return ForeignState(starts, trial.layout, None, *rest)
    starts = {
        slot: as_tensor(trial.before.get(slot, _nothing_like(value))).detach().clone().contiguous()
        for slot, value in trial.first.items()
        if not is_constant(slot, trial.before.get(slot, trial.start(slot)))
    }
    return ForeignState(starts, trial.layout, trial.layout_before, *rest)


def _holder_of_a_tensor(value: Any) -> str | None:
    """The type of an object whose attributes are not walked, and that has a tensor among them."""
    if isinstance(value, (dict, list, tuple)) or is_holder(value):
        return next(filter(None, (_holder_of_a_tensor(item) for _, item in parts(value))), None)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)):
        return None
    holds = any(isinstance(v, torch.Tensor) for v in getattr(value, "__dict__", {}).values())
    return type(value).__name__ if holds else None


def _starts_of_one_rule(
    trial: Trial, another: Callable[[], Trial], is_constant: Callable[[Slot, Any], bool]
) -> dict[Slot, torch.Tensor] | None:
    """The values to start from so that the rule of later steps gives the first step, too; None if none are found."""
    state: dict[Slot, torch.Tensor] = {}
    for slot, value in trial.first.items():
        start = trial.before.get(slot, trial.start(slot))
        if is_constant(slot, start):
            continue
        if start is None:
            return None
        start = torch.full_like(value, start) if not slot.is_number and not isinstance(start, torch.Tensor) else start
        if slot not in trial.before and as_tensor(start).is_floating_point() and slot in another().first:
            again = another().start(slot)
            if type(again) is type(start) and not is_same(start, again):
                start = _nothing_like(start)  # it starts as the gradient, as a momentum does
        is_whole = isinstance(start, int) and isinstance(value, int)  # a sum of floats may start as 0
        state[slot] = as_tensor(start if is_whole or isinstance(start, torch.Tensor) else float(start))
        state[slot] = state[slot].detach().clone().contiguous()
    return state if trial.begins_like(state) else None


def _nothing_like(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
