"""Record the derivatives that a model or a loss computes itself: calls of `torch.autograd.grad` and of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C import _DisableFuncTorch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch import eager_transforms, predispatch, vmap
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    _fetch_proxies_and_all_constant_flag,
    disable_proxy_modes_tracing,
    snapshot_fake,
    track_tensor_tree,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from irongrad.graph.derivatives import LEVEL_CALLS, Call, gradients, tracked
from irongrad.pipeline.capture.module_calls import around_calls

T = TypeVar("T")


# The tracer that calls the module; within it, loops and branches are traced by others, which differentiate themselves.
_TRACER: ContextVar[Any] = ContextVar("tracer", default=None)


@contextmanager
def recorded_derivatives(module: nn.Module) -> Iterator[None]:
    """While open, a trace of torch.export records the derivatives that `module` computes."""

    def begin(module: nn.Module, inputs: object) -> None:
        mode = _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
        _TRACER.set(mode.tracer if mode is not None else None)

    def end(module: nn.Module, inputs: object, output: object) -> None:
        _TRACER.set(None)

    replaced: dict[tuple[Any, str], Callable[..., Any]] = {
        (torch.autograd, "_engine_run_backward"): _run_engine,
        (torch.autograd._vmap_internals, "_vmap"): _for_each,
        (vmap, "lazy_load_decompositions"): lambda: None,
        (proxy_tensor, "snapshot_fake"): _snapshot,
    }
    for name, call in LEVEL_CALLS.items():
        owners = (owner for owner in (predispatch, eager_transforms, vmap) if hasattr(owner, name))
        replaced |= {(owner, name): partial(_recorded, call) for owner in owners}
    predispatch.lazy_load_decompositions()
    with ExitStack() as stack:
        for (owner, name), replacement in replaced.items():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_Tracked())
        stack.enter_context(around_calls(module, begin, end))
        yield


# In the errors of autograd.grad, and of retain_grad, where gradients are disabled.
_NEEDS_GRADIENTS = ("does not require grad", "requires_grad=False")


def evaluated(run: Callable[[], T]) -> T:
    """Run an evaluation under `torch.no_grad`, as users do, or with gradients if it asks for derivatives itself."""
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if not any(words in str(error) for words in _NEEDS_GRADIENTS):
            raise
    with torch.enable_grad():
        return run()


_FOLLOWS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)


class _Tracked(TorchFunctionMode):
    """While open, a trace records from where on autograd follows a tensor that the traced code says it should."""

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ):
        result = func(*args, **(kwargs or {}))
        if func in _FOLLOWS and args[0].requires_grad and not is_functorch_wrapped_tensor(args[0]):
            _recorded(tracked, args[0])
        return result


def _run_engine(
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor],
    allow_unused: bool,
    accumulate_grad: bool,
) -> tuple[Tensor | None, ...]:
    """Record what `torch.autograd.grad` computes."""
    found: tuple[Tensor | None, ...] = _recorded(gradients, outputs, inputs, weights, create_graph)
    if not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return found


def _snapshot(tensor: Tensor, include_real: bool = False) -> Tensor | None:
    """What a node says of its value; of a tensor inside `torch.func`, the tensor that lies below all levels."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    with _DisableFuncTorch():  # an open level would wrap the result
        return snapshot_fake(tensor, include_real)


def _for_each(
    function: Callable[[Any], Any], in_dims: int, out_dims: int, allow_none_pass_through: bool
) -> Callable[[Any], Any]:
    """What `is_grads_batched=True` computes in one call, row by row."""

    def run(batch: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        rows = [function(tuple(row)) for row in zip(*(t.unbind(0) for t in batch), strict=True)]
        return tuple(None if same[0] is None else torch.stack(same) for same in zip(*rows, strict=True))

    return run


def _recorded(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Run `call`, and add it to the graph of the trace of the module, if that is what traces."""
    mode = _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or mode.tracer is not (tracer := _TRACER.get()):
        return call(*args, **kwargs)
    leaves, structure = tree_flatten(args)
    _, proxies, _ = _fetch_proxies_and_all_constant_flag(leaves, tracer)
    made = tracer.create_proxy("call_function", call, tree_unflatten(proxies, structure), kwargs)
    with disable_proxy_modes_tracing():
        result = call(*args, **kwargs)
        track_tensor_tree(result, made, constant=None, tracer=tracer)
    return result
