"""Hooks around an optimizer's step: they are traced with it, and refused if they do more than compute with tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from irongrad.pipeline.capture.hooks import spelled
from irongrad.pipeline.capture.side_effects import plain_values_outside
from irongrad.runtime.errors import CaptureError
from irongrad.step.borrow import Record
from irongrad.step.train_step import TrainStep


@contextmanager
def in_modules(step: TrainStep, names: Mapping[int, str], fresh: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While open, the model's modules have the traced parameters: a hook may reach them there."""
    if not any(map(hooks_of, step.optimizers)):
        yield
        return
    for module in step.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and names.get(id(parameter), "") in fresh:
                module._parameters[name] = fresh[names[id(parameter)]]
    yield


def hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks before and after the optimizer's step."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def step_with_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's step between its hooks, as the wrapper of torch.optim does."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if _called(hook, optimizer) is not None:
            raise CaptureError(f"{spelled(hook)}\n  a pre-hook of {type(optimizer).__name__} changes step's arguments")
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)
    for hook in optimizer._optimizer_step_post_hooks.values():
        _called(hook, optimizer)


def _called(hook: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    """Call a hook of an optimizer.

    Raises:
        CaptureError: it changes a hyperparameter or another Python value.
    """
    before, record = [dict(group) for group in optimizer.param_groups], Record([hook])
    result = hook(optimizer, (), {})
    what = type(optimizer).__name__
    for number, (held, group) in enumerate(zip(before, optimizer.param_groups, strict=True)):
        if changed := [k for k in group if k != "params" and group[k] is not held.get(k)]:
            raise CaptureError(
                f"{spelled(hook)}\n  a hook of {what} changes {changed[0]!r} of parameter group {number}, a Python "
                "value, which would happen once, at capture. Hyperparameters are arguments of the compiled step: "
                "compute them between steps, and pass them to train_step"
            )
    if changed_value := record.changed():
        raise CaptureError(
            f"{spelled(hook)}\n  a hook of {what} changes {changed_value}, a Python value, which would happen once, at "
            "capture. Compute with tensors alone"
        )
    return result


@contextmanager
def without_side_effects(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """While open, a hook that changes a Python value, which would happen once at capture, raises CaptureError."""
    hooks = [(o, hook) for o in optimizers for hook in hooks_of(o)]
    before = [plain_values_outside(hook) for _, hook in hooks]
    yield
    for (optimizer, hook), values in zip(hooks, before, strict=True):
        if changed := [n for n, v in plain_values_outside(hook).items() if values.get(n) != v]:
            raise CaptureError(
                f"{spelled(hook)}\n  a hook of {type(optimizer).__name__} changes {changed[0]}, a Python value, which "
                "would happen once, at capture. Compute with tensors alone"
            )
