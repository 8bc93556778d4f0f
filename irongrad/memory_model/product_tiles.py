"""How many results of a matrix product a CPU holds in registers, and which products have kernels of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Results that a kernel holds in registers at once.

    Attributes:
        rows: of them.
        vectors: in each row.
        width: numbers of a vector.
    """

    rows: int
    vectors: int
    width: int

    @property
    def columns(self) -> int:
        """Of the results."""
        return self.vectors * self.width

    @property
    def instructions(self) -> int:
        """To add one summand to all results."""
        return self.rows * self.vectors + self.rows + self.vectors


# What registers hold, by a feature that all CPUs with such registers have: results, one of each row's vectors of the
# right operand, and a number of the left one. As many chains of additions are under way at once, which hides how long
# each takes, 4 cycles, two of them in each.
AVX512 = (Tile(6, 4, 16), Tile(4, 4, 16), Tile(8, 3, 16), Tile(8, 2, 16))

AVX2 = (Tile(6, 2, 8),)

TILES = {"avx512f": AVX512, "fma": AVX2}

# Columns of a block, at most: what is copied into it from one row is several cache lines.
WIDTH = 64

# Bytes of the largest operand that is read where it lies, half of the second cache of the smallest such CPU.
_NEAR = 1 << 19

# Multiplications of the smallest product that has a kernel of ours, about 10 µs of one core. What IREE makes of smaller
# ones is slower, but fewer kernels, as it computes in the product's what is elementwise before and behind it.
_LEAST = 1 << 20

# Summands of a product that is not bound by writing its result; IREE computes others with what reads them.
_FEWEST = 4


def tile_for(sizes: Mapping[str, int], tiles: Sequence[Tile]) -> Tile | None:
    """What registers hold for a product; None where it is small, or has no whole tiles.

    The best takes the fewest instructions for all results: of a summand it reads a number of each row, and vectors.

    Args:
        sizes: the numbers of rows, `r`, of columns, `c`, of summands, `k`, and of pairs of matrices, `b`.
        tiles: to choose from.
    """
    if math.prod(sizes.values()) < _LEAST or sizes["k"] < _FEWEST:
        return None
    rows, columns = sizes["r"], sizes["c"]
    whole = [t for t in tiles if columns % t.columns == 0 and rows >= t.rows]
    return min(whole, key=lambda t: -(-rows // t.rows) * (columns // t.columns) * t.instructions, default=None)


def is_near(sizes: Mapping[str, int], letters: str) -> bool:
    """Whether an operand, or one of a batch, is so small that it is read where it lies.

    Args:
        sizes: as for `tile_for`.
        letters: of its dimensions.
    """
    return 4 * math.prod(sizes[letter] for letter in letters if letter != "b") <= _NEAR
