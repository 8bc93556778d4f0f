"""The errors of an optimizer's update that cannot be traced: they name the user's optimizer or hook, and its line."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import unwrap

import torch

from irongrad.diagnostics.source_lines import place_of
from irongrad.pipeline.capture.hooks import spelled, untraceable
from irongrad.pipeline.optimizer.step_hooks import hooks_of
from irongrad.runtime.errors import CaptureError


def cannot_be_traced(error: Exception, optimizers: Sequence[torch.optim.Optimizer]) -> CaptureError:
    """The error for an update whose trace failed with `error`."""
    reason, what = untraceable(error), type(optimizers[0]).__name__
    if hooks := [h for o in optimizers for h in hooks_of(o)]:
        place = place_of(error, hooks[0])
        return CaptureError(f"{place}\n  the hook {spelled(hooks[0])} of {what} cannot be compiled: {reason}")
    place = place_of(error, unwrap(type(optimizers[0]).step))
    return CaptureError(
        f"{place}\n  {what}.step cannot be compiled: {reason}. Compute with tensors, such as torch.where"
    )


def reads_outside(optimizers: Sequence[torch.optim.Optimizer]) -> CaptureError:
    """The error for an update whose trace has a tensor from outside as a constant."""
    hooks = [h for o in optimizers for h in hooks_of(o)]
    what = f"the hook {spelled(hooks[0])}" if hooks else f"{type(optimizers[0]).__name__}.step"
    return CaptureError(
        f"{what} reads a tensor that is neither a parameter in the optimizer nor in its state, and a compiled step "
        "would keep the value that it has now. Reach parameters through the optimizer's groups or the model's modules, "
        "and keep tensors in the optimizer's state"
    )
