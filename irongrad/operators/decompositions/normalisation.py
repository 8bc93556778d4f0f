"""Layer, group and root-mean-square normalisation, weight normalisation, and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

Maybe: TypeAlias = torch.Tensor | None


@decomposes(aten.native_layer_norm.default)
def _layer_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer normalisation (Ba, Kiros and Hinton, arXiv:1607.06450)."""
    var, mean = aten.var_mean.correction(x, _last(x, normalized_shape), correction=0, keepdim=True)
    inverse = (var + eps).rsqrt()
    out = (x - mean) * inverse
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, inverse


def _last(x: torch.Tensor, normalized_shape: Sequence[int]) -> list[int]:
    """The normalised dimensions: the last ones, as many as `normalized_shape` has."""
    return list(range(x.ndim - len(normalized_shape), x.ndim))


@decomposes(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    """For y = (x - mean) * rstd, where mean and rstd depend on x: dx = rstd * (dy - mean(dy) - y * mean(dy * y)).

    The formula follows from equation 4 of Ba, Kiros and Hinton by the chain rule. S. Ioffe and C. Szegedy,
    arXiv:1502.03167, section 3, give the same formula for a batch.
    """
    normalised = (x - mean) * rstd
    outer = list(range(x.ndim - len(normalized_shape)))
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight
        grad_x = _unprojected(scaled, normalised, _last(x, normalized_shape)) * rstd
    if output_mask[1] and weight is not None:
        grad_weight = _sum(grad * normalised, outer)
    if output_mask[2] and bias is not None:
        grad_bias = _sum(grad, outer)
    return grad_x, grad_weight, grad_bias


def _unprojected(grad: torch.Tensor, normalised: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Subtract from `grad` its mean and its projection on `normalised`.

    Both terms arise because the mean and the deviation depend on the input.
    """
    along = (grad * normalised).mean(dims, keepdim=True)
    return grad - grad.mean(dims, keepdim=True) - normalised * along


def _sum(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Sum over `dims`; `x` itself for no dimensions, which ATen would take to mean all."""
    return x.sum(list(dims)) if dims else x


@decomposes(aten.native_group_norm.default)
def _group_norm(
    x: torch.Tensor, weight: Maybe, bias: Maybe, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group normalisation (Wu and He, arXiv:1803.08494).

    Sums are over the positions of each channel first, and then over the channels of a group. So no group is one
    dimension, and channels-last images stay as they are.
    """
    mean = _of_groups(_over_positions(x), n, group) / (c // group * hxw)
    centred = x - _of_channels(mean, x, c)
    var = _of_groups(_over_positions(centred * centred), n, group) / (c // group * hxw)
    inverse = (var + eps).rsqrt()
    out = centred * _of_channels(inverse, x, c)
    out = out if weight is None else out * _along_channels(weight, x)
    out = out if bias is None else out + _along_channels(bias, x)
    return out, mean, inverse


@decomposes(aten.native_group_norm_backward.default)
def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    """As `_layer_norm_backward` within each group; weight and bias are per channel.

    The sums over the positions of a channel are the gradients of its weight and bias, for each image. Those over a
    group, which the gradient of `x` needs, are sums of them.
    """
    normalised = (x - _of_channels(mean, x, c)) * _of_channels(rstd, x, c)
    along, total = _over_positions(grad * normalised), _over_positions(grad)  # [N, C]
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * _along_channels(weight, x)
        sums = (s if weight is None else s * weight for s in (along, total))
        of_along, of_total = (_of_channels(_of_groups(s, n, group) / (c // group * hxw), x, c) for s in sums)
        grad_x = (scaled - of_total - normalised * of_along) * _of_channels(rstd, x, c)
    if output_mask[1] and weight is not None:
        grad_weight = along.sum(0)
    if output_mask[2]:
        grad_bias = total.sum(0)
    return grad_x, grad_weight, grad_bias


def _over_positions(x: torch.Tensor) -> torch.Tensor:
    """The sum over the positions of each channel, [N, C]."""
    return _sum(x, range(2, x.ndim))


def _of_groups(x: torch.Tensor, n: int, group: int) -> torch.Tensor:
    """The sum of [N, C] over the channels of each group, [N, groups]."""
    return x.reshape(n, group, x.shape[1] // group).sum(2)


def _of_channels(x: torch.Tensor, image: torch.Tensor, c: int) -> torch.Tensor:
    """A number of each group, [N, groups], for each channel of it: [N, C, 1, ...]."""
    n, group = x.shape
    of_channels = x.unsqueeze(2).expand(n, group, c // group).reshape(n, c)
    return of_channels.reshape(n, c, *[1] * (image.ndim - 2))


def _along_channels(x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """A number of each channel, [C], as [C, 1, ...]."""
    return x.reshape(-1, *[1] * (image.ndim - 2))


@decomposes(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For w = g v / |v|, each slice along `dim` separately (Salimans and Kingma, arXiv:1602.07868, equation 3)."""
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    along = (grad * v).sum(others, keepdim=True) / norms
    return g / norms * (grad - v * (along / norms)), along


@decomposes(aten._fused_rms_norm.default)
def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = ((x * x).mean(_last(x, normalized_shape), keepdim=True) + eps).rsqrt()
    out = x * inverse
    return out if weight is None else out * weight, inverse


@decomposes(aten._fused_rms_norm_backward.default)
def _rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe]:
    """For y = x * rstd with rstd = mean(x^2)^(-1/2): dx = rstd * (dy - y * mean(dy * y))."""
    normalised = x * rstd
    grad_x = grad_weight = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight
        along = (scaled * normalised).mean(_last(x, normalized_shape), keepdim=True)
        grad_x = (scaled - normalised * along) * rstd
    if output_mask[1] and weight is not None:
        grad_weight = _sum(grad * normalised, list(range(x.ndim - len(normalized_shape))))
    return grad_x, grad_weight
