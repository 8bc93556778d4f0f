"""Linear maps along one dimension in which every output is a weighted sum of a few inputs.

Average pooling, interpolation, padding, `unfold` and `fold` apply such maps to one dimension after another. The tables
are known when a step is traced, so the backward of each is the same code with the table transposed. It is a gather with
a short sum, parallel over its outputs; ATen scatters instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from irongrad.operators.decompositions.constants import constant

Row = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Taps:
    """The map of one dimension.

    Attributes:
        rows: for each output, the inputs that it reads, with their weights.
        size: the number of inputs.
    """

    rows: tuple[Row, ...]
    size: int

    @classmethod
    def gather(cls, indices: Iterable[int], size: int) -> Taps:
        """Return the map in which output n is the input `indices[n]`; an index out of range gives zero."""
        return cls(tuple(((i, 1.0),) if 0 <= i < size else () for i in indices), size)

    def transposed(self) -> Taps:
        """Return the map from gradients of the outputs to gradients of the inputs."""
        columns: list[list[tuple[int, float]]] = [[] for _ in range(self.size)]
        for output, row in enumerate(self.rows):
            for place, weight in row:
                columns[place].append((output, weight))
        return Taps(tuple(tuple(c) for c in columns), len(self.rows))

    def apply(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Apply the map to dimension `dim` of `x`."""
        dim %= x.ndim
        if self.rows == tuple(((i, 1.0),) for i in range(self.size)):
            return x
        width = max((len(row) for row in self.rows), default=0)
        if not width:
            return x.new_zeros([*x.shape[:dim], len(self.rows), *x.shape[dim + 1 :]])
        block = self._blocks(width)
        if block is not None:
            return _scaled(x.unflatten(dim, (len(self.rows), width)).sum(dim + 1), block)
        return self._gathered(x, dim, width)

    def _blocks(self, width: int) -> float | None:
        """The common weight if the outputs read consecutive blocks of inputs, which needs no gather; else None."""
        places = [place for row in self.rows for place, _ in row]
        weights = {weight for row in self.rows for _, weight in row}
        if len(weights) > 1 or any(len(row) != width for row in self.rows) or places != list(range(self.size)):
            return None
        return weights.pop()

    def _gathered(self, x: torch.Tensor, dim: int, width: int) -> torch.Tensor:
        """Gather [outputs, width] inputs and sum over the width.

        Shorter rows are padded with the first input and then masked. If the padding were multiplied by zero instead, an
        infinite first input would spread to their outputs.
        """
        filled = [(*row, *[(0, 0.0)] * (width - len(row))) for row in self.rows]
        read = [k < len(row) for row in self.rows for k in range(width)]
        weights = {weight for row in self.rows for _, weight in row}
        shape = [-1] + [1] * (x.ndim - dim - 1)
        taken = x.index_select(dim, constant([place for row in filled for place, _ in row], torch.int64))
        if len(weights) == 1:
            taken = _scaled(taken, *weights)
        else:
            taken = taken * constant([weight for row in filled for _, weight in row], x.dtype).reshape(shape)
        if not all(read):
            taken = torch.where(constant(read, torch.bool).reshape(shape), taken, 0)
        return taken if width == 1 else taken.unflatten(dim, (len(self.rows), width)).sum(dim + 1)


def _scaled(x: torch.Tensor, weight: float) -> torch.Tensor:
    return x if weight == 1 else x * weight


def apply_each(x: torch.Tensor, maps: Sequence[Taps]) -> torch.Tensor:
    """Apply `maps` to the last dimensions of `x`, one map per dimension."""
    for dim, taps in enumerate(maps, start=x.ndim - len(maps)):
        x = taps.apply(x, dim)
    return x


def apply_each_transposed(grad: torch.Tensor, maps: Sequence[Taps]) -> torch.Tensor:
    """Return the gradient of the input of `apply_each`."""
    return apply_each(grad, [taps.transposed() for taps in maps])
