"""Cross entropy, other losses that depend on one element or one target class each, and their backward."""

from __future__ import annotations

import torch
from torch.nn.modules import linear_cross_entropy as _  # noqa: F401  registers its operators

from irongrad.operators.decompositions.loss_margin import MEAN, NONE, reduced, spread
from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


def _at_class(weight: torch.Tensor, target: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The weight of each target class; that of class 0 where `counts` is false, as such a class may be no index."""
    return weight[torch.where(counts, target, 0)]


@decomposes(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss_forward(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value at the target class, and the sum of the weights.

    PyTorch's own decomposition weights all values before it reads one of each row.
    """
    dim, counts = min(x.ndim - 1, 1), target != ignore_index
    values = -x.gather(dim, torch.where(counts, target, 0).unsqueeze(dim)).squeeze(dim)
    weights = None if weight is None else _at_class(weight, target, counts)
    values = torch.where(counts, values if weights is None else values * weights, 0.0)
    if reduction == NONE and x.ndim > 1:
        return values, x.new_zeros(())
    total = counts.sum().to(x.dtype) if weights is None else torch.where(counts, weights, 0.0).sum()
    return (values.sum() / total if reduction == MEAN else values.sum()), total


@decomposes(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """The slope at the target class, and zero elsewhere.

    PyTorch's own decomposition scatters the slopes into zeros, which takes IREE 3.13.0 five kernels. A comparison fuses
    into the kernel of the softmax's backward, which reads it.
    """
    dim = min(x.ndim - 1, 1)
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    slope = -grad / total_weight if reduction == MEAN else -grad
    slope = slope.unsqueeze(dim) if slope.ndim else slope
    target = target.unsqueeze(dim)
    counts = target != ignore_index
    if weight is not None:
        slope = slope * _at_class(weight, target, counts)
    return torch.where((target == torch.arange(x.shape[dim]).view(shape)) & counts, slope, 0.0)


@decomposes(aten.soft_margin_loss.default)
def _soft_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """log(1 + exp(-t x)), as in the documentation of torch.nn.SoftMarginLoss."""
    return reduced((-target * x).exp().log1p(), reduction)


@decomposes(aten.soft_margin_loss_backward.default)
def _soft_margin_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """The slope is -t sigmoid(-t x), which is finite even if ATen's exp(-t x) / (1 + exp(-t x)) is not."""
    return -target * (-target * x).sigmoid() * spread(grad, target * x, reduction)


@decomposes(torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default)
def _linear_cross_entropy(
    x: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    policy: str,
    dtype: torch.dtype,
    retain: bool,
    wants_input: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and its gradients at once, as the operator returns them.

    The operator works in chunks to save memory. Here memory is left to the compiler, so the chunks are ignored.
    """
    log_probabilities = _log_probabilities(x, linear_weight, bias)
    places, factor = _weights(log_probabilities, target, weight, ignore_index)
    factor = factor / factor.sum() if reduction == "mean" else factor
    loss = -(factor.unsqueeze(1) * places * log_probabilities).sum()
    slopes = factor.unsqueeze(1) * (log_probabilities.exp() - places)
    return (
        loss,
        slopes @ linear_weight if wants_input else x.new_zeros((0, 0)),
        slopes.T @ x if wants_weight else x.new_zeros((0, 0)),
        slopes.sum(0) if wants_bias else x.new_zeros((0,)),
    )


@decomposes(torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default)
def _linear_cross_entropy_each(
    x: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    ignore_index: int,
    chunk: int,
    policy: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    log_probabilities = _log_probabilities(x, linear_weight, bias)
    places, factor = _weights(log_probabilities, target, weight, ignore_index)
    return -factor * (places * log_probabilities).sum(1)


def _log_probabilities(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    scores = x @ weight.T
    return (scores if bias is None else scores + bias).log_softmax(1)


def _weights(
    log_probabilities: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The one-hot target classes, and the weight of each sample: its class's weight, or 0 if the sample is ignored."""
    places = target.unsqueeze(1) == torch.arange(log_probabilities.shape[1])
    hot = places.to(log_probabilities.dtype)
    factor = hot.sum(1) if weight is None else hot @ weight
    return hot, torch.where(target == ignore_index, 0.0, factor)
