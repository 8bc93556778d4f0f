"""`grid_sample` in two and three dimensions, and its backward, as weighted gathers (ATen/native/GridSampler.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

# ATen's mode numbers.
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2

_CUBIC_A = -0.75


class _Mode(NamedTuple):
    """The options of `grid_sample`.

    Attributes:
        interpolation: the interpolation mode, numbered as in ATen.
        padding: the padding mode, numbered as in ATen.
        align_corners: whether -1 and 1 are the centres of the outermost inputs, not their outer edges.
    """

    interpolation: int
    padding: int
    align_corners: bool


class _Near(NamedTuple):
    """The inputs that the sample points read along one dimension, called taps. Every tensor is [N, P, taps].

    Attributes:
        places: the index of each tap in the input; 0 if the tap is outside the input.
        inside: whether the tap is inside the input.
        weights: the interpolation weight of each tap.
        slopes: the derivative of the weights by the point's coordinate in the grid.
    """

    places: torch.Tensor
    inside: torch.Tensor
    weights: torch.Tensor
    slopes: torch.Tensor


@decomposes(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def _grid_sampler(
    x: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    """Sample `x` [N, C, *in] at `grid` [N, *out, dimensions]; the result is [N, C, *out]."""
    near = _near_points(x, grid, _Mode(interpolation_mode, padding_mode, align_corners))
    read = _read(x, near)
    return (read * _product([n.weights for n in near]).unsqueeze(1)).sum(-1).unflatten(-1, grid.shape[1:-1])


@decomposes(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def _grid_sampler_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    near = _near_points(x, grid, _Mode(interpolation_mode, padding_mode, align_corners))
    grad = grad.flatten(2).unsqueeze(-1)  # [N, C, P, 1]
    grad_x = grad_grid = None
    if output_mask[0]:
        places = _flat_indices(near, x).flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
        parts = grad * _product([n.weights for n in near]).unsqueeze(1)
        parts = torch.where(_all_inside(near).unsqueeze(1), parts, 0)
        grad_x = torch.zeros_like(x).flatten(2).scatter_add(2, places, parts.flatten(2)).reshape(x.shape)
    if output_mask[1]:
        along = (grad * _read(x, near)).sum(1)  # [N, P, taps of all dimensions]
        slopes = []
        for dim in range(len(near)):
            factors = [n.slopes if d == dim else n.weights for d, n in enumerate(near)]
            slopes.append((along * _product(factors)).sum(-1))
        grad_grid = torch.stack(slopes[::-1], -1).reshape(grid.shape)
    return grad_x, grad_grid


def _near_points(x: torch.Tensor, grid: torch.Tensor, mode: _Mode) -> list[_Near]:
    """The taps along each spatial dimension of `x`. The grid holds the coordinates in the opposite order."""
    points = grid.flatten(1, -2)
    return [_near(points[..., grid.shape[-1] - 1 - d], size, mode) for d, size in enumerate(x.shape[2:])]


def _near(coordinate: torch.Tensor, size: int, mode: _Mode) -> _Near:
    """The taps along one dimension, from grid coordinates.

    With `align_corners`, -1 and 1 are the centres of the first and the last input. Otherwise they are the outer edges.
    """
    slope = (size - 1 if mode.align_corners else size) / 2
    at = (coordinate + 1) * slope - (0 if mode.align_corners else 0.5)
    if mode.interpolation == _BICUBIC:
        first = at.floor()
        steps = torch.arange(-1, 3, dtype=at.dtype)
        weights, slopes = _cubic(at - first)
        places, _ = _padded(first.unsqueeze(-1) + steps, size, mode)
        return _near_of(places, size, weights, slopes * slope)
    at, sign = _padded(at, size, mode)
    if mode.interpolation == _NEAREST:
        places = at.round().unsqueeze(-1)
        return _near_of(places, size, torch.ones_like(places), torch.zeros_like(places))
    first = at.floor()
    places = torch.stack([first, first + 1], -1)
    weights = torch.stack([first + 1 - at, at - first], -1)
    return _near_of(places, size, weights, torch.stack([-sign, sign], -1) * slope)


def _near_of(places: torch.Tensor, size: int, weights: torch.Tensor, slopes: torch.Tensor) -> _Near:
    inside = (places >= 0) & (places <= size - 1)
    return _Near(torch.where(inside, places, 0).to(torch.int64), inside, weights, slopes)


def _padded(at: torch.Tensor, size: int, mode: _Mode) -> tuple[torch.Tensor, torch.Tensor]:
    """Move positions outside the input into it, as the padding mode asks. Also return the derivative of this move.

    The derivative is 1 inside, -1 if the position is reflected, and 0 beyond the border.
    """
    if mode.padding == _ZEROS:
        return at, torch.ones_like(at)
    sign = torch.ones_like(at)
    if mode.padding == _REFLECTION:
        at, sign = _reflected(at, size, mode.align_corners)
    moves = (at > 0) & (at < size - 1)
    return at.clamp(0, size - 1), torch.where(moves, sign, 0)


def _reflected(at: torch.Tensor, size: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Reflect positions at the first and last input, or at their outer edges, until they are inside.

    Also return the derivative of the reflection, 1 or -1.
    """
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return torch.zeros_like(at), torch.zeros_like(at)
    beyond = (at - low).abs()
    flips = (beyond / span).floor()
    rest = beyond - flips * span
    even = (flips / 2).floor() * 2 == flips
    sign = torch.where(at < low, -1.0, 1.0).to(at.dtype)
    return torch.where(even, rest, span - rest) + low, torch.where(even, sign, -sign)


def _cubic(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the four inputs around a point, and their derivatives. The point is `t` after the second input.

    Keys, "Cubic convolution interpolation for digital image processing", IEEE Trans. ASSP 29, 1981.
    """
    near = [t, 1 - t]
    far = [t + 1, 2 - t]
    a = _CUBIC_A
    inner = [((a + 2) * x - (a + 3)) * x * x + 1 for x in near]
    outer = [((a * x - 5 * a) * x + 8 * a) * x - 4 * a for x in far]
    inner_slope = [(3 * (a + 2) * x - 2 * (a + 3)) * x for x in near]
    outer_slope = [(3 * a * x - 10 * a) * x + 8 * a for x in far]
    weights = torch.stack([outer[0], inner[0], inner[1], outer[1]], -1)
    return weights, torch.stack([outer_slope[0], inner_slope[0], -inner_slope[1], -outer_slope[1]], -1)


def _read(x: torch.Tensor, near: Sequence[_Near]) -> torch.Tensor:
    """The values that the points read, [N, C, P, taps of all dimensions]; zero outside the input."""
    places = _flat_indices(near, x)
    index = places.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
    read = x.flatten(2).gather(2, index).unflatten(2, places.shape[1:])
    return torch.where(_all_inside(near).unsqueeze(1), read, 0)


def _flat_indices(near: Sequence[_Near], x: torch.Tensor) -> torch.Tensor:
    """Row-major indices over all spatial dimensions, [N, P, taps of all dimensions]."""
    strides = [math.prod(x.shape[d + 1 :]) for d in range(2, x.ndim)]
    total = _broadcastable([n.places * stride for n, stride in zip(near, strides, strict=True)])
    return sum(total[1:], total[0]).flatten(2)


def _all_inside(near: Sequence[_Near]) -> torch.Tensor:
    inside, *others = _broadcastable([n.inside for n in near])
    for other in others:
        inside = inside & other
    return inside.flatten(2)


def _product(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The product for every combination of one tap per dimension, [N, P, taps of all dimensions]."""
    product, *others = _broadcastable(factors)
    for other in others:
        product = product * other
    return product.flatten(2)


def _broadcastable(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Reshape tensors [N, P, taps] so that they broadcast: the taps of each get a dimension of their own."""
    shapes = [[1] * len(parts) for _ in parts]
    for dim, part in enumerate(parts):
        shapes[dim][dim] = part.shape[-1]
    return [part.reshape(*part.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)]
