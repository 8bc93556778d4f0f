"""Convolutions of 3x3 kernels with stride 1 by Winograd's minimal filtering, F(2x2, 3x3), and their weight's gradient.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308), section 4.1: 16 multiplications
for four outputs, not 36. The transforms are sums and differences along one dimension at a time. Inside, all is
channels-last; the transforms of the 16 places are stacked in front, so that what is left is one batched product.

What is the larger tiles' gain is their loss: F(4x4, 3x3) needs a quarter of the products that a direct convolution
does, and its errors are some ten times as large.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from irongrad.passes.interleave import choice

Parts = Sequence[torch.Tensor]

# The filter's transform of a flipped kernel is that of the kernel itself with the first and the last place swapped.
_FORWARD, _FLIPPED = (0, 1, 2, 3), (3, 1, 2, 0)


def winograd(
    x: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], out: Sequence[int], *, adjoint: bool
) -> torch.Tensor:
    """The convolution of `x` [N, C, H, W] with `weight` [O, C, 3, 3].

    With `adjoint`, of `x` [N, O, H, W] with the flipped weight and its first two dimensions swapped, [C, O, 3, 3]: the
    input's gradient. It is made of the same transformed weight, so that this is computed once for both.

    Args:
        x: the image.
        weight: the weight.
        padding: how many zeros are before each dimension; as many as `out` needs are after it.
        out: the sizes of the result.
        adjoint: see above.
    """
    order = _FLIPPED if adjoint else _FORWARD
    filters = _filters(weight)
    tiles = _input_tiles(x, padding, out, order)
    products = torch.bmm(tiles.flatten(2, 4).flatten(0, 1), filters.transpose(1, 2) if adjoint else filters)
    by_place = products.reshape(4, 4, *tiles.shape[2:5], -1)  # [4, 4, N, tiles, tiles, channels]
    rows = choice(_outputs([by_place[i] for i in order]), 3)  # [4, N, tiles, 2, tiles, channels]
    both = choice(_outputs([rows[i] for i in order]), 4)  # [N, tiles, 2, tiles, 2, channels]
    image = both.flatten(3, 4).flatten(1, 2)
    return image[:, : out[0], : out[1]].permute(0, 3, 1, 2)


def winograd_weight_gradient(grad: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """The gradient [O, C, 3, 3] of the weight, from `grad` [N, O, H, W] of the output.

    The transposes of the transforms of `winograd`: of the outputs for `grad`, and of the filter for the result.
    """
    out = grad.shape[2:]
    tiles = _input_tiles(x, padding, out, _FORWARD)
    spread = _output_tiles(grad)
    left, right = (t.flatten(2, 4).flatten(0, 1) for t in (spread, tiles))
    places = torch.bmm(left.transpose(1, 2), right).reshape(4, 4, grad.shape[1], x.shape[1])
    rows = choice(_filter_gradients([places[i] for i in range(4)]), 0)
    both = choice(_filter_gradients([rows[:, i] for i in range(4)]), 1)
    return both.permute(2, 3, 0, 1)


def _input_tiles(x: torch.Tensor, padding: Sequence[int], out: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """The transformed 4x4 tiles, two apart: [4, 4, N, tiles, tiles, C], places in `order`."""
    counts = [(size + 1) // 2 for size in out]
    pads: list[int] = []
    for size, pad, count in reversed(list(zip(x.shape[2:], padding, counts, strict=True))):
        pads += [pad, 2 * count + 2 - size - pad]
    last = F.pad(x.permute(0, 2, 3, 1), (0, 0, *pads))
    height, width = counts
    halves = last.reshape(x.shape[0], height + 1, 2, width + 1, 2, x.shape[1])
    down = [halves[:, i // 2 : i // 2 + height, i % 2] for i in range(4)]
    rows = choice([_inputs(down)[i] for i in order], 0)  # [4, N, tiles, tiles + 1, 2, C]
    across = [rows[:, :, :, i // 2 : i // 2 + width, i % 2] for i in range(4)]
    return choice([_inputs(across)[i] for i in order], 1)


def _output_tiles(grad: torch.Tensor) -> torch.Tensor:
    """The transformed 2x2 tiles of an output's gradient: [4, 4, N, tiles, tiles, O]."""
    height, width = ((size + 1) // 2 for size in grad.shape[2:])
    last = grad.permute(0, 2, 3, 1)
    last = F.pad(last, (0, 0, 0, 2 * width - last.shape[2], 0, 2 * height - last.shape[1]))
    pairs = last.reshape(grad.shape[0], height, 2, width, 2, grad.shape[1])
    rows = choice(_output_gradients([pairs[:, :, i] for i in range(2)]), 0)  # [4, N, tiles, tiles, 2, O]
    return choice(_output_gradients([rows[:, :, :, :, i] for i in range(2)]), 1)


def _filters(weight: torch.Tensor) -> torch.Tensor:
    """[16, C, O]."""
    kernel = weight.permute(2, 3, 1, 0)
    rows = choice(_kernels([kernel[i] for i in range(3)]), 0)
    return choice(_kernels([rows[:, i] for i in range(3)]), 1).flatten(0, 1)


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
