"""Checks of the kinds of a `TrainStep`'s arguments, each with the way to give the right kind."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from irongrad.quantisation.torchao import is_torchao
from irongrad.runtime.errors import CaptureError


def check_kinds(model: Any, loss: Any, optimizer: Any, inputs: Any) -> None:
    """Refuse arguments of other kinds than `TrainStep` names.

    Raises:
        CaptureError: with the argument, what it is, and what to give instead.
    """
    _check_model(model)
    _check_loss(loss)
    _check_optimizer(optimizer)
    if not isinstance(inputs, Mapping):
        raise CaptureError(
            f"inputs is a {_kind(inputs)}; it must be a dictionary of names and tensors, such as "
            "inputs={'x': x, 'y': y}"
        )
    if not inputs:
        raise CaptureError("inputs is empty: give an example batch, such as inputs={'x': x, 'y': y}")
    for name, value in inputs.items():
        check_input(name, value)
    _refuse_empty(inputs)


def outside_inference(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with a copy of each that was made under `torch.inference_mode`, which autograd does not take."""
    with torch.inference_mode(False):
        return {name: t.clone() if t.is_inference() else t for name, t in tensors.items()}


def _check_model(model: Any) -> None:
    if isinstance(model, type):
        raise CaptureError(f"model is the class {model.__qualname__}; it must be a module: call the class first")
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"model is a {_kind(model)}; it must be a torch.nn.Module. Write the function as the forward of a module "
            "that holds its layers, so that their parameters are found"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name!r} of the model has no shape yet, because its lazy module was never called. Call the model "
                "once on an example batch, then make the optimizer from its parameters"
            )
        if tensor.device.type == "meta":
            raise CaptureError(
                f"{name!r} of the model is on the device 'meta' and has no values. Give it values before: "
                "model.to_empty(device='cpu'), then initialise or load the model"
            )
        if is_torchao(tensor):
            raise CaptureError(
                f"{name!r} of the model is a {type(tensor).__name__} of torchao. Take its numbers before: "
                "irongrad.quantize(model)"
            )
    for path, module in model.named_modules():
        own = {**vars(module), **module._parameters, **module._buffers}
        if name := next((n for n, v in own.items() if isinstance(v, torch.Tensor) and v.is_inference()), None):
            raise CaptureError(
                f"{f'{path}.{name}'.removeprefix('.')!r} of the model was made under torch.inference_mode, and "
                "autograd does not take such a tensor. Make it outside, or under torch.no_grad"
            )


def check_limits(limits: Mapping[str, Any]) -> None:
    """Refuse limits of gradients that are no positive numbers: zero would stop training, and -1 would reverse it.

    Raises:
        CaptureError: with the argument and its value.
    """
    for name, limit in limits.items():
        is_number = isinstance(limit, Real) and not isinstance(limit, bool)
        if limit is not None and not (is_number and float(limit) > 0):
            raise CaptureError(f"{name} is {limit!r}; it must be a positive number. Without clipping, leave it out")


def check_modules(modules: Any, model: nn.Module) -> None:
    """Refuse modules beside the model that are none, or whose names the model uses.

    Raises:
        CaptureError: with the module's name.
    """
    if not isinstance(modules, Mapping):
        raise CaptureError(f"modules is a {_kind(modules)}; it must be a dictionary, such as {{'target': target}}")
    taken = names_taken(model)
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise CaptureError(f"modules[{name!r}] is a {_kind(module)}; it must be a torch.nn.Module")
        if not (isinstance(name, str) and name.isidentifier()):
            raise CaptureError(f"modules has the name {name!r}; it must be an identifier, such as 'target'")
        if name in taken:
            raise CaptureError(f"modules has the name {name!r}, which a part of the model has, too; rename it")


def names_taken(model: nn.Module) -> set[str]:
    """The names that no module beside the model can have: those of its parts, and of the model and the loss."""
    parts = {name for name, _ in (*model.named_children(), *model.named_parameters(), *model.named_buffers())}
    return {*parts, "model", "loss"}


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type):
        raise CaptureError(f"loss is the class {loss.__qualname__}; call it first: loss={loss.__qualname__}()")
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"loss is a {_kind(loss)}; it must be a function, such as torch.nn.functional.cross_entropy, a module, or "
            "None for a model that returns its own loss"
        )


def _check_optimizer(optimizer: Any) -> None:
    for one in optimizer if isinstance(optimizer, Sequence) else (optimizer,):
        if isinstance(one, torch.optim.Optimizer):
            _check_epsilon(one)
            continue
        if one is None or inspect.isfunction(one) or isinstance(one, type):
            advice = "Make it from the model's parameters first: torch.optim.SGD(model.parameters(), lr=0.1)"
        elif isinstance(one, torch.optim.lr_scheduler.LRScheduler):
            advice = (
                "A scheduler runs outside of the step, and its rate is an argument of train_step: give the optimizer "
                "that it schedules"
            )
        else:
            advice = (
                "If it wraps one, the wrapper's own rule cannot be compiled: use an optimizer that has both in its step"
            )
        raise CaptureError(f"optimizer is a {_kind(one)}; it must be a torch.optim.Optimizer. {advice}")


def _check_epsilon(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an epsilon that is zero in the parameters' dtype: eager divides zero gradients by zero, too."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or not eps:
            continue
        for dtype in {p.dtype for p in group["params"] if p.is_floating_point()}:
            if not torch.tensor(eps, dtype=dtype):
                raise CaptureError(
                    f"eps of {type(optimizer).__name__} is {eps}, which is 0 in {dtype}, the dtype of its parameters: "
                    "a gradient of zero would be divided by zero. Set eps=1e-4, or keep the parameters in float32 and "
                    "set precision='f16'"
                )


def check_input(name: Any, value: Any) -> None:
    """Refuse an example input that is no tensor with values, or whose name cannot be an argument's.

    Raises:
        CaptureError: with the input, what it is, and what to give instead.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise CaptureError(f"input name {name!r} is not an identifier; it becomes an argument of the entry points")
    if name == "self":
        raise CaptureError("an input has the name 'self', which Python's methods give to their object; rename it")
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"input {name!r} is a {_kind(value)}, not a torch.Tensor. {_advice(name, value)}")
    if value.device.type == "meta":
        raise CaptureError(
            f"input {name!r} is on the device 'meta' and has no values, which verify the step. Give an example batch"
        )


def _refuse_empty(inputs: Mapping[str, Any]) -> None:
    """Refuse an example without elements. An index may be empty beside other inputs, if nothing is looked up."""
    for name, value in inputs.items():
        if not value.numel() and (value.is_floating_point() or not any(v.numel() for v in inputs.values())):
            raise CaptureError(
                f"input {name!r} has shape {tuple(value.shape)}, and so no elements: nothing would verify the step, "
                "and most losses are NaN. Give an example batch with elements"
            )


def _advice(name: str, value: Any) -> str:
    if type(value).__module__ == "numpy":
        return f"Convert it: torch.from_numpy({name})"
    if isinstance(value, Mapping) or (isinstance(value, tuple | list) and _holds_tensors(value)):
        parts = list(value) if isinstance(value, Mapping) else [f"{name}_{i}" for i in range(len(value))]
        return f"Make each of its tensors an input of its own, such as {', '.join(map(repr, parts[:3]))}"
    if value is None:
        return "Leave it out, or give a tensor"
    if isinstance(value, str):
        return "A step computes on numbers: encode it before, or bind it in the model"
    if isinstance(value, tuple | list):
        return f"Convert it: torch.tensor({name})"
    return (
        "A Python number would become a constant of the compiled step: pass torch.tensor(...) to keep it an input, or "
        "bind it in the model"
    )


def _holds_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(v, torch.Tensor) for v in values)


def _kind(value: Any) -> str:
    return f"class ({value.__qualname__})" if isinstance(value, type) else type(value).__name__
