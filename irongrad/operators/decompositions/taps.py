"""Linear maps along one dimension in which every output is a weighted sum of a few inputs.

Average pooling, interpolation, padding, `unfold` and `fold` are such maps, one dimension after the other. The
tables are known when a step is traced, so that the backward of each is the same code with the table transposed: a
gather with a short sum, parallel over its outputs, where ATen scatters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from irongrad.operators.decompositions.constants import constant

Row = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Taps:
    """One dimension's map.

    Attributes:
        rows: for each output the inputs that it reads, with their weights.
        size: how many inputs there are.
    """

    rows: tuple[Row, ...]
    size: int

    @classmethod
    def gather(cls, indices: Iterable[int], size: int) -> Taps:
        """Each output is one input; an index outside of them gives zero."""
        return cls(tuple(((i, 1.0),) if 0 <= i < size else () for i in indices), size)

    def transposed(self) -> Taps:
        """The map that carries gradients of the outputs to the inputs."""
        columns: list[list[tuple[int, float]]] = [[] for _ in range(self.size)]
        for output, row in enumerate(self.rows):
            for place, weight in row:
                columns[place].append((output, weight))
        return Taps(tuple(tuple(c) for c in columns), len(self.rows))

    def apply(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Map one dimension of `x`."""
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
        """The common weight, where the outputs read neighbouring blocks of inputs, which needs no gather."""
        places = [place for row in self.rows for place, _ in row]
        weights = {weight for row in self.rows for _, weight in row}
        if len(weights) > 1 or any(len(row) != width for row in self.rows) or places != list(range(self.size)):
            return None
        return weights.pop()

    def _gathered(self, x: torch.Tensor, dim: int, width: int) -> torch.Tensor:
        """Gather [outputs, width] inputs and add them up, leaving out the places that fill up shorter rows.

        Those would spread an infinity at the first input if they were multiplied by zero.
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
    """Map the last dimensions of `x`, one for each of `maps`."""
    for dim, taps in enumerate(maps, start=x.ndim - len(maps)):
        x = taps.apply(x, dim)
    return x


def apply_each_transposed(grad: torch.Tensor, maps: Sequence[Taps]) -> torch.Tensor:
    """The gradient of `apply_each`'s input."""
    return apply_each(grad, [taps.transposed() for taps in maps])
