"""How the rows of a loop's batch are divided among threads, and the register tiles of its products."""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.memory_model.product_tiles import AMX_SUMMANDS, Tile

# The fewest and the most rows that one thread computes at once; each row needs a register.
_FEWEST_ROWS, _MOST_ROWS = 3, 16

# Thread counts for which rows are divided.
_THREADS = (2, 4, 8)

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


def strips_of(batch: int, columns: Sequence[int], width: int) -> int:
    """Into how many strips the rows of a batch are best divided, for products of these columns."""

    def time(strips: int) -> float:
        rows = -(-batch // strips)
        of_strip = sum(_instructions(tile_of(rows, c, width), c) for c in columns)
        gain = 1.0 if batch % strips == 0 else _GAIN
        return gain * sum(-(-strips // threads) * threads for threads in _THREADS) * of_strip

    fewest = -(-batch // min(_MOST_ROWS, _REGISTERS[width] - 2))
    return min(range(fewest, max(fewest, batch // _FEWEST_ROWS) + 1), key=time)


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
