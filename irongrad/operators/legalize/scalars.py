"""Turn symbolic scalars of a traced optimizer into rank-0 float64 tensors, so that they are run-time values.

Eager computes hyperparameter arithmetic (`1 - beta1 ** step`) in Python's doubles; float64 tensors give the same
numbers. A rank-0 tensor does not promote the dtype of other operands (PyTorch, "Type Promotion"), so parameters keep
their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Target

from irongrad.diagnostics.source_lines import line_of
from irongrad.operators.legalize.half_precision import is_computed_wider, rounded, widened
from irongrad.operators.legalize.negative_indices import without_negative_indices
from irongrad.runtime.errors import CaptureError

aten = torch.ops.aten


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x + y * alpha


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x - y * alpha


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """Interpolate by ATen's two-sided formula, which is exact at both ends (aten/src/ATen/native/Lerp.h)."""
    if not isinstance(weight, torch.Tensor):
        return torch.lerp(start, end, weight)
    difference = end - start
    return torch.where(abs(weight) < 0.5, start + weight * difference, end - difference * (1 - weight))


def _addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + value * a * b


def _addcdiv(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + value * a / b


def _addmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return x * beta + torch.mm(a, b) * alpha


def _clamp(x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low = min if low is None else low
    high = max if high is None else high
    if low is not None:
        x = torch.maximum(x, _tensor(low, x.dtype))
    if high is not None:
        x = torch.minimum(x, _tensor(high, x.dtype))
    return x


def _tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    # full is traced as an operator; torch.tensor(value) would become a constant of the tracing mode.
    return value.to(dtype) if isinstance(value, torch.Tensor) else torch.full((), value, dtype=dtype)


def _condition(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=torch.bool)
    return value if value.dtype == torch.bool else value != 0  # `.item()` of a bool has become a float64


def _pairwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return min(a, b) if function is torch.minimum else max(a, b)
        return function(_tensor(a, torch.float64), _tensor(b, torch.float64))

    return apply


# For operators whose Scalar argument may now be a tensor: functions that take one.
_FORMS: dict[object, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.rsub.Scalar: lambda x, y, alpha=1: y - x * alpha,
    aten.mul.Tensor: lambda x, y: x * y,
    aten.mul.Scalar: lambda x, y: x * y,
    aten.div.Tensor: lambda x, y: x / y,
    aten.div.Scalar: lambda x, y: x / y,
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.addmm.default: _addmm,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda x, low: _clamp(x, low),
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    aten.pow.Scalar: torch.pow,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.gt.Scalar: torch.gt,
    aten.lt.Scalar: torch.lt,
    aten.ge.Scalar: torch.ge,
    aten.le.Scalar: torch.le,
    aten.eq.Scalar: torch.eq,
    torch.sym_ite: lambda condition, a, b: torch.where(
        _condition(condition), _tensor(a, torch.float64), _tensor(b, torch.float64)
    ),
    torch.sym_min: _pairwise(torch.minimum),
    torch.sym_max: _pairwise(torch.maximum),
}


_FILLING = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.fill.Scalar)


def with_tensors(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `operator` with rank-0 tensors in place of numbers; the result may have a wider dtype.

    Raises:
        RuntimeError, TypeError: no form of the operator takes a tensor there.
    """
    if operator in _FILLING:
        return _filled(operator, args, kwargs)
    form = _FORMS.get(operator) or operator._overloadpacket
    return form(*args, **kwargs)


def _filled(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position = 0 if operator is aten.scalar_tensor.default else 1
    value = args[position]
    if not isinstance(value, torch.Tensor):
        return operator(*args, **kwargs)
    zeros = operator(*args[:position], 0.0, *args[position + 1 :], **kwargs)
    return zeros + value.to(zeros.dtype)


class ScalarsToTensors(torch.fx.Interpreter):
    """Interpreter of a traced update that computes its symbolic floats as tensors."""

    def run_node(self, n: Node) -> Any:
        """Run one node, and keep it in `self.node` meanwhile."""
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node; `.item()` becomes a cast of the tensor of one element to float64."""
        if target is aten._local_scalar_dense.default:
            return (args[0].reshape(()) if args[0].ndim else args[0]).to(torch.float64)
        if target is torch.sym_float:
            return args[0]
        if target in _FILLING:
            return _filled(target, args, kwargs)
        args = without_negative_indices(target, args)
        if target is aten.index_put.default:
            args = (*args[:2], args[2].to(args[0].dtype), *args[3:])  # a number times a tensor of rank 0 is wider
        form = _FORMS.get(target, target)
        if form is target and isinstance(target, OpOverload) and _has_tensor_for_number(target, args, kwargs):
            form = partial(self._with_tensor_for_number, target)
        assert callable(form)
        if is_computed_wider(target, (args, kwargs)):
            wide, named = widened((args, kwargs))
            return rounded(target, args, form(*wide, **named), self.node.meta["val"])
        return form(*args, **kwargs)

    def _with_tensor_for_number(self, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        try:
            return operator._overloadpacket(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            raise CaptureError(
                f"{line_of(self.node)}\n  {operator} takes a number, and here the step computes it. To select by it, "
                "index by the tensor itself: x[i], x[:, i]"
            ) from error


def _has_tensor_for_number(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    types = {a.name: str(a.type) for a in operator._schema.arguments}
    given = [*zip(types.values(), args, strict=False), *((types[name], value) for name, value in kwargs.items())]
    return any(isinstance(value, torch.Tensor) and "Tensor" not in kind for kind, value in given)
