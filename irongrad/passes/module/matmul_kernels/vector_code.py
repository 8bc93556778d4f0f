"""The code of matrix product kernels, as loops over vectors.

IREE 3.13.0's code generator keeps too few results in registers, or spills them, and prefetches nothing. LLVM compiles
the loops here to the same code as a microkernel in C. A kernel is an executable of IREE's dialect `stream`, as in
IREE's sample of custom dispatches (samples/custom_dispatch/cpu/embedded).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, hal, memref, scf, vector

from irongrad.mlir.loop_code import (
    PartsOf,
    bounded,
    constant,
    each,
    fixed,
    loop,
    new_executable,
    number,
    row_of,
    vector_of,
    zeros,
)
from irongrad.passes.module.matmul_kernels.pair_code import write_pairs
from irongrad.passes.module.matmul_kernels.places import (
    Memory,
    Place,
    existing,
    existing_row,
    first_column,
    first_row,
    left_rows,
    matrix_in,
)
from irongrad.passes.module.matmul_kernels.right_block import RightBlock
from irongrad.passes.module.matmul_kernels.tiling import LINE, ProductKernel

# The prefetch distance of the right operand, in steps along the reduction dimension.
_AHEAD = 8


def executable_of(kernel: ProductKernel, name: str) -> Any:
    """A kernel as an operation `stream.executable`, with one entry point; both are called `name`."""
    strips, panels = kernel.part
    counts = -(-kernel.panels // panels), -(-kernel.strips // strips), kernel.sizes.batch
    each = (1, strips * kernel.tile.rows, 1)
    parts = [PartsOf(n) if x == kernel.open else count for x, n, count in zip("crb", each, counts, strict=True)]
    tensors = 2 + kernel.right_tensors + kernel.adds_row
    operations = None if kernel.open else 2 * kernel.sizes.multiplications
    with new_executable(name, parts, tensors, operations, sizes=len(kernel.open)) as (executable, arguments):
        left, *others, result = arguments
        size = others.pop() if kernel.open else None
        right, row = others[: kernel.right_tensors], others[kernel.right_tensors :]
        half = ir.BF16Type.get()
        of_operands, of_result = half if kernel.multiplies_halves else None, half if kernel.is_rounded else None
        of_left = _elements(kernel, kernel.left.elements, "brk" if kernel.left.batch else "rk", size)
        of_right = _elements(kernel, kernel.right.elements, "bk" if kernel.right.batch else "k", size)
        in_place = None if kernel.has_own_block else row_of(right[0], of_right, of_operands)
        memory = Memory(
            row_of(left, of_left, of_operands),
            in_place or RightBlock.of(kernel, right, of_right, size if kernel.open == "k" else None),
            row_of(row[0], kernel.sizes.columns) if row else None,
            row_of(result, _elements(kernel, kernel.result_elements, "br", size), of_result),
            size,
        )
        _write(kernel, memory)
    return executable


def _elements(kernel: ProductKernel, assumed: int, letters: str, size: Any) -> Any:
    """How many elements a tensor with dimensions of these letters has: `assumed`, or an index if the launch says it."""
    if not kernel.open or kernel.open not in letters:
        return assumed
    of = {"b": kernel.sizes.batch, "r": kernel.sizes.rows, "k": kernel.sizes.summands}
    return number(ir.AffineExpr.get_floor_div(ir.AffineExpr.get_dim(0) * assumed, of[kernel.open]), size)


def write_strips(kernel: ProductKernel, memory: Memory, rows: tuple[Any, Any]) -> None:
    """Write code that computes a product of some strips at the current insertion point.

    Args:
        kernel: the product; it has the rows of one strip.
        memory: its buffers.
        rows: the first row of the first strip in them, and the first row behind the last strip.
    """
    with each(constant(0), constant(kernel.panels), 1) as panel:
        column = first_column(kernel, panel)
        blocks = each(constant(0), constant(kernel.sizes.summands), kernel.depth)
        with blocks as summand, each(*rows, kernel.tile.rows) as row:
            _write_tile(kernel, memory, Place(constant(0), constant(0), row, panel, column, summand))


def _write(kernel: ProductKernel, memory: Memory) -> None:
    """Write the code of one workgroup, which computes one part."""
    strips, panels = kernel.part
    d = ir.AffineExpr.get_dim(0)
    across, down, batch = (hal.interface_workgroup_id(i) for i in range(3))
    rows = memory.given(kernel, "r")
    number_of_strips = None if rows is None else number(ir.AffineExpr.get_ceil_div(d, kernel.tile.rows), rows)
    of_panels = _share(across, panels, kernel.panels)
    of_strips = _share(down, strips, kernel.strips, number_of_strips)
    if kernel.multiplies_halves:
        write_pairs(kernel, memory, batch, of_panels, of_strips)
        return
    over_blocks = each(constant(0), _end_of_blocks(kernel, memory), kernel.depth)
    with _nested(each(*of_panels, 1), over_blocks, turned=kernel.blocks_first) as (panel, summand):
        column = first_column(kernel, panel)
        if kernel.has_own_block:
            memory.right.write_block(matrix_in(kernel.right, batch, memory.size), column, summand)
        with each(*of_strips, 1) as strip:
            _write_tile(kernel, memory, Place(batch, strip, first_row(kernel, strip), panel, column, summand))


def _end_of_blocks(kernel: ProductKernel, memory: Memory) -> Any:
    """Before which summand blocks begin. There is one block even of no summands, as it writes the result."""
    given = memory.given(kernel, "k")
    return constant(kernel.sizes.summands) if given is None else arith.maxui(given, constant(1))


@contextmanager
def _nested(
    outer: AbstractContextManager[Any], inner: AbstractContextManager[Any], *, turned: bool
) -> Iterator[tuple[Any, Any]]:
    """Nest two loops, or nest them the other way round; return the index of `outer` and that of `inner`."""
    if turned:
        with inner as j, outer as i:
            yield i, j
    else:
        with outer as i, inner as j:
            yield i, j


def _share(part: Any, size: int, count: int, given: Any = None) -> tuple[Any, Any]:
    """The bounds of the part with the index `part`: parts have `size` of all `count` strips or panels.

    `given` is their number if it depends on a size that the launch gives.
    """
    d = ir.AffineExpr.get_dim(0)
    return number(d * size, part), bounded(number(d * size + size, part), count, given)


def _write_tile(kernel: ProductKernel, memory: Memory, place: Place) -> None:
    """Accumulate one block of the reduction dimension into the results of a tile."""
    tile = kernel.tile
    places = _places_of_results(kernel, memory, place)
    is_first = arith.cmpi(arith.CmpIPredicate.eq, place.summand, constant(0))
    sums = _added(kernel, memory, place, _beginning(kernel, memory, place, is_first))
    if kernel.blocks > 1:  # the blocks before are added last, so that no chain is longer than a block
        before = [
            _stored(kernel, memory.result, p, place, (n % tile.vectors) * tile.width) for n, p in enumerate(places)
        ]
        sums = [arith.select(is_first, x, arith.addf(x, y)) for x, y in zip(sums, before, strict=True)]
    for i in range(tile.rows):
        with _where_owned(kernel, place, i, memory.given(kernel, "r")):
            for n in range(i * tile.vectors, (i + 1) * tile.vectors):
                _store(kernel, memory.result, sums[n], places[n], place, (n % tile.vectors) * tile.width)


def _places_of_results(kernel: ProductKernel, memory: Memory, place: Place) -> list[Any]:
    """Where each vector of a tile's results is; the last row stands for rows that do not exist."""
    tile = kernel.tile
    b, r, c = (ir.AffineExpr.get_dim(i) for i in range(3))
    of_batch, of_row = kernel.result
    result = b * of_batch + r * of_row + c
    if kernel.open == "r":
        rows = [existing_row(kernel, number(b + i, place.row), memory.size) for i in range(tile.rows)]
        first, columns = arith.muli(place.batch, memory.size), range(0, tile.columns, tile.width)
        return [number(result + j, first, row, place.column) for row, j in product(rows, columns)]
    return [
        number(result + (i * of_row + j * tile.width), place.batch, place.row, place.column)
        for i, j in product(range(tile.rows), range(tile.vectors))
    ]


@contextmanager
def _where_owned(kernel: ProductKernel, place: Place, i: int, given: Any) -> Iterator[None]:
    """Write code for row `i` of a tile that runs only if the row is not in the strip before.

    Where the launch has `given` the number of rows, it runs only if the row exists.
    """
    rows = kernel.tile.rows
    if given is None and kernel.sizes.rows % rows == 0:
        yield
        return
    d = ir.AffineExpr.get_dim(0)
    row = number(d + i, place.row)
    if given is None:
        owned = arith.cmpi(arith.CmpIPredicate.uge, row, number(d * rows, place.strip))
    else:
        owned = arith.cmpi(arith.CmpIPredicate.ult, row, given)
    with ir.InsertionPoint(scf.IfOp(owned).then_block):
        yield
        scf.yield_([])


def _store(kernel: ProductKernel, result: Any, sums: Any, at: Any, place: Place, beyond: int) -> None:
    """Write code that stores a vector of results, without those of the panel before, or behind the last column."""
    if kernel.sizes.columns % kernel.tile.columns == 0:
        vector.store(sums, result, [at])
        return
    if kernel.pads_right:
        vector.maskedstore(result, [at], existing(kernel, place.column, beyond), sums)
        return
    p, c = (ir.AffineExpr.get_dim(i) for i in range(2))
    before = number(p * kernel.tile.columns - c - beyond, place.panel, place.column)
    kind = ir.VectorType.get([kernel.tile.width], ir.IndexType.get())
    owned = arith.cmpi(arith.CmpIPredicate.sge, vector.step(kind), vector.broadcast(kind, before))
    vector.maskedstore(result, [at], owned, sums)


def _stored(kernel: ProductKernel, result: Any, at: Any, place: Place, beyond: int) -> Any:
    """A vector of results that was stored before."""
    kind = vector_of(kernel.tile.width)
    if not kernel.pads_right:
        return vector.load(kind, result, [at])
    return vector.maskedload(kind, result, [at], existing(kernel, place.column, beyond), zeros(kind))


def _beginning(kernel: ProductKernel, memory: Memory, place: Place, is_first: Any) -> list[Any]:
    """The initial values of a tile's results: zero, or the added row in the first block."""
    tile = kernel.tile
    vector_type = vector_of(tile.width)
    nothing = zeros(vector_type)
    if memory.row is None:
        return [nothing] * (tile.rows * tile.vectors)
    c = ir.AffineExpr.get_dim(0)
    of_row = [
        vector.load(vector_type, memory.row, [number(c + j * tile.width, place.column)]) for j in range(tile.vectors)
    ]
    return [arith.select(is_first, x, nothing) for x in of_row] * tile.rows


def _added(kernel: ProductKernel, memory: Memory, place: Place, begun: list[Any]) -> list[Any]:
    """The results after one block of the reduction dimension is added."""
    rows = left_rows(kernel, place.batch, place.row, kernel.tile.rows, memory.size)
    if kernel.round == kernel.sizes.summands:
        return _add_round(kernel, memory, place, place.summand, rows, begun)
    d = ir.AffineExpr.get_dim(0)
    end = bounded(number(d + kernel.depth, place.summand), kernel.sizes.summands, memory.given(kernel, "k"))
    stretch = kernel.stretch
    if stretch is None:
        return _add_stretch(kernel, memory, place, (place.summand, end), rows, begun)

    def add(first: Any, sums: list[Any]) -> list[Any]:
        f, r = (ir.AffineExpr.get_dim(i) for i in range(2))
        summand = kernel.left.summand
        of_rows = [number(r + summand.to(f) - f * summand.one, first, row) for row in rows]
        return _add_stretch(kernel, memory, place, (first, number(f + stretch, first)), of_rows, sums)

    return loop(place.summand, end, stretch, begun, add)


def _add_stretch(
    kernel: ProductKernel,
    memory: Memory,
    place: Place,
    bounds: tuple[Any, Any],
    rows: Sequence[Any],
    sums: list[Any],
) -> list[Any]:
    """The results after the summands within `bounds` are added, along which the left operand has one stride.

    Args:
        kernel: the kernel.
        memory: its buffers.
        place: the place of the tile.
        bounds: the first summand, and the first that is not added.
        rows: where the summand 0 of each row would be in the left operand with that stride.
        sums: the results before.
    """
    r, k = (ir.AffineExpr.get_dim(i) for i in range(2))

    def add(summand: Any, sums: list[Any]) -> list[Any]:
        at = [number(r + k * kernel.left.summand.one, row, summand) for row in rows]
        return _add_round(kernel, memory, place, summand, at, sums)

    return loop(*bounds, kernel.round, sums, add)


def _add_round(
    kernel: ProductKernel, memory: Memory, place: Place, summand: Any, rows: Sequence[Any], sums: list[Any]
) -> list[Any]:
    """The results after `ProductKernel.round` summands are added, which start at the offsets `rows` on the left."""
    tile = kernel.tile
    kind = vector_of(tile.width)
    d = ir.AffineExpr.get_dim(0)
    for step in range(kernel.round):
        vectors = _right_vectors(kernel, memory, place, summand, step)
        new = []
        for i, row in enumerate(rows):
            of_row = memref.load(memory.left, [number(d + kernel.left.summand.to(fixed(step)), row)])
            factor = vector.broadcast(kind, of_row)
            new += [vector.fma(factor, x, sums[i * tile.vectors + j]) for j, x in enumerate(vectors)]
        sums = new
    return sums


def _right_vectors(kernel: ProductKernel, memory: Memory, place: Place, summand: Any, step: int) -> list[Any]:
    """The vectors of the right operand for the columns of a tile, `step` behind the index `summand`."""
    right, tile = kernel.right, kernel.tile
    columns = range(0, tile.columns, tile.width)
    if kernel.has_own_block:
        return [memory.right.vector_at(place.summand, summand, step, column) for column in columns]
    b, c, k = (ir.AffineExpr.get_dim(i) for i in range(3))
    matrix = matrix_in(right, place.batch, memory.size)

    def at(step: int, column: int) -> Any:
        expression = right.at(b, c + column) + right.summand.to(k + step)
        return number(expression, matrix, place.column, summand)

    vectors = []
    for column in columns:
        vectors.append(vector.load(vector_of(tile.width), memory.right, [at(step, column)]))
        if column % LINE == 0:
            memref.prefetch(memory.right, [at(step + _AHEAD, column)], False, 3, True)
    return vectors
