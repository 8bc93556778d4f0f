"""Depthwise convolutions and their weight gradients in a module, as operations of `linalg`.

Both are sums of products of an image with another tensor, channel by channel. IREE has written them as
`linalg.generic`, and has moved transposes into their maps, so that the maps tell the layout. A letter names each loop:

    n, c      the image and the channel
    h, w      the position in the result
    i, j      the position in the other operand
    y, x      a position in the image: y = h * stride + i * dilation, and x likewise

A convolution has the result [n, h, w, c] and the other operand [i, j, c], its weight. In a weight gradient the result
is [i, j, c], and the other operand [n, h, w, c] is the gradient of the output. Its letters here are those of its
operation: the result has h and w, and the stride is the dilation of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from irongrad.mlir.contractions import Dimension, dimensions_of, sums_of_products_in
from irongrad.mlir.halves import half_source
from irongrad.mlir.letters import dimensions_in, lettered_source, zero_padding
from irongrad.mlir.linalg import has_known_sizes
from irongrad.mlir.transposes import Lettered

# The most columns of a kernel: the code of all of them is written one after the other.
_MOST_TAPS = 32

# The loops of a dimension of the image: of the result, and of the other operand.
_LOOPS = {"y": ("h", "i"), "x": ("w", "j")}


@dataclass(frozen=True)
class Along:
    """A spatial dimension.

    Attributes:
        size: of the image, without padding.
        results: the number of positions in the result.
        others: the number of positions in the other operand.
        stride: how far a position in the result moves the position in the image.
        dilation: how far a position in the other operand moves it.
        padding: the zeros before the image. Behind it are as many as are read.
    """

    size: int = 1
    results: int = 1
    others: int = 1
    stride: int = 1
    dilation: int = 1
    padding: int = 0


@dataclass(frozen=True)
class FilterShape:
    """The sizes of a depthwise convolution, or of its weight gradient.

    Attributes:
        batch: the number of images.
        channels: the number of channels.
        rows: the first spatial dimension.
        columns: the second spatial dimension.
        adds_images: whether the result is a sum over the images, as a weight gradient is.
    """

    batch: int
    channels: int
    rows: Along
    columns: Along
    adds_images: bool

    @property
    def multiplications(self) -> int:
        """The number of multiplications, those with padding included."""
        of_rows, of_columns = (along.results * along.others for along in (self.rows, self.columns))
        return self.batch * self.channels * of_rows * of_columns


@dataclass(frozen=True, eq=False)
class Filter:
    """A depthwise convolution, or its weight gradient.

    Attributes:
        operation: the operation that computes it.
        shape: its sizes.
        image: the image without its padding, and the letters of its dimensions; float32 or bfloat16.
        other: the other operand, likewise.
        letters: the letters of the result.
    """

    operation: Any
    shape: FilterShape
    image: Lettered
    other: Lettered
    letters: str


def filters_in(module: ir.Module) -> Iterator[Filter]:
    """The depthwise convolutions and weight gradients of a module that add float32, and are of known sizes.

    Each may be replaced before the next is asked for: one may read another.
    """
    for operation in sums_of_products_in(module):
        if has_known_sizes(operation) and (found := _filter_of(operation)) is not None:
            yield found


def _filter_of(operation: Any) -> Filter | None:
    """What a sum of products computes; None if it is neither."""
    maps = [m.value for m in operation.attributes["indexing_maps"]]
    operands = list(operation.operands)
    by_operand = [dimensions_of(m) for m in maps[:2]]
    result = dimensions_in(maps[2])
    sums = [any(d is not None and len(d) == 2 for d in of) for of in by_operand]
    if -1 in result or sorted(sums) != [False, True] or any(d is None for of in by_operand for d in of):
        return None
    place = sums.index(True)
    image, other = operands[place], operands[1 - place]
    of_image = [d for d in by_operand[place] if d is not None]
    of_other = dimensions_in(maps[1 - place])
    roles = None if -1 in of_other else _roles(of_image, of_other, result)
    letters = None if roles is None else _letters(roles, of_image, of_other, result)
    if roles is None or letters is None:
        return None
    sizes = _sizes([(other, of_other), (operation.results[0], result)])
    source, before = _source(image, roles)
    size = dict(zip(source[1], source[0].type.shape, strict=True))
    alongs = {
        role: _along(of, size[role], before[role], sizes, set(result))
        for role, of in zip(roles, of_image, strict=True)
        if role in "yx"
    }
    lettered_result = "".join(letters[n] for n in result)
    columns = alongs["x"]
    # Of one image, both are the same sum.
    adds = "n" not in lettered_result if "n" in letters.values() else columns.others > columns.results
    if min(columns.others, columns.results) > _MOST_TAPS or (not adds and columns.others > _MOST_TAPS):
        return None
    shape = FilterShape(size.get("n", 1), size["c"], alongs.get("y", Along()), columns, adds)
    of_other_letters = "".join(letters[n] for n in of_other)
    lettered_other = half_source(other, of_other_letters) or lettered_source(other, of_other_letters)
    return Filter(operation, shape, source, lettered_other, lettered_result)


def _roles(image: Sequence[Dimension], other: Sequence[int], result: Sequence[int]) -> str | None:
    """The letter of each dimension of an image; None if they are not those of an image.

    A kernel of one row has no loop over its rows, so that a dimension of the image may be spatial without a sum.
    """
    sums = [d for d, of in enumerate(image) if len(of) == 2]
    plain = [d for d, of in enumerate(image) if len(of) == 1]
    channel = [d for d in plain if image[d][0][0] in result and image[d][0][0] in other]
    rest = [d for d in plain if d not in channel]
    batch = next((d for d in rest if image[d][0][1] == 1), None) if len(rest) + len(sums) < 4 else None
    spatial = sorted([*sums, *(d for d in rest if d != batch)])
    if len(channel) != 1 or len(spatial) not in (1, 2) or image[channel[0]][0][1] != 1:
        return None
    named = dict(zip(spatial, "yx"[-len(spatial) :], strict=True)) | {channel[0]: "c"}
    named |= {} if batch is None else {batch: "n"}
    return "".join(named[d] for d in range(len(image)))


def _letters(
    roles: str, image: Sequence[Dimension], other: Sequence[int], result: Sequence[int]
) -> dict[int, str] | None:
    """The letter of each loop; None if the loops are not those of a depthwise convolution or of its weight gradient."""
    letters: dict[int, str] = {}
    for role, of in zip(roles, image, strict=True):
        of_result, of_other = _LOOPS.get(role, (role, role))
        letters |= {number: of_result if number in result else of_other for number, _ in of}
    is_each_once = {*letters} == {*result, *other} and len(letters) == len({*letters.values()})
    is_apart = all((number in other) == (x in "ij") for number, x in letters.items() if x in "hwij")
    return letters if is_each_once and is_apart else None


def _sizes(operands: Sequence[tuple[Any, Sequence[int]]]) -> dict[int, int]:
    """The size of each loop."""
    return {n: size for value, loops in operands for n, size in zip(loops, value.type.shape, strict=True)}


def _along(of: Dimension, size: int, padding: int, sizes: dict[int, int], result: set[int]) -> Along:
    """A spatial dimension of an image; a loop that is not there has one position."""
    ways = [
        [(sizes[n], factor) for n, factor in of if (n in result) == is_result] or [(1, 1)]
        for is_result in (True, False)
    ]
    ((results, stride),), ((others, dilation),) = ways
    return Along(size, results, others, stride, dilation, padding)


def _source(image: Any, letters: str) -> tuple[Lettered, dict[str, int]]:
    """The tensor that an image widens from bfloat16 or pads, or both, and the zeros before each of its dimensions."""
    source, before = _unpadded(half_source(image, letters) or lettered_source(image, letters))
    return half_source(*source) or source, before


def _unpadded(image: Lettered) -> tuple[Lettered, dict[str, int]]:
    """The tensor that an image pads with zeros along `y` and `x`, and the zeros before each of its dimensions."""
    value, letters = image
    nothing = image, dict.fromkeys(letters, 0)
    if (padding := zero_padding(value)) is None:
        return nothing
    source, before, after = padding
    elsewhere = [n for of in (before, after) for x, n in zip(letters, of, strict=True) if x not in "yx"]
    if any(elsewhere) or min(*before, *after) < 0:
        return nothing
    return lettered_source(source, letters), dict(zip(letters, before, strict=True))
