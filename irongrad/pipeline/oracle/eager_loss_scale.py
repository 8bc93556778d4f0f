"""The loss scale of an eager run, with the real `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from irongrad.runtime.manifest import GROWTH_TRACKER, SCALE, SKIPPED
from irongrad.step.loss_scale import LossScale

# For each step, and each optimizer in it, whether the update is skipped.
Skips = list[tuple[bool, ...]]


class EagerScaler:
    """Scales losses, unscales gradients and updates the parameters; without a loss scale, it only updates.

    Attributes:
        skips: for each step so far, and each optimizer in it, whether the update was skipped.
    """

    def __init__(self, scale: LossScale | None, optimizers: Sequence[torch.optim.Optimizer], replayed: Skips | None):
        """Begin with `scale`; skip the updates in `replayed`, or if it is None, those whose gradients overflow."""
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
        """Return the loss times the scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self) -> None:
        """Divide the gradients of all optimizers by the scale, and detect overflow."""
        for number, optimizer in enumerate(self._optimizers if self._scaler is not None else ()):
            if _has_gradient(optimizer):
                self._scaler.unscale_(optimizer)
                if self._replayed is not None:
                    self._found(optimizer).fill_(self._replayed[len(self.skips)][number])

    def step(self) -> None:
        """Update the parameters, then the scale."""
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
        """Return the state of the scale, under the names of the compiled step's state."""
        if self._scaler is None:
            return {}
        skipped = torch.tensor(self.skips, dtype=torch.int64).sum(0)
        dynamic = {GROWTH_TRACKER: self._scaler._growth_tracker, SKIPPED: skipped} if self._dynamic else {}
        return {SCALE: self._scaler._scale, **dynamic}

    def _found(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """GradScaler's own flag for an optimizer: not zero if a gradient overflowed."""
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return next(iter(found.values()), torch.zeros(()))


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether GradScaler accepts the optimizer; it refuses one whose parameters have no gradients."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
