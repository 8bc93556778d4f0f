"""Run the user's code in eager float64, although it asks for float32 or leaves the dtype out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@contextmanager
def eager_float64() -> Iterator[None]:
    """While open, this thread computes in float64.

    Where code asks for float32 by name, it gets float64. Where code makes a tensor of the default dtype, float32, from
    numbers or integers, that tensor is widened: `torch.ones(3)`, `torch.rand(3)`, `labels / 2`. Its elements are those
    that the step has. The functions in `_FORMS` accept float64.

    The default dtype itself stays: it belongs to all threads, and others compile meanwhile.
    """
    with _Float64(), _Float64OfOperators():
        yield


class _Float64(TorchFunctionMode):
    """Widens what PyTorch's functions are asked for and return, also where they call no operator."""

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ):
        args, kwargs = _all_wider(args, kwargs)
        form = _FORMS.get(func)
        if form is not None and args[0].dtype is torch.float64:
            return form(*args, **kwargs)
        return _widened(_NAMED.get(func, func)(*args, **kwargs), (args, kwargs))


class _Float64OfOperators(TorchDispatchMode):
    """Widens operators that no function mode sees: autograd runs hooks, backwards and checkpoints without one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        args, kwargs = _all_wider(args, kwargs)
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        return _widened(func(*args, **kwargs), given)


def _all_wider(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_wider, args)), {name: _wider(value) for name, value in (kwargs or {}).items()}


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _widened(result: Any, given: object) -> Any:
    """Widen a result that is narrow although no tensor that it was computed from is."""
    if not isinstance(result, Tensor) or result.dtype not in _WIDER:
        return result
    if any(isinstance(g, Tensor) and g.dtype in _WIDER for g in tree_leaves(given)):
        return result
    return result.detach().to(_WIDER[result.dtype]).requires_grad_(result.requires_grad)


def _grouped_mm(x: Tensor, y: Tensor, *, offs: Tensor | None = None, **kwargs: object) -> Tensor:
    """A matrix product for each group, from operators that autograd differentiates."""
    if offs is None:
        return torch.bmm(x, y)
    parts = [slice(start, end) for start, end in itertools.pairwise([0, *offs.tolist()])]
    if x.ndim == y.ndim:
        return torch.stack([x[:, p] @ y[p] for p in parts])
    if x.ndim == 3:
        return torch.cat([x[g] @ y[:, p] for g, p in enumerate(parts)], 1)
    rest = x.new_zeros(x.shape[0] - parts[-1].stop, y.shape[2])
    return torch.cat([*(x[p] @ y[g] for g, p in enumerate(parts)), rest])


_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
}

# Methods whose name says float32.
_NAMED: dict[Callable[..., Any], Callable[..., Any]] = {Tensor.float: Tensor.double, Tensor.cfloat: Tensor.cdouble}
