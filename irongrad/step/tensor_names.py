"""The names that the tensors of the user's modules have in the state of a step, or of several."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from irongrad.step.steps import Steps
from irongrad.step.train_step import TrainStep


def named_tensors(step: TrainStep, *, beside: bool = True) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a step's modules, by name; a tied tensor by the first of its names.

    Args:
        step: the step.
        beside: whether to include `TrainStep.modules`, and an `AveragedModel` of `after_step`.
    """
    parts = {"": step.model}
    if isinstance(step.loss, nn.Module):
        parts["loss."] = step.loss
    if beside:
        parts |= {f"{name}.": module for name, module in step.modules.items()}
    parameters = [(p + n, t) for p, m in parts.items() for n, t in m.named_parameters(remove_duplicate=False)]
    buffers = [(p + n, t) for p, m in parts.items() for n, t in m.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {n: t for n, t in (*parameters, *buffers) if first.setdefault(id(t), n) == n}


def joined_names(steps: Mapping[str, TrainStep]) -> dict[int, str]:
    """The names of tensors in the state of several steps, by the tensors' ids.

    A tensor has its name in the model of the first step whose model holds it. The step's name is before it, unless all
    steps have the same model.
    """
    is_one_model = len({id(step.model) for step in steps.values()}) == 1
    names: dict[int, str] = {}
    taken: set[str] = set()
    of_models = [(name, named_tensors(step, beside=False)) for name, step in steps.items()]
    for step_name, own in [*of_models, *((name, named_tensors(step)) for name, step in steps.items())]:
        for path, tensor in own.items():
            if id(tensor) in names:
                continue
            name = path if is_one_model and path not in taken else f"{step_name}.{path}"
            names[id(tensor)] = name
            taken.add(name)
    return names


def state_tensors(step: TrainStep | Steps) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a step's modules, or of several steps', by their names in the state."""
    if isinstance(step, TrainStep):
        return named_tensors(step)
    names = joined_names(step.steps)
    return {names[id(tensor)]: tensor for own in step.steps.values() for tensor in named_tensors(own).values()}
