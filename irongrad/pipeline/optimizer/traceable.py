"""Stand-ins for functions of torch that make_fx or functionalize cannot trace in an optimizer's update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

# In-place functions that have no functional ATen twin in torch 2.13, and those that do the same and have one.
_TWINS = {
    "absolute_": "abs_",
    "clip_": "clamp_",
    "divide_": "div_",
    "multiply_": "mul_",
    "negative_": "neg_",
    "subtract_": "sub_",
    "true_divide_": "div_",
}


def _for_each(name: str, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """A `torch._foreach` function, tensor by tensor: its operators take no symbolic number."""

    def of(value: Any, position: int) -> Any:
        is_list = isinstance(value, (list, tuple)) and len(value) == len(tensors)
        return value[position] if is_list else value

    results = []
    for i, tensor in enumerate(tensors):
        own, named = [of(a, i) for a in args], {k: of(v, i) for k, v in kwargs.items()}
        if name == "norm":
            results.append(torch.linalg.vector_norm(tensor, *own))
        elif hasattr(torch.Tensor, name):
            results.append(getattr(tensor, name)(*own, **named))
        else:
            others = [torch.full((), o) if isinstance(o, float | torch.SymFloat) else o for o in own]
            results.append(tensor.copy_(getattr(torch, name.removesuffix("_"))(tensor, *others, **named)))
    return None if name.endswith("_") else results


class TraceableFunctions(TorchFunctionMode):
    """Replaces functions that functionalize refuses.

    `Tensor.square_` has no functional ATen twin in torch 2.13, and the result of `Tensor.data` is not traced.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.square_:
            return args[0].mul_(args[0])
        if func is torch.Tensor.data.__get__:
            return args[0].detach()
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_"):
            return _for_each(name.removeprefix("_foreach_"), *args, **(kwargs or {}))
        if name in _TWINS and args and isinstance(args[0], torch.Tensor):
            func = getattr(torch.Tensor, _TWINS[name])
        return func(*args, **(kwargs or {}))


@contextmanager
def traceable_optimizers() -> Iterator[None]:
    """While open, torch.optim's Python code keeps symbolic values symbolic.

    `is_compiling` makes it keep step counts as tensors. The builtins `min`, `max` and `float` in Adafactor and in
    gradient clipping would force a decision or a constant, so they are replaced.
    """
    from torch.optim import _adafactor

    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.compiler.is_compiling", return_value=True))
        # A subclass that calls super().step() enters it, for the profiler.
        stack.enter_context(mock.patch("torch.autograd.profiler.record_function", nullcontext))
        stack.enter_context(mock.patch.object(_adafactor, "min", torch.sym_min, create=True))
        stack.enter_context(mock.patch.object(_adafactor, "max", torch.sym_max, create=True))
        stack.enter_context(mock.patch.object(clip_grad, "float", lambda x: x, create=True))
        yield
