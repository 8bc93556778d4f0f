"""Batch normalisation in training and evaluation, and its backward (Ioffe and Szegedy, arXiv:1502.03167).

All of ATen's forms differ in what they return besides the result.
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
    """What batch normalisation computes; statistics have one number a channel."""

    out: torch.Tensor
    mean: torch.Tensor
    inverse: torch.Tensor  # 1 / sqrt(variance + eps)
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
    """`x` [N, C, ...]; the running variance is of a sample, what normalises is the variance of the batch itself."""
    mean, var = running
    if training:
        batch_var, batch_mean = aten.var_mean.correction(x, _others(x), correction=0)
        count = x.numel() // x.shape[1]
        of_sample = batch_var * _of_sample(count)
        running = (_moved(mean, batch_mean, momentum), _moved(var, of_sample, momentum))
        mean, var = batch_mean, batch_var
    assert mean is not None
    assert var is not None
    inverse = (var + eps).rsqrt()
    out = (x - _each(mean, x)) * _each(inverse, x)
    out = out if weight is None else out * _each(weight, x)
    out = out if bias is None else out + _each(bias, x)
    return _Normalised(out, mean, inverse, *running)


def _of_sample(count: int) -> float:
    """The variance of a sample by that of the batch itself; a batch of one is refused by PyTorch."""
    if not is_known(count):
        return count / (count - 1)
    return count / (count - 1) if count > 1 else math.nan


def _moved(running: Maybe, new: torch.Tensor, momentum: float) -> Maybe:
    """The running statistic after a batch; PyTorch's momentum is the weight of the new one."""
    return None if running is None else new * momentum + running * (1 - momentum)


def _others(x: torch.Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [0, *range(2, x.ndim)]


def _each(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number a channel, in the shape that meets the channels of `x`."""
    return channels.reshape([-1] + [1] * (x.ndim - 2))


def _saved(result: _Normalised, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What ATen saves for the backward: nothing in evaluation."""
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
    """It says nothing in its schema of the running statistics that it writes to, which are left as they are."""
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
    """Of x^ = (x - mean) / sqrt(var + eps): in training the mean and the variance move with `x` too.

    The input's gradient is then `grad` without its mean and without its projection on x^ (section 3 of the paper).
    """
    if train:
        assert save_mean is not None
        assert save_invstd is not None
        mean, inverse = save_mean, save_invstd
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, inverse = running_mean, (running_var + eps).rsqrt()
    normalised = (x - _each(mean, x)) * _each(inverse, x)
    grad_bias = grad.sum(_others(x))
    grad_weight = (grad * normalised).sum(_others(x))
    moved = grad
    if train:
        count = x.numel() // x.shape[1]
        moved = grad - _each(grad_bias / count, x) - normalised * _each(grad_weight / count, x)
    grad_x = moved * _each(inverse if weight is None else inverse * weight, x)
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
    """What is called `save_var` is 1 / sqrt(variance + eps) all the same."""
    return _backward(grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)
