"""Convolutions and their weight gradients as matrix products whose left operand is an image.

Both are sums of products of an image and another tensor. Each loop of the image is one of the result or one of the sum,
and its spatial dimensions are sums of one of each. So a row of the left operand is a window of the image, and windows
overlap in memory. The kernel reads them there, with the strides of rows and of summands: nothing is copied.

The idea is that of implicit products (S. Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning",
arXiv:1410.0759, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from iree.compiler import ir

from irongrad.memory_model.product_tiles import has_windows
from irongrad.mlir.contractions import Dimension, dimensions_of, is_sum_of_products
from irongrad.mlir.letters import dimensions_in, lettered_source
from irongrad.mlir.transposes import Lettered, copied
from irongrad.mlir.walk import inside
from irongrad.passes.module.matmul_kernels.products import Product
from irongrad.passes.module.matmul_kernels.tiling import Matrix, Strides

# The letters of loops. `b` is that of a batch of products, and `c` that of their columns.
_LETTERS = "adefghijklm"
_BATCH, _COLUMN = "b", "c"

# A dimension of an image: the letters of its loops, each with the factor of its index.
_Dimension: TypeAlias = tuple[tuple[str, int], ...]


class Level(NamedTuple):
    """A loop of an image in memory.

    Attributes:
        letter: the letter of the loop.
        size: the number of iterations.
        stride: how far an iteration moves in the image, in elements.
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
    """

    product: Product
    image: Matrix
    rows: str
    summands: str
    result: str

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


def windows_in(module: ir.Module) -> Iterator[Windows]:
    """The convolutions and weight gradients of a module that are of float32 and of known sizes.

    Each may be replaced before the next is asked for: one may read another.
    """
    for operation in [op for op in inside(module.operation) if is_sum_of_products(op)]:
        if (found := _windows_of(operation)) is not None:
            yield found


def _windows_of(operation: Any) -> Windows | None:
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
    image = [tuple((names[number], factor) for number, factor in of) for of in of_image]
    other, result = ("".join(names[number] for number in of) for of in (of_other, of_result))
    operands = list(operation.operands)
    return _windows(operation, (operands[place], image), (operands[1 - place], other), result)


def _windows(operation: Any, image: tuple[Any, Sequence[_Dimension]], other: Lettered, result: str) -> Windows | None:
    """A product of windows, from its image, its other operand, and the letters of its result; None without a kernel."""
    shapes = (other[1], other[0].type.shape), (result, operation.results[0].type.shape)
    sizes = {letter: size for of in shapes for letter, size in zip(*of, strict=True)}
    value, dimensions = _channels_last(operation, *image)
    levels = _levels(value.type.shape, dimensions, sizes)
    batch = [x for x in levels if x.letter == _BATCH]
    rows = [x for x in levels if x.letter in result and x not in batch]
    summands = [x for x in levels if x.letter not in result]
    counts = (math.prod(x.size for x in of) for of in (batch, rows, summands))
    shape = dict(zip("brk", counts, strict=True)) | {"c": sizes[_COLUMN]}
    strides = _strides(rows), _strides(summands)
    if not has_windows(shape, strides[1].width or shape["k"]):
        return None
    product = Product(operation, shape, (value, "rk"), lettered_source(*other))
    matrix = Matrix(math.prod(value.type.shape), sum(x.stride for x in batch), *strides)
    of_rows, of_summands = ("".join(x.letter for x in reversed(of)) for of in (rows, summands))
    return Windows(product, matrix, of_rows, of_summands, result)


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


def _channels_last(operation: Any, image: Any, dims: Sequence[_Dimension]) -> tuple[Any, list[_Dimension]]:
    """The image with its channels innermost, so that long stretches of it have one stride.

    Images and channels are the dimensions that are not spatial. If only one of them is there, the image stays as it is.
    """
    places = "tuvwxyz"[: len(dims)]
    value, letters = lettered_source(image, places)
    plain = [x for x in letters if len(dims[places.index(x)]) == 1]
    if len(plain) > 1 and letters[-1] not in plain:
        order = letters.replace(plain[-1], "") + plain[-1]
        with operation.location, ir.InsertionPoint(operation):
            value, letters = copied((value, letters), order), order
    return value, [dims[places.index(x)] for x in letters]


def _levels(shape: Sequence[int], dims: Sequence[_Dimension], sizes: dict[str, int]) -> list[Level]:
    """The loops of an image, from the innermost in memory to the outermost."""
    found, apart = [], 1
    for size, of in zip(reversed(shape), reversed(dims), strict=True):
        found += [Level(letter, sizes[letter], factor * apart) for letter, factor in of]
        apart *= size
    return found


def _strides(levels: Sequence[Level]) -> Strides:
    """The strides along several loops, the innermost first."""
    first, *others = levels
    size, stride = first.size, first.stride
    while others and others[0].stride == stride * size:
        size *= others.pop(0).size
    return Strides(stride, size, _strides(others)) if others else Strides(stride)
