"""Kernels of products of matrices: what they read, what registers hold, and what one thread computes.

A kernel holds `Tile.rows` times `Tile.columns` results in registers, to which it adds one summand at a time: a few
vectors of the right operand, each times a number of every row. What is read lies where `Matrix` says, so that an
operand need not be copied where its elements lie well. `product_code.py` has the code.

The loops are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (ACM Transactions on
Mathematical Software 34(3), 2008), and what registers hold is chosen as in BLIS (Van Zee and van de Geijn, ACM
Transactions on Mathematical Software 41(3), 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from iree.compiler import ir

from irongrad.memory_model.product_tiles import Tile

# Numbers of float32 in a cache line: blocks have a multiple of it.
LINE = 16

# Bytes of the right operand that one round over all rows reads, at most: they stay in the second cache.
_PANEL = 1 << 19

# Rows and columns of the result that one thread computes at a time, at most.
_ROWS, _COLUMNS = 512, 768

# Of as many threads all are to have nearly equally much. A thread of IREE 3.13.0's takes one part at a time where there
# are fewer than eight for each, and else eight: of 20 parts one of two threads computes twelve, and the other eight
# (runtime/src/iree/hal/drivers/local_task/block_processor.c).
_THREADS, _AT_A_TIME, _NEARLY = (2, 4, 8, 16), 8, 1.03

# Multiplications of a part, of which there are more than threads: 2 to 3 µs of one core.
_LEAST = 1 << 18


@dataclass(frozen=True)
class Strides:
    """How far apart the elements of an operand are in memory along one dimension.

    Attributes:
        one: from each to the next.
        width: how many a block has; None where there are no blocks.
        block: from one block to the next.
    """

    one: int
    width: int | None = None
    block: int = 0

    def to(self, index: ir.AffineExpr) -> ir.AffineExpr:
        """Where the element `index` is."""
        if self.width is None:
            return index * self.one
        block, inside = ir.AffineExpr.get_floor_div(index, self.width), ir.AffineExpr.get_mod(index, self.width)
        return block * self.block + inside * self.one


@dataclass(frozen=True)
class Matrix:
    """How an operand of a product lies in memory.

    Attributes:
        elements: how many it has.
        batch: how far apart the matrices of a batch are.
        outer: the steps along rows of the result, or along its columns.
        summand: the steps along what is added up.
    """

    elements: int
    batch: int
    outer: Strides
    summand: Strides


@dataclass(frozen=True)
class MatmulShape:
    """Of a product.

    Attributes:
        batch: pairs of matrices.
        rows: of the result.
        columns: of the result.
        summands: of each result.
    """

    batch: int
    rows: int
    columns: int
    summands: int

    @property
    def multiplications(self) -> int:
        """Of all results."""
        return self.batch * self.rows * self.columns * self.summands


@dataclass(frozen=True)
class ProductKernel:
    """A product of float32, or a batch of them.

    Attributes:
        sizes: of the product; the tile's columns divide its columns, and it has no fewer rows.
        tile: what registers hold.
        left: the left operand, as it lies in memory.
        right: the right operand; along columns its blocks are of elements side by side.
        adds_row: whether a row is added to all rows of the result.
    """

    sizes: MatmulShape
    tile: Tile
    left: Matrix
    right: Matrix
    adds_row: bool

    @property
    def panels(self) -> int:
        """How many tiles are side by side."""
        return self.sizes.columns // self.tile.columns

    @property
    def strips(self) -> int:
        """How many tiles are one below the other; the last one begins earlier where rows are not divided evenly."""
        return -(-self.sizes.rows // self.tile.rows)

    @property
    def round(self) -> int:
        """How many summands the innermost loop adds at once."""
        return 2 if self.sizes.summands % 2 == 0 else 1

    @property
    def depth(self) -> int:
        """How many summands are added up before the next rows are read."""
        stretches = -(-self.sizes.summands * 4 * self.tile.columns // _PANEL)
        return -(-self.sizes.summands // (stretches * LINE)) * LINE

    @cached_property
    def part(self) -> tuple[int, int]:
        """How many strips and panels one thread computes at a time: the most that leave all nearly equally much.

        Of as many in a part, those that read the least: all of their rows once, as rows stay in the second cache, and
        all of their columns once.
        """
        down, across = min(_ROWS // self.tile.rows, self.strips), min(_COLUMNS // self.tile.columns, self.panels)
        ways = product(range(1, down + 1), range(1, across + 1))
        times = {part: self._time(part) for part in ways if part == (down, across) or self._is_enough(part)}
        least = min(times.values())
        equal = [part for part, time in times.items() if time <= _NEARLY * least]
        return min(equal, key=lambda part: (self._parts(part), self._read(part)))

    def _parts(self, part: tuple[int, int]) -> int:
        """How many parts there are of `part` strips and panels."""
        return -(-self.strips // part[0]) * -(-self.panels // part[1]) * self.sizes.batch

    def _read(self, part: tuple[int, int]) -> int:
        """How many rows and columns of operands a part reads."""
        return part[0] * self.tile.rows + part[1] * self.tile.columns

    def _is_enough(self, part: tuple[int, int]) -> bool:
        """Whether a part is so large that to hand it to a thread is worth it."""
        multiplications = part[0] * part[1] * self.tile.rows * self.tile.columns * self.sizes.summands
        return multiplications >= _LEAST or self._parts(part) <= max(_THREADS)

    def _time(self, part: tuple[int, int]) -> int:
        """How many tiles are computed one after the other, for each number of threads times that, added up."""
        parts = self._parts(part)
        of_threads = 0
        for threads in _THREADS:
            at_a_time = 1 if parts < threads * _AT_A_TIME else _AT_A_TIME
            of_threads += threads * at_a_time * -(-parts // (threads * at_a_time))
        return of_threads * part[0] * part[1]
