"""Margin losses: the score of a target class should exceed the scores of the other classes by a margin."""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

NONE, MEAN = 0, 1  # values of ATen's Reduction


def reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    """Reduce the losses of the samples to their mean or sum, or keep them as they are."""
    return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()


def spread(grad: torch.Tensor, like: torch.Tensor, reduction: int) -> torch.Tensor:
    """Compute the gradient of each sample's loss, from the gradient of the result of `reduced`.

    Args:
        grad: the gradient of the reduced loss.
        like: a tensor of the shape of the losses.
        reduction: as in `reduced`.
    """
    return (grad / like.numel() if reduction == MEAN else grad).expand(like.shape)


@decomposes(aten.multi_margin_loss.default)
def multi_margin_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
) -> torch.Tensor:
    """The sum over other classes of max(0, margin - x[target] + x[class])^p, divided by the number of classes."""
    excess, _, factor = _excess_over_target(x, target, margin, weight)
    loss = (excess if p == 1 else excess * excess).sum(-1) * factor
    return reduced(loss if x.ndim > 1 else loss.squeeze(0), reduction)


@decomposes(aten.multi_margin_loss_backward.default)
def _multi_margin_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    p: float,
    margin: float,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
) -> torch.Tensor:
    """The slope of another class is p * excess^(p - 1). The slope of the target is minus the sum of these slopes."""
    excess, is_target, factor = _excess_over_target(x, target, margin, weight)
    slopes = (excess > 0).to(x.dtype) if p == 1 else 2 * excess
    slopes = slopes - torch.where(is_target, slopes.sum(-1, keepdim=True), 0.0)
    result = slopes * (factor * spread(grad.reshape(-1) if grad.ndim else grad, factor, reduction)).unsqueeze(-1)
    return result.reshape(x.shape)


def _excess_over_target(
    x: torch.Tensor, target: torch.Tensor, margin: float, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far each score violates the margin, and whether its class is the target, both [samples, classes].

    The third result is the weight of each sample, divided by the number of classes.
    """
    scores, target = x.reshape(-1, x.shape[-1] if x.ndim else 1), target.reshape(-1, 1)
    is_target = target == torch.arange(scores.shape[-1])
    violation = (margin - scores.gather(1, target) + scores).relu()  # at the margin, unlike clamp: no gradient
    factor = torch.ones_like(scores[:, 0]) if weight is None else weight[target.squeeze(1)]
    return torch.where(is_target, 0.0, violation), is_target, factor / scores.shape[-1]


@decomposes(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over targets t and other classes c of max(0, 1 - x[t] + x[c]), divided by the number of classes."""
    excess, _, is_target = _excess_over_targets(x, target)
    loss = excess.sum((-2, -1)) / excess.shape[-1]
    loss = loss if x.ndim > 1 else loss.squeeze(0)
    return reduced(loss, reduction), is_target.to(x.dtype).reshape(target.shape)


@decomposes(aten.multilabel_margin_loss_backward.default)
def _multilabel_margin_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, is_target: torch.Tensor
) -> torch.Tensor:
    """Each pair of a target and another class that violates the margin adds to the slopes of both.

    It adds -1 to the target's slope and 1 to the other's, divided by the number of classes.
    """
    excess, places, _ = _excess_over_targets(x, target)
    slopes = (excess > 0).to(x.dtype) / excess.shape[-1]
    result = slopes.sum(1) - (slopes.sum(2, keepdim=True) * places.to(x.dtype)).sum(1)
    like = result[:, 0]
    return (result * spread(grad.reshape(-1) if grad.ndim else grad, like, reduction).unsqueeze(-1)).reshape(x.shape)


def _excess_over_targets(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far each score violates the margin of each target, [samples, place in the list of targets, classes].

    The second result tells which class that target is, one-hot in the same shape. The third result tells which classes
    are targets of a sample, [samples, classes]. A list of targets ends at its first -1.
    """
    classes = x.shape[-1] if x.ndim else 1
    scores, target = x.reshape(-1, classes), target.reshape(-1, classes)
    order = torch.arange(classes)
    end = torch.where(target < 0, order, classes).amin(-1, keepdim=True)
    listed = order < end
    places = (target.unsqueeze(-1) == order) & listed.unsqueeze(-1)
    is_target = places.any(1)
    own = scores.gather(1, target.clamp(min=0)).unsqueeze(-1)
    counted = listed.unsqueeze(-1) & ~is_target.unsqueeze(1)
    return torch.where(counted, (1 - own + scores.unsqueeze(1)).relu(), 0.0), places, is_target
