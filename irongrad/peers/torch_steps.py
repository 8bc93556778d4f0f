"""A training step as PyTorch runs it, eagerly or by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.runtime.errors import UserError
from irongrad.step.train_step import TrainStep

# What only IronGrad's own step has; PyTorch's users write it by hand.
_OURS = ("carry", "after_step", "sam", "between", "dynamic", "clip_grad_value", "loss_scale", "entries")


@dataclass(frozen=True)
class TorchStep:
    """A training step of PyTorch.

    Attributes:
        run: takes one step and returns its loss.
        clear: drops the gradients, as each step does first.
    """

    run: Callable[[], float]
    clear: Callable[[], None]


def torch_step(step: TrainStep, *, compiled: bool, whole: bool = False) -> TorchStep:
    """A step of PyTorch on the example inputs of `step`; the arguments are those of `stepper`."""
    module = StepModule(step)
    if not step.model.training:
        module.train()
    values = tuple(step.inputs.values())
    return stepper(step, lambda: module(*values), compiled=compiled, whole=whole)


def stepper(step: TrainStep, loss_of: Callable[[], Tensor], *, compiled: bool, whole: bool = False) -> TorchStep:
    """A step of PyTorch with the optimizers of `step`, whose loss `loss_of` computes.

    Args:
        step: gives the optimizers and the clipping.
        loss_of: runs the model and its loss.
        compiled: whether torch.compile compiles the model with its loss, and the update.
        whole: whether it fails where it would run a part of the model eagerly.
    """
    held = step.trained

    def clear() -> None:
        for optimizer in step.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def update() -> None:
        if step.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(held, step.clip_grad_norm)
        for optimizer in step.optimizers:
            optimizer.step()

    if compiled:
        loss_of, update = torch.compile(loss_of, fullgraph=whole), torch.compile(update)

    def run() -> float:
        clear()
        loss = loss_of()
        loss.backward()
        update()
        return float(loss.detach())

    return TorchStep(run, clear)


def check_comparable(step: TrainStep) -> None:
    """Refuse a step of which PyTorch and XLA would run only a part.

    Raises:
        UserError: names the field.
    """
    given = [name for name in _OURS if getattr(step, name)]
    given += ["accumulate"] if step.accumulate > 1 else []
    given += ["precision"] if step.precision == "f16" else []
    if given:
        raise UserError(
            f"{step.made_at}: a step with {' and '.join(given)} cannot be compared, for the other compilers would run "
            "only a part of it. Compare the step without it"
        )
