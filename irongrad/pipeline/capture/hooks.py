"""Hooks of the user's objects: which are compiled into the step, and a refusal by name for all others.

A hook on a parameter's gradient is a function of tensors, and so is one around the optimizer's update: both are traced
where they run. A hook on the backward of a module or of a tensor inside the forward runs between two operators of the
backward, which AOTAutograd derives on its own; it would be lost, so it is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType, FunctionType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from irongrad.diagnostics.source_lines import is_user_file, source_line, where
from irongrad.pipeline.capture.profiled import profiled
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.step.borrow import unchanged
from irongrad.step.train_step import TrainStep

_BACKWARD = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}
_GLOBAL = {"_global_backward_hooks": "global backward hook", "_global_backward_pre_hooks": "global backward pre-hook"}
_LOST = "the compiled backward would not call it"
_WAY_OUT = (
    "Write what it does in a torch.autograd.Function inside the forward, or as a gradient hook of parameters "
    "(parameter.register_hook)"
)
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
    if code is not None and not is_user_file(code.co_filename) and (inner := _users_function(function)):
        function, code = inner, inner.__code__  # a library wraps the user's hook, as register_multi_grad_hook does
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{code.co_filename}:{code.co_firstlineno}: {name}" if code is not None else name


def _users_function(function: Any) -> FunctionType | None:
    """The user's own function among the variables of a library's function."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a variable without a value yet
            if isinstance(cell.cell_contents, FunctionType) and is_user_file(cell.cell_contents.__code__.co_filename):
                return cell.cell_contents
    return None


def untraceable(error: Exception) -> str:
    """Why a hook, or an optimizer's code, cannot be traced, in the words of an error; the first line of others."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    if "data-dependent" in reason:
        return "it decides on the value of a tensor or of a counter, which is not known at compile time"
    if "non-functional tensor" in str(error):
        return (
            "it writes into a tensor that is neither a parameter in the optimizer nor in its state. Write into buffers "
            "of the model in its forward"
        )
    if "inside a backward call" in reason:
        return (
            "it waits for the gradients of several tensors (register_multi_grad_hook), and a compiled step calls each "
            "hook with one gradient. Write it as a gradient hook of each parameter, or as a hook of the optimizer"
        )
    if isinstance(error, KeyError):
        return (
            "it looks up a tensor in a dictionary (KeyError), and a trace has another tensor in its place. Bind what "
            "belongs to each parameter when the hook is registered; a hook that runs an optimizer can be left out, for "
            "the compiled step updates after the backward"
        )
    return reason


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
    _refuse_accumulators(step)
    for optimizer in step.optimizers:
        _refuse_own_step(optimizer)
    for attribute, kind in _GLOBAL.items():
        for hook in getattr(torch_module, attribute).values():
            _refuse(hook, f"{kind} of all modules")
    for attribute, kind in _OF_ALL_OPTIMIZERS.items():
        for hook in getattr(torch_optimizer, attribute).values():
            _refuse(hook, f"{kind} of all optimizers")


def _refuse_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose `step` the user has replaced; a scheduler's wrapper around it only counts."""
    own = vars(optimizer).get("step")
    if own is None:
        return
    function = getattr(inspect.unwrap(own), "__func__", inspect.unwrap(own))
    if is_user_file(getattr(function, "__code__", _unknown.__code__).co_filename):
        name = type(optimizer).__name__
        raise CaptureError(
            f"{spelled(own)}\n  the step of this {name} is replaced by another function, which a compiled update does "
            f"not call. Write it as a subclass of {name}, or as a hook (optimizer.register_step_pre_hook)"
        )


def _refuse(hook: Callable[..., Any], what: str) -> NoReturn:
    raise CaptureError(f"{spelled(hook)}\n  a {what} cannot be compiled: {_LOST}. {_WAY_OUT}")


@contextmanager
def refused_in_forward() -> Iterator[None]:
    """While open, a forward that puts a hook on a tensor, or on what autograd saves, raises CaptureError."""

    def register(tensor: torch.Tensor, hook: Callable[..., Any]) -> NoReturn:
        _refuse(hook, "gradient hook of a tensor inside the forward")

    push = torch._C._autograd._push_saved_tensors_default_hooks

    def checked(*hooks: Callable[..., Any]) -> None:
        for hook in hooks:
            if is_user_file(getattr(hook, "__code__", _unknown.__code__).co_filename):
                _refuse(hook, "saved-tensors hook")
        push(*hooks)

    with (
        mock.patch.object(torch.Tensor, "register_hook", register),
        mock.patch.object(torch.Tensor, "retain_grad", _keep_nothing),
        mock.patch.object(torch._C._autograd, "_push_saved_tensors_default_hooks", checked),
    ):
        yield


def _keep_nothing(tensor: torch.Tensor) -> None:
    """Stands for `retain_grad`, which only keeps a gradient for Python to read later."""


class NodeHooks:
    """Finds a hook that the forward puts on a node of autograd's graph (`tensor.grad_fn`), which no tensor shows."""

    def __init__(self) -> None:
        self._place = ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While open, note a call that registers such a hook in this thread."""
        with profiled(self._seen):
            yield

    def _seen(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or getattr(called, "__name__", "") not in ("register_hook", "register_prehook"):
            return
        path, is_node = frame.f_code.co_filename, isinstance(getattr(called, "__self__", None), Node)
        if is_node and is_user_file(path) and not self._place:
            self._place = source_line(path, frame.f_lineno)

    def refuse(self) -> None:
        """Refuse the hook, if there is one.

        Raises:
            CaptureError: with the line that registers it.
        """
        if self._place:
            raise CaptureError(
                f"{self._place}\n  a hook of an autograd node (grad_fn) cannot be compiled: {_LOST}. {_WAY_OUT}"
            )


def _refuse_accumulators(step: TrainStep) -> None:
    """Refuse nodes that accumulate a parameter's gradient, if Python holds them: they may have hooks, as in DDP."""
    # register_multi_grad_hook holds such nodes, too; it is refused as a hook of the parameters.
    known = {name: p for name, p in step.model.named_parameters() if not p._backward_hooks}
    with torch._C.DisableTorchFunctionSubclass():  # a parameter without a shape yet, of a lazy module, allows nothing
        unheld = _references(torch.zeros(()))
        held = [name for name, p in known.items() if _may_accumulate(p) and _references(p) > unheld]
    if held:
        raise CaptureError(
            f"{where(step.model)}\n  a Python object holds the node that accumulates the gradient of {held[0]!r} "
            f"(AccumulateGrad). A hook on it cannot be compiled: {_LOST}. {_WAY_OUT}. Without a hook, hold no such node"
        )


def _may_accumulate(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a gradient of its own, now or once it is no longer frozen."""
    has_gradient = tensor.is_floating_point() or tensor.is_complex()
    return tensor.is_leaf and has_gradient and not tensor.is_inference()


class _Reading(torch.autograd.Function):
    """A function of any tensor, also of a sparse one. Its node in autograd's graph leads to that of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor."""
        return torch.empty(0)


def _references(leaf: torch.Tensor) -> int:
    """Count Python's references to the node that accumulates a tensor's gradient, with the one of this function.

    A node has at most one Python object. If Python holds none, it is made here.
    """
    required = leaf.requires_grad
    try:
        with torch.enable_grad():
            reading = _Reading.apply(leaf.requires_grad_())
        return sys.getrefcount(reading.grad_fn.next_functions[0][0])
    finally:
        leaf.requires_grad_(required)


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
        gradient, value = gradient.clone(), value.clone()  # a hook may write into them
        for hook in before:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if not after:
            return [gradient, value]
        value.grad = gradient.clone()
        for hook in after:
            hook(value)
        if value.grad is None:
            _refuse(after[-1], f"post-accumulate hook of the parameter {name!r} that drops the gradient")
        return [value.grad, value]

    hooks = [*before, *after]
    what = f"gradient hook of the parameter {name!r}"
    example = torch.zeros_like(parameter, requires_grad=False)
    try:
        with unchanged(hooks) as record, torch.no_grad(), _no_update_in(hooks[-1], what):
            graph = make_fx(torch.func.functionalize(run), tracing_mode="fake", _allow_non_fake_inputs=True)(
                example, parameter.detach().clone()
            )
            if changed := record.changed():
                raise CaptureError(f"it changes {changed}, a Python value, which would happen once, at capture")
    except Exception as error:
        if isinstance(error, UserError) and "cannot be compiled" in str(error):
            raise
        raise CaptureError(f"{spelled(hooks[0])}\n  the {what} cannot be compiled: {untraceable(error)}") from error
    _keep_gradient(graph, hooks[-1], what)
    constants = {str(n.target): getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"}
    return GradientHook(graph, constants)


@contextmanager
def _no_update_in(hook: Callable[..., Any], what: str) -> Iterator[None]:
    """While open, a step of an optimizer raises CaptureError."""

    def refuse(*arguments: object) -> NoReturn:
        raise CaptureError(
            f"{spelled(hook)}\n  the {what} cannot be compiled: it runs the optimizer. A compiled step has one update, "
            "after the whole backward: give the optimizer to TrainStep, and leave the hook out"
        )

    handle = torch_optimizer.register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _keep_gradient(graph: GraphModule, hook: Callable[..., Any], what: str) -> None:
    """Leave only the gradient among the results of a traced hook, which returns the parameter, too.

    Raises:
        CaptureError: the hook changes the parameter.
    """
    output = graph.graph.output_node()
    gradient, value = output.args[0]
    if value.target is not torch.ops.aten.clone.default or value.args[0].op != "placeholder":
        raise CaptureError(
            f"{spelled(hook)}\n  the {what} cannot be compiled: it writes into the parameter. A step has one update, "
            "after the whole backward: give the optimizer to TrainStep, and change only the gradient here"
        )
    output.args = ([gradient],)
    graph.graph.eliminate_dead_code()
    graph.recompile()
