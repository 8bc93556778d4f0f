"""Average pooling and its backward, as weighted sums along one dimension after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from irongrad.graph.recorder import Operator
from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.taps import Taps, apply_each, apply_each_transposed
from irongrad.operators.decompositions.windows import Places, Window, adaptive, sliding

aten = torch.ops.aten


def _average_pooling(dims: int, forward: Operator, backward: Operator) -> None:
    @decomposes(forward)
    def pool(
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> torch.Tensor:
        """y[o] = sum of x[i] over the places i of window o, divided by the window's divisor.

        The shapes are [..., sizes] -> [..., windows]. The dimensions are pooled one after another, because the divisor
        is a product of one divisor per dimension (`_averages`).
        """
        windows = sliding(x, kernel_size, stride, padding, ceil_mode=ceil_mode, dims=dims)
        return apply_each(x, _averages(windows, count_include_pad, divisor_override))

    @decomposes(backward)
    def pool_backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> torch.Tensor:
        """dx[i] = sum of dy[o] / divisor[o] over the windows o that contain i: the transposed map."""
        windows = sliding(x, kernel_size, stride, padding, ceil_mode=ceil_mode, dims=dims)
        return apply_each_transposed(grad, _averages(windows, count_include_pad, divisor_override))


_average_pooling(2, aten.avg_pool2d.default, aten.avg_pool2d_backward.default)
_average_pooling(3, aten.avg_pool3d.default, aten.avg_pool3d_backward.default)


def _averages(windows: Sequence[Window], count_include_pad: bool, divisor: int | None) -> list[Taps]:
    """For each dimension, the map that sums a window and divides by the number of its places.

    The divisor of a window is the product of these numbers over the dimensions (AvgPoolKernel.cpp). With
    `count_include_pad`, places in the padding count. Places beyond the padding, which `ceil_mode` lets a window reach,
    do not.
    """
    maps = []
    for number, window in enumerate(windows):
        places = window.places()
        if divisor is not None:
            counts = [divisor if number == 0 else 1] * len(places)
        elif count_include_pad:
            counts = [sum(p < window.size + window.after for p in reached) for reached in window.all_places()]
        else:
            counts = [len(inputs) for inputs in places]
        maps.append(_sums(places, counts, window.size))
    return maps


def _sums(places: Places, counts: Sequence[int], size: int) -> Taps:
    return Taps(tuple(tuple((p, 1 / n) for p in row) for row, n in zip(places, counts, strict=True)), size)


def _adaptive_pooling(dims: int, forward: Operator, backward: Operator) -> None:
    def averages(x: torch.Tensor, counts: Sequence[int]) -> list[Taps]:
        tables = [(size, adaptive(size, count)) for size, count in zip(x.shape[-dims:], counts, strict=True)]
        return [_sums(places, [len(p) for p in places], size) for size, places in tables]

    @decomposes(forward)
    def pool(x: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
        """The mean of each window of `adaptive`: [..., sizes] -> [..., *output_size]."""
        return apply_each(x, averages(x, output_size))

    @decomposes(backward)
    def pool_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dx[i] = sum of dy[o] / size[o] over the windows o that contain i: the transposed map."""
        return apply_each_transposed(grad, averages(x, grad.shape[-dims:]))


_adaptive_pooling(2, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default)
_adaptive_pooling(3, aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default)
