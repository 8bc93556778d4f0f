"""The code of kernels of depthwise convolutions and of their weight gradients, as loops over vectors of channels.

Images are channels-last, so that a vector holds adjacent channels of one position. A kernel computes a few adjacent
positions of a row at once. It loads each vector of the image once for all results of these that it counts for. Padding
is not in memory: rows of it are left out, and a vector of it is replaced by zeros, in code of its own for positions at
an edge.

The scheme is that of direct convolutions of vector code (Georganas et al., "Anatomy of High-Performance Deep Learning
Convolutions on SIMD Architectures", SC 2018, section II), with one channel for each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import affine, arith, hal, scf, vector

from irongrad.mlir.loop_code import (
    constant,
    each,
    fixed,
    least,
    loop,
    new_executable,
    number,
    row_of,
    vector_of,
    zeros,
)
from irongrad.passes.module.depthwise_kernels.filters import Along, FilterShape

# The multiplications of a part of the work, about 10 µs of one core, and into how many parts images are shared out.
_PART, _PARTS = 1 << 18, 64

# Chains of additions that hide the latency of one: 4 cycles, two additions per cycle.
_CHAINS = 8


@dataclass(frozen=True)
class FilterKernel:
    """A kernel of a depthwise convolution, or of its weight gradient.

    The image is [batch, y, x, channels]. A convolution reads a weight [i, j, channels], and gives [batch, h, w,
    channels]. A weight gradient reads [batch, i, j, channels], and gives a sum for each part of the images, [parts, h,
    w, channels].

    Attributes:
        shape: the sizes.
        width: the channels of a vector; there are at least so many.
        at_once: the most positions of a row that are computed at once.
        halves: which of the image, the other operand and the result are bfloat16; all others are float32.
    """

    shape: FilterShape
    width: int
    at_once: int
    halves: tuple[bool, bool, bool] = (False, False, False)

    @property
    def blocks(self) -> int:
        """The number of vectors of channels; if channels do not divide evenly, the last one overlaps."""
        return ceil(self.shape.channels / self.width)

    @property
    def images_of_part(self) -> int:
        """The images whose products are added to one part of a weight gradient."""
        return ceil(self.shape.batch / min(self.shape.batch, ceil(_PARTS / self.blocks)))

    @property
    def parts(self) -> int:
        """The number of parts of a weight gradient."""
        return ceil(self.shape.batch / self.images_of_part)

    @property
    def rows_of_part(self) -> int:
        """The rows of a convolution's result that are computed in one part of the work."""
        columns, rows = self.shape.columns, self.shape.rows
        of_row = columns.results * columns.others * rows.others * self.width
        return min(rows.results, ceil(_PART / of_row))

    @property
    def result(self) -> tuple[int, int, int, int]:
        """The sizes of the result."""
        first = self.parts if self.shape.adds_images else self.shape.batch
        return first, self.shape.rows.results, self.shape.columns.results, self.shape.channels


def executable_of(kernel: FilterKernel, name: str) -> Any:
    """A kernel as an operation `stream.executable`, with one entry point; both are called `name`."""
    shape = kernel.shape
    rows, columns = shape.rows, shape.columns
    if shape.adds_images:
        counts, of_other = (kernel.blocks, kernel.parts, 1), shape.batch * rows.others * columns.others
    else:
        counts = kernel.blocks, ceil(rows.results / kernel.rows_of_part), shape.batch
        of_other = rows.others * columns.others
    first, *_ = kernel.result
    elements = [shape.batch * rows.size * columns.size, of_other, first * rows.results * columns.results]
    with new_executable(name, counts, 3, 2 * shape.multiplications) as (executable, bindings):
        image, other, result = (
            row_of(binding, count * shape.channels, ir.BF16Type.get() if is_half else None)
            for binding, count, is_half in zip(bindings, elements, kernel.halves, strict=True)
        )
        channel = least([_d(0) * kernel.width, fixed(shape.channels - kernel.width)], _group(0))
        code = _Code(kernel, image, other, result, channel)
        if shape.adds_images:
            code.write_gradient()
        else:
            code.write_images()
    return executable


def _group(dimension: int) -> Any:
    return hal.interface_workgroup_id(dimension)


def _d(place: int) -> ir.AffineExpr:
    return ir.AffineExpr.get_dim(place)


@dataclass(frozen=True)
class _Code:
    """The code of one part of the work.

    Attributes:
        kernel: the kernel.
        image: the memory of the image, of rank 1.
        other: the memory of the other operand.
        result: the memory of the result.
        channel: the first channel of the part.
    """

    kernel: FilterKernel
    image: Any
    other: Any
    result: Any
    channel: Any

    @property
    def _kind(self) -> ir.VectorType:
        return vector_of(self.kernel.width)

    @property
    def _half(self) -> ir.VectorType:
        return ir.VectorType.get([self.kernel.width], ir.BF16Type.get())

    def write_images(self) -> None:
        """Write the code of a convolution: each part computes some rows of one image."""
        shape, image = self.kernel.shape, _group(2)
        rows, columns = shape.rows, shape.columns
        wide = min(self.kernel.at_once, columns.results)
        size = self.kernel.rows_of_part
        begin, end = number(_d(0) * size, _group(1)), least([_d(0) * size + size, fixed(rows.results)], _group(1))
        with each(begin, end, 1) as row, each(constant(0), constant(ceil(columns.results / wide)), 1) as tile:
            column = least([_d(0) * wide, fixed(columns.results - wide)], tile)

            def add(is_inside: bool, image: Any = image, row: Any = row, column: Any = column) -> list[Any]:
                return self._sums(image, row, column, wide, is_inside=is_inside)

            sums = self._where_inside(column, wide, columns.stride, columns.others, columns.dilation, wide, add)
            at = (_d(0) * rows.results + _d(1)) * columns.results + _d(2)
            for u, total in enumerate(sums):
                place = number((at + u) * shape.channels + _d(3), image, row, column, self.channel)
                vector.store(self._rounded(total), self.result, [place])

    def _sums(self, image: Any, row: Any, column: Any, wide: int, *, is_inside: bool) -> list[Any]:
        """The results at `wide` adjacent positions."""
        rows, columns = self.kernel.shape.rows, self.kernel.shape.columns

        def add(i: Any, sums: list[Any]) -> list[Any]:
            weights = [self._load(self.other, number(_d(0) * columns.others + j, i)) for j in range(columns.others)]
            y = number(_d(0) * rows.stride + _d(1) * rows.dilation - rows.padding, row, i)
            x = number(_d(0) * columns.stride - columns.padding, column)
            sums = list(sums)
            for offset, pairs in _meeting(wide, columns.stride, columns.others, columns.dilation).items():
                read = self._pixel(image, y, x, offset, is_inside=is_inside)
                for u, j in pairs:
                    sums[u] = vector.fma(read, weights[j], sums[u])
            return sums

        nothing = [zeros(self._kind)] * wide
        return loop(*_meeting_rows(rows, row), 1, nothing, add)

    def write_gradient(self) -> None:
        """Write the code of a weight gradient: each part adds the products of some images.

        The sums stay in registers until they are stored. The last block of channels may overlap the one before, and
        two threads then store the same sums there.
        """
        shape = self.kernel.shape
        part, size = _group(1), self.kernel.images_of_part
        begin, end = number(_d(0) * size, part), least([_d(0) * size + size, fixed(shape.batch)], part)
        rows, columns = shape.rows, shape.columns
        nothing = [zeros(self._kind)] * columns.results
        with each(constant(0), constant(rows.results), 1) as row:

            def add_image(image: Any, sums: list[Any], row: Any = row) -> list[Any]:
                def add_row(i: Any, sums: list[Any]) -> list[Any]:
                    return _added(sums, self._row_of_sums(image, row, i))

                return _added(sums, loop(*_meeting_rows(rows, row), 1, nothing, add_row))

            totals = loop(begin, end, 1, nothing, add_image)
            at = (_d(0) * rows.results + _d(1)) * columns.results
            for w, total in enumerate(totals):
                vector.store(total, self.result, [number((at + w) * shape.channels + _d(2), part, row, self.channel)])

    def _row_of_sums(self, image: Any, row: Any, i: Any) -> list[Any]:
        """The products of one row of the other operand, added up for each column of the result."""
        rows, columns = self.kernel.shape.rows, self.kernel.shape.columns
        wide = min(self.kernel.at_once, columns.others)
        chains = min(wide, ceil(_CHAINS / columns.results))
        y = number(_d(0) * rows.stride + _d(1) * rows.dilation - rows.padding, row, i)

        def add(tile: Any, sums: list[Any]) -> list[Any]:
            j = number(_d(0) * wide, tile)

            def products(is_inside: bool) -> list[Any]:
                return self._products(image, y, i, j, wide, sums, is_inside=is_inside)

            return self._where_inside(j, wide, columns.dilation, columns.results, columns.stride, len(sums), products)

        nothing = [zeros(self._kind)] * (chains * columns.results)
        sums = loop(constant(0), constant(ceil(columns.others / wide)), 1, nothing, add)
        of_chains = [sums[n * columns.results : (n + 1) * columns.results] for n in range(chains)]
        return reduce(_added, of_chains)

    def _products(
        self, image: Any, y: Any, i: Any, j: Any, wide: int, sums: Sequence[Any], *, is_inside: bool
    ) -> list[Any]:
        """`sums` with the products of `wide` adjacent positions of the other operand."""
        shape = self.kernel.shape
        rows, columns = shape.rows, shape.columns
        grads = []
        for u in range(wide):
            at = (_d(0) * rows.others + _d(1)) * columns.others
            if is_inside:
                grads.append(self._load(self.other, number(at + _d(2) + u, image, i, j)))
                continue
            last = least([_d(0) + u, fixed(columns.others - 1)], j)
            read = self._load(self.other, number(at + _d(2), image, i, last))
            exists = arith.cmpi(arith.CmpIPredicate.slt, number(_d(0) + u, j), constant(columns.others))
            grads.append(arith.select(exists, read, zeros(self._kind)))
        x = number(_d(0) * columns.dilation - columns.padding, j)
        sums, chains = list(sums), len(sums) // columns.results
        for offset, pairs in _meeting(wide, columns.dilation, columns.results, columns.stride).items():
            read = self._pixel(image, y, x, offset, is_inside=is_inside)
            for u, w in pairs:
                place = (u % chains) * columns.results + w
                sums[place] = vector.fma(read, grads[u], sums[place])
        return sums

    def _where_inside(
        self,
        first: Any,
        wide: int,
        step: int,
        taps: int,
        apart: int,
        results: int,
        code: Callable[[bool], list[Any]],
    ) -> list[Any]:
        """Write `code` without and with checks for positions at an edge, and a choice between them.

        Args:
            first: the first of `wide` positions that are `step` apart in the image.
            taps: the number of vectors, `apart` from each other, that a position reads.
            results: the number of vectors that `code` returns.
        """
        columns = self.kernel.shape.columns
        behind = columns.size + columns.padding - (wide - 1) * step - (taps - 1) * apart  # the first that reads behind
        counted = columns.others if self.kernel.shape.adds_images else columns.results
        at_most = min(counted - wide, (behind - 1) // step)
        at_least = ceil(columns.padding / step)
        if at_least > at_most:
            return code(False)
        if at_least <= 0 and at_most == counted - wide and counted % wide == 0:
            return code(True)
        begins = arith.cmpi(arith.CmpIPredicate.sge, first, constant(at_least))
        ends = arith.cmpi(arith.CmpIPredicate.sle, first, constant(at_most))
        choice = scf.IfOp(arith.andi(begins, ends), [self._kind] * results, has_else=True)
        for block, is_inside in ((choice.then_block, True), (choice.else_block, False)):
            with ir.InsertionPoint(block):
                scf.yield_(code(is_inside))
        return list(choice.results)

    def _pixel(self, image: Any, y: Any, x: Any, offset: int, *, is_inside: bool) -> Any:
        """The vector of the image at row `y`, `offset` columns behind `x`; zeros outside of the image."""
        rows, columns = self.kernel.shape.rows, self.kernel.shape.columns
        at = (_d(0) * rows.size + _d(1)) * columns.size + _d(2)
        if is_inside:
            return self._load(self.image, number(at + offset, image, y, x))
        column = number(_d(0) + offset, x)
        nearest = least([_d(0), fixed(columns.size - 1)], _most([_d(0), fixed(0)], column))
        read = self._load(self.image, number(at, image, y, nearest))
        exists = arith.cmpi(arith.CmpIPredicate.eq, column, nearest)
        return arith.select(exists, read, zeros(self._kind))

    def _load(self, memory: Any, position: Any) -> Any:
        """The vector of a position, as float32."""
        place = number(_d(0) * self.kernel.shape.channels + _d(1), position, self.channel)
        if memory.type.element_type == self._kind.element_type:
            return vector.load(self._kind, memory, [place])
        return arith.extf(self._kind, vector.load(self._half, memory, [place]))

    def _rounded(self, sums: Any) -> Any:
        """A vector as the result has it."""
        return arith.truncf(self._half, sums) if self.kernel.halves[2] else sums


def _added(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [arith.addf(x, y) for x, y in zip(first, second, strict=True)]


def _meeting(wide: int, step: int, taps: int, apart: int) -> dict[int, list[tuple[int, int]]]:
    """For each offset in the image, the positions that read it, each with the tap that does."""
    found: dict[int, list[tuple[int, int]]] = {}
    for u in range(wide):
        for tap in range(taps):
            found.setdefault(u * step + tap * apart, []).append((u, tap))
    return dict(sorted(found.items()))


def _meeting_rows(rows: Along, row: Any) -> tuple[Any, Any]:
    """The range of the other operand's rows that meet a row of the image, for a row of the result."""
    before = ir.AffineExpr.get_ceil_div(fixed(rows.padding) - _d(0) * rows.stride, rows.dilation)
    last = ir.AffineExpr.get_floor_div(fixed(rows.size - 1 + rows.padding) - _d(0) * rows.stride, rows.dilation)
    return _most([before, fixed(0)], row), least([last + 1, fixed(rows.others)], row)


def _most(expressions: Sequence[ir.AffineExpr], *values: Any) -> Any:
    """The maximum of affine `expressions` of `values`."""
    return affine.AffineMaxOp(ir.AffineMap.get(len(values), 0, list(expressions)), values).result
