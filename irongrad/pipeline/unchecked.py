"""Capture where PyTorch would look at values: argument checks are left out, and shapes follow what is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from irongrad.decompositions.loss_ctc import Lengths, longest_target
from irongrad.decompositions.registry import Operator

aten = torch.ops.aten


class UncheckedArguments(TorchFunctionMode):
    """While open, argument checks that would need values are left out: a step is captured for all values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return _UNCHECKED.get(func, func)(*args, **(kwargs or {}))


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """The functional of that name, which refuses negative variances; the gradient ignores the bound `eps`."""
    if not isinstance(var, torch.Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    if var.shape == input.shape[:-1] and var.shape != input.shape:
        var = var.unsqueeze(-1)
    bounded = var.clone()
    with torch.no_grad():
        bounded.clamp_(min=eps)
    loss = 0.5 * (bounded.log() + (input - target).square() / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


_UNCHECKED: dict[Callable[..., Any], Callable[..., Any]] = {functional.gaussian_nll_loss: _gaussian_nll_loss}


@register_op_impl([aten._ctc_loss.default, aten._ctc_loss.Tensor])  # type: ignore[untyped-decorator]
def _fake_ctc_loss(
    mode: FakeTensorMode,
    operator: Operator,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shapes of `_ctc_loss`; PyTorch has none for capture, because its own depend on lengths that are data."""
    time, batch, _ = log_probs.shape
    places = 2 * longest_target(targets, target_lengths) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, places)


@register_op_impl([aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor])  # type: ignore[untyped-decorator]
def _fake_ctc_loss_backward(
    mode: FakeTensorMode, operator: Operator, grad: torch.Tensor, log_probs: torch.Tensor, *rest: object
) -> torch.Tensor:
    return torch.empty_like(log_probs)
