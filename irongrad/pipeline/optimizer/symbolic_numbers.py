"""Let the Python code of optimizers from outside torch.optim run on symbolic numbers."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import unwrap
from typing import Any
from unittest import mock

import torch

_MATH: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    getattr(math, name): getattr(torch, name)
    for name in ("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tanh", "floor", "ceil", "erf")
}


def _on_symbols(function: Callable[..., Any], form: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def apply(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.numel() == 1:
            return form(x.to(torch.float64)).item()  # the function would read its value
        if isinstance(x, torch.SymFloat | torch.SymInt):
            return form(torch.full((), x, dtype=torch.float64)).item()
        return function(x)

    return apply


def _either(function: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(*values: Any, **options: Any) -> Any:
        if len(values) == 2 and any(isinstance(v, torch.SymFloat | torch.SymInt) for v in values):
            return symbolic(*values)
        return function(*values, **options)

    return apply


def _extreme(function: Callable[..., Any], symbolic: Callable[..., Any], less: bool) -> Callable[..., Any]:
    """`min` or `max` of numbers and tensors of one element, without a decision on which of them it is."""

    def of_two(best: Any, value: Any) -> Any:
        if isinstance(best, torch.Tensor) or isinstance(value, torch.Tensor):
            dtype = next(v.dtype for v in (best, value) if isinstance(v, torch.Tensor))
            first, second = (
                v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=dtype) for v in (best, value)
            )
            return torch.where(second < first if less else second > first, second, first)
        is_symbolic = any(isinstance(v, torch.SymFloat | torch.SymInt) for v in (best, value))
        return symbolic(best, value) if is_symbolic else function(best, value)

    def apply(*values: Any, **options: Any) -> Any:
        if options:
            return function(*values, **options)
        items = list(values[0]) if len(values) == 1 else list(values)
        numbers = (torch.SymFloat, torch.SymInt, int, float)
        unknown = [v for v in items if isinstance(v, (torch.Tensor, torch.SymFloat, torch.SymInt))]
        is_of_numbers = all(isinstance(v, numbers) or (isinstance(v, torch.Tensor) and v.numel() == 1) for v in items)
        return functools.reduce(of_two, items) if unknown and is_of_numbers else function(items)

    return apply


class _FloatOrSymbol(type):
    """The class of what replaces `float`: a symbolic number is one of its instances, and stays as it is.

    The value of a tensor is a symbolic number, as that of `Tensor.item()` is.
    """

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, float | torch.SymFloat)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, float | torch.SymFloat)

    def __call__(cls, x: Any = 0.0) -> Any:
        if isinstance(x, torch.Tensor) and x.numel() == 1:
            return x.to(torch.float64).item()
        return x if isinstance(x, torch.SymFloat) else float(x)

    def __getattr__(cls, name: str) -> Any:
        return getattr(float, name)


class _Float(metaclass=_FloatOrSymbol):
    pass


def _pow(x: Any, y: Any) -> Any:
    return x**y


def _with_sign_of(x: Any, y: Any) -> Any:
    return torch.copysign(*(torch.full((), v, dtype=torch.float64) for v in (x, y))).item()


_REPLACED: dict[Any, Callable[..., Any]] = {
    **{function: _on_symbols(function, form) for function, form in _MATH.items()},
    math.pow: _pow,
    math.copysign: _either(math.copysign, _with_sign_of),
    min: _extreme(min, torch.sym_min, less=True),
    max: _extreme(max, torch.sym_max, less=False),
    float: _Float,
}


_BUILTINS: dict[str, Any] = {"min": min, "max": max, "float": float}


@contextmanager
def symbolic_numbers(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """While open, `math`'s functions, min, max and float keep symbolic numbers symbolic in the optimizers' own code."""
    replaced = types.SimpleNamespace(**vars(math))
    for name, function in vars(math).items():
        if _is_replaced(function):
            setattr(replaced, name, _REPLACED[function])
    with ExitStack() as stack:
        for names in _namespaces(optimizers):
            changed: dict[str, Any] = {n: _REPLACED[b] for n, b in _BUILTINS.items() if n not in names}
            changed |= {n: replaced for n, v in names.items() if v is math}
            changed |= {n: _REPLACED[v] for n, v in names.items() if callable(v) and _is_replaced(v)}
            stack.enter_context(mock.patch.dict(names, changed))
        yield


def _is_replaced(value: Any) -> bool:
    try:
        return value in _REPLACED
    except TypeError:
        return False


def _namespaces(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for optimizer in optimizers:
        for cls in type(optimizer).__mro__:
            for value in vars(cls).values():
                function: Any = unwrap(value) if callable(value) else value
                names = getattr(function, "__globals__", None)
                if names is not None and not str(names.get("__name__")).startswith("torch."):
                    found[id(names)] = names
    return list(found.values())
