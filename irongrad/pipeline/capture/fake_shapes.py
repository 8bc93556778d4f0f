"""Fake results of operators whose shapes depend on values in PyTorch; to be imported before any tracing."""

from __future__ import annotations

import torch
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

from irongrad.graph.recorder import Operator
from irongrad.operators.decompositions.loss_ctc import Lengths, longest_target

aten = torch.ops.aten


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
    """The shapes of `_ctc_loss`; PyTorch has none for capture, because its shapes depend on lengths that are data."""
    time, batch, _ = log_probs.shape
    places = 2 * longest_target(targets, target_lengths) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, places)


@register_op_impl([aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor])  # type: ignore[untyped-decorator]
def _fake_ctc_loss_backward(
    mode: FakeTensorMode, operator: Operator, grad: torch.Tensor, log_probs: torch.Tensor, *rest: object
) -> torch.Tensor:
    return torch.empty_like(log_probs)
