"""Calls of an optimizer's Python code in forms that a trace can record, with hyperparameters left symbolic."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from irongrad.pipeline.capture.origins import Origins
from irongrad.pipeline.capture.selected_rows import SelectedRows
from irongrad.pipeline.capture.without_value_reads import set_by_mask
from irongrad.pipeline.optimizer.indexed import IndexedCopies

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

# In-place functions that have no functional ATen twin if an argument is a tensor.
_CLAMPS = {"clamp_": torch.clamp, "clamp_min_": torch.clamp_min, "clamp_max_": torch.clamp_max}

# Their decompositions ask whether `alpha` is 1, and the answer would fix the hyperparameter.
_SCALED = frozenset({torch.add, torch.sub, Tensor.add, Tensor.add_, Tensor.sub, Tensor.sub_})

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class TracedCalls(TorchFunctionMode):
    """Replaces functions that functionalize refuses, or that would turn a symbolic number or a tensor into a constant.

    `Tensor.square_` has no functional ATen twin in torch 2.13, and the result of `Tensor.data` is not traced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows = SelectedRows(Origins())
        self._indexed = IndexedCopies()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = (args, kwargs or {})
        self._indexed.refuse_stale(given)
        result = self._called(func, *given)
        self._indexed.write_back()
        return result

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[2], (bool, int, float, *_SYMBOLS)):
            args = (*args[:2], torch.full((), args[2], dtype=args[0].dtype))  # PyTorch's would be a constant
        result = self._rows.called(func, args, kwargs)
        if result is NotImplemented:
            result = self._indexed.called(func, args)
        if result is not NotImplemented:
            return result
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_"):
            with self:  # its calls are replaced, too
                return _for_each(name.removeprefix("_foreach_"), *args, **kwargs)
        if name in _TWINS and args and isinstance(args[0], Tensor):
            name = _TWINS[name]
            func = getattr(Tensor, name)
        if isinstance(out := kwargs.get("out"), Tensor):
            return out.copy_(func(*args, **{k: v for k, v in kwargs.items() if k != "out"}))
        if func is getattr(Tensor, name, None) and name in _CLAMPS:
            return args[0].copy_(_CLAMPS[name](*args, **kwargs))
        replacement = _REPLACED.get(func)
        result = replacement(*args, **kwargs) if replacement is not None else NotImplemented
        if result is not NotImplemented:
            return result
        if func in _SCALED and isinstance(kwargs.get("alpha"), torch.SymFloat):
            args, kwargs = (args[0], args[1] * kwargs["alpha"]), {}
        return func(*args, **kwargs)


def _for_each(name: str, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """A `torch._foreach` function, tensor by tensor: its operators take no symbolic number."""

    def of(value: Any, position: int) -> Any:
        is_list = isinstance(value, (list, tuple)) and len(value) == len(tensors)
        return value[position] if is_list else value

    results = []
    for i, tensor in enumerate(tensors):
        own, named = [of(a, i) for a in args], {k: of(v, i) for k, v in kwargs.items()}
        if name == "norm":
            results.append(torch.linalg.vector_norm(tensor, *own))
        elif hasattr(Tensor, name) and name not in ("maximum", "minimum"):
            results.append(getattr(tensor, name)(*own, **named))
        else:
            others = [torch.full((), o, dtype=tensor.dtype) if not isinstance(o, Tensor) else o for o in own]
            result = getattr(torch, name.removesuffix("_"))(tensor, *others, **named)
            results.append(tensor.copy_(result) if name.endswith("_") else result)
    return None if name.endswith("_") else results


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: Any = 1e-8) -> Tensor:
    """The function of that name, which clamps in place in C++."""
    x1, x2 = (x / torch.clamp_min(torch.linalg.vector_norm(x, dim=dim, keepdim=True), eps) for x in (x1, x2))
    return (x1 * x2).sum(dim)


def _square_(input: Tensor) -> Tensor:
    return input.mul_(input)


def _all_close(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    if equal_nan:
        return NotImplemented
    return bool(((input - other).abs() <= atol + rtol * other.abs()).all())


def _equal(input: Tensor, other: Tensor) -> bool | torch.SymBool:
    return input.shape == other.shape and bool((input == other).all())


def _tensor(data: Any, dtype: torch.dtype | None = None, device: object = None, requires_grad: bool = False) -> Any:
    """A tensor of numbers as an operator; the tensor itself would be a constant of unknown origin."""
    if isinstance(data, (list, tuple)) and data:
        rows = [_tensor(item, dtype) for item in data]
        if any(row is NotImplemented for row in rows):
            return NotImplemented
        wide = dtype or functools.reduce(torch.promote_types, (row.dtype for row in rows))
        return torch.stack([row.to(wide) for row in rows])
    if not isinstance(data, (bool, int, float, *_SYMBOLS)):
        return NotImplemented
    return torch.full((), data, dtype=dtype or _dtype_of(data))


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, (bool, torch.SymBool)):
        return torch.bool
    return torch.int64 if isinstance(number, (int, torch.SymInt)) else torch.get_default_dtype()


_REPLACED: dict[object, Callable[..., Any]] = {
    Tensor.square_: _square_,
    Tensor.data.__get__: Tensor.detach,
    torch.allclose: _all_close,
    Tensor.allclose: _all_close,
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.cosine_similarity: _cosine_similarity,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    Tensor.__setitem__: set_by_mask,
}


def product(*factors: Any) -> Any:
    """The product of any number of factors: sympy joins products of symbolic numbers, and the operator takes two."""
    return functools.reduce(operator.mul, factors)
