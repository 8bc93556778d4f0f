"""Batch normalisation in training and evaluation, and its backward (Ioffe and Szegedy, arXiv:1502.03167).

ATen has several variants, which return different values besides the normalised tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import is_known

aten = torch.ops.aten

Maybe: TypeAlias = torch.Tensor | None


class _Normalised(NamedTuple):
    """Results of batch normalisation.

    Attributes:
        out: the normalised tensor, [N, C, ...].
        mean: the mean that was subtracted, [C].
        inverse: 1 / sqrt(variance + eps), [C].
        running_mean: the running mean after the batch, [C].
        running_var: the running variance after the batch, [C].
    """

    out: torch.Tensor
    mean: torch.Tensor
    inverse: torch.Tensor
    running_mean: Maybe
    running_var: Maybe


def _normalise(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running: tuple[Maybe, Maybe],
    training: bool,
    momentum: float,
    eps: float,
) -> _Normalised:
    """Normalise `x` [N, C, ...] per channel.

    The biased variance of the batch normalises `x`. The running variance averages the unbiased variance.
    """
    mean, var = running
    if training:
        batch_var, batch_mean = aten.var_mean.correction(x, _all_but_channels(x), correction=0)
        count = x.numel() // x.shape[1]
        unbiased_var = batch_var * _unbiased_ratio(count)
        running = (_update_running(mean, batch_mean, momentum), _update_running(var, unbiased_var, momentum))
        mean, var = batch_mean, batch_var
    assert mean is not None
    assert var is not None
    inverse = (var + eps).rsqrt()
    out = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
    out = out if weight is None else out * _per_channel(weight, x)
    out = out if bias is None else out + _per_channel(bias, x)
    return _Normalised(out, mean, inverse, *running)


def _unbiased_ratio(count: int) -> float:
    """The ratio of the unbiased to the biased variance. PyTorch refuses a batch of one."""
    if not is_known(count):
        return count / (count - 1)
    return count / (count - 1) if count > 1 else math.nan


def _update_running(running: Maybe, new: torch.Tensor, momentum: float) -> Maybe:
    """The running statistic after a batch. PyTorch's momentum is the weight of the new value."""
    return None if running is None else new * momentum + running * (1 - momentum)


def _all_but_channels(x: torch.Tensor) -> list[int]:
    """All dimensions except the channel dimension."""
    return [0, *range(2, x.ndim)]


def _per_channel(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape a tensor [C] so that it broadcasts along the channels of `x`."""
    return channels.reshape([-1] + [1] * (x.ndim - 2))


def _saved(result: _Normalised, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The statistics that ATen saves for the backward: empty tensors in evaluation."""
    if training:
        return result.mean, result.inverse
    return result.mean.new_zeros(0), result.mean.new_zeros(0)


@decomposes(aten.native_batch_norm.default)
def _native(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Leave the running statistics unchanged: the operator's schema does not say that it writes to them."""
    result = _normalise(x, weight, bias, (running_mean, running_var), training, momentum, eps)
    return result.out, *_saved(result, training)


@decomposes(aten._native_batch_norm_legit.no_stats)
def _without_statistics(
    x: torch.Tensor, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float
) -> tuple[torch.Tensor, ...]:
    return _normalise(x, weight, bias, (None, None), True, momentum, eps)[:3]


@decomposes(aten._native_batch_norm_legit_functional.default)
def _functional(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Maybe, ...]:
    result = _normalise(x, weight, bias, (running_mean, running_var), training, momentum, eps)
    return result.out, *_saved(result, training), result.running_mean, result.running_var


@decomposes(aten._native_batch_norm_legit_no_training.default)
def _in_evaluation(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    result = _normalise(x, weight, bias, (running_mean, running_var), False, momentum, eps)
    return result.out, *_saved(result, False)


@decomposes(aten._batch_norm_with_update_functional.default)
def _with_update(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[Maybe, ...]:
    result = _normalise(x, weight, bias, (running_mean, running_var), True, momentum, eps)
    reserve = torch.zeros(0, dtype=torch.uint8)
    return *result[:3], reserve, result.running_mean, result.running_var


@decomposes(aten._batch_norm_no_update.default)
def _without_update(
    x: torch.Tensor, weight: Maybe, bias: Maybe, running_mean: Maybe, running_var: Maybe, momentum: float, eps: float
) -> tuple[torch.Tensor, ...]:
    result = _normalise(x, weight, bias, (running_mean, running_var), False, momentum, eps)
    return result.out, *_saved(result, False), torch.zeros(0, dtype=torch.uint8)


@decomposes(aten.native_batch_norm_backward.default)
def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_invstd: Maybe,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    """Gradients of the input, the weight and the bias, from x^ = (x - mean) / sqrt(var + eps).

    In training, the mean and the variance depend on `x` too. The input's gradient is then `grad` minus its mean and
    minus its projection on x^ (section 3 of the paper), scaled by weight / sqrt(var + eps).
    """
    if train:
        assert save_mean is not None
        assert save_invstd is not None
        mean, inverse = save_mean, save_invstd
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, inverse = running_mean, (running_var + eps).rsqrt()
    normalised = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
    grad_bias = grad.sum(_all_but_channels(x))
    grad_weight = (grad * normalised).sum(_all_but_channels(x))
    adjusted = grad
    if train:
        count = x.numel() // x.shape[1]
        adjusted = grad - _per_channel(grad_bias / count, x) - normalised * _per_channel(grad_weight / count, x)
    grad_x = adjusted * _per_channel(inverse if weight is None else inverse * weight, x)
    needs_x, needs_weight, needs_bias = output_mask
    return grad_x if needs_x else None, grad_weight if needs_weight else None, grad_bias if needs_bias else None


@decomposes(aten.batch_norm_backward.default)
def _backward_with_reserve(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_var: Maybe,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: torch.Tensor,
) -> tuple[Maybe, Maybe, Maybe]:
    """`save_var` holds 1 / sqrt(variance + eps), despite its name."""
    return _backward(grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)
