"""The loss scale of an eager run, by the real `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from irongrad.runtime.manifest import GROWTH_TRACKER, SCALE, SKIPPED
from irongrad.step.loss_scale import LossScale

# For each step, whether each optimizer's update is skipped.
Skips = list[tuple[bool, ...]]


class EagerScaler:
    """Scales losses, and updates the parameters from gradients that it unscales; without a scale, just updates.

    Attributes:
        skips: which updates were skipped.
    """

    def __init__(self, scale: LossScale | None, optimizers: Sequence[torch.optim.Optimizer], replayed: Skips | None):
        """Begin with `scale`; skip what `replayed` says, by default what overflows."""
        self.skips: Skips = []
        self._optimizers = optimizers
        self._replayed = replayed
        self._dynamic = scale is not None and scale.dynamic
        self._scaler: Any = None
        if scale is not None:
            hypers = {n: int(v) if n == "growth_interval" else v for n, v in scale.hypers.items()}
            self._scaler = torch.amp.GradScaler("cpu", scale.scale, **hypers)
            self._scaler._init_growth_tracker = scale.tracker

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self) -> None:
        """Divide the gradients of all optimizers by the scale, and look for overflow."""
        for number, optimizer in enumerate(self._optimizers if self._scaler is not None else ()):
            if _has_gradient(optimizer):
                self._scaler.unscale_(optimizer)
                if self._replayed is not None:
                    self._found(optimizer).fill_(self._replayed[len(self.skips)][number])

    def step(self) -> None:
        """Update the parameters, and then the scale."""
        self.skips.append(tuple(self._dynamic and bool(self._found(o)) for o in self._optimizers))
        for optimizer in self._optimizers:
            if self._dynamic and _has_gradient(optimizer):
                self._scaler.step(optimizer)
            else:
                optimizer.step()
        if self._dynamic:
            self._scaler.update()
        elif self._scaler is not None:
            self._scaler._per_optimizer_states.clear()  # as update() does

    def state(self) -> dict[str, torch.Tensor]:
        """What the compiled step's state has of the scale."""
        if self._scaler is None:
            return {}
        skipped = torch.tensor(self.skips, dtype=torch.int64).sum(0)
        dynamic = {GROWTH_TRACKER: self._scaler._growth_tracker, SKIPPED: skipped} if self._dynamic else {}
        return {SCALE: self._scaler._scale, **dynamic}

    def _found(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """GradScaler's own flag for an optimizer: not zero where a gradient overflowed."""
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return next(iter(found.values()), torch.zeros(()))


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether GradScaler takes the optimizer; it refuses one whose parameters have no gradients."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
