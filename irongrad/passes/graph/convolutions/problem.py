"""The computation that a form implements: a convolution or one of its gradients, independent of any graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["forward", "input", "weight"]


class Halves(StrEnum):
    """How a target multiplies bfloat16.

    Attributes:
        VECTORS: pairs of numbers in vector registers, such as those of AVX512-BF16.
        TILES: matrices in tile registers, those of AMX.
    """

    VECTORS = "vectors"
    TILES = "tiles"


@dataclass(frozen=True)
class Window:
    """The geometry of a two-dimensional convolution, with one number for each spatial dimension.

    Attributes:
        sizes: the size of the input.
        out: the size of the output.
        kernel: the size of the kernel.
        stride: the stride.
        padding: the padding before each dimension. The padding after it is as much as the output needs.
        dilation: the dilation.
    """

    sizes: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def taps(self) -> list[tuple[int, ...]]:
        """Return the taps, as a rectangular block that covers all taps which read an input for some output."""
        return list(itertools.product(*(self.taps_along(d) for d in range(len(self.sizes)))))

    def taps_along(self, dim: int) -> list[int]:
        """Return the taps along one dimension, from the first that reads an input to the last, without gaps."""
        step, first = self.stride[dim], -self.padding[dim]
        starts = range(first, first + (self.out[dim] - 1) * step + 1, step)
        meeting = [
            tap
            for tap in range(self.kernel[dim])
            if any(0 <= start + tap * self.dilation[dim] < self.sizes[dim] for start in starts)
        ]
        return list(range(meeting[0], meeting[-1] + 1)) if meeting else []

    def pads(self) -> list[int]:
        """The padding that makes the input exactly as large as the outputs need, from the last dimension to the first.

        It is negative where some inputs are not read.
        """
        pads: list[int] = []
        for d in reversed(range(len(self.sizes))):
            end = (self.out[d] - 1) * self.stride[d] + (self.kernel[d] - 1) * self.dilation[d] + 1
            pads += [self.padding[d], end - self.sizes[d] - self.padding[d]]
        return pads

    def slices(self, tap: tuple[int, ...]) -> list[slice]:
        """Return the slice of each input dimension that `tap` reads; it may extend beyond the input."""
        dims = zip(tap, self.out, self.stride, self.padding, self.dilation, strict=True)
        return [slice(t * dil - pad, t * dil - pad + (out - 1) * step + 1, step) for t, out, step, pad, dil in dims]


@dataclass(frozen=True)
class Problem:
    """A convolution or one of its gradients; equal problems have the same fastest form.

    Attributes:
        kind: `forward` computes the output from the input and the weight. `input` computes the input's gradient from
            the output's gradient and the weight. `weight` computes the weight's gradient from the output's gradient and
            the input.
        batch: the number of images.
        channels: the number of input channels, and of output channels.
        groups: the number of groups that the channels are split into.
        window: the geometry of the forward convolution.
        halves: how the target multiplies both operands, if they are widened from bfloat16; None if they are not, or if
            the target multiplies float32 as fast.
    """

    kind: Kind
    batch: int
    channels: tuple[int, int]
    groups: int
    window: Window
    halves: Halves | None = None

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is a group of its own."""
        return self.groups == self.channels[0] == self.channels[1] > 1

    @property
    def adds_images(self) -> bool:
        """Whether this is a weight gradient that the form `filtered` wrote as a convolution."""
        return self.batch == 1 and self.groups > 1 and math.prod(self.window.kernel) > math.prod(self.window.out)

    def of_group(self) -> Problem:
        """Return the problem of a single group."""
        inner, outer = (channels // self.groups for channels in self.channels)
        return replace(self, channels=(inner, outer), groups=1)

    def positions(self, sizes: Sequence[int]) -> int:
        """Return the number of positions in a batch of images of `sizes`."""
        return self.batch * math.prod(sizes)

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the two operands."""
        inner, outer = self.channels
        image, out = (self.batch, inner, *self.window.sizes), (self.batch, outer, *self.window.out)
        weight = (outer, inner // self.groups, *self.window.kernel)
        return {"forward": (image, weight), "input": (out, weight), "weight": (out, image)}[self.kind]

    def __str__(self) -> str:
        """Return one line, such as `forward 8x64x32x32 64x64x3x3 stride 1,1 padding 1,1`."""
        operands = " ".join("x".join(map(str, shape)) for shape in self.shapes())
        w = self.window
        moves = (("stride", w.stride), ("padding", w.padding), ("dilation", w.dilation))
        how = [f"{name} {','.join(map(str, values))}" for name, values in moves]
        return " ".join([self.kind, operands, *how, *["bfloat16"] * (self.halves is not None)])
