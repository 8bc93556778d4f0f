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

    Sums are over the positions of each channel first, and then over the channels of a group. So positions and channels
    never become one dimension, and channels-last images stay as they are.
    """
    groups = _split(x, group)
    count = c // group * hxw
    mean = _over_positions(groups).sum(2) / count
    centred = groups - _of_groups(mean, groups)
    var = _over_positions(centred * centred).sum(2) / count
    inverse = (var + eps).rsqrt()
    out = centred * _of_groups(inverse, groups)
    out = out if weight is None else out * _of_channels(weight, groups)
    out = out if bias is None else out + _of_channels(bias, groups)
    return out.reshape(x.shape), mean, inverse


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

    A group's sums are not taken from those of its channels, times the weight: IREE 3.13.0 takes such a small product
    for a contraction, and does not compile it with its readers ("write affecting operations on global resources are
    restricted to workgroup distributed contexts").
    """
    groups, of_out = _split(x, group), _split(grad, group)
    normalised = (groups - _of_groups(mean, groups)) * _of_groups(rstd, groups)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = of_out if weight is None else of_out * _of_channels(weight, groups)
        sums = (_over_positions(values).sum(2) for values in (scaled * normalised, scaled))
        of_along, of_total = (_of_groups(s / (c // group * hxw), groups) for s in sums)
        moved = (scaled - of_total - normalised * of_along) * _of_groups(rstd, groups)
        grad_x = moved.reshape(x.shape)
    if output_mask[1] and weight is not None:
        grad_weight = _over_positions(of_out * normalised).sum(0).reshape(c)
    if output_mask[2]:
        grad_bias = _over_positions(of_out).sum(0).reshape(c)
    return grad_x, grad_weight, grad_bias


def _split(x: torch.Tensor, group: int) -> torch.Tensor:
    """An image [N, C, ...] with its channels in groups, [N, groups, C / groups, ...]."""
    return x.reshape(x.shape[0], group, x.shape[1] // group, *x.shape[2:])


def _over_positions(groups: torch.Tensor) -> torch.Tensor:
    """The sum over the positions of each channel, [N, groups, C / groups]."""
    return _sum(groups, range(3, groups.ndim))


def _of_groups(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """A number of each group, [N, groups], beside the elements of `groups`: [N, groups, 1, ...]."""
    return x.reshape(*groups.shape[:2], *[1] * (groups.ndim - 2))


def _of_channels(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """A number of each channel, [C], beside the elements of `groups`: [groups, C / groups, 1, ...]."""
    return x.reshape(*groups.shape[1:3], *[1] * (groups.ndim - 3))


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
