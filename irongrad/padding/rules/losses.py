"""Padding rules of loss operators: padding does not contribute to the loss, nor to its divisor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from irongrad.padding.layout import solid
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, aten, rule
from irongrad.padding.rules.reductions import wide

# The values of the operators' argument `reduction` (torch/nn/_reduction.py).
_NONE, _MEAN, _SUM = 0, 1, 2


def _align(call: Call) -> None:
    """Give the targets, and gradients for each target, the padding of the scores without the class dimension."""
    scores = call["self"].layout
    each = (*scores[:-1][:1], *scores[2:])
    call.like("target", each)
    if "grad_output" in call.arguments and call["grad_output"].ndim:
        call.like("grad_output", each)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(call: Call) -> list[Padded]:
    """Give padding the ignored class as its target, so that its scores are not read."""
    _align(call)
    target = call["target"]
    loss, weight = call.run(target=call.padding.fill(target, call["ignore_index"]))
    return [Padded(loss, tuple(map(solid, target.layout)) if loss.ndim else ()), Padded(weight, ())]


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_backward(call: Call) -> Padded:
    _align(call)
    gradient = call.run(target=call.padding.fill(call["target"], call["ignore_index"]))
    return Padded(gradient, tuple(map(solid, call["self"].layout)), zero=True)


_OPERANDS = ("self", "target", "weight", "pos_weight")


def _operands(call: Call) -> list[Padded]:
    call.aligned(*(n for n in _OPERANDS if isinstance(call.arguments.get(n), Padded)))
    return [call[n] for n in _OPERANDS if isinstance(call.arguments.get(n), Padded)]


def _zeros(call: Call) -> dict[str, Any]:
    return call.zeros(*(n for n in _OPERANDS if isinstance(call.arguments.get(n), Padded)))


@rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
def _elementwise(call: Call) -> Padded:
    layout = tuple(map(solid, call.broadcast(*_operands(call))))
    losses: Tensor = call.run(**_zeros(call), reduction=_NONE)
    each = Padded(losses, layout)
    if call["reduction"] == _NONE:
        return each
    total: Any = wide(call.padding.fill(each, 0)).sum()
    if call["reduction"] == _MEAN:
        total = total / call.padding.count(each)
    return Padded(total.to(losses.dtype), ())


@rule(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)
def _elementwise_backward(call: Call) -> Padded:
    layout = tuple(map(solid, call.broadcast(*_operands(call))))
    if call["grad_output"].ndim:
        call.like("grad_output", layout)
    gradient = call["grad_output"].tensor
    filled = _zeros(call)
    if call["reduction"] == _MEAN:
        gradient = gradient / call.padding.count(Padded(filled["self"], layout))
    if call["reduction"] != _NONE:
        gradient = gradient.expand(filled["self"].shape)
    return Padded(call.run(**filled, grad_output=gradient, reduction=_NONE), layout)
