"""The loss scale of a step: part of its state, updated by the rules of `torch.amp.GradScaler`.

The backward pass starts from the scale instead of one, so that small gradients stay above float16's smallest number.
The update begins by dividing the gradients by the scale. With a dynamic scale, an optimizer skips its update if its
gradients are not all finite. The scale then changes after each step (torch/amp/grad_scaler.py,
aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from irongrad.graph.step_graph import StateTensor, Value
from irongrad.runtime.manifest import GROWTH_TRACKER, SCALE, SKIPPED, Role
from irongrad.step.train_step import TrainStep

Values: TypeAlias = dict[Value, torch.Tensor]
Rule: TypeAlias = Callable[[Values], Values]

SCALE_VALUE = Value("state", SCALE)
TRACKER_VALUE = Value("state", GROWTH_TRACKER)
SKIPPED_VALUE = Value("state", SKIPPED)


@dataclass(frozen=True)
class LossScale:
    """The loss scale at the beginning of a step.

    Attributes:
        scale: its value.
        tracker: the number of steps in a row that were not skipped since the scale last changed.
        hypers: a dynamic scale's `growth_factor`, `backoff_factor` and `growth_interval`; empty for a fixed one.
    """

    scale: float
    tracker: int = 0
    hypers: Mapping[str, float] = field(default_factory=dict)

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes and steps are skipped."""
        return bool(self.hypers)

    @property
    def values(self) -> tuple[Value, ...]:
        """The scale's state tensors, as arguments and results of functions."""
        return (SCALE_VALUE, TRACKER_VALUE, SKIPPED_VALUE) if self.dynamic else (SCALE_VALUE,)

    def state(self, optimizers: int) -> tuple[StateTensor, ...]:
        """Return the state tensors; a dynamic scale counts the skipped updates of each optimizer."""
        initial = (
            torch.tensor(self.scale, dtype=torch.float32),
            torch.tensor(self.tracker, dtype=torch.int32),
            torch.zeros(optimizers, dtype=torch.int64),
        )
        return tuple(StateTensor(v.name, Role.SCALER, t) for v, t in zip(self.values, initial, strict=False))


def loss_scale_of(step: TrainStep) -> LossScale | None:
    """Return the loss scale of `step`; None if it has none."""
    scaler = step.scaler
    if not isinstance(scaler, torch.amp.GradScaler):
        return None if scaler is None else LossScale(scaler)
    state = scaler.state_dict()
    hypers = {k: float(state[k]) for k in ("growth_factor", "backoff_factor", "growth_interval")}
    return LossScale(state["scale"], state["_growth_tracker"], hypers)


def scaled_update(scale: LossScale, owners: Mapping[str, int], update: Rule) -> Rule:
    """Wrap `update` so that it gets unscaled gradients; with a dynamic scale, only finite ones are applied.

    Args:
        scale: the loss scale.
        owners: the position of the optimizer that updates each state tensor, by its name.
        update: parameters, gradients and state -> new parameters and state.
    """

    def fixed(values: Values) -> Values:
        inverse = values[SCALE_VALUE].double().reciprocal().float()
        return update(values | {v: t * inverse for v, t in values.items() if v.kind == "gradient"})

    def dynamic(values: Values) -> Values:
        overflow = [_overflow(values, owners, i) for i in range(values[SKIPPED_VALUE].numel())]
        new = {v: torch.where(overflow[owners[v.name]], values[v], t) for v, t in fixed(values).items()}
        flags = torch.stack(overflow)
        return new | _next_scale(values, flags.any()) | {SKIPPED_VALUE: values[SKIPPED_VALUE] + flags.to(torch.int64)}

    return dynamic if scale.dynamic else fixed


def _overflow(values: Values, owners: Mapping[str, int], optimizer: int) -> torch.Tensor:
    """Whether a gradient of `optimizer` has an element that is not finite."""
    mine = [t for v, t in values.items() if v.kind == "gradient" and owners[v.name] == optimizer]
    finite: Sequence[torch.Tensor] = [gradient.isfinite().all() for gradient in mine]
    return ~torch.stack(finite).all() if mine else torch.zeros((), dtype=torch.bool)


def _next_scale(values: Values, overflow: torch.Tensor) -> Values:
    """The scale after a step.

    It is smaller after an overflow, and larger after `growth_interval` steps without one, unless it would be infinite.
    ATen multiplies by the factors in float64 and rounds to float32.
    """
    scale, good = values[SCALE_VALUE], values[TRACKER_VALUE] + 1
    growth, backoff, interval = (
        values[Value("hyper", n)] for n in ("growth_factor", "backoff_factor", "growth_interval")
    )
    due = good.double() == interval
    grown, smaller = (scale.double() * growth).float(), (scale.double() * backoff).float()
    larger = torch.where(due & grown.isfinite(), grown, scale)
    return {
        SCALE_VALUE: torch.where(overflow, smaller, larger),
        TRACKER_VALUE: torch.where(overflow | due, torch.zeros_like(good), good),
    }
