"""Register tiles of matrix products on a CPU, and which products have kernels of ours."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The tile of results that a kernel holds in registers.

    Attributes:
        rows: the number of rows.
        vectors: the number of vectors in each row.
        width: the number of elements in a vector.
        summands: the number of summands that a vector instruction adds to a result.
        is_amx: whether the registers are those of Intel's AMX.
    """

    rows: int
    vectors: int
    width: int
    summands: int = 1
    is_amx: bool = False

    @property
    def columns(self) -> int:
        """The number of columns of results."""
        return self.vectors * self.width

    @property
    def fewest(self) -> int:
        """The fewest summands of a product that is worth the tile."""
        return AMX_SUMMANDS if self.is_amx else _FEWEST

    @property
    def instructions(self) -> int:
        """The number of instructions that add one summand to all results."""
        return self.rows * self.vectors + self.rows + self.vectors


# Tiles by vector extension; `TILES` names a CPU feature that all CPUs with such registers have. Registers hold the
# results, the vectors of one row of the right operand, and one element of the left operand. Each result vector is a
# chain of additions. Enough chains run at once to hide the latency of an addition: 4 cycles, two additions per cycle.
AVX512 = (Tile(6, 4, 16), Tile(4, 4, 16), Tile(8, 3, 16), Tile(8, 2, 16))

AVX2 = (Tile(6, 2, 8),)

TILES = {"avx512f": AVX512, "fma": AVX2}

# That of CPUs with kernels of ours.
ARCHITECTURE = "x86_64"

# Tiles of products of bfloat16, whose vector instructions multiply pairs. AMX has eight registers. Each holds 16 by 16
# results, or `AMX_SUMMANDS` summands of `AMX_ROWS` rows or columns. A tile of two by two of them
# loads one for each product.
AMX_ROWS, AMX_SUMMANDS = 16, 32
AMX = tuple(Tile(rows, vectors, 16, 2, is_amx=True) for rows, vectors in ((32, 2), (16, 2), (32, 1)))
AVX512_BF16 = tuple(Tile(tile.rows, tile.vectors, tile.width, 2) for tile in AVX512)

HALF_TILES = {"amx-bf16": AMX, "avx512bf16": AVX512_BF16}

# The most columns of a block, so that each row copied into it fills several cache lines.
WIDTH = 64

# Bytes of the largest operand that is read in its original layout: half the L2 cache of the smallest such CPU.
_NEAR = 1 << 19

# The most rows of a product whose kernel copies the right operand itself: those of one part. With 256 rows, copying
# before takes 3 to 25 % longer. With 1,024 rows, each thread copies twice and takes as long or 10 % longer. But of more
# summands than `_LONG`, a kernel copies short blocks in any case, and copying before takes 4 to 9 % longer.
_FEW_ROWS, _FEW_ROWS_OF_LONG = 512, 1024

# Multiplications of the smallest product that has a kernel of ours, about 10 µs of one core. IREE's kernels for smaller
# products are slower, but there are fewer of them: IREE fuses elementwise code before and after the product with it.
SMALLEST = 1 << 20

# The longest chain of additions in a product of more summands than `_LONG`, where the error of one chain would be
# several times that of eager's blocked kernels (operators/decompositions/reductions.py).
_LONG, _CHAIN = 2048, 256

# The shortest block of a product of bfloat16, in summands.
_HALF_CHAIN = 256

# The most columns of all tiles, for each column of the result.
_WASTED = 1.125

# The fewest summands of windows in a loop, if more have one stride: a number without divisors has no equal parts.
_STRETCH = 16

# The fewest channels of windows that are read backwards. Read forwards, the channels of a row of taps are one loop.
BACKWARDS = 32

# The fewest rows of a product of windows: those of a tile of any CPU. Of results in one vector, a tile has more rows.
_ROWS, _ROWS_OF_VECTOR = 6, 12

# The fewest summands of a product that is not bound by writing its result. IREE fuses products below it with readers.
_FEWEST = 4


def vector_width(architecture: str, features: Collection[str]) -> int | None:
    """The numbers of float32 in a vector of a CPU; None if it has no kernels of ours.

    Args:
        architecture: the architecture, as LLVM names it.
        features: the features of the CPU, as LLVM names them.
    """
    tiles = next((found for feature, found in TILES.items() if feature in features), None)
    return tiles[0].width if architecture == ARCHITECTURE and tiles is not None else None


def tile_for(sizes: Mapping[str, int], tiles: Sequence[Tile]) -> Tile | None:
    """The best register tile for a product; None if the product is small, or no tile fits it.

    The best tile takes the fewest instructions for all results. For each summand, a tile reads one element for each of
    its rows, and its vectors.

    Args:
        sizes: the numbers of rows (`r`), of columns (`c`), of summands (`k`) and of pairs of matrices (`b`).
        tiles: the tiles to choose from.
    """
    if math.prod(sizes.values()) < SMALLEST:
        return None
    rows, columns, summands = sizes["r"], sizes["c"], sizes["k"]
    fit = [t for t in tiles if rows >= t.rows and summands % t.summands == 0 and summands >= t.fewest]
    whole = [t for t in fit if columns % t.columns == 0] or [t for t in fit if _nearly_covers(t, columns)]
    return min(whole, key=lambda t: _instructions(t, sizes), default=None)


def window_tile_for(sizes: Mapping[str, int], tiles: Sequence[Tile]) -> Tile:
    """The best register tile for a product of the windows of an image, whose right operand may be padded with zeros.

    Args:
        sizes: as for `tile_for`, of a product that `has_windows`.
        tiles: the tiles to choose from.
    """
    of_vectors = {(t.width, t.summands) for t in tiles if not t.is_amx}
    every = [*tiles, *(Tile(_ROWS_OF_VECTOR, 1, *of) for of in of_vectors)]
    return min((t for t in every if t.rows <= sizes["r"]), key=lambda t: _instructions(t, sizes))


def has_windows(sizes: Mapping[str, int], stretch: int, *, halves: bool = False) -> bool:
    """Whether there is a kernel of ours for a product of the windows of an image, on a CPU with register tiles.

    Args:
        sizes: as for `tile_for`.
        stretch: along how many summands the image has one stride.
        halves: whether the operands are bfloat16, of which pairs of summands are multiplied.
    """
    enough = sizes["r"] >= _ROWS and sizes["c"] > 1 and sizes["k"] >= _FEWEST and math.prod(sizes.values()) >= SMALLEST
    if halves:
        pairs = stretch // 2
        return enough and stretch % 2 == 0 and longest_stretch(pairs, _HALF_CHAIN // 2) >= min(pairs, _STRETCH)
    return enough and longest_stretch(stretch, longest_block(sizes["k"])) >= min(stretch, _STRETCH)


def has_copied_windows(sizes: Mapping[str, int], stretch: int) -> bool:
    """Whether there is a kernel of ours that copies windows of bfloat16 for AMX.

    Args:
        sizes: as for `tile_for`.
        stretch: how many numbers of the image are neighbours: summands, or the rows of a weight gradient.
    """
    enough = sizes["r"] >= AMX_ROWS and sizes["c"] > 1 and math.prod(sizes.values()) >= SMALLEST
    longest = longest_stretch(stretch, _HALF_CHAIN) >= min(stretch, _STRETCH)
    return enough and sizes["k"] % 2 == 0 and sizes["k"] >= AMX_SUMMANDS and longest


def stretch_of(channels: int, taps: int, dilation: int, groups: int) -> int:
    """Along how many summands a channels-last image has one stride, in a convolution.

    Args:
        channels: the number of channels of a group.
        taps: the columns of the kernel.
        dilation: their distance.
        groups: the number of groups.
    """
    return channels * taps if dilation == groups == 1 else channels


def slides(kernel: Sequence[int], out: Sequence[int]) -> bool:
    """Whether there are windows: along some dimension a kernel of several taps has several positions.

    Otherwise IREE drops a loop, and a convolution is a plain product.
    """
    return any(taps > 1 < positions for taps, positions in zip(kernel, out, strict=True))


def _instructions(tile: Tile, sizes: Mapping[str, int]) -> int:
    """The instructions that add one summand to all results of a product in tiles."""
    return -(-sizes["r"] // tile.rows) * -(-sizes["c"] // tile.columns) * tile.instructions


def _nearly_covers(tile: Tile, columns: int) -> bool:
    """Whether tiles of float32 cover so many columns with little waste, if the last tile overlaps the one before."""
    return tile.summands == 1 and tile.columns <= columns >= -(-columns // tile.columns) * tile.columns / _WASTED


def has_few_rows(sizes: Mapping[str, int]) -> bool:
    """Whether the kernel of a product of these sizes copies the right operand itself. It does so for each part."""
    return sizes["r"] <= (_FEW_ROWS_OF_LONG if sizes["k"] > _LONG else _FEW_ROWS)


def is_near(sizes: Mapping[str, int], letters: str) -> bool:
    """Whether a block of an operand's matrix is so small that it is read in its original layout.

    Args:
        sizes: as for `tile_for`.
        letters: the letters of the operand's dimensions.
    """
    of_block = {**sizes, "b": 1, "k": longest_block(sizes["k"])}
    return 4 * math.prod(of_block[letter] for letter in letters) <= _NEAR


def longest_block(summands: int) -> int:
    """The most summands that a kernel of float32 adds in one chain, and reads before all others."""
    return _CHAIN if summands > _LONG else summands


def longest_stretch(width: int, most: int) -> int:
    """The length of equal parts of `width` summands, at most `most`, of which a loop of a kernel adds one."""
    return max(n for n in range(1, min(width, most) + 1) if width % n == 0)
