"""Padded tensors, and how rules treat their padding: mask it, leave it out of counts, move elements past it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from irongrad.padding.layout import Axis, Dim, Layout, is_padded, size_of, solid
from irongrad.sizes.expressions import Number, Sizes

# Fillers for `Padding.fill`: the smallest and the largest value of the tensor's dtype.
LOWEST, HIGHEST = "lowest", "highest"


@dataclass(frozen=True)
class Padded:
    """A tensor with a bucket's sizes, in which only some elements exist in the program without padding.

    It has no padding if its sizes depend on open dimensions alone.

    Attributes:
        tensor: the elements. Padding may have any values.
        layout: which elements are true, by dimension.
        zero: whether all padding is known to be zero.
        maker: the node result that this tensor is, or is a view of, as the node's name and the result's number; None
            for a tensor that a rule computes.
    """

    tensor: Tensor
    layout: Layout
    zero: bool = False
    maker: Hashable = None

    def __post_init__(self) -> None:
        assert self.tensor.ndim == len(self.layout), (self.tensor.shape, self.layout)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.layout)

    @property
    def mT(self) -> Padded:  # noqa: N802 (as that of a tensor)
        """The matrices of the last two dimensions, transposed."""
        return self.view(self.tensor.mT, (*self.layout[:-2], self.layout[-1], self.layout[-2]))

    def view(self, tensor: Tensor, layout: Layout) -> Padded:
        """`tensor`, a view with exactly the elements of this one; padding stays padding."""
        return replace(self, tensor=tensor, layout=layout)

    def named(self, layout: Layout) -> Padded:
        """The same tensor with another `layout` that broadcasts with its own."""
        same = all(solid(a) == solid(b) for a, b in zip(self.layout, layout, strict=True))
        return self.view(self.tensor, layout) if same else Padded(self.tensor, layout)

    def dims(self, chosen: Sequence[int] | int | None = None) -> list[int]:
        """The `chosen` dimensions as indices from the front; all dimensions for None or an empty list."""
        if chosen is None or chosen == [] or chosen == ():
            return list(range(self.ndim))
        indices = [chosen] if isinstance(chosen, int) else chosen
        return [d % self.ndim for d in indices] if self.ndim else []

    def padded(self, chosen: Sequence[int] | int | None = None) -> list[int]:
        """The `chosen` dimensions that have padding."""
        return [d for d in self.dims(chosen) if is_padded(self.layout[d])]

    def repeats_padding(self) -> bool:
        """Whether a padded axis is uniform; views of the tensor may read all its elements as true ones."""
        return any(a.uniform and a.padded for dim in self.layout for a in dim)


class Padding:
    """The padding of one call.

    Attributes:
        sizes: the sizes of the bucket and the true sizes of the call.
        needs: expressions of named dimensions that must not be negative at the sizes of any call.
        zeroed: the makers of the tensors whose padding was replaced by zeros.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.needs: set[Any] = set()
        self.zeroed: set[Hashable] = set()
        self._masks: dict[Dim, Tensor] = {}

    def need(self, dim: Dim, count: Any) -> None:
        """Require that a dimension has at least `count` elements in the program without padding."""
        self.needs.add(size_of(dim) - count)

    def extent(self, dim: Dim) -> Any:
        """The number of elements of a dimension in the bucket; a symbolic number if the dimension is open."""
        return self.sizes.bucket(size_of(dim))

    def positions(self, axis: Axis) -> Tensor:
        """The indices 0, 1, … along an axis in the bucket."""
        return torch.arange(self.sizes.bucket(axis.size))

    def mask(self, dim: Dim) -> Tensor:
        """A boolean vector that marks the true elements of a dimension."""
        if dim not in self._masks:
            valid = torch.ones((1,), dtype=torch.bool)
            for axis in dim:
                inner = self._true_along(axis)
                valid = (valid.unsqueeze(1) & inner).reshape(-1)
            self._masks[dim] = valid
        return self._masks[dim]

    def _true_along(self, axis: Axis) -> Tensor:
        """A boolean vector that marks the true elements of an axis; an open one has no others."""
        if not axis.padded and axis.size.free_symbols:
            return torch.ones([self.sizes.bucket(axis.size)], dtype=torch.bool)
        return self.positions(axis) < self.sizes.true(axis.size)

    def valid(self, value: Padded, dims: Sequence[int] | int | None = None) -> Tensor | None:
        """A mask of the true elements along `dims`, which broadcasts to the tensor; None if all elements are true."""
        result: Tensor | None = None
        for d in value.padded(dims):
            along = self.mask(value.layout[d]).reshape([-1 if i == d else 1 for i in range(value.ndim)])
            result = along if result is None else result & along
        return result

    def fill(self, value: Padded, filler: float | str, dims: Sequence[int] | int | None = None) -> Tensor:
        """The tensor with `filler` in place of the padding along `dims`."""
        if value.zero and filler == 0:
            return value.tensor
        valid = self.valid(value, dims)
        if valid is None:
            return value.tensor
        if filler == 0:
            self.zeroed.add(value.maker)
        return torch.where(valid, value.tensor, _constant(filler, value.tensor))

    def count(self, value: Padded, dims: Sequence[int] | int | None = None) -> Number:
        """The number of true elements along `dims`."""
        total: Any = 1
        for d in value.dims(dims):
            total = total * size_of(value.layout[d])
        return self.sizes.true(total)

    def locate(self, dim: Dim, index: Tensor) -> Tensor:
        """Map indices into the dimension without padding to indices into the padded one, clamped to its size."""
        place: Any = 0
        stride = 1
        for axis in reversed(dim[1:]):
            size = self.sizes.true(axis.size)
            place = place + index % size * stride
            index = index // size
            stride *= self.sizes.bucket(axis.size)
        return (place + index * stride).clamp(0, max(self.extent(dim) - 1, 0))

    def take(self, value: Padded, d: int, index: Tensor) -> Tensor:
        """Select along dimension `d` the elements that have these indices in the tensor without padding."""
        return value.tensor.index_select(d, self.locate(value.layout[d], index))

    def aligned(self, value: Padded, d: int, dim: Dim) -> Padded:
        """Move elements along dimension `d`, so that the true elements lie where `dim` has them."""
        places = self.places((dim,))
        return Padded(self.take(value, d, places), (*value.layout[:d], dim, *value.layout[d + 1 :]))

    def places(self, value: Layout) -> Tensor:
        """The row-major index of each element in the tensor without padding."""
        numbers = torch.zeros((), dtype=torch.int64)
        stride: Any = 1
        axes = [a for dim in value for a in dim]
        for position, axis in reversed(list(enumerate(axes))):
            along = self.positions(axis) * self.sizes.true(stride)
            numbers = numbers + along.reshape([-1, *[1] * (len(axes) - position - 1)])
            stride = stride * axis.size
        return numbers.reshape([self.extent(dim) for dim in value])


def _constant(filler: float | str, like: Tensor) -> Tensor:
    dtype = like.dtype
    if filler in (LOWEST, HIGHEST):
        if dtype.is_floating_point:
            number: float = float("-inf") if filler == LOWEST else float("inf")
        elif dtype == torch.bool:
            number = filler == HIGHEST
        else:
            number = torch.iinfo(dtype).min if filler == LOWEST else torch.iinfo(dtype).max
        filler = number
    return torch.full((), filler, dtype=dtype)
