"""Convolutions that IREE takes, and their backward as products of matrices and a convolution.

torch-mlir 20261001 lowers `convolution_backward` itself, but refuses groups, and its weight gradient runs at a tenth
of eager's speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from irongrad.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.convolution.default)
def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Cut off what the stride leaves unread of the padded input.

    IREE 3.13.0 fails on it where one output position is left ("inferred input/output operand #1 has shape's
    dimension #2 to be 4, but found 3").
    """
    unread = [
        (size + 2 * pad - dil * (kernel - 1) - 1) % step
        for size, pad, dil, kernel, step in zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
    ]
    if transposed or not any(unread):
        return NotImplemented
    pads = [p for pad, rest in zip(reversed(padding), reversed(unread), strict=True) for p in (pad, pad - rest)]
    zeros = [0] * len(stride)
    return aten.convolution.default(_pad(x, pads), weight, bias, stride, zeros, dilation, False, zeros, groups)


@decomposes(aten.convolution_backward.default)
def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of input, weight and bias (Dumoulin and Visin, arXiv:1603.07285, for the input's).

    Shapes: `grad` [N, O, *out], `x` [N, C, *in], `weight` [O, C / groups, *kernel].
    """
    if transposed:
        return NotImplemented  # type: ignore[no-any-return]
    geometry = _Geometry(stride, padding, dilation, groups)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = _input_gradient(grad, x, weight, geometry)
    if output_mask[1]:
        grad_weight = _weight_gradient(grad, x, weight, geometry)
    if output_mask[2]:
        grad_bias = aten.sum.dim_IntList(grad, [0, *range(2, grad.ndim)])
    return grad_x, grad_weight, grad_bias


class _Geometry(NamedTuple):
    """How a convolution moves over its input: one number for each spatial dimension, and the groups."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


def _input_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: _Geometry) -> torch.Tensor:
    """A convolution of the output's gradient, spread out by the stride, with the flipped and transposed weight."""
    stride, padding, dilation, groups = geometry
    spread = _spread(grad, stride)
    pads: list[int] = []
    for size, out, kernel, pad, dil in reversed(
        list(zip(x.shape[2:], spread.shape[2:], weight.shape[2:], padding, dilation, strict=True))
    ):
        before = dil * (kernel - 1) - pad
        pads += [before, size + dil * (kernel - 1) - before - out]
    spatial = list(range(2, weight.ndim))
    grouped = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    transposed = grouped.reshape(-1, weight.shape[0] // groups, *weight.shape[2:]).flip(spatial)
    ones, zeros = [1] * len(spatial), [0] * len(spatial)
    return aten.convolution.default(_pad(spread, pads), transposed, None, ones, zeros, dilation, False, zeros, groups)


def _spread(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Put `stride` - 1 zeros between neighbours of the spatial dimensions."""
    for dim, step in enumerate(stride, start=2):
        if step == 1 or x.shape[dim] == 1:
            continue
        size = x.shape[dim]
        apart = _pad(x.unsqueeze(dim + 1), [0, 0] * (x.ndim - dim - 1) + [0, step - 1])
        x = apart.flatten(dim, dim + 1).narrow(dim, 0, (size - 1) * step + 1)
    return x


def _pad(x: torch.Tensor, pads: Sequence[int]) -> torch.Tensor:
    """`constant_pad_nd` with zeros; negative pads become slices, as torch-mlir 20261001 does not lower them."""
    for dim, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True), start=1):
        start, end = max(-before, 0), x.shape[-dim] - max(-after, 0)
        if (start, end) != (0, x.shape[-dim]):
            x = x.narrow(-dim, start, end - start)
    positive = [max(p, 0) for p in pads]
    return aten.constant_pad_nd.default(x, positive) if any(positive) else x


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: _Geometry) -> torch.Tensor:
    """Output gradients times the inputs that each place of the kernel met, summed over batch and output positions.

    One product of matrices, [O, positions] times [positions, C * width of the kernel], for every row of the kernel:
    gathering along the width alone copies the input a few times, gathering whole windows would copy it nine times.
    """
    stride, padding, dilation, groups = geometry
    out, kernel = grad.shape[2:], weight.shape[2:]
    padded = _pad(x, [p for pad in reversed(padding) for p in (pad, pad)])
    left = grad.transpose(0, 1).reshape(groups, weight.shape[0] // groups, -1)
    steps = [
        [slice(k * dil, k * dil + (size - 1) * step + 1, step) for k in range(count)]
        for size, count, step, dil in zip(out, kernel, stride, dilation, strict=True)
    ]
    rows = []
    for places in itertools.product(*steps[:-1]):
        met = torch.stack([_at(padded, (*places, column)) for column in steps[-1]])  # [width, N, C, *out]
        met = met.unflatten(2, (groups, -1)).movedim((2, 0, 3), (0, -1, -2))  # [groups, N, *out, C / groups, width]
        right = met.reshape(groups, left.shape[-1], -1)
        rows.append(_product(left, right))
    stacked = torch.stack(rows, dim=2)  # [groups, O / groups, rows of the kernel, C / groups * width]
    split = stacked.unflatten(3, (-1, kernel[-1])).movedim(3, 2)
    return split.reshape(weight.shape)


def _at(x: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    for dim, part in enumerate(slices, start=2):
        x = aten.slice.Tensor(x, dim, part.start, part.stop, part.step)
    return x


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A batched product of matrices; with a batch of one a plain product, which IREE compiles to faster code."""
    if left.shape[0] == 1:
        return aten.mm.default(left[0], right[0]).unsqueeze(0)
    return aten.bmm.default(left, right)
