"""Convolutions and their weight gradients as matrix products whose left operand is an image.

Both are sums of products of an image and another tensor. Each loop of the image is one of the result or one of the sum,
and its spatial dimensions are sums of one of each. So a row of the left operand is a window of the image, and windows
overlap in memory. The kernel reads them there, with the strides of rows and of summands: nothing is copied.

Of bfloat16, a kernel multiplies pairs of summands, which have to be neighbours. Channels are. Positions, over which a
weight gradient adds, are not. The kernel then reads a copy of the image, which has a pair of positions for each one.
With AMX, the kernel itself copies windows to where they are rows of neighbours (`strip_code.py`).

The idea is that of implicit products (S. Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning",
arXiv:1410.0759, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

from iree.compiler import ir

from irongrad.memory_model.product_tiles import AMX_ROWS, BACKWARDS, Tile, has_copied_windows, has_windows
from irongrad.mlir.contractions import Dimension, dimensions_of, sums_of_products_in
from irongrad.mlir.flips import Flipped, flipped_source
from irongrad.mlir.halves import half_source, pairs_along
from irongrad.mlir.letters import dimensions_in, lettered_source
from irongrad.mlir.transposes import Lettered, copied
from irongrad.passes.module.matmul_kernels.products import Product
from irongrad.passes.module.matmul_kernels.tiling import Matrix, Strides

# The letters of loops. `b` is that of a batch of products, and `c` that of their columns.
_LETTERS = "adefghijklm"
_BATCH, _COLUMN = "b", "c"

# The letters of an image's dimensions, before it is known which loops they have.
_PLACES = "tuvwxyz"

# By how many images the work is divided if their number is known at run time alone.
_ASSUMED_IMAGES = 8

# A dimension of an image: the letters of its loops, each with the factor of its index.
_Dimension: TypeAlias = tuple[tuple[str, int], ...]


class Level(NamedTuple):
    """A loop of an image in memory.

    Attributes:
        letter: the letter of the loop.
        size: the number of iterations.
        stride: how far an iteration moves in the image, in elements; negative if it moves backwards.
    """

    letter: str
    size: int
    stride: int


@dataclass(frozen=True, eq=False)
class Windows:
    """A product of the windows of an image.

    Attributes:
        product: the product; the letters of its right operand are those of the loops.
        image: the layout of the image as the left operand.
        rows: the letters of the result's loops in the image, from the outermost to the innermost.
        summands: those of the loops of the sum.
        result: the letters of the result as its readers know it.
        is_half: whether both operands are bfloat16.
        rows_of_image: how many rows there are for each image, if the number of images is known at run time alone; else
            None. The sizes of `product` are those of a few images then.
    """

    product: Product
    image: Matrix
    rows: str
    summands: str
    result: str
    is_half: bool
    rows_of_image: int | None = None

    @property
    def reads_in_order(self) -> bool:
        """Whether the right operand is in the order in which the kernel reads it: nothing has to be copied."""
        return self.product.right[1] in (self.summands + _COLUMN, self.summands + _BATCH + _COLUMN)

    @property
    def right_in_place(self) -> Matrix:
        """The layout of the right operand, if it is in order."""
        sizes, (_, letters) = self.product.sizes, self.product.right
        columns, batch = sizes["c"], sizes["b"] if _BATCH in letters else 1
        return Matrix(sizes["k"] * batch * columns, columns if batch > 1 else 0, Strides(1), Strides(batch * columns))


class _Image(NamedTuple):
    """An image.

    Attributes:
        value: the tensor.
        dims: the loops of each of its dimensions.
    """

    value: Any
    dims: list[_Dimension]


def windows_in(module: ir.Module, halves: Sequence[Tile]) -> Iterator[Windows]:
    """The convolutions and weight gradients of a module, of float32 or widened from bfloat16.

    All sizes are known, but the number of images of a convolution of float32 may not be. Each may be replaced before
    the next is asked for: one may read another.

    Args:
        module: the module.
        halves: the tiles of kernels that multiply bfloat16 as such.
    """
    for operation in sums_of_products_in(module):
        if (found := _windows_of(operation, halves)) is not None:
            yield found


def _windows_of(operation: Any, halves: Sequence[Tile]) -> Windows | None:
    """What a sum of products computes; None if it is no product of windows."""
    maps = [m.value for m in operation.attributes["indexing_maps"]]
    by_operand = [dimensions_of(m) for m in maps[:2]]
    sums = [any(d is not None and len(d) == 2 for d in of) for of in by_operand]
    if sorted(sums) != [False, True]:
        return None
    place = sums.index(True)
    of_image = [d for d in by_operand[place] if d is not None]
    of_other, of_result = dimensions_in(maps[1 - place]), dimensions_in(maps[2])
    if len(of_image) != len(by_operand[place]) or -1 in (*of_other, *of_result):
        return None
    names = _names(of_image, of_other, of_result)
    if names is None:
        return None
    dims = [tuple((names[number], factor) for number, factor in of) for of in of_image]
    other, result = ("".join(names[number] for number in of) for of in (of_other, of_result))
    operands = (operation.operands[place], _PLACES[: len(dims)]), (operation.operands[1 - place], other)
    ways = [(halves, half_source)] if halves else []
    for tiles, source in (*ways, ((), lettered_source)):
        image, right = (source(*operand) for operand in operands)
        if image is None or right is None:
            continue
        for read in _readings(right):
            if found := _windows(operation, _image(image, dims), read, result, tiles):
                return found
    return None


def _readings(right: Lettered) -> Iterator[Flipped]:
    """The right operand, if it is flipped first as what it flips: an image can be read backwards instead."""
    if flipped := flipped_source(*right):
        yield Flipped(*lettered_source(flipped.value, flipped.letters), flipped.backwards)
    yield Flipped(*right, "")


def _image(source: Lettered, dims: Sequence[_Dimension]) -> _Image:
    """An image that may be the transpose of one with the dimensions `dims`."""
    value, places = source
    return _Image(value, [dims[_PLACES.index(x)] for x in places])


def _windows(operation: Any, image: _Image, right: Flipped, result: str, halves: Sequence[Tile]) -> Windows | None:
    """A product of windows; None without a kernel.

    Args:
        operation: the operation that computes it.
        image: its image.
        right: its other operand; windows are read backwards along the same loops.
        result: the letters of its result.
        halves: the tiles of a kernel of bfloat16; none for float32.
    """
    kinds = (right.letters, right.value.type), (result, operation.results[0].type)
    sizes = {letter: size for letters, kind in kinds for letter, size in zip(letters, kind.shape, strict=True)}
    unknown = {x for letters, kind in kinds for d, x in enumerate(letters) if kind.is_dynamic_dim(d)}
    if unknown and (halves or not _are_images(unknown, image, result, right.letters)):
        return None
    sizes |= dict.fromkeys(unknown, _ASSUMED_IMAGES)
    is_half, copies = bool(halves), any(tile.is_amx for tile in halves)
    order = _channels_last(image.dims, result if is_half else None)
    dims, shape = [image.dims[d] for d in order], [int(image.value.type.shape[d]) for d in order]
    shape[0] = _ASSUMED_IMAGES if unknown else shape[0]
    levels = _levels(shape, dims, sizes, right.backwards)
    inner = next(x for x in levels if x.letter not in result)
    paired = _Pairing.of(dims, inner.letter) if is_half and inner.stride > 1 and not copies else None
    if paired is not None:
        shape[paired.dimension] -= paired.step
        levels = list(_in_pairs(_levels(shape, dims, sizes, right.backwards), inner))
    batch = [x for x in levels if x.letter == _BATCH]
    rows = [x for x in levels if x.letter in result and x not in batch]
    summands = [x for x in levels if x.letter not in result]
    counts = (math.prod(x.size for x in of) for of in (batch, rows, summands))
    of_product = dict(zip("brk", counts, strict=True)) | {"c": sizes[_COLUMN]}
    elements = math.prod(shape) * (1 if paired is None else 2)
    begin = -sum((x.size - 1) * x.stride for x in levels if x.stride < 0)
    matrix = Matrix(elements, sum(x.stride for x in batch), _strides(rows), _strides(summands), begin)
    if right.backwards and not (set(right.backwards).isdisjoint(result) and _is_long(matrix.summand)):
        return None
    if not _has_kernel(matrix, of_product, inner, halves):
        return None
    with operation.location, ir.InsertionPoint(operation):
        value = _transposed(image.value, order)
        value = value if paired is None else pairs_along(value, *paired)
    product = Product(operation, of_product, (value, "rk"), (right.value, right.letters))
    rows_of_image = of_product["r"] // _ASSUMED_IMAGES if unknown else None
    of_rows, of_summands = ("".join(dict.fromkeys(x.letter for x in reversed(of))) for of in (rows, summands))
    return Windows(product, matrix, of_rows, of_summands, result, is_half, rows_of_image)


def _are_images(unknown: Set[str], image: _Image, result: str, other: str) -> bool:
    """Whether all letters of unknown sizes are one: that of an image's first dimension, which is rows of the product.

    Then there is one product, not one for each of several groups of channels.
    """
    first = "".join(letter for letter, _ in image.dims[0])
    return unknown == {first} and first in result and first not in other and _BATCH not in result


def _has_kernel(image: Matrix, sizes: Mapping[str, int], inner: Level, halves: Sequence[Tile]) -> bool:
    """Whether there is a kernel for a product of windows.

    Args:
        image: the layout of the image.
        sizes: the sizes of the product.
        inner: the innermost loop of the sum.
        halves: the tiles of a kernel of bfloat16; none for float32.
    """
    if any(tile.is_amx for tile in halves):
        neighbours = _neighbours(image, sizes)
        return neighbours is not None and has_copied_windows(sizes, neighbours)
    if halves and inner.size % 2:
        return False
    return has_windows(sizes, _stretch(image, sizes, bool(halves)), halves=bool(halves))


def _names(image: Sequence[Dimension], other: Sequence[int], result: Sequence[int]) -> dict[int, str] | None:
    """The letter of each loop; None if the operation is no product of windows.

    A loop of the image is one of the result, one of the other operand and of the sum, or a batch, which is everywhere.
    """
    loops = [number for of in image for number, _ in of]
    batch = [number for number in loops if number in result and number in other]
    columns = [number for number in result if number not in loops]
    summed = [number for number in loops if number not in result]
    rows = [number for number in loops if number in result and number not in batch]
    is_apart = all(len({number in result for number, _ in of}) == len(of) for of in image)
    if len(batch) > 1 or len(columns) != 1 or not summed or not rows or not is_apart or len(loops) > len({*loops}):
        return None
    if sorted(other) != sorted([*batch, *summed, *columns]):
        return None
    names = dict(zip(sorted([*rows, *summed]), _LETTERS, strict=False))
    return names | dict.fromkeys(batch, _BATCH) | dict.fromkeys(columns, _COLUMN)


def _channels_last(dims: Sequence[_Dimension], of_pairs: str | None) -> list[int]:
    """The order of an image's dimensions with its channels innermost, so that long stretches of it have one stride.

    Images and channels are the dimensions that are not spatial. If only one of them is there, the image stays as it is,
    except where pairs of channels are multiplied.

    Args:
        dims: the loops of each dimension.
        of_pairs: the letters of the result, if pairs of summands have to be neighbours.
    """
    plain = [d for d, of in enumerate(dims) if len(of) == 1]
    every = list(range(len(dims)))
    adds_channels = of_pairs is not None and any(dims[d][0][0] not in of_pairs for d in plain)
    if plain and (len(plain) > 1 or adds_channels) and every[-1] not in plain:
        every.remove(plain[-1])
        every.append(plain[-1])
    return every


def _transposed(value: Any, order: Sequence[int]) -> Any:
    """`value` with its dimensions in another order, copied at the current insertion point if anything moves."""
    letters = _PLACES[: len(order)]
    moved = "".join(letters[d] for d in order)
    return value if moved == letters else copied((value, letters), moved)


def _levels(shape: Sequence[int], dims: Sequence[_Dimension], sizes: dict[str, int], backwards: str) -> list[Level]:
    """The loops of an image, from the innermost in memory to the outermost; some move backwards."""
    found, apart = [], 1
    for size, of in zip(reversed(shape), reversed(dims), strict=True):
        found += [Level(x, sizes[x], -factor * apart if x in backwards else factor * apart) for x, factor in of]
        apart *= size
    return found


def _is_long(summand: Strides) -> bool:
    """Whether loops over the innermost summands of a window that is read backwards are long enough to be worth it."""
    return summand.one > 0 and summand.width is not None and summand.width >= BACKWARDS


class _Pairing(NamedTuple):
    """Along which dimension of an image pairs are made, and of positions how far apart."""

    dimension: int
    step: int

    @classmethod
    def of(cls, dims: Sequence[_Dimension], letter: str) -> Self:
        """The pairs of neighbours along a loop."""
        return next(cls(d, step) for d, of in enumerate(dims) for x, step in of if x == letter)


def _in_pairs(levels: Sequence[Level], inner: Level) -> Iterator[Level]:
    """The loops of an image of pairs, of which each second one along `inner` is read; strides count numbers."""
    for level in levels:
        if level.letter == inner.letter:
            yield Level(level.letter, 2, 1)
            yield Level(level.letter, level.size // 2, 4 * level.stride)
        else:
            yield level._replace(stride=2 * level.stride)


def _stretch(image: Matrix, sizes: Mapping[str, int], is_half: bool) -> int:
    """Along how many summands an image has one stride; of bfloat16 between pairs."""
    if not is_half:
        return image.summand.width or sizes["k"]
    pairs = image.summand.of_pairs.width
    return sizes["k"] if pairs is None else 2 * pairs


def _neighbours(image: Matrix, sizes: Mapping[str, int]) -> int | None:
    """How many summands of an image are neighbours, or else rows; None if neither fill registers of AMX."""
    if image.summand.one == 1:
        return image.summand.width or sizes["k"]
    width = image.outer.width or sizes["r"]
    return width if image.outer.one == 1 and (image.outer.width is None or width % AMX_ROWS == 0) else None


def _strides(levels: Sequence[Level]) -> Strides:
    """The strides along several loops, the innermost first."""
    first, *others = levels
    size, stride = first.size, first.stride
    while others and others[0].stride == stride * size:
        size *= others.pop(0).size
    return Strides(stride, size, _strides(others)) if others else Strides(stride)
