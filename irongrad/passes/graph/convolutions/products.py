"""Convolutions as matrix products over the kernel taps that read any input, channels-last throughout.

For one tap, a convolution is a product of the inputs that the tap reads, [positions, C], with the tap's weights [C, O].
A 1x1 kernel has one tap. If an image is no larger than the padding, most taps of a kernel read only zeros.
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
    """Compute the convolution of `x` [N, C, H, W] with `weight` [O, C, ...] as one product over all taps.

    If the reduction is too long to round well, the products are one for each row of the kernel.
    """
    parts = met(x, window)
    if _is_long(weight, window):
        rows = [[parts[i, j] for j in window.taps_along(1)] for i in window.taps_along(0)]
        places = _tap_weights_by_row(weight, window).flatten(2)
        result = reduce(
            torch.add, [_product(_joined(row), of_row.t()) for row, of_row in zip(rows, places, strict=True)]
        )
    else:
        result = _product(_joined(list(parts.values())), _tap_weights(weight, window).flatten(1).t())
    return result.unflatten(0, (x.shape[0], *window.out)).permute(0, 3, 1, 2)


def gathered_products(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the convolution of `x` [N, C, H, W] with `weight` [O, C / groups, ...] as a batch of products."""
    groups = x.shape[1] // weight.shape[1]
    parts = torch.stack(list(met(x, window).values()), 3).flatten(0, 2)  # [positions, taps, C]
    left = parts.unflatten(2, (groups, -1)).permute(2, 0, 1, 3).flatten(2)
    right = _tap_weights(weight, window).flatten(1).unflatten(0, (groups, -1)).transpose(1, 2)
    result = _product(left, right).transpose(0, 1).flatten(1)
    return result.unflatten(0, (x.shape[0], *window.out)).permute(0, 3, 1, 2)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The inputs of several taps, [positions, taps * C].

    They are concatenated as images: IREE 3.13.0 then copies each part only once.
    """
    return (torch.cat(parts, 3) if len(parts) > 1 else parts[0]).flatten(0, 2)


def scattered_product(grad: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the input's gradient [N, C, H, W]: one product for all taps, then a sum at each tap's inputs."""
    left, images = grad.permute(0, 2, 3, 1).flatten(0, 2), (grad.shape[0], *window.out)
    if _is_long(weight, window):
        by_row = _tap_weights_by_row(weight, window)
        product = _product(left.expand(len(by_row), -1, -1), by_row.flatten(2))
        by_place = product.unflatten(2, by_row.shape[2:]).unflatten(1, images).movedim(0, 3)
    else:
        places = _tap_weights(weight, window)
        by_place = _product(left, places.flatten(1)).unflatten(1, places.shape[1:]).unflatten(0, images)
    by_place = surrounded(by_place, window)
    rows, columns = (window.taps_along(d) for d in range(2))
    return scattered(lambda tap: by_place[:, :, :, tap[0] - rows[0], tap[1] - columns[0]], window)


def surrounded(x: torch.Tensor, window: Window) -> torch.Tensor:
    """Zero-pad `x` [N, *out, ...] so that each tap contributes one block of it to the inputs.

    Padding all taps at once is one copy. Padding each tap separately would take two or three kernels for each.
    """
    pads: list[int] = []
    for d in reversed(range(2)):
        starts = [start for ends in _starts(window, d) for start in ends.values()]
        pads += [max(0, -min(starts)), max(0, max(starts) + _phase_size(window, d) - window.out[d])]
    return F.pad(x, [0, 0] * (x.ndim - 3) + pads) if any(pads) else x


def scattered(of_tap: Callable[[Tap], torch.Tensor], window: Window) -> torch.Tensor:
    """Sum the contributions of all taps at the inputs that they read: [N, C, *sizes].

    Inputs that are a multiple of the stride apart are read by the same taps. Each such phase is summed separately, and
    then the phases are interleaved. So no zeros are inserted between outputs and multiplied.

    Args:
        of_tap: returns the contribution of a tap, [N, *out, C], padded by `surrounded`.
        window: the geometry of the convolution.
    """
    values = {tap: of_tap(tap) for tap in window.taps()}
    some = next(iter(values.values()))
    starts = [_starts(window, d) for d in range(2)]
    counts = [_phase_size(window, d) for d in range(2)]
    before = [max(0, *(-start for ends in along for start in ends.values())) for along in starts]

    def phase(i: int, j: int) -> torch.Tensor:
        """The sum for input `(i, j)` and for all inputs that are a multiple of the stride away."""
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


def _phase_size(window: Window, dim: int) -> int:
    """The number of inputs of one phase along `dim`."""
    return -(-window.sizes[dim] // window.stride[dim])


def _starts(window: Window, dim: int) -> list[dict[int, int]]:
    """For each phase, the taps that read its first input, each with the index of the output that it contributes to.

    The index may be out of range.
    """
    step, pad, dilation = window.stride[dim], window.padding[dim], window.dilation[dim]
    ends = [{tap: first + pad - tap * dilation for tap in window.taps_along(dim)} for first in range(step)]
    return [{tap: end // step for tap, end in along.items() if end % step == 0} for along in ends]


def weight_gradient_by_row(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the weight's gradient [O, C, ...] as one product for each row of the kernel.

    One product for each tap takes as long and launches three times as many kernels. One product for all taps copies
    more than it saves.
    """
    left, parts = grad.permute(0, 2, 3, 1).flatten(0, 2).t(), met(x, window)
    rows, columns = (window.taps_along(d) for d in range(2))
    products = torch.stack(
        [_product(left, _joined([parts[i, j] for j in columns])) for i in rows]
    )  # [rows, O, columns * C]
    return _padded_to_kernel(products.unflatten(2, (len(columns), x.shape[1])).permute(1, 3, 0, 2), window)


def weight_gradient_gathered(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """Compute the weight's gradient [O, C, ...] as one product.

    Its right operand is the inputs of all taps in the order of the weight: [positions, C * taps].
    """
    left = grad.permute(0, 2, 3, 1).flatten(0, 2).t()
    gathered = torch.stack(list(met(x, window).values()), 4)
    counts = [len(window.taps_along(d)) for d in range(2)]
    return _padded_to_kernel(
        _product(left, gathered.flatten(3).flatten(0, 2)).unflatten(1, (x.shape[1], *counts)), window
    )


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of two matrices, or of two batches of them, in float32."""
    return torch.matmul(*widened(left, right))


def widened(*operands: torch.Tensor) -> list[torch.Tensor]:
    """The operands of a product, widened directly before it: so it is still found to be one of half precision."""
    return [x.float() if x.dtype is torch.bfloat16 else x for x in operands]


def _is_long(weight: torch.Tensor, window: Window) -> bool:
    """Whether sums over all taps and channels are too long to round well."""
    return bool(len(window.taps()) * weight.shape[1] > LONGEST_PRODUCT)


def _tap_weights_by_row(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """As `_tap_weights`, one row of the kernel after the other: [rows, O, columns, C]."""
    return _reached_weights(weight, window).permute(2, 0, 3, 1)


def _tap_weights(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The weights that any input is multiplied with, [O, rows, columns, C].

    This order is close to the weight's own. It serves both the convolution and its input's gradient.
    """
    return _reached_weights(weight, window).permute(0, 2, 3, 1)


def _reached_weights(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The weights that any input is multiplied with, [O, C, rows, columns].

    A single row or column is extracted by zeroing all others and summing, not by a slice. If a slice is packed for a
    product, IREE 3.13.0 puts a whole matrix on the stack. It then refuses to compile ("exceeded stack allocation
    limit").
    """
    for d in range(2):
        taps = window.taps_along(d)
        if 1 < len(taps) < window.kernel[d]:
            weight = weight.narrow(2 + d, taps[0], len(taps))
        elif len(taps) < window.kernel[d]:
            among = torch.arange(window.kernel[d]) == taps[0]
            weight = torch.where(among.reshape([-1] + [1] * (1 - d)), weight, 0).sum(2 + d, keepdim=True)
    return weight


def _padded_to_kernel(block: torch.Tensor, window: Window) -> torch.Tensor:
    """Zero-pad the gradients of the taps that read any input to the size of the kernel."""
    pads: list[int] = []
    for dim, size in reversed(list(enumerate(window.kernel))):
        taps = window.taps_along(dim)
        pads += [taps[0], size - 1 - taps[-1]]
    return F.pad(block, pads) if any(pads) else block


def met(x: torch.Tensor, window: Window) -> dict[Tap, torch.Tensor]:
    """Return the inputs that each tap reads: [N, *out, C].

    A tap that reads exactly the whole image gets the image itself, not a slice of the padded one. IREE 3.13.0 then
    reads it in place.
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
