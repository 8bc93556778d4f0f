"""Winograd's minimal filtering F(2x2, 3x3) for 3x3 convolutions with stride 1, and for their gradients.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308), section 4.1: four outputs take
16 multiplications, not 36. The transforms are sums and differences along one dimension at a time. Between them are 16
matrix products, one for each position of a tile. They are computed as two batched products of eight.

With 16 separate products, IREE 3.13.0 fuses more of the transforms with the packing of each product's operands. A step
of ResNet-18 is then 2 to 5 % faster. But it launches nearly three times as many kernels and takes twice as long to
compile. In a single batch, the tiles and the packed tiles take more memory than anything else in a network.

All tensors are channels-last inside. Larger tiles lose precision: F(4x4, 3x3) needs a quarter of the multiplications of
a direct convolution, but its errors are some ten times as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.nn import functional as F

from irongrad.passes.graph.convolutions.problem import Window
from irongrad.passes.stack_by_position import stack_by_position

Parts: TypeAlias = Sequence[torch.Tensor]

# For each position of a tile, the position of the transformed kernel that it is multiplied with. Flipping a kernel
# swaps the first and the last position of its transform.
_SAME = (0, 1, 2, 3)
_FLIPPED = (3, 1, 2, 0)


def winograd(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the convolution of `x` [N, C, H, W] with `weight` [O, C, 3, 3]."""
    return _filtered(x, _filters(weight), window.padding, window.out, _SAME)


def winograd_input_gradient(grad: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the input's gradient: the convolution of `grad` [N, O, H, W] with the flipped weight, channels swapped.

    It uses the same transformed weight as the convolution, so that is computed once for both.
    """
    filters = _filters(weight).transpose(1, 2)
    return _filtered(grad, filters, [2 - pad for pad in window.padding], window.sizes, _FLIPPED)


def _filtered(
    x: torch.Tensor, filters: torch.Tensor, padding: Sequence[int], out: Sequence[int], order: Sequence[int]
) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    for half, kernels in zip(_input_rows(x, padding, out, order), filters.split(8), strict=True):
        tiles = _input_tiles(half, order)
        places = (_matrices(tiles) @ kernels).unflatten(1, tiles.shape[2:5]).unflatten(0, (2, 4))
        rows += stack_by_position(_outputs([places[:, j] for j in order]), 4)  # each [N, tiles, tiles, 2, channels]
    both = stack_by_position(_outputs([rows[i] for i in order]), 2)  # [N, tiles, 2, tiles, 2, channels]
    image = both.flatten(3, 4).flatten(1, 2)
    return image[:, : out[0], : out[1]].permute(0, 3, 1, 2)


def winograd_weight_gradient(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the weight's gradient [O, C, 3, 3] from `grad` [N, O, H, W], the gradient of the output.

    It uses the transposes of the transforms in `winograd`: the output transform for `grad`, the filter transform for
    the result. The images are transformed with rows and columns swapped, so that they differ from the forward's.
    Otherwise common subexpression elimination would keep the forward's transformed input for the backward, at four
    times the memory of the input.
    """
    spread = _output_rows(grad.transpose(2, 3))
    inputs = _input_rows(x.transpose(2, 3), window.padding[::-1], window.out[::-1], _SAME)
    rows: list[torch.Tensor] = []
    for left, right in zip(spread, inputs, strict=True):
        product = _matrices(_output_tiles(left)).transpose(1, 2) @ _matrices(_input_tiles(right, _SAME))
        places = product.unflatten(0, (2, 4))
        rows += stack_by_position(_filter_gradients([places[:, j] for j in range(4)]), 3)  # each [O, C, 3]
    return stack_by_position(_filter_gradients(rows), 3)


def _matrices(tiles: torch.Tensor) -> torch.Tensor:
    """Transformed tiles [rows, 4, N, tiles, tiles, channels] as matrices [rows * 4, N * tiles, channels]."""
    return tiles.flatten(2, 4).flatten(0, 1)


def _input_rows(x: torch.Tensor, padding: Sequence[int], out: Sequence[int], order: Sequence[int]) -> Parts:
    """4x4 tiles, two apart, transformed along columns, rows in `order`: two [2, N, tiles, tiles + 1, 2, C]."""
    height, width = ((size + 1) // 2 for size in out)
    pads: list[int] = []
    for size, pad, count in reversed(list(zip(x.shape[2:], padding, (height, width), strict=True))):
        pads += [pad, 2 * count + 2 - size - pad]
    last = F.pad(x.permute(0, 2, 3, 1), (0, 0, *pads))
    halves = last.reshape(x.shape[0], height + 1, 2, width + 1, 2, x.shape[1])
    rows = _inputs(_overlapping(halves, 1, height))
    return [stack_by_position([rows[i] for i in half], 0) for half in (order[:2], order[2:])]


def _input_tiles(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Transform tiles along rows too, each tile's positions in `order`: [rows, 4, N, tiles, tiles, C]."""
    columns = _inputs(_overlapping(rows, 3, rows.shape[3] - 1))
    return stack_by_position([columns[j] for j in order], 1)


def _overlapping(pairs: torch.Tensor, dim: int, count: int) -> Parts:
    """The elements at each of the four positions of tiles that are two apart.

    Dimension `dim` of `pairs` counts pairs of elements, and the next one has size two.
    """
    even, odd = pairs.unbind(dim + 1)
    return [half.narrow(dim, start, count) for start in range(2) for half in (even, odd)]


def _output_rows(grad: torch.Tensor) -> Parts:
    """2x2 tiles of an output's gradient, transformed along columns: two [2, N, tiles, tiles, 2, O]."""
    height, width = ((size + 1) // 2 for size in grad.shape[2:])
    last = grad.permute(0, 2, 3, 1)
    last = F.pad(last, (0, 0, 0, 2 * width - last.shape[2], 0, 2 * height - last.shape[1]))
    pairs = last.reshape(grad.shape[0], height, 2, width, 2, grad.shape[1])
    rows = _output_gradients([pairs[:, :, i] for i in range(2)])
    return [stack_by_position(half, 0) for half in (rows[:2], rows[2:])]


def _output_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Transform those tiles along rows too: [rows, 4, N, tiles, tiles, O]."""
    return stack_by_position(_output_gradients([rows[:, :, :, :, j] for j in range(2)]), 1)


def _filters(weight: torch.Tensor) -> torch.Tensor:
    """The transformed weight: a matrix [C, O] for each of the 16 positions of a tile, [16, C, O]."""
    kernel = weight.permute(2, 3, 1, 0)
    rows = stack_by_position(_kernels(list(kernel)), 0)
    return stack_by_position(_kernels([rows[:, j] for j in range(3)]), 1).flatten(0, 1)


def _inputs(d: Parts) -> Parts:
    return d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]


def _kernels(g: Parts) -> Parts:
    ends = g[0] + g[2]
    return g[0], (ends + g[1]) * 0.5, (ends - g[1]) * 0.5, g[2]


def _outputs(m: Parts) -> Parts:
    return m[0] + m[1] + m[2], m[1] - m[2] - m[3]


def _output_gradients(y: Parts) -> Parts:
    return y[0], y[0] + y[1], y[0] - y[1], -y[1]


def _filter_gradients(u: Parts) -> Parts:
    middle = (u[1] + u[2]) * 0.5
    return u[0] + middle, (u[1] - u[2]) * 0.5, middle + u[3]
