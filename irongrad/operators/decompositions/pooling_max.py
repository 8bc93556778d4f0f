"""Maximum pooling with sliding, adaptive and fractional windows, and its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from irongrad.graph.recorder import Operator
from irongrad.operators.decompositions.constants import constant
from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.windows import Places, adaptive, flat_places, sliding
from irongrad.runtime.errors import UnsupportedOpError

aten = torch.ops.aten

Pooled = tuple[torch.Tensor, torch.Tensor]


def _max_pooling(dims: int, forward: Operator, backward: Operator) -> None:
    @decomposes(forward)
    def pool(
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Pooled:
        """The maximum of each window and its place in the flattened image: [..., sizes] -> twice [..., windows].

        Of equal elements the first in row-major order is the maximum (ATen/native/cpu/MaxPoolKernel.cpp).
        """
        windows = sliding(x, kernel_size, stride, padding, dilation, ceil_mode, dims=dims)
        return _pool(x, [w.places() for w in windows])

    @decomposes(backward)
    def pool_backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        """dx[i] = sum of dy[o] over the windows o whose maximum is at i: [..., windows] -> [..., sizes]."""
        windows = sliding(x, kernel_size, stride, padding, dilation, ceil_mode, dims=dims)
        return _backward(grad, x, [w.places() for w in windows], indices)


_max_pooling(2, aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
_max_pooling(3, aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default)


def _adaptive_pooling(dims: int, forward: Operator, backward: Operator) -> None:
    @decomposes(forward)
    def pool(x: torch.Tensor, output_size: Sequence[int]) -> Pooled:
        """As for sliding windows, with the windows of `adaptive`: [..., sizes] -> twice [..., *output_size]."""
        return _pool(x, [adaptive(*sizes) for sizes in zip(x.shape[-dims:], output_size, strict=True)])

    @decomposes(backward)
    def pool_backward(grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """dx[i] = sum of dy[o] over the windows o whose maximum is at i; the shape of `grad` gives their number."""
        tables = [adaptive(*sizes) for sizes in zip(x.shape[-dims:], grad.shape[-dims:], strict=True)]
        return _backward(grad, x, tables, indices)


_adaptive_pooling(2, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool2d_backward.default)
_adaptive_pooling(3, aten.adaptive_max_pool3d.default, aten.adaptive_max_pool3d_backward.default)


def _pool(x: torch.Tensor, tables: Sequence[Places]) -> Pooled:
    """The maximum of each window and its place; a shorter window repeats its last place, which keeps its maximum."""
    if not all(window for table in tables for window in table):
        raise UnsupportedOpError(
            "max_pool: a dilated window reaches only padding, and has no maximum (eager gives an index outside of the "
            "input). Pad less, or dilate less"
        )
    dims = len(tables)
    counts = [len(table) for table in tables]
    places = flat_places([_of_equal_width(table) for table in tables], x.shape[-dims:])
    windows = x.flatten(-dims).index_select(-1, places.flatten()).unflatten(-1, places.shape)
    values, indices = _largest(windows, places)
    return values.unflatten(-1, counts), indices.unflatten(-1, counts)


def _of_equal_width(table: Places) -> list[list[int]]:
    width = max(len(window) for window in table)
    return [[*window, *[window[-1]] * (width - len(window))] for window in table]


def _largest(windows: torch.Tensor, places: torch.Tensor) -> Pooled:
    """Maxima over the last dimension and the first place of each; NaN is the largest, as in eager."""
    values = windows.amax(-1)
    found = (windows == values.unsqueeze(-1)) | (windows != windows)
    return values, torch.where(found, places, torch.iinfo(torch.int64).max).amin(-1)


def _backward(grad: torch.Tensor, x: torch.Tensor, tables: Sequence[Places], indices: torch.Tensor) -> torch.Tensor:
    """For each input, sum the gradients of the windows that contain it and whose maximum it is.

    Few windows contain an input. Each sum is written once, while a scatter would write to one place several times.
    """
    dims = len(tables)
    holding = [_windows_of_inputs(table, size) for table, size in zip(tables, x.shape[-dims:], strict=True)]
    width = [max(len(row) for row in rows) for rows in holding]
    filled = [[[*row, *[0] * (w - len(row))] for row in rows] for rows, w in zip(holding, width, strict=True)]
    places = flat_places(filled, grad.shape[-dims:])
    real = [[[1] * len(row) + [0] * (w - len(row)) for row in rows] for rows, w in zip(holding, width, strict=True)]
    # In base 2, the flat place of a window that is real in every dimension has all bits set.
    is_real = flat_places(real, [2] * dims) == 2**dims - 1
    flat = places.flatten()
    gradients = grad.flatten(-dims).index_select(-1, flat).unflatten(-1, places.shape)
    maxima = indices.flatten(-dims).index_select(-1, flat).unflatten(-1, places.shape)
    own = torch.arange(places.shape[0]).unsqueeze(1)
    return torch.where((maxima == own) & is_real, gradients, 0).sum(-1).reshape(x.shape)


def _windows_of_inputs(table: Places, size: int) -> list[list[int]]:
    windows: list[list[int]] = [[] for _ in range(size)]
    for number, window in enumerate(table):
        for place in window:
            windows[place].append(number)
    return windows


def _fractional_pooling(dims: int, forward: Operator, backward: Operator) -> None:
    @decomposes(forward)
    def pool(
        x: torch.Tensor, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: torch.Tensor
    ) -> Pooled:
        """Maxima of windows whose places are computed from random numbers (Graham, arXiv:1412.6071)."""
        places = torch.zeros((), dtype=torch.int64)
        batch = x.shape[:-dims]
        samples = random_samples.reshape(*batch, dims)
        for dim, (size, kernel, count) in enumerate(zip(x.shape[-dims:], kernel_size, output_size, strict=True)):
            # ATen orders the samples by width and height in two dimensions, by depth, height and width in three.
            sample = samples[..., dim if dims == 3 else 1 - dim]
            reach = _starts(sample, size, kernel, count).unsqueeze(-1) + torch.arange(kernel)
            shape = [1] * (2 * dims)
            shape[dim], shape[dims + dim] = count, kernel
            places = places * size + reach.reshape(*batch, *shape)
        places = places.flatten(-dims).flatten(-dims - 1, -2)
        windows = x.flatten(-dims).gather(-1, places.flatten(-2)).unflatten(-1, places.shape[-2:])
        values, indices = _largest(windows, places)
        return values.unflatten(-1, list(output_size)), indices.unflatten(-1, list(output_size))

    @decomposes(backward)
    def pool_backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        kernel_size: Sequence[int],
        output_size: Sequence[int],
        indices: torch.Tensor,
    ) -> torch.Tensor:
        """dx[indices[o]] += dy[o], as a scatter: in each plane, windows overlap differently."""
        zeros = torch.zeros_like(x).flatten(-dims)
        return zeros.scatter_add(-1, indices.flatten(-dims), grad.flatten(-dims)).reshape(x.shape)


_fractional_pooling(2, aten.fractional_max_pool2d.default, aten.fractional_max_pool2d_backward.default)
_fractional_pooling(3, aten.fractional_max_pool3d.default, aten.fractional_max_pool3d_backward.default)


def _starts(sample: torch.Tensor, size: int, kernel: int, count: int) -> torch.Tensor:
    """The first place of each window, per plane; the last window ends at the edge (FractionalMaxPool2d.cpp)."""
    if count == 1:
        return torch.full((*sample.shape, 1), size - kernel)
    steps = torch.arange(count - 1).to(sample.dtype)
    alpha = constant((size - kernel) / (count - 1), sample.dtype)
    one = sample.unsqueeze(-1)
    starts = ((steps + one) * alpha).to(torch.int64) - (one * alpha).to(torch.int64)
    return torch.cat([starts, torch.full((*sample.shape, 1), size - kernel)], -1)
