"""Kernels of matrix products: operand layouts, register tiles, and the work of one thread.

A kernel holds `Tile.rows` times `Tile.columns` results in registers. For each step along the reduction dimension, it
loads a few vectors of the right operand and multiplies each by one number of every row. A `Matrix` describes the layout
of an operand, so operands with a suitable layout need no copy. `vector_code.py` writes the code.

The loops are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (ACM Transactions on
Mathematical Software 34(3), 2008). Register tiles are chosen as in BLIS (Van Zee and van de Geijn, ACM
Transactions on Mathematical Software 41(3), 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from iree.compiler import ir

from irongrad.memory_model.product_tiles import AMX_SUMMANDS, Tile, longest_block, longest_stretch
from irongrad.passes.module.matmul_kernels.packed_weights import Packing

# float32 numbers per cache line. The length of a block of the reduction dimension is a multiple of it.
LINE = 16

# The most bytes of the right operand that one pass over all rows reads. They stay in the second-level cache.
_PANEL = 1 << 19

# The most bytes of the right operand that are unpacked at once, and stay in the first-level cache. float32 that is only
# copied is in larger blocks: the results of a whole panel are read and written once for each block.
_UNPACKED, _COPIED = 1 << 14, 1 << 16

# The most bytes of the right operand that are copied into pairs at once, and of the sums that are kept meanwhile. Both
# are on the stack of the thread.
_PAIRS, _SUMS = 1 << 15, 1 << 16

# Copying the right operand takes as long as to multiply it by this many rows: into pairs with AMX, and float32. Copying
# a strip for AMX takes as long as to multiply it by this many columns: in stretches of neighbours, and transposed.
_COPYING_PAIRS, _COPYING = 128, 16
_COPYING_STRETCHES, _COPYING_SQUARES = 16, 96

# Where strips are copied: the most bytes of the right operand in one block of all panels of a part, and of the sums of
# all its tiles; the most summands of a block, so that a strip and a panel of it stay in the first-level cache.
_PANELS, _TILES, _NEAR = 3 << 14, 3 << 14, 288

# The most summands of windows that are added without a loop.
_UNROLLED = 32

# The most rows and columns of the result in one part, the unit of work of a thread.
MOST = 512, 768

# Thread counts for which work is divided so that all threads finish at nearly the same time, within the factor
# `_NEARLY`. A thread of IREE 3.13.0 takes eight parts at a time, or one if there are fewer than eight per thread. So of
# 20 parts, one of two threads computes twelve, and the other eight
# (runtime/src/iree/hal/drivers/local_task/block_processor.c).
_THREADS, _AT_A_TIME, _NEARLY = (2, 4, 8, 16), 8, 1.03

# The fewest multiplications in a part, if there are more parts than threads: 2 to 3 µs of one core.
_LEAST = 1 << 18


@dataclass(frozen=True)
class Strides:
    """The strides of an operand along one dimension, which may be blocked; in elements.

    Attributes:
        one: the stride from one element to the next, within a block.
        width: the number of elements along this dimension in a block; None without blocks.
        of_blocks: the strides from one block to the next, which may be blocked themselves.
    """

    one: int
    width: int | None = None
    of_blocks: Strides | None = None

    def to(self, index: ir.AffineExpr) -> ir.AffineExpr:
        """The offset of the element `index`, in elements."""
        if self.width is None or self.of_blocks is None:
            return index * self.one
        block, inside = ir.AffineExpr.get_floor_div(index, self.width), ir.AffineExpr.get_mod(index, self.width)
        return self.of_blocks.to(block) + inside * self.one

    @property
    def of_pairs(self) -> Strides:
        """The strides between every second element; blocks are of even numbers of elements."""
        if self.width is None or self.of_blocks is None:
            return Strides(2 * self.one)
        return self.of_blocks if self.width == 2 else Strides(2 * self.one, self.width // 2, self.of_blocks)


@dataclass(frozen=True)
class Matrix:
    """The layout of an operand in memory.

    Attributes:
        elements: the number of elements of the operand.
        batch: the stride between matrices of a batch, in elements; 0 if they all share one matrix.
        outer: the strides along the dimension that is not reduced: rows of the left operand, columns of the right one.
        summand: the strides along the reduction dimension.
        begin: where the first element of the first matrix is; strides of blocks may be negative.
        batch_is_open: whether the stride between matrices is `batch` times the size that a launch gives.
    """

    elements: int
    batch: int
    outer: Strides
    summand: Strides
    begin: int = 0
    batch_is_open: bool = False

    def at(self, batch: ir.AffineExpr, outer: ir.AffineExpr) -> ir.AffineExpr:
        """Where the summands of a row or column of one matrix of a batch begin."""
        return batch * self.batch + self.outer.to(outer) + self.begin


@dataclass(frozen=True)
class MatmulShape:
    """The sizes of a product.

    Attributes:
        batch: the number of matrix pairs.
        rows: the rows of the result.
        columns: the columns of the result.
        summands: the size of the reduction dimension.
    """

    batch: int
    rows: int
    columns: int
    summands: int

    @property
    def multiplications(self) -> int:
        """The number of multiplications in the whole batch."""
        return self.batch * self.rows * self.columns * self.summands


@dataclass(frozen=True)
class ProductKernel:
    """A kernel of a product, or of a batch of them. It adds in float32.

    Attributes:
        sizes: the sizes of the product; it has at least the tile's rows and columns.
        tile: the results that registers hold.
        left: the layout of the left operand. Of bfloat16, the two numbers of a pair of summands are neighbours.
        right: the layout of the right operand; columns within a block are contiguous.
        adds_row: whether the kernel adds a row to all rows of the result.
        packing: how the right operand is stored, if not as float32; its strides then count numbers, not elements.
        copies_right: whether the kernel copies the right operand, which is float32, in blocks into its own memory.
        multiplies_halves: whether both operands are bfloat16, multiplied as such.
        is_rounded: whether the result is rounded to bfloat16.
        most: the most rows and columns of a part.
        pads_right: whether the right operand has zeros behind its columns, up to whole tiles. The last panel then does
            not overlap the one before.
        batch_inside: whether the batch is a dimension of the result between rows and columns.
        has_pairs: whether the right operand, of bfloat16, is stored as a kernel copies it: panel by panel, in pairs.
        open: the letter of the size that a launch gives: `b`, `r` or `k`; empty if there is none. `sizes` has an
            assumed one, by which the work is divided.
    """

    sizes: MatmulShape
    tile: Tile
    left: Matrix
    right: Matrix
    adds_row: bool
    packing: Packing | None = None
    copies_right: bool = False
    multiplies_halves: bool = False
    is_rounded: bool = False
    most: tuple[int, int] = MOST
    pads_right: bool = False
    batch_inside: bool = False
    has_pairs: bool = False
    open: str = ""

    @property
    def result(self) -> tuple[int, int]:
        """The strides of the result: between the matrices of a batch, and between rows; in elements.

        The first one is that of one row of each matrix if a launch gives the number of rows.
        """
        sizes = self.sizes
        if self.batch_inside:
            return sizes.columns, sizes.batch * sizes.columns
        return sizes.columns * (1 if self.open == "r" else sizes.rows), sizes.columns

    @property
    def result_elements(self) -> int:
        """The number of elements of the result."""
        return self.sizes.batch * self.sizes.rows * self.sizes.columns

    @property
    def right_tensors(self) -> int:
        """The number of tensors in which the right operand is stored."""
        return 1 if self.packing is None else self.packing.tensors

    @property
    def has_own_block(self) -> bool:
        """Whether the kernel keeps a block of the right operand in its own memory, as float32."""
        return self.copies_right or self.packing is not None

    @property
    def panels(self) -> int:
        """The number of panels: columns of tiles; if columns do not divide evenly, the last one overlaps."""
        return -(-self.sizes.columns // self.tile.columns)

    @property
    def strips(self) -> int:
        """The number of strips: rows of tiles; if rows do not divide evenly, the last strip overlaps the one before."""
        return -(-self.sizes.rows // self.tile.rows)

    @property
    def round(self) -> int:
        """The unroll factor of the innermost loop, along the reduction dimension."""
        summands = self.sizes.summands
        if self.open == "k":
            return 1
        if self.stretch is None:
            return 2 if summands % 2 == 0 else 1
        return summands if summands <= _UNROLLED else next(n for n in (4, 3, 2, 5, 7, 1) if self.stretch % n == 0)

    @property
    def copies_left(self) -> bool:
        """Whether the kernel copies strips of the left operand, as registers of AMX cannot read it where it is."""
        left = self.left
        in_place = left.outer.width is None and left.summand.width is None and left.summand.one == 1
        return self.tile.is_amx and not in_place

    @property
    def strip_stride(self) -> int:
        """How many elements are between rows of a copied strip: one more register than a block fills."""
        return (-(-self.depth // AMX_SUMMANDS) + 1) * AMX_SUMMANDS

    @property
    def stretch(self) -> int | None:
        """How many summands a loop of their own adds, along which the left operand has one stride.

        None if it has one stride along the whole reduction dimension. Of bfloat16, this is the stride between pairs,
        except where strips are copied.
        """
        if self.copies_left:
            neighbours = self.left.summand.width or self.sizes.summands
            return longest_stretch(neighbours, self._most_depth) if self.left.summand.one == 1 else None
        if self.multiplies_halves:
            pairs = self.left.summand.of_pairs.width
            return None if pairs is None else 2 * longest_stretch(pairs, self._most_depth // 2)
        width = self.left.summand.width
        return None if width is None else longest_stretch(width, self._most_depth)

    @property
    def depth(self) -> int:
        """The length of a block of the reduction dimension; all rows of a part use one block before the next starts."""
        unit = self.stretch or (AMX_SUMMANDS if self.multiplies_halves else LINE)
        unit = 2 * unit if self.copies_left and unit % 2 else unit
        return _stretch(self.sizes.summands, max(self._most_depth, unit), unit)

    @property
    def _most_depth(self) -> int:
        """The most summands in a block."""
        if self.has_pairs:
            return self.sizes.summands
        if self.tile.is_amx:
            return min(_NEAR, self.sizes.summands)
        if self.multiplies_halves:
            return _PAIRS // (2 * self.tile.columns)
        return min(self._right_bytes // (4 * self.tile.columns), longest_block(self.sizes.summands))

    @property
    def _right_bytes(self) -> int:
        """The most bytes of the right operand in one block of the reduction dimension."""
        if self.packing is not None:
            return _UNPACKED
        return _COPIED if self.copies_right else _PANEL

    @property
    def blocks(self) -> int:
        """The number of blocks of the reduction dimension."""
        return -(-self.sizes.summands // self.depth)

    @property
    def blocks_first(self) -> bool:
        """Whether a part goes through all panels with one block of the reduction dimension before the next block.

        It then reads the left operand once, not once for each panel, and adds to its results once for each block. Of
        bfloat16, the sums of one panel stay on the stack. Of a packed right operand, blocks are short.
        """
        return not self.multiplies_halves and self.packing is None

    @property
    def rest(self) -> int:
        """The summands that are left when whole registers of AMX are multiplied."""
        return self.sizes.summands % AMX_SUMMANDS

    @property
    def fills_blocks(self) -> bool:
        """Whether the last registers of AMX that a block needs are filled up with zeros."""
        return self.rest > 0 or (self.blocks > 1 and self.depth % AMX_SUMMANDS > 0)

    @property
    def kept_strips(self) -> int:
        """Of how many strips a kernel of bfloat16 keeps the sums at once: all of a part, if there are more blocks."""
        return self.part[0] if self.blocks > 1 else 1

    @property
    def kept_panels(self) -> int:
        """Of how many panels a kernel of bfloat16 keeps the sums at once: all of a part, if it copies strips, too."""
        return self.part[1] if self.blocks > 1 and self.copies_left else 1

    @property
    def copied_panels(self) -> int:
        """Of how many panels a kernel of bfloat16 has a block of the right operand at once."""
        if self.has_pairs:
            return self.panels
        return self.part[1] if self.copies_left else 1

    @cached_property
    def part(self) -> tuple[int, int]:
        """The strips and panels of a part, the unit of work of a thread.

        Parts are as large as possible while all threads finish at nearly the same time. Among equal numbers of parts,
        the parts that read the least are best. A part reads each of its rows once, as rows stay in the second-level
        cache, and each of its columns once.
        """
        down, across = (
            min(self._most_rows // self.tile.rows, self.strips),
            min(self.most[1] // self.tile.columns, self.panels),
        )
        ways = product(range(1, down + 1), range(1, across + 1))
        fit = [part for part in ways if self._has_room(part)]
        times = {part: self._time(part) for part in fit if part == fit[-1] or self._is_enough(part)}
        least = min(times.values())
        equal = [part for part, time in times.items() if time <= _NEARLY * least]
        return min(equal, key=lambda part: (self._parts(part), self._read(part)))

    @property
    def _most_rows(self) -> int:
        """The most rows of a part."""
        rows = self.most[0]
        if self.copies_left or not self.multiplies_halves:
            return rows
        return min(rows, _SUMS // (4 * self.tile.columns))

    def _has_room(self, part: tuple[int, int]) -> bool:
        """Whether all that a part of a kernel that copies strips keeps fits on the stack of its thread."""
        if not self.copies_left:
            return True
        strips, panels = part
        of_right = 2 * panels * self.depth * self.tile.columns
        tiles = 1 if self.blocks == 1 else strips * panels
        return of_right <= _PANELS and tiles * 4 * self.tile.rows * self.tile.columns <= _TILES

    def _parts(self, part: tuple[int, int]) -> int:
        """The number of parts of `part` strips and panels."""
        return -(-self.strips // part[0]) * -(-self.panels // part[1]) * self.sizes.batch

    def _read(self, part: tuple[int, int]) -> int:
        """The number of rows and columns of operands that a part reads."""
        return part[0] * self.tile.rows + part[1] * self.tile.columns

    def _is_enough(self, part: tuple[int, int]) -> bool:
        """Whether a part is large enough to be worth scheduling on a thread."""
        multiplications = part[0] * part[1] * self.tile.rows * self.tile.columns * self.sizes.summands
        return multiplications >= (_LEAST * 8 if self.multiplies_halves else _LEAST) or self._parts(part) <= max(
            _THREADS
        )

    def _time(self, part: tuple[int, int]) -> float:
        """A cost estimate: the tiles of the busiest thread times the number of threads, summed over `_THREADS`."""
        parts = self._parts(part)
        of_threads = 0
        for threads in _THREADS:
            at_a_time = 1 if parts < threads * _AT_A_TIME else _AT_A_TIME
            of_threads += threads * at_a_time * -(-parts // (threads * at_a_time))
        of_left = part[0] * self._copying_left / self.tile.columns
        return of_threads * ((part[0] + self._copying // self.tile.rows) * part[1] + of_left)

    @property
    def _copying_left(self) -> int:
        """By how many columns a strip could be multiplied while it is copied."""
        if not self.copies_left:
            return 0
        return _COPYING_STRETCHES if self.left.summand.one == 1 else _COPYING_SQUARES

    @property
    def _copying(self) -> int:
        """By how many rows the right operand could be multiplied while it is copied."""
        if self.multiplies_halves:
            return _COPYING_PAIRS
        return _COPYING if self.has_own_block else 0


def _stretch(size: int, most: int, unit: int) -> int:
    """The length of equal stretches of `size`, of at most `most`; a multiple of `unit`."""
    units = -(-size // unit)
    stretches = -(-units // (most // unit))
    return -(-units // stretches) * unit
