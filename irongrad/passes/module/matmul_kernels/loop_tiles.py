"""How the rows of a loop's batch are divided among threads, and the register tiles of its products."""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.memory_model.product_tiles import AMX_SUMMANDS, Tile
from irongrad.passes.module.matmul_kernels.loop_kernel import ASSUMED_ROWS, LoopProduct

# The fewest and the most rows that one thread computes at once; each row needs a register.
_FEWEST_ROWS, _MOST_ROWS = 3, 16

# Thread counts for which rows are divided.
_THREADS = (2, 4, 8)

# Cache lines of the right operands of all products that stay near a core from one iteration to the next: half its L2
# cache.
_NEAR = (1 << 20) // 64

# What it costs to read a cache line from the L2 cache, and from farther, in instructions: at 80 and at 12 GB/s.
_FROM_L2, _FAR = 4, 20

# Bytes of a cache line.
_LINE = 64

# The elementwise instructions for each vector of the wider side of a product: those of a sigmoid.
_OF_GATES = 20

# The instructions in the time in which AMX adds a summand to a register of results: 16 cycles for 32 summands.
_OF_AMX = 1.0

# What strips of two sizes have to gain, as their code is written twice.
_GAIN = 1.1

# The vector registers, by the width of a vector.
_REGISTERS = {16: 32, 8: 16, 4: 16}

# The most vectors in a row of a tile. Of few rows there are more: each result vector is a chain of additions, and eight
# chains hide the latency of an addition.
_MOST_VECTORS, _OF_FEW_ROWS = 4, 8

# The vectors in a row of a tile of products of bfloat16, and the numbers of a vector.
_PAIR_VECTORS, _PAIR_WIDTH = 2, 16


def width_of(columns: Sequence[int], most: int) -> int | None:
    """The width of a vector, at most `most`, of which every product has one; None if there is none."""
    return next((width for width in _REGISTERS if width <= min(most, *columns)), None)


def division_of(batch: int | None, products: Sequence[LoopProduct], width: int, *, is_amx: bool) -> tuple[int, int]:
    """How the rows of a batch are best divided: into strips, of which each thread computes some at a time.

    Args:
        batch: the number of rows; None if it is known at run time alone. All strips are then of one size.
        products: the products of an iteration.
        width: the numbers of a vector.
        is_amx: whether AMX multiplies pairs.
    """
    of_any_size, batch = batch is None, batch or ASSUMED_ROWS
    first = _FAR if sum(_lines(p) * p.summands for p in products) > _NEAR else _FROM_L2

    def time(division: tuple[int, int]) -> float:
        strips, together = division
        rows, groups = -(-batch // strips), strips // together
        gain = 1.0 if batch % strips == 0 else _GAIN
        of_group = together * rows * sum(max(p.summands, p.columns) for p in products) / width * _OF_GATES
        for p in products:
            read = (first + (together - 1) * _FROM_L2) * _lines(p)
            of_group += p.summands * max(together * _computed(p, rows, width, is_amx), read)
        return gain * sum(-(-groups // threads) * threads for threads in _THREADS) * of_group

    fewest = -(-batch // min(_MOST_ROWS, _REGISTERS[width] - 2))
    numbers = range(fewest, max(fewest, batch // _FEWEST_ROWS) + 1)
    even = [(n, t) for n in numbers for t in range(1, n + 1) if batch % n == n % t == 0]
    uneven = [(n, 1) for n in numbers if batch % n and not of_any_size]
    return min(sorted(even + uneven), key=time)


def _lines(product: LoopProduct) -> float:
    """The cache lines of the right operand for one summand."""
    return product.columns * product.bytes_of_number / _LINE


def _computed(product: LoopProduct, rows: int, width: int, is_amx: bool) -> float:
    """The instructions that add one summand to all results of a strip."""
    if not product.is_in_pairs:
        return _instructions(tile_of(rows, product.columns, width), product.columns)
    if is_amx:
        return product.columns / _PAIR_WIDTH * _OF_AMX
    return _instructions(pairs_of(rows, is_amx=False), product.columns) / 2


def tile_of(rows: int, columns: int, width: int) -> Tile:
    """The register tile for all rows of a strip that takes the fewest instructions; the last one may overlap."""
    most = min(_MOST_VECTORS if rows >= _FEWEST_ROWS else _OF_FEW_ROWS, columns // width)
    fit = [v for v in range(1, most + 1) if rows * v + v + 1 <= _REGISTERS[width]]
    return min((Tile(rows, v, width) for v in reversed(fit)), key=lambda tile: _instructions(tile, columns))


def pairs_of(rows: int, *, is_amx: bool) -> Tile:
    """The register tile for all rows of a strip that multiplies pairs of bfloat16: two vectors across."""
    return Tile(rows, _PAIR_VECTORS, _PAIR_WIDTH, 2, is_amx=is_amx)


def has_pairs(columns: int, summands: int, width: int) -> bool:
    """Whether a product of bfloat16 of these sizes consists of whole tiles of pairs."""
    return width == _PAIR_WIDTH and columns % (_PAIR_VECTORS * width) == 0 and summands % AMX_SUMMANDS == 0


def _instructions(tile: Tile, columns: int) -> int:
    """The instructions that add one summand to all results of a strip."""
    return -(-columns // tile.columns) * tile.instructions
