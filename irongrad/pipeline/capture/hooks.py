"""Hooks of the user's objects: which are compiled into the step, and a refusal by name for all others.

A hook on a parameter's gradient is a function of tensors, and so is one around the optimizer's update: both are traced
where they run. A hook on the backward of a module or of a tensor inside the forward runs between two operators of the
backward, which AOTAutograd derives on its own; it would be lost, so it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from irongrad.diagnostics.source_lines import is_user_file
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.step.borrow import unchanged
from irongrad.step.train_step import TrainStep

_BACKWARD = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}
_GLOBAL = {"_global_backward_hooks": "global backward hook", "_global_backward_pre_hooks": "global backward pre-hook"}
_OF_ALL_OPTIMIZERS = {"_global_optimizer_pre_hooks": "pre-hook", "_global_optimizer_post_hooks": "post-hook"}


def spelled(hook: Callable[..., Any]) -> str:
    """`file:line: name` of a hook, as far as it is known."""
    function: Any = hook
    while True:
        if isinstance(function, partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{code.co_filename}:{code.co_firstlineno}: {name}" if code is not None else name


def refuse_hooks(step: TrainStep) -> None:
    """Refuse hooks that a compiled backward would lose.

    Raises:
        CaptureError: there is one; with its kind, its place, its name, and the hook's file and line.
    """
    roots: list[tuple[str, nn.Module]] = [("model", step.model)]
    if isinstance(step.loss, nn.Module):
        roots.append(("loss", step.loss))
    for root, module in roots:
        for path, submodule in module.named_modules():
            place = f"{root}.{path} ({type(submodule).__name__})" if path else f"{root} ({type(submodule).__name__})"
            for attribute, kind in _BACKWARD.items():
                for hook in getattr(submodule, attribute).values():
                    _refuse(hook, f"{kind} of {place}")
    for attribute, kind in _GLOBAL.items():
        for hook in getattr(torch_module, attribute).values():
            _refuse(hook, f"{kind} of all modules")
    for attribute, kind in _OF_ALL_OPTIMIZERS.items():
        for hook in getattr(torch_optimizer, attribute).values():
            _refuse(hook, f"{kind} of all optimizers")


def _refuse(hook: Callable[..., Any], what: str) -> NoReturn:
    raise CaptureError(
        f"{spelled(hook)}\n  a {what} cannot be compiled: the compiled backward would not call it. Write what it "
        "does in a torch.autograd.Function inside the forward, or as a gradient hook of parameters "
        "(parameter.register_hook)"
    )


@contextmanager
def refused_in_forward() -> Iterator[None]:
    """While open, a forward that puts a hook on a tensor, or on what autograd saves, raises CaptureError."""

    def register(tensor: torch.Tensor, hook: Callable[..., Any]) -> NoReturn:
        _refuse(hook, "gradient hook of a tensor inside the forward")

    enter = saved_tensors_hooks.__enter__

    def checked(self: Any) -> None:
        for hook in (self.pack_hook, self.unpack_hook):
            if is_user_file(getattr(hook, "__code__", _unknown.__code__).co_filename):
                _refuse(hook, "saved-tensors hook")
        enter(self)

    with (
        mock.patch.object(torch.Tensor, "register_hook", register),
        mock.patch.object(saved_tensors_hooks, "__enter__", checked),
    ):
        yield


def _unknown() -> None:
    """Stands for a hook without code of its own."""


@dataclass(frozen=True)
class GradientHook:
    """The hooks of one parameter's gradient, traced.

    Attributes:
        graph: takes the gradient and the parameter, and returns the gradient that the optimizer sees.
        constants: other tensors that the hooks read, by the name under which `graph` has them.
    """

    graph: GraphModule
    constants: Mapping[str, torch.Tensor]


def gradient_hooks(parameters: Mapping[str, nn.Parameter], accumulate: int) -> dict[str, GradientHook]:
    """Trace the gradient hooks and the post-accumulate hooks of parameters.

    Args:
        parameters: by name.
        accumulate: the number of micro-batches in a step.

    Raises:
        CaptureError: a hook does more than change the gradient: a decision on its values, a change of a Python object
            or of a parameter, or a post-accumulate hook with several micro-batches.
    """
    found: dict[str, GradientHook] = {}
    for name, parameter in parameters.items():
        before = list((parameter._backward_hooks or {}).values())
        after = list((parameter._post_accumulate_grad_hooks or {}).values())
        if after and accumulate > 1:
            _refuse(after[0], f"post-accumulate hook of the parameter {name!r} with accumulate={accumulate}")
        if before or after:
            found[name] = _traced(name, parameter, before, after)
    return found


def _traced(
    name: str, parameter: nn.Parameter, before: Sequence[Callable[..., Any]], after: Sequence[Callable[..., Any]]
) -> GradientHook:
    def run(gradient: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        for hook in before:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if not after:
            return [gradient]
        value.grad = gradient.clone()
        for hook in after:
            hook(value)
        if value.grad is None:
            _refuse(after[-1], f"post-accumulate hook of the parameter {name!r} that drops the gradient")
        return [value.grad]

    hooks = [*before, *after]
    what = f"gradient hook of the parameter {name!r}"
    example = torch.zeros_like(parameter, requires_grad=False)
    try:
        with unchanged(hooks) as record, torch.no_grad():
            graph = make_fx(torch.func.functionalize(run), tracing_mode="fake", _allow_non_fake_inputs=True)(
                example, parameter.detach().clone()
            )
            if changed := record.changed():
                raise CaptureError(f"it changes {changed}, a Python value, which would happen once, at capture")
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, UserError) and "cannot be compiled" in reason:
            raise
        raise CaptureError(f"{spelled(hooks[0])}\n  the {what} cannot be compiled: {reason}") from error
    constants = {str(n.target): getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"}
    return GradientHook(graph, constants)
