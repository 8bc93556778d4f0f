"""Where the windows of a pooling or of `unfold` lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from irongrad.operators.decompositions.constants import constant

Places = Sequence[Sequence[int]]  # for each output of one dimension, the inputs in its window


@dataclass(frozen=True)
class Window:
    """How windows move over one dimension of `size` inputs, with padding before and behind them."""

    size: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def count(self) -> int:
        """How many windows there are; one that begins in the padding on the right does not count."""
        room = self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        count = (-(-room // self.stride) if self.ceil_mode else room // self.stride) + 1
        if self.ceil_mode and (count - 1) * self.stride >= self.size + self.before:
            count -= 1
        return count

    @property
    def end(self) -> int:
        """The place after the last window, which with `ceil_mode` may lie behind the padding."""
        return (self.count - 1) * self.stride - self.before + self.dilation * (self.kernel - 1) + 1

    def all_places(self) -> list[range]:
        """The places of each window, those in the padding too."""
        starts = range(-self.before, -self.before + self.count * self.stride, self.stride)
        return [range(s, s + self.kernel * self.dilation, self.dilation) for s in starts]

    def places(self) -> list[list[int]]:
        """The places of each window that are inputs."""
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
    """The windows of each of the last `dims` dimensions; one number stands for all, and no stride for the kernel."""
    kernel = each(kernel, dims)
    steps, edges, gaps = each(stride or kernel, dims), each(padding, dims), each(dilation, dims)
    numbers = zip(x.shape[-dims:], kernel, steps, edges, gaps, strict=True)
    return [Window(size, k, step, edge, edge, gap, ceil_mode) for size, k, step, edge, gap in numbers]


def each(numbers: Sequence[int], dims: int) -> list[int]:
    """One number a dimension, where ATen may be given one for all."""
    return list(numbers) * dims if len(numbers) == 1 else list(numbers)


def adaptive(size: int, count: int) -> list[list[int]]:
    """`count` windows that cover `size` inputs, as even as they can be (ATen/native/AdaptivePooling.h)."""
    return [list(range(i * size // count, -(-(i + 1) * size // count))) for i in range(count)]


def flat_places(tables: Sequence[Places], sizes: Sequence[int]) -> torch.Tensor:
    """[outputs, width]: the places of windows over several dimensions, counted through all of them.

    Args:
        tables: a dimension each, with windows of the same width.
        sizes: of those dimensions.
    """
    dims = len(tables)
    total = constant(0, torch.int64)
    for dim, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        places = constant(table, torch.int64)
        shape = [1] * (2 * dims)
        shape[dim], shape[dims + dim] = places.shape
        total = total * size + places.reshape(shape)
    return total.flatten(dims).flatten(0, dims - 1)
