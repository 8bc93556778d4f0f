"""The code of a product of few rows, or of few summands, in registers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, memref, vector

from irongrad.mlir.loop_code import Lanes, constant, each, loop, number, vector_of, widened, zeros

# The vector registers, by the width of a vector.
_REGISTERS = {16: 32, 8: 16}

# The most vectors in a row of a tile, and the fewest results of one: eight chains of additions hide their latency.
_MOST_VECTORS, _CHAINS = 4, 8


@dataclass(frozen=True)
class Side:
    """An operand or the result of a product, in memory.

    Attributes:
        memory: a memref of rank 1 of float32 or bfloat16.
        first: the index of its first element.
        outer: how far apart rows of the left operand and of the result are, and summands of the right one.
        summand: how far apart summands of the left operand are. Columns are neighbours.
        block: the columns of a block of the right operand, which has all summands of a block before the next; 0 if it
            is in one piece.
    """

    memory: Any
    first: Any
    outer: int
    summand: int = 1
    block: int = 0


class Dimension(Enum):
    """A dimension of a product."""

    ROWS = "rows"
    COLUMNS = "columns"
    SUMMANDS = "summands"


@dataclass(frozen=True)
class Limit:
    """How much of a dimension of a product is computed.

    Attributes:
        of: the dimension.
        end: where it ends: a number that is known when the code runs, a multiple of `unit`, as the whole size is.
        unit: a number of elements.
    """

    of: Dimension
    end: Any
    unit: int


@dataclass(frozen=True)
class ProductCode:
    """Writes the code of a product.

    Attributes:
        rows: the rows of the result.
        columns: its columns.
        summands: the summands of each element.
        width: the number of elements in a vector.
        left: the left operand.
        right: the right operand.
        result: the result.
        adds: a condition under which the product is added to what is there; None for never.
        limit: what is left out.
    """

    rows: int
    columns: int
    summands: int
    width: int
    left: Side
    right: Side
    result: Side
    adds: Any = None
    limit: Limit | None = None

    def write(self) -> None:
        """Write the code at the current insertion point."""
        rows, vectors = self._tile()
        of_panel = vectors * self.width
        whole = self.columns // of_panel * of_panel
        with each(constant(0), self._end(Dimension.COLUMNS, whole), of_panel) as column:
            self._write_rows(column, rows, [self.width] * vectors)
        beyond = self.columns - whole
        rest = [self.width] * (beyond // self.width) + [beyond % self.width] * (beyond % self.width > 0)
        if rest:
            self._write_rows(constant(whole), rows, rest)

    def _end(self, dimension: Dimension, size: int) -> Any:
        """Where a loop over a dimension ends that has no limit at `size`."""
        return self.limit.end if self.limit and self.limit.of is dimension else constant(size)

    def _fits(self, dimension: Dimension, size: int) -> bool:
        """Whether tiles of a size end where the dimension does."""
        return not self.limit or self.limit.of is not dimension or self.limit.unit % size == 0

    def _tile(self) -> tuple[int, int]:
        """The rows and vectors of a tile that takes the fewest instructions."""

        def cost(tile: tuple[int, int]) -> float:
            rows, vectors = tile
            tiles = -(-self.rows // rows) * -(-self.columns // (vectors * self.width))
            return tiles * (max(rows * vectors, _CHAINS) + rows / 2 + vectors)

        most = _REGISTERS[self.width] - 1
        tiles = (
            (r, v)
            for v in range(1, _MOST_VECTORS + 1)
            for r in range(1, most)
            if r * v + v <= most
            and self.right.block % (v * self.width) == 0
            and self._fits(Dimension.ROWS, r)
            and self._fits(Dimension.COLUMNS, v * self.width)
        )
        return min(tiles, key=cost)

    def _write_rows(self, column: Any, rows: int, widths: list[int]) -> None:
        whole = self.rows // rows * rows
        with each(constant(0), self._end(Dimension.ROWS, whole), rows) as row:
            self._write_tile(row, column, rows, widths)
        if self.rows > whole:
            self._write_tile(constant(whole), column, self.rows - whole, widths)

    def _write_tile(self, row: Any, column: Any, rows: int, widths: list[int]) -> None:
        kind = vector_of(self.width)
        lanes = [Lanes(kind) if w == self.width else Lanes(kind).first(w) for w in widths]
        o, i, j = (ir.AffineExpr.get_dim(d) for d in range(3))
        of_column = j
        if block := self.right.block:
            of_column = ir.AffineExpr.get_floor_div(j, block) * (block * self.summands) + j % block
        of_rows = [number(o + (i + r) * self.left.outer, self.left.first, row) for r in range(rows)]

        def add(summand: Any, sums: list[Any]) -> list[Any]:
            of_right = number(o + i * self.right.outer + of_column, self.right.first, summand, column)
            places = [number(o + v * self.width, of_right) for v in range(len(lanes))]
            vectors = [_loaded(lane, self.right.memory, p) for lane, p in zip(lanes, places, strict=True)]
            new = []
            for r, of_row in enumerate(of_rows):
                element = memref.load(self.left.memory, [number(o + i * self.left.summand, of_row, summand)])
                factor = vector.broadcast(kind, widened(element, ir.F32Type.get()))
                new += [vector.fma(factor, x, sums[r * len(lanes) + v]) for v, x in enumerate(vectors)]
            return new

        end = self._end(Dimension.SUMMANDS, self.summands)
        sums = loop(constant(0), end, 1, [zeros(kind)] * (rows * len(lanes)), add)
        for n, total in enumerate(sums):
            r, v = divmod(n, len(lanes))
            expression = o + (i + r) * self.result.outer + j + v * self.width
            place = number(expression, self.result.first, row, column)
            if self.adds is not None:
                more = arith.addf(total, lanes[v].load(self.result.memory, place))
                total = arith.select(self.adds, more, total)
            lanes[v].store(total, self.result.memory, place)


def _loaded(lanes: Lanes, memory: Any, place: Any) -> Any:
    """A vector of float32 of memory of float32 or bfloat16."""
    return widened(lanes.load(memory, place), lanes.kind)
