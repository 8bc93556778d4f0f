"""Batch normalisation by the statistics of all ranks' batches, and its backward.

The formulas are those of `batch_norm.py`. Sums over the batch are exchanged: the forward's moments, and the backward's
two sums of gradients, which depend on all ranks' elements through the moments. So N ranks compute what one rank with
all elements does, whatever each has of them (H. Zhang et al., "Context Encoding for Semantic Segmentation", CVPR 2018,
section 3.4).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from irongrad.graph.over_ranks import GRADIENT, MOMENTS, OVER_RANKS
from irongrad.operators.decompositions.registry import decomposes
from irongrad.runtime.errors import UnsupportedOpError

aten = torch.ops.aten


class Statistics(NamedTuple):
    """The statistics of all ranks' elements.

    Attributes:
        mean: the mean of each channel, [C].
        squares: the sum of squared deviations of each channel, [C].
        count: the number of elements of a channel, [1].
    """

    mean: Tensor
    squares: Tensor
    count: Tensor


def wide(x: Tensor) -> Tensor:
    """Cast half precision to float32, the dtype in which ATen accumulates it."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def pooled(mean: Tensor, squares: Tensor, count: Any) -> Statistics:
    """Exchange the statistics of this rank's elements; `count` is a number, or a tensor of one element."""
    own = mean.new_ones(1) * (count.to(mean.dtype) if isinstance(count, Tensor) else count)
    vector = OVER_RANKS(torch.cat([own, mean, squares]), MOMENTS)
    channels = mean.shape[0]
    return Statistics(vector[1 : 1 + channels], vector[1 + channels :], vector[:1])


def pooled_sums(bias: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange this rank's sums of gradients, and of gradients times normalised elements, each [C]."""
    vector = OVER_RANKS(torch.cat([bias, weight]), GRADIENT)
    return vector[: bias.shape[0]], vector[bias.shape[0] :]


def normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None],
    found: Statistics,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Normalise `x` by statistics; the results are those of `sync_batch_norm`."""
    inverse = (found.squares / found.count + eps).rsqrt()
    out = (wide(x) - _per_channel(found.mean, x)) * _per_channel(inverse, x)
    out = out if weight is None else out * _per_channel(weight, x)
    out = out if bias is None else out + _per_channel(bias, x)
    new = found.mean, found.squares / (found.count - 1)
    kept = [
        n.new_zeros(0) if old is None else (n * momentum + old * (1 - momentum)).to(old.dtype)
        for old, n in zip(running, new, strict=True)
    ]
    return out.to(x.dtype), found.mean, inverse, found.count, *kept


def _per_channel(channels: Tensor, x: Tensor) -> Tensor:
    """Reshape a tensor [C] so that it broadcasts along the channels of `x`."""
    return channels.reshape([-1] + [1] * (x.ndim - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """See `sync_batch_norm`."""
    count = x.numel() // x.shape[1]
    var, mean = aten.var_mean.correction(wide(x), _all_but_channels(x), correction=0)
    return normalised(x, weight, bias, (running_mean, running_var), pooled(mean, var * count, count), momentum, eps)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sync_batch_norm_backward`."""
    dims, given = _all_but_channels(x), wide(grad)
    scaled = (wide(x) - _per_channel(mean, x)) * _per_channel(inverse, x)
    return gradients(given, scaled, weight, inverse, count, dims, x.dtype)


def gradients(
    grad: Tensor,
    scaled: Tensor,
    weight: Tensor | None,
    inverse: Tensor,
    count: Tensor,
    dims: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the input, the weight and the bias, from x' = (x - mean) / sqrt(var + eps).

    Args:
        grad: the gradient of the output.
        scaled: x'.
        weight: as in `sync_batch_norm`.
        inverse: 1 / sqrt(var + eps), [C].
        count: the number of elements of a channel on all ranks, [1].
        dims: all dimensions but that of the channels.
        dtype: that of the input.
    """
    grad_bias, grad_weight = grad.sum(dims), (grad * scaled).sum(dims)
    bias, along = pooled_sums(grad_bias, grad_weight)
    adjusted = grad - _per_channel(bias / count, grad) - scaled * _per_channel(along / count, grad)
    grad_x = adjusted * _per_channel(inverse if weight is None else inverse * weight, grad)
    return grad_x.to(dtype), grad_weight, grad_bias


@torch.library.custom_op("irongrad::sync_batch_norm", mutates_args=())  # type: ignore[untyped-decorator]
def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise a batch by the statistics of all ranks' batches.

    Args:
        x: this rank's batch, [N, C, ...].
        weight: the scale of each channel, [C], or None.
        bias: the shift of each channel, [C], or None.
        running_mean: the running mean before the step, [C], or None.
        running_var: the running variance before the step, [C], or None.
        momentum: the weight of the new statistics in the running ones.
        eps: added to the variance.

    Returns:
        The normalised batch; the mean and 1 / sqrt(variance + eps) of each channel; the number of elements of a
        channel, [1]; and the running statistics after the step, [C], or [0] for None.
    """
    made: Any = forward(x, weight, bias, running_mean, running_var, momentum, eps)
    return tuple(t.clone() for t in made)  # an operator's results share no memory


@torch.library.custom_op("irongrad::sync_batch_norm_backward", mutates_args=())  # type: ignore[untyped-decorator]
def sync_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the input, the weight and the bias.

    Args:
        grad: the gradient of the normalised batch.
        x: as in `sync_batch_norm`.
        weight: as in `sync_batch_norm`.
        mean: a result of `sync_batch_norm`.
        inverse: a result of `sync_batch_norm`.
        count: a result of `sync_batch_norm`.
    """
    return backward(grad, x, weight, mean, inverse, count)


decomposes(torch.ops.irongrad.sync_batch_norm.default)(forward)
decomposes(torch.ops.irongrad.sync_batch_norm_backward.default)(backward)


@sync_batch_norm.register_fake  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    dtype, channels = wide(x).dtype, x.shape[1]
    vectors = (x.new_empty(size, dtype=dtype) for size in (channels, channels, 1))
    running = (
        x.new_empty(0, dtype=dtype) if old is None else old.new_empty(channels) for old in (running_mean, running_var)
    )
    return x.new_empty(x.shape), *vectors, *running


@sync_batch_norm_backward.register_fake  # type: ignore[untyped-decorator]
def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, count: Tensor
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), mean.new_empty(mean.shape), mean.new_empty(mean.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *_ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, *output[1:4])


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, mean, inverse, count = ctx.saved_tensors
    if torch.is_grad_enabled():
        raise UnsupportedOpError(
            "a second derivative of a BatchNorm whose statistics ranks exchange: give the loss no gradient that goes "
            "through it, or normalise by each rank's own statistics (compile without sync_batch_norm, and with "
            "nn.BatchNorm in place of nn.SyncBatchNorm)"
        )
    given = torch.zeros_like(x) if grad is None else grad
    dx, dweight, dbias = torch.ops.irongrad.sync_batch_norm_backward(given, x, weight, mean, inverse, count)
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype),
        dbias.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
        *[None] * 4,
    )


sync_batch_norm.register_autograd(_differentiate, setup_context=_keep)
