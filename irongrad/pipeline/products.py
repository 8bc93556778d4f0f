"""Products of matrices in panels, on a CPU of the architecture x86.

With data tiling IREE 3.13.0 packs both operands of a product into tiles of 16 rows. Its kernel reads 17 numbers for 16
products, brings the result back into rows, and has half of what a processor can do. Here a kernel keeps so many results
in registers that it seldom reads, and the right operand lies in panels of as many columns, so that it is read in one
go, as in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (ACM Transactions on Mathematical
Software 34(3), 2008). The left operand and the result stay as they are: rows are read at several places at a time, and
written whole. Where the left one is transposed it is laid out in panels too, as what a kernel reads together would lie
a power of two apart far too often. A small operand stays in a cache however it lies, and is read in place if what a
panel has side by side is side by side in it too. docs/benchmarks.md has figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith

from irongrad.pipeline.barriers import hold
from irongrad.pipeline.devices import cpu_of
from irongrad.pipeline.generics import GENERIC, PRODUCTS, inputs_of, is_elementwise
from irongrad.pipeline.loop_invariants import outside_loops
from irongrad.pipeline.loops import Lettered, empty, generic, merged, split
from irongrad.pipeline.operations import inside

_ARCHITECTURE = "x86_64"


@dataclass(frozen=True)
class Registers:
    """How many results a kernel computes at once.

    Attributes:
        rows: of them.
        columns: of them, two registers full.
    """

    rows: int
    columns: int


# What registers hold, by a feature that all CPUs with such registers have. As many chains of additions as results are
# under way at once, which hides how long each takes: 4 cycles, two of them in each.
AVX512, AVX2 = Registers(8, 32), Registers(4, 16)
_REGISTERS = {"avx512f": AVX512, "fma": AVX2}

# Columns of a left operand that is transposed in one panel: a cache line.
_LINE = 16

# Summands that are added up before the next rows are read, at most those of a panel in the second cache; and those of
# one round of the innermost loop.
_DEPTH = 2048
_ROUND = 4

# Bytes of the largest operand that is read where it lies, half of the second cache of the smallest such CPU.
_NEAR = 1 << 19

# Multiplications of the smallest product that has panels, about 10 µs of one core. What IREE makes of smaller ones is
# slower, but fewer kernels, as it computes in the product's what is elementwise before and behind it.
_LEAST = 1 << 20

# Rows and columns of the result that one thread computes at a time, at most, so that it reads operands seldom; and how
# many such parts there are at least, where that leaves each as many as registers hold, so that all threads have some.
_ROWS, _COLUMNS, _PARTS = 256, 384, 16


@dataclass(frozen=True)
class _Product:
    """A product of matrices, or of as many pairs of them as there are in a batch.

    Each letter is a dimension: `b` of a batch, `r` rows, `c` columns, `k` summands; later `p` is panels of rows and `q`
    panels of columns.

    Attributes:
        operation: it.
        sizes: by letter.
        left: the left operand.
        right: the right operand.
    """

    operation: Any
    sizes: dict[str, int]
    left: Lettered
    right: Lettered

    @property
    def has_panels_of_rows(self) -> bool:
        """Whether the left operand is read in panels: a row of it is not side by side in memory, and it is large."""
        letters = self.left[1]
        return not letters.endswith("k") and not (letters.endswith("r") and is_near(self.sizes, letters))

    @property
    def has_panels_of_columns(self) -> bool:
        """Whether the right operand is read in panels."""
        letters = self.right[1]
        return not (letters.endswith("c") and is_near(self.sizes, letters))

    @property
    def letters(self) -> str:
        """The letters of the result as it is computed."""
        batch = "b" if "b" in self.sizes else ""
        return batch + ("pr" if self.has_panels_of_rows else "r") + ("qc" if self.has_panels_of_columns else "c")


def lay_out_products(module: ir.Module) -> None:
    """Have products of float32 of known sizes read panels; others are left to IREE, as on other architectures.

    Args:
        module: as it is after IREE's phase `global-optimization`, in its own context.
    """
    architecture, features = cpu_of(module)
    registers = next((r for feature, r in _REGISTERS.items() if feature in features), None)
    if architecture != _ARCHITECTURE or registers is None:
        return
    for operation in [op for op in inside(module.operation) if op.name in PRODUCTS]:
        product = _product_of(operation)
        if product is not None and fits(product.sizes, registers, has_panels_of_rows=product.has_panels_of_rows):
            _lay_out(product, registers)


def _product_of(operation: Any) -> _Product | None:
    """What a product of float32 multiplies; None where sizes are not known."""
    *operands, result = operation.operands
    kinds = [value.type for value in operation.operands]
    if not all(kind.has_static_shape and isinstance(kind.element_type, ir.F32Type) for kind in kinds):
        return None
    letters = "brck" if len(result.type.shape) > 2 else "rck"
    of_operands = ["".join(letters[d] for d in _dimensions(m.value)) for m in operation.attributes["indexing_maps"]]
    sizes = {
        x: size for kind, of in zip(kinds, of_operands, strict=True) for x, size in zip(of, kind.shape, strict=True)
    }
    left, right = (_source(value, of) for value, of in zip(operands, of_operands, strict=False))
    return _Product(operation, sizes, left, right)


def _source(value: Any, letters: str) -> Lettered:
    """What `value` has in another order, or as often as there are in a batch; else itself."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != GENERIC or len(inputs_of(owner)) != 1:
        return value, letters
    (source,), (of_source, of_value) = inputs_of(owner), [m.value for m in owner.attributes["indexing_maps"]]
    body = owner.regions[0].blocks[0]
    copies = len(body.operations) == 1 and body.operations[0].operands[0] == body.arguments[0]
    if not copies or not of_source.is_projected_permutation or of_value != ir.AffineMap.get_identity(len(letters)):
        return value, letters
    read = "".join(letters[d] for d in _dimensions(of_source))
    return (source, read) if set(letters) <= {*read, "b"} else (value, letters)


def _dimensions(indexing: Any) -> list[int]:
    """The numbers of the loops that go over the dimensions of an operand; -1 where that is not one loop."""
    return [x.position if isinstance(x, ir.AffineDimExpr) else -1 for x in indexing.results]


def fits(sizes: Mapping[str, int], registers: Registers, *, has_panels_of_rows: bool) -> bool:
    """Whether a product is large enough to be laid out in panels, and keeps registers full all the time.

    Args:
        sizes: the numbers of rows, `r`, of columns, `c`, of summands, `k`, and of pairs of matrices, `b`.
        registers: what they hold.
        has_panels_of_rows: whether the left operand is read in panels.
    """
    units = {"r": _rows_at_once(registers, has_panels_of_rows), "c": registers.columns, "k": _ROUND}
    full = all(sizes[letter] % unit == 0 for letter, unit in units.items())
    return full and math.prod(sizes.values()) >= _LEAST


def is_near(sizes: Mapping[str, int], letters: str) -> bool:
    """Whether an operand, or one of a batch, is so small that it is read where it lies.

    Args:
        sizes: as for `fits`.
        letters: of its dimensions.
    """
    return 4 * math.prod(sizes[letter] for letter in letters if letter != "b") <= _NEAR


def _rows_at_once(registers: Registers, has_panels_of_rows: bool) -> int:
    return math.lcm(registers.rows, _LINE) if has_panels_of_rows else registers.rows


def _lay_out(product: _Product, registers: Registers) -> None:
    """Put a product of panels in the place of one of matrices, as a kernel of its own, which adds a bias too."""
    operation, letters = product.operation, product.letters
    left, right, place = product.left, product.right, ir.InsertionPoint(operation)
    if product.has_panels_of_rows:
        left = _panels(left, "r", "p", _LINE, operation)
    if product.has_panels_of_columns:
        right = _panels(right, "c", "q", registers.columns, operation)
    with operation.location, place:
        init = _as_computed(operation.operands[-1], letters, registers)
        # IREE would compute a product of other loops if it knew how the operands are made, and forget how to nest them.
        operands = [(hold(value, place), of_value) for value, of_value in (left, right)]
        nested = {"compilation_info": _loops(product, registers)}
        result = generic(lambda x, y, sum_: arith.addf(sum_, arith.mulf(x, y)), operands, (init, letters), nested)
    added = _added_row(operation.results[0])
    last = operation if added is None else added.result.owner.operation
    place = ir.InsertionPoint(last)
    with last.location, place:
        if added is not None:
            room, of_row = empty(result.type.shape, result.type.element_type), letters[letters.index("r") + 1 :]
            row = _as_computed(added.row, of_row, registers)
            result = generic(lambda x, y, _: arith.addf(x, y), [(result, letters), (row, of_row)], (room, letters), {})
        for panels in [x for x in "qp" if x in letters]:
            result = merged(result, letters.index(panels))
        last.results[0].replace_all_uses_with(hold(result, place))
    for done in dict.fromkeys((last, operation)):
        done.erase()


def _as_computed(value: Any, letters: str, registers: Registers) -> Any:
    """`value` with panels as dimensions of their own, where `letters` has these."""
    if "p" in letters:
        value = split(value, letters.index("p"), _LINE)
    return split(value, letters.index("q"), registers.columns) if "q" in letters else value


@dataclass(frozen=True)
class _AddedRow:
    """A row that is added to all rows of a product, as a bias is.

    Attributes:
        row: it.
        result: the sums.
    """

    row: Any
    result: Any


def _added_row(product: Any) -> _AddedRow | None:
    """The row that is added to a product, where nothing else reads that."""
    readers = [use.owner.operation for use in product.uses]
    if len(readers) != 1 or not is_elementwise(readers[0]) or len(readers[0].results) != 1:
        return None
    (reader,) = readers
    body = reader.regions[0].blocks[0]
    *of_inputs, of_result = (_dimensions(m.value) for m in reader.attributes["indexing_maps"])
    whole = list(range(len(product.type.shape)))
    by_dimensions = {tuple(of): value for of, value in zip(of_inputs, inputs_of(reader), strict=True)}
    row = by_dimensions.get((whole[-1],))
    if row is None or len(of_inputs) != 2 or by_dimensions.get(tuple(whole)) != product or of_result != whole:
        return None
    adds = len(body.operations) == 2 and body.operations[0].operation.name == "arith.addf"
    if not adds or set(body.operations[0].operands) != set(list(body.arguments)[:2]):
        return None
    return _AddedRow(row, reader.results[0])


def _panels(operand: Lettered, letter: str, panel: str, width: int, before: Any) -> Lettered:
    """An operand with `width` rows or columns of a summand side by side; made before loops that leave it as it is."""
    value, letters = operand
    laid_out = ("b" if "b" in letters else "") + panel + "k" + letter
    with before.location, ir.InsertionPoint(outside_loops(before, [value])):
        pieces = split(value, letters.index(letter), width)
        letters = letters.replace(letter, panel + letter)
        sizes = dict(zip(letters, pieces.type.shape, strict=True))
        init = empty([sizes[x] for x in laid_out], value.type.element_type)
        return generic(lambda x, _: x, [(pieces, letters)], (init, laid_out), {}), laid_out


def _loops(product: _Product, registers: Registers) -> ir.Attribute:
    """How the loops of a product are nested: what a thread computes, with which panel, and what registers hold."""
    rows, columns = _part(product, registers)
    depth = _divisor(product.sizes["k"], _DEPTH, _ROUND)
    of_rows = {"p": rows // _LINE, "r": _LINE} if product.has_panels_of_rows else {"r": rows}
    with_panels = {"q": columns // registers.columns, "c": registers.columns}
    part = {"b": 1, **of_rows, **(with_panels if product.has_panels_of_columns else {"c": columns})}
    panel = {**part, "q": 1, "c": registers.columns}
    stretch = {"k": depth if depth < product.sizes["k"] else 0}
    held = {**panel, "p": 1, "r": registers.rows}
    levels = {
        "distribution": part,
        "cache_parallel": panel,
        "cache_reduction": stretch,
        "vector_common_parallel": held,
        "vector_reduction": {"k": _ROUND},
    }
    loops = f"{product.letters}k"
    config = ", ".join(f"{level} = {[found.get(letter, 0) for letter in loops]}" for level, found in levels.items())
    return ir.Attribute.parse(
        f"#iree_codegen.compilation_info<lowering_config = #iree_cpu.lowering_config<{config}>,"
        " translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>"
    )


def _part(product: _Product, registers: Registers) -> tuple[int, int]:
    """How many rows and columns of the result a thread computes at a time."""
    all_rows, all_columns = product.sizes["r"], product.sizes["c"]
    row, column = _rows_at_once(registers, product.has_panels_of_rows), registers.columns
    rows, columns = _divisor(all_rows, _ROWS, row), _divisor(all_columns, _COLUMNS, column)
    while (all_rows // rows) * (all_columns // columns) * product.sizes.get("b", 1) < _PARTS:
        if rows == row and columns == column:
            break
        if columns > max(rows, column) or rows == row:
            columns = _divisor(all_columns, columns - 1, column)
        else:
            rows = _divisor(all_rows, rows - 1, row)
    return rows, columns


def _divisor(size: int, most: int, unit: int) -> int:
    """The largest divisor of `size` of at most `most`, or else `unit`, of those that `unit` divides."""
    return max(d for d in range(unit, max(most, unit) + 1, unit) if size % d == 0)
