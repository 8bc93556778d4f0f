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

from irongrad.operators.decompositions.reductions import LONGEST_PRODUCT
from irongrad.passes.graph.convolutions.problem import Window
from irongrad.passes.stack_by_position import stack_by_position

Tap: TypeAlias = tuple[int, ...]


def gathered_product(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The convolution of `x` [N, C, H, W] with `weight` [O, C, ...]: one product with what all places meet.

    Where its sums were too long for their rounding, there is one for each row of the kernel.
    """
    parts = met(x, window)
    if _is_long(weight, window):
        rows = [[parts[i, j] for j in window.taps_along(1)] for i in window.taps_along(0)]
        places = _places_by_row(weight, window).flatten(2)
        result = reduce(torch.add, [_joined(row) @ of_row.t() for row, of_row in zip(rows, places, strict=True)])
    else:
        result = _joined(list(parts.values())) @ _places(weight, window).flatten(1).t()
    return result.unflatten(0, (x.shape[0], *window.out)).permute(0, 3, 1, 2)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """What places meet, [positions, places * C]; joined as images, for then IREE 3.13.0 copies each part once."""
    return (torch.cat(parts, 3) if len(parts) > 1 else parts[0]).flatten(0, 2)


def scattered_product(grad: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradient [N, C, H, W] of the input: one product for all places, and a sum over where they go."""
    left, images = grad.permute(0, 2, 3, 1).flatten(0, 2), (grad.shape[0], *window.out)
    if _is_long(weight, window):
        by_row = _places_by_row(weight, window)
        product = left.expand(len(by_row), -1, -1) @ by_row.flatten(2)
        by_place = product.unflatten(2, by_row.shape[2:]).unflatten(1, images).movedim(0, 3)
    else:
        places = _places(weight, window)
        by_place = (left @ places.flatten(1)).unflatten(1, places.shape[1:]).unflatten(0, images)
    by_place = surrounded(by_place, window)
    rows, columns = (window.taps_along(d) for d in range(2))
    return scattered(lambda tap: by_place[:, :, :, tap[0] - rows[0], tap[1] - columns[0]], window)


def surrounded(x: torch.Tensor, window: Window) -> torch.Tensor:
    """`x` [N, *out, ...] with zeros around it, so that at each place all inputs meet a block of it.

    One copy of the whole; each place moved by itself would be two or three kernels of its own.
    """
    pads: list[int] = []
    for d in reversed(range(2)):
        starts = [start for ends in _starts(window, d) for start in ends.values()]
        pads += [max(0, -min(starts)), max(0, max(starts) + _count(window, d) - window.out[d])]
    return F.pad(x, [0, 0] * (x.ndim - 3) + pads) if any(pads) else x


def scattered(of_tap: Callable[[Tap], torch.Tensor], window: Window) -> torch.Tensor:
    """The sum over the places of `of_tap`, each where it goes in the input: [N, C, *sizes].

    Inputs that are a stride apart meet the same places. Each such phase is a sum of its own, and they take turns: no
    zeros are put between outputs and multiplied.

    Args:
        of_tap: of a place, what is to be added up, [N, *out, C], `surrounded`.
        window: how the convolution moves.
    """
    values = {tap: of_tap(tap) for tap in window.taps()}
    some = next(iter(values.values()))
    starts = [_starts(window, d) for d in range(2)]
    counts = [_count(window, d) for d in range(2)]
    before = [max(0, *(-start for ends in along for start in ends.values())) for along in starts]

    def phase(i: int, j: int) -> torch.Tensor:
        """The inputs `(i, j)`, and those that are a stride apart."""
        terms = []
        for (row, column), value in values.items():
            if row in starts[0][i] and column in starts[1][j]:
                block = value.narrow(1, starts[0][i][row] + before[0], counts[0])
                terms.append(block.narrow(2, starts[1][j][column] + before[1], counts[1]))
        return reduce(torch.add, terms) if terms else some.new_zeros([some.shape[0], *counts, some.shape[3]])

    high, wide = (range(step) for step in window.stride)
    both = stack_by_position([stack_by_position([phase(i, j) for j in wide], 3) for i in high], 2)
    image = both.flatten(3, 4).flatten(1, 2)
    return image[:, : window.sizes[0], : window.sizes[1]].permute(0, 3, 1, 2)


def _count(window: Window, dim: int) -> int:
    """How many inputs are a stride apart."""
    return -(-window.sizes[dim] // window.stride[dim])


def _starts(window: Window, dim: int) -> list[dict[int, int]]:
    """For each of the first inputs, the places that meet it, and at which output each does; it may be none."""
    step, pad, dilation = window.stride[dim], window.padding[dim], window.dilation[dim]
    ends = [{tap: first + pad - tap * dilation for tap in window.taps_along(dim)} for first in range(step)]
    return [{tap: end // step for tap, end in along.items() if end % step == 0} for along in ends]


def weight_gradient_by_row(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradient [O, C, ...] of the weight: one product for each row of the kernel.

    One for each place takes as long to compute and three times the kernels, one for all gathers more than it saves.
    """
    left, parts = grad.permute(0, 2, 3, 1).flatten(0, 2).t(), met(x, window)
    rows, columns = (window.taps_along(d) for d in range(2))
    products = torch.stack([left @ _joined([parts[i, j] for j in columns]) for i in rows])  # [rows, O, columns * C]
    return _in_kernel(products.unflatten(2, (len(columns), x.shape[1])).permute(1, 3, 0, 2), window)


def weight_gradient_gathered(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """The same as one product with what all places meet, in the order of the weight: [positions, C * places]."""
    left = grad.permute(0, 2, 3, 1).flatten(0, 2).t()
    gathered = torch.stack(list(met(x, window).values()), 4)
    counts = [len(window.taps_along(d)) for d in range(2)]
    return _in_kernel((left @ gathered.flatten(3).flatten(0, 2)).unflatten(1, (x.shape[1], *counts)), window)


def _is_long(weight: torch.Tensor, window: Window) -> bool:
    """Whether the convolution's sums over all places are too long for their rounding."""
    return bool(len(window.taps()) * weight.shape[1] > LONGEST_PRODUCT)


def _places_by_row(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """As `_places`, one row of the kernel after the other: [rows, O, columns, C]."""
    return _meeting(weight, window).permute(2, 0, 3, 1)


def _places(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The weights that meet any input, [O, rows, columns, C]: an order that is near the weight's own, and serves the
    convolution and the gradient of its input.
    """
    return _meeting(weight, window).permute(0, 2, 3, 1)


def _meeting(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The weights that meet any input, [O, C, rows, columns].

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
    return weight


def _in_kernel(block: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradients of the weights that meet any input among the zeros of the others."""
    pads: list[int] = []
    for dim, size in reversed(list(enumerate(window.kernel))):
        places = window.taps_along(dim)
        pads += [places[0], size - 1 - places[-1]]
    return F.pad(block, pads) if any(pads) else block


def met(x: torch.Tensor, window: Window) -> dict[Tap, torch.Tensor]:
    """What each place meets: [N, *out, C].

    One that meets just what is there has it as it is, for IREE 3.13.0 reads it there and not among zeros in any case.
    """
    last = image = x.permute(0, 2, 3, 1)
    whole = [slice(0, size, 1) for size in window.sizes]
    slices = {tap: window.slices(tap) for tap in window.taps()}
    before = [max(0, *(-s[d].start for s in slices.values())) for d in range(2)]
    after = [max(0, *(s[d].stop - window.sizes[d] for s in slices.values())) for d in range(2)]
    if any(before) or any(after):
        last = F.pad(last, (0, 0, before[1], after[1], before[0], after[0]))
    found = {}
    for tap, parts in slices.items():
        if parts == whole:
            found[tap] = image
            continue
        part = last
        for dim, (cut, skipped) in enumerate(zip(parts, before, strict=True), start=1):
            if (cut.start + skipped, cut.stop + skipped, cut.step) != (0, part.shape[dim], 1):
                part = torch.ops.aten.slice.Tensor(part, dim, cut.start + skipped, cut.stop + skipped, cut.step)
        found[tap] = part
    return found
