"""`unfold`, which copies the windows of an image into columns, and `fold`, which adds columns up to an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.taps import Taps, apply_each, apply_each_transposed
from irongrad.operators.decompositions.windows import Window

aten = torch.ops.aten


@decomposes(aten.im2col.default)
def _im2col(
    x: torch.Tensor, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """[..., C, H, W] -> [..., C * places in the kernel, positions of the kernel]."""
    windows = _windows(x.shape[-2:], kernel_size, dilation, padding, stride)
    rows = apply_each(x, _maps(windows))  # [..., C, kernel * positions, kernel * positions]
    (high, down), (wide, across) = [(w.kernel, w.count) for w in windows]
    apart = rows.unflatten(-1, (wide, across)).unflatten(-3, (high, down)).transpose(-2, -3)
    return apart.flatten(-5, -3).flatten(-2)


@decomposes(aten.col2im.default)
def _col2im(
    columns: torch.Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    windows = _windows(output_size, kernel_size, dilation, padding, stride)
    (high, down), (wide, across) = [(w.kernel, w.count) for w in windows]
    channels = columns.shape[-2] // (high * wide)
    apart = columns.unflatten(-1, (down, across)).unflatten(-3, (channels, high, wide)).transpose(-2, -3)
    return apply_each_transposed(apart.flatten(-2).flatten(-3, -2), _maps(windows))


def _windows(size: Sequence[int], *geometry: Sequence[int]) -> list[Window]:
    kernel, dilation, padding, stride = geometry
    return [Window(size[d], kernel[d], stride[d], padding[d], padding[d], dilation[d]) for d in range(2)]


def _maps(windows: Sequence[Window]) -> list[Taps]:
    """For each dimension, the map from inputs to what each place in the kernel reads at each position of the kernel."""
    return [Taps.gather((p for met in zip(*w.all_places(), strict=True) for p in met), w.size) for w in windows]
