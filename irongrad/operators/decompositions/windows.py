"""The places of the windows of a pooling or of `unfold`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from irongrad.operators.decompositions.constants import constant

Places = Sequence[Sequence[int]]  # for each output of one dimension, the inputs in its window


@dataclass(frozen=True)
class Window:
    """How windows move over one padded dimension.

    Attributes:
        size: the number of inputs.
        kernel: the number of places in a window.
        stride: the distance between the starts of neighbouring windows.
        before: the padding before the first input.
        after: the padding after the last input.
        dilation: the distance between neighbouring places in a window.
        ceil_mode: whether there may be a last window that reaches beyond the padding.
    """

    size: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def count(self) -> int:
        """The number of windows; with `ceil_mode`, a window that begins in the padding on the right does not count."""
        room = self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        count = (-(-room // self.stride) if self.ceil_mode else room // self.stride) + 1
        if self.ceil_mode and (count - 1) * self.stride >= self.size + self.before:
            count -= 1
        return count

    @property
    def end(self) -> int:
        """The place after the last window; with `ceil_mode` it may lie beyond the padding."""
        return (self.count - 1) * self.stride - self.before + self.dilation * (self.kernel - 1) + 1

    def all_places(self) -> list[range]:
        """Return the places of each window, including those in the padding."""
        starts = range(-self.before, -self.before + self.count * self.stride, self.stride)
        return [range(s, s + self.kernel * self.dilation, self.dilation) for s in starts]

    def places(self) -> list[list[int]]:
        """Return the places of each window that are inputs."""
        return [[p for p in window if 0 <= p < self.size] for window in self.all_places()]


def sliding(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    dims: int,
) -> list[Window]:
    """Return the windows of each of the last `dims` dimensions of `x`.

    Args:
        x: the input.
        kernel: one number per dimension, or one for all dimensions; the same holds for the arguments below.
        stride: empty for the sizes of the kernel.
        padding: on both sides of a dimension.
        dilation: the distance between neighbouring places in a window.
        ceil_mode: as in `Window`.
        dims: the number of dimensions.
    """
    kernel = each(kernel, dims)
    steps, edges, gaps = each(stride or kernel, dims), each(padding, dims), each(dilation, dims)
    numbers = zip(x.shape[-dims:], kernel, steps, edges, gaps, strict=True)
    return [Window(size, k, step, edge, edge, gap, ceil_mode) for size, k, step, edge, gap in numbers]


def each(numbers: Sequence[int], dims: int) -> list[int]:
    """Return one number per dimension; ATen accepts one number for all dimensions."""
    return list(numbers) * dims if len(numbers) == 1 else list(numbers)


def adaptive(size: int, count: int) -> list[list[int]]:
    """Return `count` windows that cover `size` inputs as evenly as possible (ATen/native/AdaptivePooling.h)."""
    return [list(range(i * size // count, -(-(i + 1) * size // count))) for i in range(count)]


def flat_places(tables: Sequence[Places], sizes: Sequence[int]) -> torch.Tensor:
    """Return the places of windows over several dimensions, as row-major indices: [outputs, width].

    Args:
        tables: for each dimension, its windows; all windows of a dimension have the same width.
        sizes: the sizes of the dimensions.
    """
    dims = len(tables)
    total = constant(0, torch.int64)
    for dim, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        places = constant(table, torch.int64)
        shape = [1] * (2 * dims)
        shape[dim], shape[dims + dim] = places.shape
        total = total * size + places.reshape(shape)
    return total.flatten(dims).flatten(0, dims - 1)
