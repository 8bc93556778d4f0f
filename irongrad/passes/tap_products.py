"""Convolutions as a product of matrices over the places of the kernel that meet any input.

At a place, a convolution is a product of the inputs that it meets, [positions, C], with the place's weights [C, O]. A
1x1 kernel has one place; where an image is no larger than the padding, most places of a kernel meet nothing but zeros.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Window:
    """How a two-dimensional convolution moves: sizes of input, output and kernel, stride, padding, dilation."""

    sizes: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def taps(self) -> list[tuple[int, ...]]:
        """The places of the kernel that meet an input at some position of the output."""
        return list(itertools.product(*(self._taps_along(d) for d in range(len(self.sizes)))))

    def _taps_along(self, dim: int) -> list[int]:
        step, first = self.stride[dim], -self.padding[dim]
        starts = range(first, first + (self.out[dim] - 1) * step + 1, step)
        meeting = [
            tap
            for tap in range(self.kernel[dim])
            if any(0 <= start + tap * self.dilation[dim] < self.sizes[dim] for start in starts)
        ]
        return list(range(meeting[0], meeting[-1] + 1)) if meeting else []

    def slices(self, tap: tuple[int, ...]) -> list[slice]:
        """What `tap` meets along each dimension of the input; it may begin before it or end after it."""
        dims = zip(tap, self.out, self.stride, self.padding, self.dilation, strict=True)
        return [slice(t * dil - pad, t * dil - pad + (out - 1) * step + 1, step) for t, out, step, pad, dil in dims]


def tap_products(x: torch.Tensor, weight: torch.Tensor, window: Window, *, adjoint: bool) -> torch.Tensor:
    """The convolution of `x` [N, C, H, W] with `weight` [O, C, ...]; adjoint as in `winograd`."""
    met = _met(x, window)
    rows, columns = (sorted({tap[d] for tap in met}) for d in range(2))
    if adjoint:
        rows, columns = (
            [size - 1 - t for t in reversed(ts)] for ts, size in ((rows, window.kernel[0]), (columns, window.kernel[1]))
        )
    places = weight[:, :, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    if adjoint:
        places = (places.flip([2, 3]) if len(met) > 1 else places).permute(2, 3, 0, 1)
    else:
        places = places.permute(2, 3, 1, 0)
    parts = [part.flatten(0, 2) for part in met.values()]
    gathered = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    result = gathered @ places.flatten(0, 2)
    return result.reshape(x.shape[0], *window.out, -1).permute(0, 3, 1, 2)


def tap_weight_gradients(grad: torch.Tensor, x: torch.Tensor, window: Window) -> torch.Tensor:
    """The gradient [O, C, ...] of the weight, from `grad` [N, O, H, W] of the output."""
    met = _met(x, window)
    left = grad.permute(0, 2, 3, 1).flatten(0, 2).t()
    places = torch.stack([left @ rows.flatten(0, 2) for rows in met.values()])  # [taps, O, C]
    counts = [len({tap[d] for tap in met}) for d in range(2)]
    block = places.reshape(*counts, *places.shape[1:]).permute(2, 3, 0, 1)
    pads: list[int] = []
    for dim, size in reversed(list(enumerate(window.kernel))):
        first, last = min(tap[dim] for tap in met), max(tap[dim] for tap in met)
        pads += [first, size - 1 - last]
    return F.pad(block, pads) if any(pads) else block


def _met(x: torch.Tensor, window: Window) -> dict[tuple[int, ...], torch.Tensor]:
    """What each tap meets, channels-last: [N, height, width, C]."""
    last = x.permute(0, 2, 3, 1)
    slices = {tap: window.slices(tap) for tap in window.taps()}
    before = [max(0, *(-s[d].start for s in slices.values())) for d in range(2)]
    after = [max(0, *(s[d].stop - window.sizes[d] for s in slices.values())) for d in range(2)]
    if any(before) or any(after):
        last = F.pad(last, (0, 0, before[1], after[1], before[0], after[0]))
    met = {}
    for tap, parts in slices.items():
        part = last
        for dim, (cut, skipped) in enumerate(zip(parts, before, strict=True), start=1):
            if (cut.start + skipped, cut.stop + skipped, cut.step) != (0, part.shape[dim], 1):
                part = torch.ops.aten.slice.Tensor(part, dim, cut.start + skipped, cut.stop + skipped, cut.step)
        met[tap] = part
    return met
