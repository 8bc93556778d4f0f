"""Copies of a step for eager runs, which leave the user's own step unchanged."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import CellType, FunctionType

import torch
from torch import nn

from irongrad.step.train_step import TrainStep


def twin_of(step: TrainStep, dtype: torch.dtype | None) -> TrainStep:
    """Return a deep copy of the step.

    Args:
        step: the step.
        dtype: the dtype of the copy's floating-point parameters, buffers and optimizer state; None keeps their own.
    """
    memo: dict[int, object] = {}
    model, optimizers = copy.deepcopy(step.model, memo), copy.deepcopy(list(step.optimizers), memo)
    loss = _rebound(step.loss, memo) if isinstance(step.loss, FunctionType) else copy.deepcopy(step.loss, memo)
    if dtype is not None:
        for optimizer in optimizers:
            _cast_optimizer(optimizer, dtype)
        model.to(dtype)
        if isinstance(loss, nn.Module):
            loss.to(dtype)
    return replace(step, model=model, loss=loss, optimizer=optimizers)


def _rebound(function: FunctionType, memo: dict[int, object]) -> FunctionType:
    """A copy of `function` that uses the copies in `memo`; it may refer to the model (to penalise its weights)."""
    outside = {n: memo.get(id(v), v) for n, v in function.__globals__.items()}
    cells = tuple(CellType(memo.get(id(c.cell_contents), c.cell_contents)) for c in function.__closure__ or ())
    twin = FunctionType(function.__code__, outside, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _cast_optimizer(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.to(dtype)
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adafactor) and group["eps"][0] is None:
            # None means the epsilon of the parameters' dtype. The copy keeps the epsilon of the compiled step's dtype.
            group["eps"] = (torch.finfo(group["params"][0].dtype).eps, group["eps"][1])
