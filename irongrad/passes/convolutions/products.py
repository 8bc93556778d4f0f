"""Convolutions as products of matrices over the places of the kernel that meet any input, all channels-last.

At a place, a convolution is a product of the inputs that it meets, [positions, C], with the place's weights [C, O]. A
1x1 kernel has one place; where an image is no larger than the padding, most places of a kernel meet nothing but zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TypeAlias

import torch
from torch.nn import functional as F

from irongrad.decompositions.reductions import LONGEST_PRODUCT
from irongrad.passes.convolutions.problem import Window, choice

Tap: TypeAlias = tuple[int, ...]


def gathered_product(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The convolution of `x` [N, C, H, W] with `weight` [O, C, ...]: one product with what all places meet.

    Where its sums were too long for their rounding, there is one for each row of the kernel.
    """
    parts, places = met(x, window), _places(weight, window)
    rows = [[parts[i, j].flatten(0, 2) for j in window.taps_along(1)] for i in window.taps_along(0)]
    if len(parts) * x.shape[1] <= LONGEST_PRODUCT:
        result = _joined([part for row in rows for part in row]) @ places.flatten(1).t()
    else:
        products = [_joined(row) @ places[:, i].flatten(1).t() for i, row in enumerate(rows)]
        result = reduce(torch.add, products)
    return result.unflatten(0, (x.shape[0], *window.out)).permute(0, 3, 1, 2)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def scattered_product(grad: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradient [N, C, H, W] of the input: one product for all places, and a sum over where they go."""
    places = _places(weight, window)
    product = grad.permute(0, 2, 3, 1).flatten(0, 2) @ places.flatten(1)
    by_place = product.unflatten(1, places.shape[1:]).unflatten(0, (grad.shape[0], *window.out))
    rows, columns = (window.taps_along(d) for d in range(2))
    return scattered(lambda tap: by_place[:, :, :, tap[0] - rows[0], tap[1] - columns[0]], window)


def scattered(of_tap: Callable[[Tap], torch.Tensor], window: Window) -> torch.Tensor:
    """The sum over the places of `of_tap`, [N, *out, C], each where it goes in the input: [N, C, *sizes].

    Inputs that are a stride apart meet the same places. Each such phase is a sum of its own, and they take turns: no
    zeros are put between outputs and multiplied.
    """
    counts = [-(-size // step) for size, step in zip(window.sizes, window.stride, strict=True)]
    values = {tap: of_tap(tap) for tap in window.taps()}
    some = next(iter(values.values()))

    def phase(first: tuple[int, int]) -> torch.Tensor:
        """The inputs `first`, `first + stride` and so on."""
        terms = []
        for tap, value in values.items():
            ends = [
                f + pad - t * dil for f, pad, t, dil in zip(first, window.padding, tap, window.dilation, strict=True)
            ]
            if all(end % step == 0 for end, step in zip(ends, window.stride, strict=True)):
                starts = [end // step for end, step in zip(ends, window.stride, strict=True)]
                terms.append(_moved(_moved(value, 1, starts[0], counts[0]), 2, starts[1], counts[1]))
        return reduce(torch.add, terms) if terms else some.new_zeros([some.shape[0], *counts, some.shape[3]])

    high, wide = (range(step) for step in window.stride)
    both = choice([choice([phase((i, j)) for j in wide], 3) for i in high], 2)
    image = both.flatten(3, 4).flatten(1, 2)
    return image[:, : window.sizes[0], : window.sizes[1]].permute(0, 3, 1, 2)


def _moved(x: torch.Tensor, dim: int, start: int, count: int) -> torch.Tensor:
    """`count` places along `dim` from `start` on; zeros where there are none."""
    before, after = max(-start, 0), max(start + count - x.shape[dim], 0)
    if before or after:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])
    return x.narrow(dim, start + before, count)


def weight_gradient_by_place(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradient [O, C, ...] of the weight: one product for each place."""
    left = grad.permute(0, 2, 3, 1).flatten(0, 2).t()
    places = torch.stack([left @ part.flatten(0, 2) for part in met(x, window).values()])  # [places, O, C]
    counts = [len(window.taps_along(d)) for d in range(2)]
    return _in_kernel(places.unflatten(0, counts).permute(2, 3, 0, 1), window)


def weight_gradient_gathered(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """The same as one product with what all places meet, in the order of the weight: [positions, C * places]."""
    left = grad.permute(0, 2, 3, 1).flatten(0, 2).t()
    gathered = torch.stack([part.flatten(0, 2) for part in met(x, window).values()], 2)
    counts = [len(window.taps_along(d)) for d in range(2)]
    return _in_kernel((left @ gathered.flatten(1)).unflatten(1, (x.shape[1], *counts)), window)


def _places(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The weights that meet any input, [O, rows, columns, C]: an order that is near the weight's own, and serves the
    convolution and the gradient of its input.

    One row or column is taken out as a sum in which all others are times zero: a slice that is packed for a product
    makes IREE 3.13.0 hold a whole matrix on the stack, and then refuse to ("exceeded stack allocation limit").
    """
    for d in range(2):
        taps = window.taps_along(d)
        if 1 < len(taps) < window.kernel[d]:
            weight = weight.narrow(2 + d, taps[0], len(taps))
        elif len(taps) < window.kernel[d]:
            among = torch.arange(window.kernel[d]) == taps[0]
            weight = torch.where(among.reshape([-1] + [1] * (1 - d)), weight, 0).sum(2 + d, keepdim=True)
    return weight.permute(0, 2, 3, 1)


def _in_kernel(block: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradients of the weights that meet any input among the zeros of the others."""
    pads: list[int] = []
    for dim, size in reversed(list(enumerate(window.kernel))):
        places = window.taps_along(dim)
        pads += [places[0], size - 1 - places[-1]]
    return F.pad(block, pads) if any(pads) else block


def met(x: torch.Tensor, window: Window) -> dict[Tap, torch.Tensor]:
    """What each place meets: [N, *out, C]."""
    last = x.permute(0, 2, 3, 1)
    slices = {tap: window.slices(tap) for tap in window.taps()}
    before = [max(0, *(-s[d].start for s in slices.values())) for d in range(2)]
    after = [max(0, *(s[d].stop - window.sizes[d] for s in slices.values())) for d in range(2)]
    if any(before) or any(after):
        last = F.pad(last, (0, 0, before[1], after[1], before[0], after[0]))
    found = {}
    for tap, parts in slices.items():
        part = last
        for dim, (cut, skipped) in enumerate(zip(parts, before, strict=True), start=1):
            if (cut.start + skipped, cut.stop + skipped, cut.step) != (0, part.shape[dim], 1):
                part = torch.ops.aten.slice.Tensor(part, dim, cut.start + skipped, cut.stop + skipped, cut.step)
        found[tap] = part
    return found
