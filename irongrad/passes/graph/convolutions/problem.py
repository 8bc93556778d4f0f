"""What there is to compute: a convolution, or the gradient of its input or weight, apart from any graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["forward", "input", "weight"]


@dataclass(frozen=True)
class Window:
    """How a two-dimensional convolution moves: sizes of input, output and kernel, stride, padding, dilation.

    The padding is that before each dimension; there is as much after it as the output needs.
    """

    sizes: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def taps(self) -> list[tuple[int, ...]]:
        """The places of the kernel that meet an input at some position of the output, as a whole block."""
        return list(itertools.product(*(self.taps_along(d) for d in range(len(self.sizes)))))

    def taps_along(self, dim: int) -> list[int]:
        """The places along one dimension; what lies between two of them is among them."""
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


@dataclass(frozen=True)
class Problem:
    """A convolution or one of its gradients; equal problems have the same fastest form.

    Attributes:
        kind: `forward`, of the input and the weight; `input`, the input's gradient, of the output's gradient and the
            weight; `weight`, the weight's gradient, of the output's gradient and the input.
        batch: how many images.
        channels: of the input and of the output.
        groups: into how many the channels are split.
        window: how the convolution itself moves.
    """

    kind: Kind
    batch: int
    channels: tuple[int, int]
    groups: int
    window: Window

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel is by itself."""
        return self.groups == self.channels[0] == self.channels[1] > 1

    def of_group(self) -> Problem:
        """What there is to compute for each group."""
        inner, outer = (channels // self.groups for channels in self.channels)
        return replace(self, channels=(inner, outer), groups=1)

    def positions(self, sizes: Sequence[int]) -> int:
        """How many there are in images of `sizes`."""
        return self.batch * math.prod(sizes)

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the two operands."""
        inner, outer = self.channels
        image, out = (self.batch, inner, *self.window.sizes), (self.batch, outer, *self.window.out)
        weight = (outer, inner // self.groups, *self.window.kernel)
        return {"forward": (image, weight), "input": (out, weight), "weight": (out, image)}[self.kind]

    def __str__(self) -> str:
        """One line, such as `forward 8x64x32x32 64x64x3x3 stride 1,1 padding 1,1`."""
        operands = " ".join("x".join(map(str, shape)) for shape in self.shapes())
        w = self.window
        moves = (("stride", w.stride), ("padding", w.padding), ("dilation", w.dilation))
        return " ".join([self.kind, operands, *(f"{name} {','.join(map(str, values))}" for name, values in moves)])
