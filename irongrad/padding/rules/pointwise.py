"""Padding rules of pointwise operators: padding gives padding."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._ops import OpOverload

from irongrad.operators.legalize.scalars import with_tensors
from irongrad.padding.layout import dim_of
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten, rule

# Pointwise operators that PyTorch 2.13 does not tag as such.
_UNTAGGED = frozenset(
    {
        aten._to_copy.default,
        aten.masked_fill.Tensor,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.where.Scalar,
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.copy.default,
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.softplus_backward.default,
        aten.log_sigmoid_backward.default,
        aten.hardtanh_backward.default,
        aten.elu_backward.default,
        aten._prelu_kernel.default,
        aten.hardshrink_backward.default,
        aten.softshrink_backward.default,
        aten.leaky_relu_backward.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default,
        aten.rrelu_with_noise_backward.default,
        aten.hardswish.default,
        aten.isinf.default,
        aten.log_sigmoid.default,
    }
)


def is_pointwise(operator: OpOverload) -> bool:
    """Whether an operator with one result is pointwise."""
    return torch.Tag.pointwise in operator.tags or operator in _UNTAGGED


def pointwise(call: Call) -> Padded:
    """Run the operator itself; numbers computed from sizes become tensors of rank 0."""
    names = [n for n, v in call.arguments.items() if isinstance(v, Padded)]
    call.aligned(*names)
    layout = call.broadcast(*(call[n] for n in names))
    numbers = {n: call.padding.sizes.true(v) for n, v in call.arguments.items() if isinstance(v, sympy.Basic)}
    if not numbers:
        return Padded(call.run(), layout)
    return Padded(_with_tensors(call, numbers), layout)


def _with_tensors(call: Call, numbers: dict[str, Any]) -> torch.Tensor:
    """Run the operator in a form that takes tensors in place of numbers."""
    arguments = {n: v.tensor if isinstance(v, Padded) else v for n, v in call.arguments.items()} | numbers
    schema = call.operator._schema.arguments
    positional = tuple(arguments[a.name] for a in schema if not a.kwarg_only)
    changed = {
        a.name: arguments[a.name] for a in schema if a.kwarg_only and _differs(arguments[a.name], a.default_value)
    }
    try:
        result: torch.Tensor = with_tensors(call.operator, positional, changed)
    except (RuntimeError, TypeError):
        raise NoRule("takes a number computed from sizes, for which it has no padding rule") from None
    return result


def _differs(value: Any, default: Any) -> bool:
    return isinstance(value, torch.Tensor) or value != default


@rule(aten.log_sigmoid_forward.default)
def _log_sigmoid(call: Call) -> list[Padded]:
    result, buffer = call.run()
    layout = call["self"].layout
    return [Padded(result, layout), Padded(buffer, layout) if buffer.ndim == len(layout) else Padded(buffer, ())]


@rule(aten._prelu_kernel_backward.default)
def _prelu_backward(call: Call) -> list[Padded]:
    call.aligned("grad_output", "self", "weight")
    layout = call.broadcast(call["grad_output"], call["self"], call["weight"])
    return [Padded(r, layout) for r in call.run()]


@rule(aten.glu.default, aten.glu_backward.default)
def _glu(call: Call) -> Padded:
    value = call["self"]
    if value.padded(call["dim"]):
        raise NoRule("splits a padded dimension in half")
    result = call.run()
    layout = list(value.layout)
    d = call["dim"] % value.ndim
    layout[d] = dim_of((call.made[0] or ())[d])
    return Padded(result, tuple(layout))
